"""What reaches a hub: bytes of a fake one are searched for everything that must not leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

import lambdacgd as lc
from lambdacgd.errors import InvalidInput
from tests.integrations import hf

ALLOWED = {
    "README.md", "PRIVACY.md", "privacy-card.json", "model.safetensors", "config.json", "generation_config.json",
    "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    """All bytes that would have been uploaded, by file name, one dict an upload."""
    uploads = []

    def upload_folder(self, *, folder_path, **kwargs):
        uploads.append(
            {str(p.relative_to(folder_path)): p.read_bytes() for p in Path(folder_path).rglob("*") if p.is_file()}
        )
        return SimpleNamespace(oid="1")

    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **kwargs: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "upload_file", lambda *a, **k: pytest.fail("a file was uploaded by itself"))
    monkeypatch.setattr(HfApi, "create_commit", lambda *a, **k: pytest.fail("a commit was made by itself"))
    return uploads


def nothing_private_in(uploads, trainer, folder):
    """Names from the allow-list, and no byte of key, ledger, identity or training losses."""
    key = trainer.private.run.key
    secret = key.path.read_text().splitlines()[1]
    forbidden = {
        "the key": secret.encode(), "the key's bytes": bytes.fromhex(secret),
        "the fingerprint": key.fingerprint().encode(),
        "the run id": trainer.private.run.id.encode(), "a loss": b"loss", "the state": b"log_history",
        "the token": b"hf_secret_token", "the folder": str(folder).encode(), "a checksum of the ledger": b'"check"',
    }  # fmt: skip
    losses = [f"{v:.4g}".encode() for e in trainer.state.log_history for k, v in e.items() if "not_private" in k]
    assert losses
    for files in uploads:
        assert set(files) <= ALLOWED
        for name, content in files.items():
            content = content.replace(b"training loss, per-example norms", b"")  # said not to be covered
            for what, needle in forbidden.items():
                assert needle not in content, f"{what} is in {name}"
            if not name.endswith(".safetensors"):
                assert not any(value in content for value in losses), name


@pytest.mark.parametrize(("kind", "lora"), [("bert", False), ("llama", True)])
def test_what_is_pushed_and_that_nothing_is_during_training(kind, lora, hub, tmp_path):
    trainer = hf.make_trainer(
        kind, tmp_path / "out", lora=lora, push_to_hub=True, hub_token="hf_secret_token", save_strategy="steps",
        save_steps=4, eval_dataset=hf.Sentences(kind == "bert", 8, seed=2), eval_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    assert not hub
    trainer.save_metrics("train", {"train_loss": 0.5})
    trainer.save_state()
    trainer.save_model()
    trainer.push_to_hub(tags="mine", license="mit")
    assert len(hub) == 2  # save_model, push_to_hub
    nothing_private_in(hub, trainer, tmp_path)
    last = hub[-1]
    assert ("adapter_model.safetensors" in last) == lora
    assert b"differentially private" in last["PRIVACY.md"]
    assert b"license: mit" in last["README.md"]
    assert b"- mine" in last["README.md"]
    assert b"differential-privacy" in last["README.md"]
    newest = trainer.private.run.key.ledger().newest(trainer.private.run.id)
    assert (newest.step, newest.kind) == (8, "push_to_hub")


def test_the_weights_uploaded_are_the_models(hub, tmp_path):
    from safetensors.torch import load

    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.train()
    trainer.push_to_hub()
    uploaded = load(hub[0]["model.safetensors"])
    hf.assert_same({n: uploaded[n] for n in hf.weights(trainer.model)}, hf.weights(trainer.model))


def test_the_output_folder_may_hold_anything(hub, tmp_path):
    """An old-fashioned key or log in the output folder stays where it is."""
    trainer = hf.make_trainer("bert", tmp_path / "out", push_to_hub=True)
    (tmp_path / "out" / "runs").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "events").write_text("loss 1.0")
    lc.SecretKey.generate().save(tmp_path / "out" / "forgotten.key")
    trainer.train()
    trainer.push_to_hub()
    assert all(set(files) <= ALLOWED for files in hub)


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_uploading_checkpoints_is_refused(strategy, hub, tmp_path):
    with pytest.raises(InvalidInput, match="training losses"):
        hf.make_trainer("bert", tmp_path / "out", push_to_hub=True, hub_strategy=strategy)


def test_losses_do_not_go_to_a_space(tmp_path):
    args = hf.arguments(tmp_path)
    args.report_to, args.trackio_space_id = ["trackio"], "me/space"
    from lambdacgd.integrations.huggingface.settings import adapt

    with pytest.raises(InvalidInput, match="must not go to a Space"):
        adapt(args, hf.make_plan())


def test_nothing_is_pushed_before_training(hub, tmp_path):
    with pytest.raises(lc.TrainingError, match="before training"):
        hf.make_trainer("bert", tmp_path / "out").push_to_hub()
    assert not hub


def test_the_model_card_in_the_folder_holds_no_results(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.train()
    trainer.create_model_card(model_name="small")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "# small" in text
    assert "loss" not in text.lower().replace("training loss, per-example norms", "")


def test_a_place_on_this_machine_is_no_base_model(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.train()
    for place in ("/home/somebody/secret/model", "checkpoints", "a/b/c"):
        trainer.model.config._name_or_path = place
        assert "base_model" not in trainer._readme()
    trainer.model.config._name_or_path = "google-bert/bert-base"
    assert "base_model: google-bert/bert-base" in trainer._readme()
