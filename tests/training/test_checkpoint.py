"""Checkpoints: exact, whole or not there, never behind what was released, never of another run."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import resource
import shutil
import time

import numpy as np
import pytest
import torch
from tests.training import oracle, resumable
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.keys import LedgerError
from lambdacgd.training import CheckpointError, export, privatize


def start(folder, *, module=None, p=None, name="run.key", key=None, **options):
    if key is None:
        path = folder / name
        if path.exists():
            key = lc.SecretKey.load(path)
        else:
            key = oracle.key()
            key.save(path)
    module = module if module is not None else oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    options = {"max_grad_norm": 0.7, "dataset": oracle.data()} | options
    return privatize(module, optimizer, options.pop("dataset"), p or oracle.plan(), key=key, **options)


def steps(private, count):
    for x, y in private.loader:
        F.cross_entropy(private.model(x), y).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        count -= 1
        if count == 0:
            return


def equal(a, b):
    return all(torch.equal(v, oracle.weights(b)[n]) for n, v in oracle.weights(a).items())


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize(
    "p",
    [
        oracle.plan(),
        *(oracle.binned_plan(48, 12, 3, mechanism=m, bins="fresh") for m in (lc.LambdaCGD(0.6), lc.BLT(2))),
    ],
    ids=["cyclic", "fresh", "fresh, buffered"],
)
def test_resumed_ends_like_uninterrupted(tmp_path, p, at):
    """Before, at and after the boundary of epochs, which are 4 steps long."""
    whole = start(tmp_path, p=p)
    steps(whole, at)
    whole.save(tmp_path / "three.pt", extra={"note": [1, "two", torch.tensor(3.0)]})
    shutil.copytree(tmp_path, tmp_path / "copy")
    steps(whole, 99)
    whole.detach()
    again = start(tmp_path / "copy", module=oracle.model(seed=9), p=p)
    extra = again.load(tmp_path / "copy" / "three.pt")
    assert extra == {"note": [1, "two", torch.tensor(3.0)]}
    assert (again.steps_taken, again.run.id) == (at, whole.run.id)
    steps(again, 99)
    assert equal(whole.model, again.model)
    assert again.finished


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_every_random_thing_resumes_exactly(tmp_path, bins):
    """Dropout, augmentation, AdamW, a scheduler, an EMA: stopped at steps 1, 8 (an epoch ends) and 13."""
    resumable.prepare(tmp_path, bins, workers=0)
    shutil.copytree(tmp_path, tmp_path / "whole")
    for until in (1, 8, 13):
        random.seed(until)
        torch.manual_seed(until)
        private, _ = resumable.go_on(tmp_path, until=until, workers=0)
        private.detach()
    stopped, module = resumable.go_on(tmp_path, workers=0)
    whole, other = resumable.go_on(tmp_path / "whole", workers=0)
    assert stopped.steps_taken == whole.steps_taken == 20
    assert equal(module, other)
    with stopped.averages[0].applied() as a, whole.averages[0].applied() as b:
        assert equal(a, b)


def run_and_kill(folder, after, workers):
    """Run in another process; kill -9 it ``after`` seconds into training. Returns whether it finished, and its time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.resumable"])
    ours, theirs = context.Pipe()
    process = context.Process(target=resumable.main, args=(folder, workers, theirs))
    process.start()
    theirs.close()
    assert ours.poll(60), "it did not resume within a minute"
    assert ours.recv() == "ready"
    began = time.monotonic()
    if after is not None:
        time.sleep(after)
        process.kill()
    process.join()
    assert process.exitcode in (0, -9)
    return process.exitcode == 0, time.monotonic() - began


def kill_and_compare(folder, kills, seed, workers, bins):
    resumable.prepare(folder, bins, workers=workers)
    shutil.copytree(folder, folder / "whole")
    finished, duration = run_and_kill(folder / "whole", None, workers)
    assert finished
    moments = random.Random(seed)
    hits = 0
    for _ in range(kills):
        finished, _ = run_and_kill(folder, moments.uniform(0, 1.2 * duration / kills), workers)
        hits += not finished
    assert hits > 0
    assert run_and_kill(folder, None, workers)[0]
    one, two = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (folder, folder / "whole"))
    assert one["step"] == two["step"] == 20
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name
    for name, value in one["averages"][0]["average"].items():
        assert torch.equal(value, two["averages"][0]["average"][name]), name


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_killed_at_random_moments(tmp_path, bins):
    kill_and_compare(tmp_path, kills=4, seed=11, workers=0, bins=bins)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(5))
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_killed_thirty_times(tmp_path, round_, bins):
    """Five runs of six kills each, with a worker that reads ahead."""
    kill_and_compare(tmp_path, kills=6, seed=100 + round_, workers=1, bins=bins)


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


def test_going_back_is_refused_until_declared(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "two.pt")
    steps(private, 2)
    private.save(tmp_path / "four.pt")
    run = private.run.id
    private.detach()
    again = start(tmp_path)
    with pytest.raises(CheckpointError, match="released weights after step 4"):
        again.load(tmp_path / "two.pt")
    assert again.steps_taken == 0
    again.run.key.ledger().declare_destroyed(run, 2)
    again.load(tmp_path / "two.pt")
    assert again.steps_taken == 2


def test_an_export_is_a_release_too(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "two.pt")
    steps(private, 2)
    export(private.model, tmp_path / "release")
    private.detach()
    with pytest.raises(CheckpointError, match="released weights after step 4"):
        start(tmp_path).load(tmp_path / "two.pt")


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


def other_key(folder):
    key = lc.SecretKey.generate()
    key.save(folder / "other.key")
    return {"key": key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {"p": oracle.plan(epsilon=2.0)}, "the plan"),
        (lambda f: {"max_grad_norm": 1.0}, "clipping norm"),
        (lambda f: {"clipping_mode": "automatic"}, "clipping mode"),
        (lambda f: {"augmentations": 2}, "augmentations"),
        (lambda f: {"loss_reduction": "sum"}, "loss reduction"),
        (lambda f: {"data_fingerprint": "new data"}, "other data"),
        (other_key, "the key"),
    ],
    ids=["plan", "norm", "mode", "augmentations", "reduction", "data", "key"],
)
def test_a_checkpoint_of_something_else(tmp_path, change, message):
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "c.pt")
    private.detach()
    with pytest.raises(CheckpointError, match=message) as caught:
        start(tmp_path, **change(tmp_path)).load(tmp_path / "c.pt")
    assert str(caught.value).count("\n- ") == 1


def test_a_checkpoint_of_another_model_or_dataset(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    private.detach()
    frozen = oracle.model()
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(CheckpointError, match="trainable parameters"):
        start(tmp_path, module=frozen).load(tmp_path / "c.pt")
    longer = start(tmp_path, dataset=oracle.data(50), p=oracle.plan(50))
    with pytest.raises(CheckpointError, match=r"(?s)the plan.*length of the dataset"):
        longer.load(tmp_path / "c.pt")


def test_a_key_in_memory_cannot_be_resumed(tmp_path):
    private = start(tmp_path, key=lc.SecretKey.generate())
    with pytest.raises(CheckpointError, match="Make a key file"):
        private.save(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        private.load(tmp_path / "nothing.pt")


def test_a_new_run_with_the_same_key_has_new_noise_and_bins(tmp_path):
    p = oracle.binned_plan(48, 12, 2)
    one, two = start(tmp_path, p=p), start(tmp_path, p=p)
    assert one.run.id != two.run.id
    x, _ = next(iter(one.loader))
    y, _ = next(iter(two.loader))
    assert x.shape != y.shape or not torch.equal(x, y)
    assert one.run.key.ledger().runs() == [one.run.id, two.run.id]


def test_two_processes_cannot_hold_one_run(tmp_path, monkeypatch):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    monkeypatch.setattr("lambdacgd.training.run._ORPHANS_S", 0.2)
    with pytest.raises(CheckpointError, match="in use by another process"):
        start(tmp_path).load(tmp_path / "c.pt")
    private.detach()
    start(tmp_path).load(tmp_path / "c.pt")


def test_a_run_that_began_does_not_become_another(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    private.detach()
    other = start(tmp_path)
    steps(other, 1)
    with pytest.raises(CheckpointError, match="already begun"):
        other.load(tmp_path / "c.pt")


def test_a_load_that_fails_half_way_does_not_begin_the_run_again(tmp_path):
    """The run is the checkpoint's by then: step 1 under its noise, on other weights, would be a second sum."""
    first = start(tmp_path)
    steps(first, 3)
    first.save(tmp_path / "c.pt")
    first.detach()
    module = oracle.model()
    weight, *others = module.parameters()
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": others}], lr=0.5, momentum=0.9)
    key = lc.SecretKey.load(tmp_path / "run.key")
    again = privatize(module, optimizer, oracle.data(), oracle.plan(), key=key, max_grad_norm=0.7)
    with pytest.raises(ValueError, match="parameter groups"):
        again.load(tmp_path / "c.pt")
    assert again.steps_taken == 3
    for go_on in (lambda: steps(again, 1), optimizer.step, lambda: again.save(tmp_path / "d.pt")):
        with pytest.raises(lc.TrainingError, match="failed half-way"):
            go_on()
    again.detach()
    third = start(tmp_path)
    third.load(tmp_path / "c.pt")
    steps(third, 1)


def test_numbers_of_numpy_come_back(tmp_path):
    """As learning rates from np.logspace: what is saved can be read."""
    extra = {"rate": np.float64(0.25), "count": np.int64(3), "yes": np.bool_(True)}
    private = start(tmp_path, max_grad_norm=np.float64(0.7))
    private.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    steps(private, 1)
    private.save(tmp_path / "c.pt", extra=extra)
    private.detach()
    again = start(tmp_path, max_grad_norm=0.7)
    assert again.load(tmp_path / "c.pt") == extra
    assert again.optimizer.param_groups[0]["lr"] == 0.25


def test_state_dict_of_your_own(tmp_path):
    whole = start(tmp_path)
    steps(whole, 3)
    state = whole.state_dict(extra={"epoch": 1})
    steps(whole, 99)
    end = oracle.weights(whole.model)
    assert whole.load_state_dict(state) == {"epoch": 1}  # back in the same process: nothing newer was released
    assert whole.steps_taken == 3
    steps(whole, 99)
    assert all(torch.equal(v, end[n]) for n, v in oracle.weights(whole.model).items())
    later = whole.state_dict()
    with pytest.raises(CheckpointError, match="released weights after step 8"):
        whole.load_state_dict(state)
    whole.load_state_dict(later)


def test_after_an_optimizer_that_failed_a_checkpoint_helps(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    x, y = next(iter(private.loader))
    F.cross_entropy(private.model(x), y).backward()
    private._before_step(private.optimizer, (private.optimizer,), {})  # noised, and the optimizer never ran
    private.load(tmp_path / "c.pt")
    steps(private, 99)
    assert private.finished


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


def test_a_prepared_run_does_not_start_again_behind_weights_that_were_handed_back(tmp_path):
    first = start(tmp_path)
    run_id = first.run.key.ledger().new_run()
    first.detach()
    for _ in range(2):  # nothing was trained yet: it may be taken up again
        private = start(tmp_path, run_id=run_id)
        assert private.run.id == run_id
        private.detach()
    private = start(tmp_path, run_id=run_id)
    steps(private, 2)
    private.detach()
    with pytest.raises(LedgerError, match="released weights after step 2"):
        steps(start(tmp_path, run_id=run_id), 1)
