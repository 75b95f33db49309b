"""Checkpoint folders: whole or not there, whatever happens while they are written, and read without running code."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import threading
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.errors import LedgerError
from lambdacgd.training import CheckpointError, checkpoint
from tests.faults import fault
from tests.training import oracle
from tests.training.saved import equal, saved, start, steps


def drafts(folder):
    return list(folder.glob(".step-*.draft"))


def newest(folder):
    (found,) = folder.glob("step-*")
    return found


def content(folder):
    return {path.name: path.read_bytes() for path in newest(folder).iterdir()}


def saved_run(folder):
    saved(folder, 2, "c")
    return newest(folder / "c")


def check_refused(folder, sentence=None, **options):
    """A run that has not begun loads no checkpoint of this folder, and stays as it is."""
    private = start(folder, **options)
    with pytest.raises(CheckpointError, match=sentence):
        private.load(folder / "c")
    assert private.steps_taken == 0


def save_killed_in(private, folder, owner, function, **given):
    """The process dies in a save, when that calls this function."""
    with mock.patch.object(owner, function, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        private.save(folder, **given)


@fault(
    "Killed processes",
    "The process is killed after the ledger's entry, before the checkpoint has its name.",
    shows="Nothing: the checkpoint is completed, and the job goes on from it.",
    loses="Nothing.",
)
def test_killed_between_the_ledger_and_the_name(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c")
    steps(private, 2)
    save_killed_in(private, tmp_path / "c", checkpoint, "_give_name")
    private.detach()
    assert len(drafts(tmp_path / "c")) == 1
    again = start(tmp_path)
    again.load(tmp_path / "c")
    assert again.steps_taken == 2
    assert not drafts(tmp_path / "c")
    assert equal(private.model, again.model)
    steps(again, 1)
    again.save(tmp_path / "c")
    assert newest(tmp_path / "c").name == "step-00000003"


def test_killed_while_a_step_saved_twice_gets_its_name(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "c", extra={"time": 1})
    save_killed_in(private, tmp_path / "c", os, "rename", extra={"time": 2})
    private.detach()
    assert not list((tmp_path / "c").glob("step-*"))
    again = start(tmp_path)
    assert again.extra == {}
    assert again.resume(tmp_path / "c") is True
    assert again.extra == {"time": 2}
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000002"]


@fault(
    "Killed processes",
    "The process is killed while it writes a checkpoint.",
    shows="Nothing: what was written is discarded, and the job goes on from the checkpoint before.",
    loses="The steps since the checkpoint before.",
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_draft_the_ledger_does_not_know_is_discarded(tmp_path, whole):
    private = start(tmp_path)
    private.save(tmp_path / "c")
    steps(private, 2)
    save_killed_in(private, tmp_path / "c", private.run, "release")
    private.detach()
    (draft,) = drafts(tmp_path / "c")
    if not whole:
        (draft / "run.json").unlink()
    again = start(tmp_path)
    again.load(tmp_path / "c")
    assert again.steps_taken == 0
    assert not draft.exists()


@fault(
    "Full disks",
    "The disk is full while a checkpoint is written.",
    says="The previous checkpoint and the ledger are as they were: make room or choose another place",
    loses="Nothing: training goes on, and the next save works.",
)
def test_a_full_disk_while_saving(tmp_path, sentence):
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "c")
    steps(private, 1)
    before, ledger = content(tmp_path / "c"), (tmp_path / "run.ledger").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError, match=sentence):
            private.save(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(tmp_path / "c") == before
    assert (tmp_path / "run.ledger").read_bytes() == ledger
    assert not drafts(tmp_path / "c")
    private.save(tmp_path / "c")
    steps(private, 99)
    assert private.finished


@fault(
    "Two jobs at once, and going back",
    "A second job resumes a run while the first one saves.",
    says="is in use by another process",
    loses="Nothing: the first one's checkpoint is completed.",
)
@pytest.mark.parametrize("entered", [False, True], ids=["while it writes", "after the ledger's entry"])
def test_a_second_job_by_mistake_leaves_the_first_ones_draft_alone(tmp_path, monkeypatch, entered, sentence):
    """The first holds the run's lock. Its draft is not a dead process's, and without it nobody could go on."""
    monkeypatch.setattr("lambdacgd.training.run._ORPHANS_S", 0.0)
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "c")
    steps(private, 1)
    second = start(tmp_path)
    seen = []
    act = checkpoint._give_name if entered else checkpoint._write_facts

    def meanwhile(*given):
        with pytest.raises(CheckpointError, match=sentence):
            second.resume(tmp_path / "c")
        seen.append(len(drafts(tmp_path / "c")))
        return act(*given)

    monkeypatch.setattr(checkpoint, act.__name__, meanwhile)
    private.save(tmp_path / "c")
    monkeypatch.undo()
    assert seen == [1]
    private.detach()
    second.load(tmp_path / "c")
    assert second.steps_taken == 2


def test_a_draft_is_settled_once_its_process_has_ended(tmp_path):
    """A worker of the killed process may hold the lock for a moment longer."""
    private = start(tmp_path)
    steps(private, 1)
    save_killed_in(private, tmp_path / "c", checkpoint, "_give_name")
    timer = threading.Timer(0.3, private.run.close)
    timer.start()
    again = start(tmp_path)
    assert again.resume(tmp_path / "c") is True  # though nothing was given as extra
    assert again.extra == {}
    assert again.steps_taken == 1
    timer.join()


def test_not_within_a_logical_batch(tmp_path):
    private = start(tmp_path, max_physical_batch_size=5)
    for i, (x, y) in enumerate(private.loader):
        F.cross_entropy(private.model(x), y).backward()
        assert not private.between_steps
        with pytest.raises(CheckpointError, match="between logical steps"):
            private.save(tmp_path / "c")
        if i == 1:
            break


@fault(
    "Damaged files",
    "A file of a checkpoint is cut off.",
    says="is damaged or not a checkpoint. Restore it from a copy",
    loses="The run, unless there is a copy of this checkpoint or of one before it.",
)
@pytest.mark.parametrize("name", ["run.json", "whole.safetensors"])
def test_a_truncated_checkpoint_is_refused_with_the_choice(tmp_path, name, sentence):
    path = saved_run(tmp_path) / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    check_refused(tmp_path, sentence)


@fault(
    "Damaged files",
    "One bit of the weights in a checkpoint flips.",
    says="was released with another digest: the file was changed or is not the run's own",
    loses="The run, unless there is a copy of this checkpoint or of one before it. No weight is loaded.",
)
def test_a_flipped_bit_in_a_checkpoint_is_refused(tmp_path, sentence):
    tensors = saved_run(tmp_path) / "whole.safetensors"
    changed = bytearray(tensors.read_bytes())
    changed[-1] ^= 1
    tensors.write_bytes(changed)
    check_refused(tmp_path, sentence)


@fault(
    "The wrong key, plan, data or number of processes",
    "A run is resumed with another key file.",
    says="the key (by its fingerprint): use the key file that the run was started with",
    loses="Nothing, if the key is found.",
)
def test_another_key_is_refused(tmp_path, sentence):
    saved_run(tmp_path)
    other = lc.SecretKey.generate()
    other.save(tmp_path / "other.key")
    check_refused(tmp_path, sentence, key=other)


@fault(
    "The wrong key, plan, data or number of processes",
    "A run is resumed with another plan.",
    says="the plan: noise, horizon or sampling would not be those of the run. Load the run's own plan",
    loses="Nothing.",
)
def test_another_plan_is_refused(tmp_path, sentence):
    saved_run(tmp_path)
    check_refused(tmp_path, sentence, p=oracle.plan(epsilon=5.0))


@fault(
    "The wrong key, plan, data or number of processes",
    "A run is resumed with other data, or the same in another order.",
    says="some examples, read again, are not those of the run",
    loses="Nothing.",
)
def test_other_data_is_refused(tmp_path, sentence):
    saved_run(tmp_path)
    check_refused(tmp_path, sentence, dataset=oracle.data(seed=8))


class Attack:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@fault(
    "Files that were changed or planted",
    "A pickle that runs code is planted in any file of a checkpoint, or beside it.",
    shows="A `CheckpointError`. Nothing is unpickled, and no code runs.",
    loses=("The steps since the checkpoint before, if there is a copy of it and the later one is declared destroyed."),
)
@pytest.mark.parametrize("draft", [False, True], ids=["checkpoint", "draft"])
@pytest.mark.parametrize("name", ["run.json", "whole.safetensors", "rows-00000.safetensors", "run.pt", "metadata"])
def test_a_pickle_in_any_file_runs_nothing(tmp_path, name, draft):
    private = saved(tmp_path, 1, "c")
    folder = newest(tmp_path / "c")
    plants = {"pickle": pickle.dumps, "torch": lambda what: torch.save(what, folder / name)}
    for kind, plant in plants.items():
        planted = plant(Attack(tmp_path / "run"))
        if kind == "pickle":
            (folder / name).write_bytes(planted)
        target = folder
        if draft:
            target = folder.with_name(f".step-00000001.{private.run.id}.draft")
            shutil.copytree(folder, target)
        again = start(tmp_path)
        with pytest.raises(CheckpointError):
            again.load(tmp_path / "c")
        assert not (tmp_path / "run").exists()
        assert again.steps_taken == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: [facts],
        lambda facts: facts | {"step": "1"},
        lambda facts: facts | {"run": None},
        lambda facts: facts | {"state": 3},
        lambda facts: facts | {"groups": 0},
        lambda facts: (
            facts | {"sharded": {"state.model.0.weight": {"shape": [16, 5], "parts": [["../../run.key", 0]]}}}
        ),
        lambda facts: {k: v for k, v in facts.items() if k != "identity"},
    ],
)
def test_facts_that_were_changed_are_a_sentence_and_no_traceback(tmp_path, change):
    path = saved_run(tmp_path) / "run.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    check_refused(tmp_path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b"", b"{}", b'{"format": 1}'])
def test_files_that_are_no_facts(tmp_path, text):
    folder = tmp_path / "c" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(text)
    check_refused(tmp_path)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file.pt").write_bytes(b"")
    private = start(tmp_path)
    for act in (private.load, private.resume):
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            act(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="choose another place"):
        private.save(tmp_path / "file.pt")


@pytest.mark.parametrize("earlier", [None, 2])
def test_a_checkpoint_of_another_noise_format_is_refused(tmp_path, monkeypatch, earlier):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "NOISE_FORMAT", earlier)
        private = start(tmp_path)
        steps(private, 2)
        private.save(tmp_path / "c")
        private.detach()
    check_refused(tmp_path, "format of the noise: the run was begun under another one")


def test_only_the_owner_reads_it(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c")
    folder = newest(tmp_path / "c")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c", folder)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_what_cannot_be_saved(tmp_path):
    private = start(tmp_path)
    with pytest.raises(CheckpointError, match=r"extra\.bad is a set, which cannot be part"):
        private.save(tmp_path / "c", extra={"bad": {1, 2}})
    assert not (tmp_path / "c").exists()
    with pytest.raises(LedgerError):
        private.run.key.ledger().newest("unknown")


def test_drafts_of_others_are_left_alone(tmp_path):
    """Hidden files may be anybody's, and another key's ledger knows what to do with its own drafts."""
    saved(tmp_path, 1, "c")
    foreign = tmp_path / "c" / f".step-00000009.{'cd' * 16}.draft"
    foreign.mkdir()
    (tmp_path / "c" / ".step-letter.draft").write_text("Dear all")
    again = start(tmp_path)
    again.load(tmp_path / "c")
    assert again.steps_taken == 1
    assert foreign.is_dir()
    assert (tmp_path / "c" / ".step-letter.draft").read_text() == "Dear all"


def test_not_while_the_model_holds_an_average(tmp_path):
    """The end of the block would put weights of step 3 behind a run that stands at step 2, under noise of step 3."""
    private = start(tmp_path)
    average = private.ema(0.9)
    steps(private, 2)
    with average.applied(), pytest.raises(CheckpointError, match=r"ema\.applied"):
        private.save(tmp_path / "two")
    private.save(tmp_path / "two")
    steps(private, 1)
    with average.applied():
        for act in (lambda: private.load(tmp_path / "two"), lambda: next(iter(private.loader)), average.update):
            with pytest.raises(CheckpointError, match=r"ema\.applied"):
                act()
    assert private.steps_taken == 3
    private.load(tmp_path / "two")
    assert private.steps_taken == 2


def test_another_model_or_other_groups_are_refused_before_anything_changes(tmp_path):
    saved(tmp_path, 1, "c")
    other = start(tmp_path)
    other.model.register_buffer("counter", torch.zeros(3))
    with pytest.raises(CheckpointError, match="counter is missing"):
        other.load(tmp_path / "c")
    other.detach()
    grouped = start(tmp_path)
    grouped.optimizer.param_groups[0]["params"].reverse()
    with pytest.raises(CheckpointError, match="parameter groups"):
        grouped.load(tmp_path / "c")
    assert grouped.steps_taken == 0


def test_looking_at_a_checkpoint_needs_no_run(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "c", extra={"note": "mine"})
    found = checkpoint.read(tmp_path / "c")
    assert (found["step"], found["extra"]) == (2, {"note": "mine"})
    assert all(torch.equal(value, found["model"][name]) for name, value in private.model.state_dict().items())


def test_weights_alone_cannot_be_resumed_from(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    checkpoint.save(private, tmp_path / "c", None, weights_only=True)
    private.detach()
    assert checkpoint.read(tmp_path / "c")["optimizer"] is None
    check_refused(tmp_path, "weights only")


def test_what_is_not_a_checkpoint_stays(tmp_path):
    private = start(tmp_path)
    notes = tmp_path / "checkpoint" / "step-by-step"
    notes.mkdir(parents=True)
    (notes / "notes.txt").write_text("mine")
    for _ in range(2):
        steps(private, 1)
        private.save(tmp_path / "checkpoint")
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-00000002", "step-by-step"]
    assert (notes / "notes.txt").read_text() == "mine"


@fault(
    "Files that were changed or planted",
    "A pipe, a link or a folder is planted in a checkpoint, also in the place of one of its files.",
    says="which is not a plain file, so it is not as it was written",
    loses="Nothing, if there is a copy of the checkpoint. Nothing waits for the pipe or follows the link.",
)
@pytest.mark.parametrize("name", ["whole.safetensors", "more"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_only_plain_files_are_read(tmp_path, name, kind, sentence):
    path = saved_run(tmp_path) / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    for act in (start(tmp_path).load, checkpoint.read):
        with pytest.raises(CheckpointError, match=sentence):
            act(tmp_path / "c")


def test_names_that_are_no_text(tmp_path):
    (saved_run(tmp_path) / os.fsdecode(b"\xff")).touch()
    check_refused(tmp_path, "another digest")


def test_a_name_that_could_not_be_given_is_given_by_the_next_save(tmp_path):
    """The ledger knows it, so nothing older can be resumed from: it must outlive a next save that fails, too."""
    private = start(tmp_path)
    private.save(tmp_path / "c")
    steps(private, 2)
    save_killed_in(private, tmp_path / "c", checkpoint, "_give_name")
    steps(private, 1)
    save_killed_in(private, tmp_path / "c", checkpoint, "_write_facts")
    private.detach()
    again = start(tmp_path)
    again.load(tmp_path / "c")
    assert again.steps_taken == 2


def test_completing_another_runs_draft_removes_nothing_of_this_one(tmp_path):
    first = start(tmp_path)
    steps(first, 1)
    save_killed_in(first, tmp_path / "c", checkpoint, "_give_name")
    first.detach()
    second = saved(tmp_path, 3, "c")
    again = start(tmp_path)
    again.load(tmp_path / "c")
    assert (again.run.id, again.steps_taken) == (second.run.id, 3)
