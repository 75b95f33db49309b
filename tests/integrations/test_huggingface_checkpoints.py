"""Checkpoints of the Trainer: exact resume, and no way back behind weights that left the process."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from transformers import TrainerCallback

import lambdacgd as lc
from lambdacgd.integrations.huggingface import RUN_STATE, with_runs
from lambdacgd.training import checkpoint
from tests.integrations import hf


class Die(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def saving(folder, **changes):
    changes = {"save_strategy": "steps", "save_steps": 2, "model": hf.make_model("bert", dropout=0.2)} | changes
    return hf.make_trainer("bert", folder, **changes)


def same_run(folder, key, **changes):
    """A trainer whose run, under the same key, is the only one of a ledger in ``folder``."""
    path = folder.with_name(folder.name + ".key")
    if not path.exists():
        lc.SecretKey.from_bytes(key).save(path)
    return saving(folder, key=path, **changes)


KEY = bytes(reversed(range(32)))


@pytest.mark.parametrize("died", [5, 7], ids=lambda step: f"died at {step}")
def test_resuming_ends_with_the_same_bits(died, tmp_path, monkeypatch):
    """Dropout, AdamW, a schedule; killed within and at the end of epochs. Evaluation draws random numbers after the
    checkpoint of an epoch's last step, which the resumed run does not repeat.
    """
    looks = {"eval_dataset": hf.Sentences(True, 8, seed=6), "eval_strategy": "epoch"}
    monkeypatch.setattr("secrets.token_hex", lambda n: "ab" * n)  # the same run id for both
    whole = same_run(tmp_path / "whole", KEY, **looks)
    whole.train()
    broken = same_run(tmp_path / "broken", KEY, callbacks=[Die(died)], **looks)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = same_run(tmp_path / "broken", KEY, **looks)
    result = resumed.train(resume_from_checkpoint=True)
    assert result.global_step == resumed.plan.steps
    hf.assert_same(hf.weights(whole.model), hf.weights(resumed.model))
    steps = {entry["step"]: entry for entry in resumed.state.log_history if "loss_not_private" in entry}
    for entry in whole.state.log_history:
        if "loss_not_private" in entry:
            again = steps[entry["step"]]
            assert (again["epoch"], again["learning_rate"]) == (entry["epoch"], entry["learning_rate"])


def test_resuming_in_the_same_process(tmp_path):
    trainer = saving(tmp_path / "out", callbacks=[Die(5)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(lc.TrainingError, match="resume_from_checkpoint=True"):
        trainer.train()
    trainer.callback_handler.remove_callback(Die)
    assert trainer.train(resume_from_checkpoint=True).global_step == trainer.plan.steps
    assert len(trainer.private.run.key.ledger().runs()) == 1


def test_an_older_checkpoint_is_refused(tmp_path):
    trainer = saving(tmp_path / "out")
    trainer.train()
    again = saving(tmp_path / "out")
    before = hf.weights(again.model)
    with pytest.raises(lc.CheckpointError, match="released weights after step 8"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    hf.assert_same(before, hf.weights(again.model))


def test_an_older_checkpoint_is_refused_after_the_newer_ones_are_deleted(tmp_path):
    trainer = saving(tmp_path / "out", callbacks=[Die(7)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    with pytest.raises(lc.CheckpointError, match="released weights after step 6"):
        saving(tmp_path / "out").train(resume_from_checkpoint=True)


def test_save_model_is_a_release_that_older_checkpoints_cannot_pass(tmp_path):
    class Save(TrainerCallback):
        trainer = None

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                self.trainer.save_model(str(tmp_path / "taken"))
                raise KeyboardInterrupt

    save = Save()
    save.trainer = saving(tmp_path / "out", callbacks=[save])
    with pytest.raises(KeyboardInterrupt):
        save.trainer.train()
    assert "differentially private" in (tmp_path / "taken" / "PRIVACY.md").read_text()
    assert {path.name for path in (tmp_path / "taken").iterdir()} == {
        "model.safetensors", "config.json", "PRIVACY.md", "privacy-card.json"
    }  # fmt: skip
    with pytest.raises(lc.CheckpointError, match="released weights after step 5"):
        saving(tmp_path / "out").train(resume_from_checkpoint=True)


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path, monkeypatch):
    trainer = saving(tmp_path / "out")
    write, died = checkpoint._write_facts, []

    def dies(draft, facts, written):
        if facts["step"] == 6:
            died.append(draft)
            raise KeyboardInterrupt
        return write(draft, facts, written)

    monkeypatch.setattr(checkpoint, "_write_facts", dies)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    assert died[0].parent == tmp_path / "out" / "checkpoint-6" / RUN_STATE
    assert died[0].exists()
    resumed = saving(tmp_path / "out")
    assert resumed.train(resume_from_checkpoint=True).global_step == 8


def test_the_trainers_counters_are_those_of_the_checkpoint(tmp_path):
    trainer = saving(tmp_path / "out", callbacks=[Die(5)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").write_text("{")
    assert saving(tmp_path / "out").train(resume_from_checkpoint=True).global_step == 8


def test_killed_between_the_run_state_and_the_trainers_own_files(tmp_path, monkeypatch):
    trainer = saving(tmp_path / "out")
    monkeypatch.setattr(
        "transformers.Trainer._save_checkpoint", lambda self, *a: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    assert not list((tmp_path / "out" / "checkpoint-2").glob("*.safetensors"))
    resumed = saving(tmp_path / "out")
    assert resumed.train(resume_from_checkpoint=True).global_step == 8


def test_a_new_run_does_not_begin_among_anothers_checkpoints(tmp_path):
    saving(tmp_path / "out").train()
    with pytest.raises(lc.CheckpointError, match="another output_dir"):
        saving(tmp_path / "out").train()


def test_other_settings_and_foreign_folders_are_refused(tmp_path):
    saving(tmp_path / "out", callbacks=[]).train()
    with pytest.raises(lc.CheckpointError, match="clipping norm"):
        saving(tmp_path / "out", max_grad_norm=2.0).train(resume_from_checkpoint=True)
    with pytest.raises(lc.CheckpointError, match="the optimizer's class"):  # it would step with AdamW's settings
        saving(tmp_path / "out", optim="sgd").train(resume_from_checkpoint=True)
    with pytest.raises(lc.CheckpointError, match="holds no checkpoint"):
        saving(tmp_path / "empty").train(resume_from_checkpoint=True)
    weights_only = saving(tmp_path / "weights", save_only_model=True)
    weights_only.train()
    with pytest.raises(lc.CheckpointError, match="save_only_model"):
        saving(tmp_path / "weights").train(resume_from_checkpoint=str(tmp_path / "weights" / "checkpoint-8"))


def test_rotation_keeps_the_newest_and_it_resumes(tmp_path):
    trainer = saving(tmp_path / "out", save_total_limit=1, callbacks=[Die(7)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [folder.name for folder in with_runs(tmp_path / "out")] == ["checkpoint-6"]
    assert saving(tmp_path / "out").train(resume_from_checkpoint=True).global_step == 8


def test_resuming_a_finished_run_trains_nothing(tmp_path):
    trainer = saving(tmp_path / "out")
    trainer.train()
    again = saving(tmp_path / "out")
    again.train(resume_from_checkpoint=True)
    hf.assert_same(hf.weights(trainer.model), hf.weights(again.model))
    assert again.private.finished


def test_checkpoints_of_adapters_hold_no_frozen_weights_and_resume(tmp_path):
    first = hf.make_trainer(
        "llama", tmp_path / "out", lora=True, save_strategy="steps", save_steps=2, callbacks=[Die(5)]
    )
    with pytest.raises(KeyboardInterrupt):
        first.train()
    saved = checkpoint.read(tmp_path / "out" / "checkpoint-4" / RUN_STATE)
    assert saved["model"]
    assert all("lora_" in name for name in saved["model"])
    again = hf.make_trainer("llama", tmp_path / "out", lora=True, save_strategy="steps", save_steps=2)
    assert again.train(resume_from_checkpoint=True).global_step == 8


def test_a_key_in_memory_cannot_be_resumed_and_says_so(tmp_path):
    with pytest.raises(lc.CheckpointError, match="key file"):
        saving(tmp_path / "out", key=lc.SecretKey.generate()).train()


def test_checkpoint_folders_hold_no_key(tmp_path):
    trainer = saving(tmp_path / "out")
    trainer.train()
    secret = trainer.private.run.key.path.read_text().splitlines()[1]
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not any(secret.encode() in path.read_bytes() or bytes.fromhex(secret) in path.read_bytes() for path in files)


def test_a_run_that_died_in_its_first_checkpoint_starts_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_facts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        saving(tmp_path / "out").train()
    monkeypatch.undo()
    with pytest.raises(lc.CheckpointError, match=r"Start with train\(\)"):
        saving(tmp_path / "out").train(resume_from_checkpoint=True)
    trainer = saving(tmp_path / "out")
    trainer.train()
    assert trainer.private.finished


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickle_planted_in_any_file_runs_nothing(tmp_path):
    """Every file of the run's own state is refused; the Trainer's files, all at once, are not read."""
    trainer = saving(tmp_path / "out", callbacks=[Die(5)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    whole, out = tmp_path / "whole", tmp_path / "out"
    out.rename(whole)
    folder = whole / "checkpoint-4"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = {name for name in names if name.startswith(RUN_STATE)}
    theirs = names - own | {"optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"}
    assert len(own) > 1
    assert len(theirs) > 6
    for planted, error in ((theirs, KeyboardInterrupt), *(({name}, lc.CheckpointError) for name in (*own, RUN_STATE))):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        for name in planted:
            path = out / "checkpoint-4" / name
            if path.is_dir():
                shutil.rmtree(path)
            torch.save(Attack(tmp_path / "ran"), path)
        again = saving(out, key=trainer.private.run.key.path, callbacks=[Die(5)])
        with pytest.raises(error):
            again.train(resume_from_checkpoint=str(out / "checkpoint-4"))
        assert not (tmp_path / "ran").exists(), planted


def test_the_best_model_of_the_run_can_be_released(tmp_path):
    looks = {"eval_dataset": hf.Sentences(True, 8, seed=6), "eval_strategy": "steps", "eval_steps": 2}
    trainer = saving(tmp_path / "out", load_best_model_at_end=True, learning_rate=1.0, **looks)
    trainer.train()
    lc.export(trainer.private, tmp_path / "release")
    assert (tmp_path / "release" / "privacy-card.json").exists()
