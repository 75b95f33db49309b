"""Checkpoint files: whole or not there, whatever happens while they are written."""

from __future__ import annotations

import io
import os
import resource

import pytest
import torch
from torch.nn import functional as F

from lambdacgd.keys import LedgerError
from lambdacgd.training import CheckpointError
from tests.training.saved import equal, start, steps


def test_killed_between_the_ledger_and_the_name(tmp_path, monkeypatch):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    steps(private, 2)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        private.save(tmp_path / "c.pt")
    monkeypatch.undo()
    private.detach()
    assert (tmp_path / ".c.pt.draft").exists()
    again = start(tmp_path)
    again.load(tmp_path / "c.pt")
    assert again.steps_taken == 2
    assert not (tmp_path / ".c.pt.draft").exists()
    assert equal(private.model, again.model)


@pytest.mark.parametrize("whole", [True, False])
def test_a_draft_the_ledger_does_not_know_is_discarded(tmp_path, whole, monkeypatch):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    steps(private, 2)
    monkeypatch.setattr(private.run, "release", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        private.save(tmp_path / "c.pt")
    private.detach()
    draft = tmp_path / ".c.pt.draft"
    if not whole:
        draft.write_bytes(draft.read_bytes()[:500])
    again = start(tmp_path)
    again.load(tmp_path / "c.pt")
    assert again.steps_taken == 0
    assert not draft.exists()


def test_a_full_disk_while_saving(tmp_path):
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "c.pt")
    steps(private, 1)
    before, ledger = (tmp_path / "c.pt").read_bytes(), (tmp_path / "run.ledger").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError, match="make room"):
            private.save(tmp_path / "c.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "c.pt").read_bytes() == before
    assert (tmp_path / "run.ledger").read_bytes() == ledger
    assert not list(tmp_path.glob(".*"))
    private.save(tmp_path / "c.pt")
    steps(private, 99)
    assert private.finished


def test_a_second_job_by_mistake_while_saving(tmp_path, monkeypatch):
    """It takes the draft for a dead process's and removes it: nothing may be entered in the ledger that nobody has."""
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "c.pt")
    steps(private, 1)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: ((tmp_path / ".c.pt.draft").unlink(missing_ok=True), fsync(f)))
    with pytest.raises(CheckpointError, match="could not be written"):
        private.save(tmp_path / "c.pt")
    monkeypatch.undo()
    private.detach()
    again = start(tmp_path)
    again.load(tmp_path / "c.pt")
    assert again.steps_taken == 1


def test_not_within_a_logical_batch(tmp_path):
    private = start(tmp_path, max_physical_batch_size=5)
    for i, (x, y) in enumerate(private.loader):
        F.cross_entropy(private.model(x), y).backward()
        assert not private.between_steps
        with pytest.raises(CheckpointError, match="between logical steps"):
            private.save(tmp_path / "c.pt")
        with pytest.raises(CheckpointError, match="between logical steps"):
            private.state_dict()
        if i == 1:
            break


def test_a_damaged_checkpoint_is_refused_with_the_choice(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "c.pt")
    private.detach()
    content = bytearray((tmp_path / "c.pt").read_bytes())
    (tmp_path / "c.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"Restore it from a copy; or.*declare"):
        start(tmp_path).load(tmp_path / "c.pt")
    state = torch.load(io.BytesIO(bytes(content)), weights_only=True)
    state["model"]["0.weight"][0, 0] += 1
    torch.save(state, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="released with another digest"):
        start(tmp_path).load(tmp_path / "c.pt")


def test_what_cannot_be_saved(tmp_path):
    private = start(tmp_path)
    with pytest.raises(CheckpointError, match="a set cannot be part"):
        private.save(tmp_path / "c.pt", extra={"bad": {1, 2}})
    with pytest.raises(LedgerError):
        private.run.key.ledger().newest("unknown")


def test_drafts_of_others_are_left_alone(tmp_path):
    """An export that was killed leaves a folder, and hidden files may be anybody's."""
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "one.pt")
    private.detach()
    (tmp_path / ".release.1a2b3c4d.draft").mkdir()
    (tmp_path / ".letter.draft").write_text("Dear all")
    again = start(tmp_path)
    again.load(tmp_path / "one.pt")
    assert again.steps_taken == 1
    assert (tmp_path / ".letter.draft").read_text() == "Dear all"


def test_not_while_the_model_holds_an_average(tmp_path):
    private = start(tmp_path)
    average = private.ema(0.9)
    steps(private, 2)
    with average.applied(), pytest.raises(CheckpointError, match=r"ema\.applied"):
        private.save(tmp_path / "two.pt")
    private.save(tmp_path / "two.pt")
