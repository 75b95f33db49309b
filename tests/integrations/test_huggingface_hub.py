"""Nothing reaches a hub by way of the Trainer: the output folder holds training losses and the run's identity."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi

from lambdacgd.errors import InvalidInput
from tests.integrations import hf


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    for name in ("create_repo", "upload_folder", "upload_file", "create_commit"):
        monkeypatch.setattr(HfApi, name, lambda *a, **k: pytest.fail("the hub was called"))


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_pushing_from_the_arguments_is_refused(strategy, tmp_path):
    with pytest.raises(InvalidInput, match="push_to_hub"):
        hf.make_trainer("bert", tmp_path / "out", push_to_hub=True, hub_strategy=strategy)
    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.args.push_to_hub = True
    with pytest.raises(InvalidInput, match="push_to_hub"):
        trainer.train()
    assert trainer.private is None


def test_pushing_turned_on_during_training_uploads_no_checkpoint(tmp_path):
    on = hf.Meddler("on_step_end", lambda *_: setattr(trainer.args, "push_to_hub", True))
    trainer = hf.make_trainer("bert", tmp_path / "out", save_strategy="steps", save_steps=2, callbacks=[on])
    with pytest.raises(InvalidInput, match="must not be uploaded"):
        trainer.train()


@pytest.mark.parametrize("call", ["push_to_hub", "create_model_card"])
@pytest.mark.parametrize("trained", [False, True])
def test_pushing_by_hand_is_refused_and_says_what_may_be_uploaded(call, trained, tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")
    if trained:
        trainer.train()
    with pytest.raises(InvalidInput, match=r"upload_folder\(repo_id=…, folder_path=folder\)"):
        getattr(trainer, call)()
    assert not (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize(("kind", "lora"), [("bert", False), ("llama", True)])
def test_a_saved_folder_may_be_uploaded(kind, lora, tmp_path):
    """Names from an allow-list, and no byte of key, ledger, identity or training losses."""
    trainer = hf.make_trainer(kind, tmp_path / "out", lora=lora, hub_token="hf_secret_token")
    trainer.train()
    trainer.args.push_to_hub = True
    trainer.save_model(str(tmp_path / "release"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "release").rglob("*") if path.is_file()}
    model = {"adapter_model.safetensors", "adapter_config.json"} if lora else {"model.safetensors", "config.json"}
    assert files.keys() - {"README.md"} == model | {"PRIVACY.md", "privacy-card.json"}
    assert b"differentially private" in files["PRIVACY.md"]
    key = trainer.private.run.key
    newest = key.ledger().newest(trainer.private.run.id)
    assert (newest.step, newest.kind) == (8, "save_model")
    secret = key.path.read_text().splitlines()[1]
    forbidden = {
        "the key": secret.encode(), "the key's bytes": bytes.fromhex(secret),
        "the fingerprint": key.fingerprint().encode(),
        "the run id": trainer.private.run.id.encode(), "a loss": b"_loss", "a logged loss": b"loss_not",
        "the state": b"log_history",
        "the token": b"hf_secret_token", "the folder": str(tmp_path).encode(),
        "a checksum of the ledger": b'"check"',
    }  # fmt: skip
    losses = [f"{v:.4g}".encode() for e in trainer.state.log_history for k, v in e.items() if "not_private" in k]
    assert losses
    for name, content in files.items():
        for what, needle in forbidden.items():
            assert needle not in content, f"{what} is in {name}"
        if not name.endswith(".safetensors"):
            assert not any(value in content for value in losses), name
