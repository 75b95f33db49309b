"""Lightning's checkpoints: exact in resuming, never behind what was released."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import lambdacgd as lc
from tests.training import oracle

pytest.importorskip("lightning")
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lambdacgd.integrations.lightning import read_checkpoint
from lambdacgd.training import checkpoint
from tests.integrations.lit import KEY, Module, fit, make

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


class Die(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            raise RuntimeError("died")


def saver(folder, every=3):
    return ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=-1, filename="{step}")


@pytest.mark.parametrize("died", [5, 7], ids=["within the first epoch", "within the second"])
def test_resuming_ends_with_the_same_bits(died, tmp_path, monkeypatch):
    """Dropout, AdamW, a schedule, and validation between the checkpoint and the next step."""
    monkeypatch.setattr("secrets.token_hex", lambda n: "ab" * n)
    ends = []
    for name in ("whole", "broken"):
        lc.SecretKey.from_bytes(KEY).save(tmp_path / f"{name}.key")
    common = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    module, _, _ = fit(
        tmp_path / "whole",
        key=tmp_path / "whole.key",
        module=Module(0.3),
        callbacks=[saver(tmp_path / "whole")],
        **common,
    )
    ends.append(module.state_dict())
    folder = tmp_path / "broken"
    with pytest.raises(RuntimeError, match="died"):
        fit(folder, key=tmp_path / "broken.key", module=Module(0.3), callbacks=[saver(folder), Die(died)], **common)
    newest = max((folder / "saved").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    module, strategy, trainer = fit(
        folder, key=tmp_path / "broken.key", module=Module(0.3), callbacks=[saver(folder)], ckpt_path=newest, **common
    )
    assert trainer.global_step == strategy.private.steps_taken == strategy.plan.steps
    ends.append(module.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_an_older_checkpoint_is_refused_before_weights_are_loaded(tmp_path):
    fit(tmp_path, callbacks=[saver(tmp_path)])
    module, strategy, trainer = make(tmp_path)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(lc.CheckpointError, match="released weights after step 6"):
        trainer.fit(module, strategy.loader, ckpt_path=tmp_path / "saved" / "step=3.ckpt")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert strategy.private.steps_taken == 0


def test_saving_by_hand_after_training_is_a_release(tmp_path):
    module, strategy, trainer = fit(tmp_path, callbacks=[saver(tmp_path)])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    newest = strategy.private.run.key.ledger().newest(strategy.private.run.id)
    assert (newest.step, newest.kind) == (strategy.plan.steps, "checkpoint")
    again, other, trainer = make(tmp_path)
    trainer.fit(again, other.loader, ckpt_path=tmp_path / "last.ckpt")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items())


def test_checkpoints_hold_no_key_and_foreign_ones_are_refused(tmp_path):
    _, strategy, trainer = fit(tmp_path, callbacks=[saver(tmp_path)])
    secret = strategy.private.run.key.path.read_text().splitlines()[1]
    for path in filter(Path.is_file, (tmp_path / "saved").rglob("*")):
        assert secret.encode() not in path.read_bytes()
        assert bytes.fromhex(secret) not in path.read_bytes()
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    other, strategy, trainer = make(tmp_path)
    with pytest.raises(lc.CheckpointError, match="save_weights_only"):
        trainer.fit(other, strategy.loader, ckpt_path=tmp_path / "weights.ckpt")
    elsewhere, strategy, trainer = make(tmp_path / "elsewhere")
    with pytest.raises(lc.CheckpointError, match="the key"):
        trainer.fit(elsewhere, strategy.loader, ckpt_path=tmp_path / "saved" / "step=6.ckpt")


def test_a_checkpoint_killed_before_it_had_its_name_is_completed(tmp_path, monkeypatch):
    give_name, count = checkpoint._give_name, []

    def dies(draft, target):
        if target.name == "step-00000006":
            count.append(True)
            raise KeyboardInterrupt
        return give_name(draft, target)

    monkeypatch.setattr(checkpoint, "_give_name", dies)
    with warnings.catch_warnings(), pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, callbacks=[saver(tmp_path)])
    monkeypatch.undo()
    assert count
    assert list((tmp_path / "saved" / "step=6.ckpt").glob(".step-00000006.*.draft"))
    with pytest.raises(lc.CheckpointError, match="released weights after step 6"):
        fit(tmp_path, ckpt_path=tmp_path / "saved" / "step=3.ckpt")
    _, strategy, _ = fit(tmp_path, ckpt_path=tmp_path / "saved" / "step=6.ckpt")
    assert strategy.private.finished


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [".step=6.ckpt.draft", "step=6.ckpt", "step=6.ckpt/step-00000006/run.json"])
def test_a_planted_pickle_runs_nothing(name, tmp_path):
    """Where earlier versions kept a draft, in the place of a checkpoint, and in one."""
    fit(tmp_path, callbacks=[saver(tmp_path)])
    planted = tmp_path / "saved" / name
    if planted.is_dir():
        planted.rename(tmp_path / "elsewhere")
    torch.save(Attack(tmp_path / "ran"), planted)
    for load in (torch.save, lambda what, where: where.write_bytes(pickle.dumps(what))):
        load(Attack(tmp_path / "ran"), planted)
        try:
            fit(tmp_path, ckpt_path=tmp_path / "saved" / "step=6.ckpt")
        except lc.CheckpointError:
            assert name != ".step=6.ckpt.draft"
        assert not (tmp_path / "ran").exists()


def test_weights_are_read_without_a_run(tmp_path):
    module, _, trainer = fit(tmp_path, callbacks=[saver(tmp_path)])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    found = read_checkpoint(tmp_path / "last.ckpt")
    assert found["global_step"] == 8
    again = Module()
    again.load_state_dict(found["state_dict"])
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items())
    other, _, trainer = make(tmp_path / "other")
    trainer.validate(other, DataLoader(oracle.data(10), batch_size=4), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in other.state_dict().items())


class Parts(Module):
    """A counter of its own beside the private part, and something that is no plain data."""

    def __init__(self, bad=False):
        super().__init__(whole=False)
        self.register_buffer("counter", torch.zeros(2))
        self.bad = bad

    def on_save_checkpoint(self, checkpoint):
        self.counter += 1
        checkpoint["state_dict"]["counter"] = self.counter
        checkpoint["mine"] = {1, 2} if self.bad else {"seen": len(self.seen)}

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["mine"]


def test_what_else_a_module_holds_comes_back(tmp_path):
    given = {"strategy": {"submodule": "net"}, "callbacks": [saver(tmp_path)]}
    first, _, _ = fit(tmp_path, module=Parts(), **given)
    again, strategy, _ = fit(tmp_path, module=Parts(), ckpt_path=tmp_path / "saved" / "step=6.ckpt", **given)
    assert strategy.private.finished
    assert again.loaded["seen"] > 0
    assert torch.equal(again.counter, torch.full((2,), 2.0))
    assert all(torch.equal(value, first.net.state_dict()[name]) for name, value in again.net.state_dict().items())
    lc.export(strategy.private, tmp_path / "release")  # loading was no change from outside


def test_what_is_not_plain_data_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(lc.CheckpointError, match=r"extra\.lightning\.mine is a set, which cannot be part"):
        fit(tmp_path, module=Parts(bad=True), strategy={"submodule": "net"}, callbacks=[saver(tmp_path)])


def test_a_second_fit_is_refused_and_the_module_is_plain_after_the_first(tmp_path):
    module, strategy, trainer = fit(tmp_path)
    assert "forward" not in module.net[0].__dict__
    with pytest.raises(lc.TrainingError, match="has taken 8 of 8 steps"):
        trainer.fit(module, strategy.loader)
    found = trainer.validate(module, DataLoader(oracle.data(10), batch_size=4), verbose=False)
    assert found[0]["val_loss"] > 0
