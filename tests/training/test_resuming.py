"""Going on with a run: exactly, after whatever end; nobody else, and never from behind what was released."""

from __future__ import annotations

import copy
import multiprocessing
import random
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.errors import LedgerError
from lambdacgd.training import CheckpointError, TrainingError, checkpoint, export
from tests.faults import fault
from tests.training import oracle, resumable
from tests.training.saved import equal, saved, start, steps

# --- a run that is resumed, after whatever end, goes on exactly ------------------------------------------------------


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
    whole.save(tmp_path / "three", extra={"note": [1, "two", torch.tensor(3.0)]})
    shutil.copytree(tmp_path, tmp_path / "copy")
    steps(whole, 99)
    whole.detach()
    again = start(tmp_path / "copy", module=oracle.model(seed=9), p=p)
    extra = again.load(tmp_path / "copy" / "three")
    assert extra == {"note": [1, "two", torch.tensor(3.0)]}
    assert (again.steps_taken, again.run.id) == (at, whole.run.id)
    steps(again, 99)
    assert equal(whole.model, again.model)
    assert again.finished


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_every_random_thing_resumes_exactly(tmp_path, bins):
    """Dropout, augmentation, AdamW, a scheduler, an EMA: stopped at steps 1, 4 (an epoch ends) and 7."""
    resumable.prepare(tmp_path, bins, workers=0)
    shutil.copytree(tmp_path, tmp_path / "whole")
    for until in (1, 4, 7):
        random.seed(until)
        torch.manual_seed(until)
        private, _ = resumable.go_on(tmp_path, until=until, workers=0)
        private.detach()
    stopped, module = resumable.go_on(tmp_path, workers=0)
    whole, other = resumable.go_on(tmp_path / "whole", workers=0)
    assert stopped.steps_taken == whole.steps_taken == 12
    assert equal(module, other)
    with stopped.averages[0].applied() as a, whole.averages[0].applied() as b:
        assert equal(a, b)


def run_and_kill(folder, after, workers):
    """Run in another process; kill -9 it ``after`` seconds into training. Returns whether it finished, and its time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "tests.training.resumable"])  # the first takes seconds, too
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
    one, two = (checkpoint.read(f / "checkpoint") for f in (folder, folder / "whole"))
    assert one["step"] == two["step"] == 12
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name
    for name, value in one["averages"][0]["average"].items():
        assert torch.equal(value, two["averages"][0]["average"][name]), name


@fault(
    "Killed processes",
    "The process is killed (kill −9) at random moments of training and saving, and started again.",
    shows="Nothing: the job goes on from its newest checkpoint.",
    loses="The steps since that checkpoint. They are computed again, to the same bits.",
)
def test_killed_at_random_moments(tmp_path):
    """With fresh bins, where noise restarts too; `test_killed_thirty_times` has both."""
    kill_and_compare(tmp_path, kills=4, seed=11, workers=0, bins="fresh")


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(5))
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_killed_thirty_times(tmp_path, round_, bins):
    """Five runs of six kills each, with a worker that reads ahead."""
    kill_and_compare(tmp_path, kills=6, seed=100 + round_, workers=1, bins=bins)


def test_numbers_of_numpy_come_back(tmp_path):
    """As learning rates from np.logspace: what is saved can be read."""
    extra = {"rate": np.float64(0.25), "count": np.int64(3), "yes": np.bool_(True)}
    private = start(tmp_path, max_grad_norm=np.float64(0.7))
    private.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    steps(private, 1)
    private.save(tmp_path / "c", extra=extra)
    private.detach()
    again = start(tmp_path, max_grad_norm=0.7)
    assert again.load(tmp_path / "c") == extra
    assert again.optimizer.param_groups[0]["lr"] == 0.25


@fault(
    "Two jobs at once, and going back",
    "A run goes back to a checkpoint that is not its newest release.",
    says="released weights after step 8; resuming from step 3 would use the same noise for other sums",
    loses="Nothing: resume from the newest; or destroy the later releases and declare that.",
)
def test_back_in_the_same_process(tmp_path, sentence):
    """Nothing newer was released, so the same steps get the same sums and the same noise."""
    whole = start(tmp_path)
    steps(whole, 3)
    whole.save(tmp_path / "three", extra={"epoch": 1})
    steps(whole, 99)
    end = oracle.weights(whole.model)
    assert whole.load(tmp_path / "three") == {"epoch": 1}
    assert whole.steps_taken == 3
    steps(whole, 99)
    assert all(torch.equal(v, end[n]) for n, v in oracle.weights(whole.model).items())
    whole.save(tmp_path / "end")
    with pytest.raises(CheckpointError, match=sentence):
        whole.load(tmp_path / "three")
    whole.load(tmp_path / "end")


def test_after_an_optimizer_that_failed_a_checkpoint_helps(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c")
    x, y = next(iter(private.loader))
    F.cross_entropy(private.model(x), y).backward()
    private._before_step(private.optimizer, (private.optimizer,), {})  # noised, and the optimizer never ran
    private.load(tmp_path / "c")
    steps(private, 99)
    assert private.finished


def test_a_job_that_was_killed_after_its_last_step_ends_when_it_is_started_again(tmp_path):
    """The same script, with its loop over the loader, was refused: all steps are done."""
    saved(tmp_path, 99, "checkpoint")
    again = start(tmp_path, module=oracle.model(seed=9))
    assert again.resume(tmp_path / "checkpoint")
    assert list(again.loader) == []
    assert list(again.epochs()) == []
    lc.export(again, tmp_path / "release")


# --- who may go on with a run: nobody else, and never from behind what was released ----------------------------------


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
    export(private, tmp_path / "release")
    private.detach()
    with pytest.raises(CheckpointError, match="released weights after step 4"):
        start(tmp_path).load(tmp_path / "two.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_grad_norm": 1.0}, "clipping norm"),
        ({"clipping_mode": "automatic"}, "clipping mode"),
        ({"augmentations": 2}, "augmentations"),
        ({"loss_reduction": "sum"}, "loss reduction"),
        ({"data_fingerprint": "new data"}, "other data"),
    ],
    ids=["norm", "mode", "augmentations", "reduction", "data"],
)
def test_a_checkpoint_of_something_else(tmp_path, change, message):
    saved(tmp_path, 1, "c.pt", data_fingerprint="the data")
    with pytest.raises(CheckpointError, match=message) as caught:
        start(tmp_path, **({"data_fingerprint": "the data"} | change)).load(tmp_path / "c.pt")
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


def test_an_interrupt_just_as_the_run_becomes_the_checkpoints(tmp_path, monkeypatch):
    """Ctrl-C between the run and the position: step 1 under the run's noise would be a second sum."""
    saved(tmp_path, 3, "c.pt")
    again = start(tmp_path)
    resume = again.run.resume

    def interrupted(*args):
        resume(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(again.run, "resume", interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.load(tmp_path / "c.pt")
    with pytest.raises(lc.TrainingError, match="failed half-way"):
        steps(again, 1)
    again.detach()


def test_a_load_that_fails_half_way_does_not_begin_the_run_again(tmp_path, monkeypatch):
    """The run is the checkpoint's by then: step 1 under its noise, on other weights, would be a second sum."""
    saved(tmp_path, 3, "c.pt")
    again = start(tmp_path)
    optimizer = again.optimizer
    monkeypatch.setattr(optimizer, "load_state_dict", lambda state: (_ for _ in ()).throw(ValueError("no memory")))
    with pytest.raises(ValueError, match="no memory"):
        again.load(tmp_path / "c.pt")
    assert again.steps_taken == 3
    for go_on in (lambda: steps(again, 1), optimizer.step, lambda: again.save(tmp_path / "d.pt")):
        with pytest.raises(lc.TrainingError, match="failed half-way"):
            go_on()
    again.detach()
    third = start(tmp_path)
    third.load(tmp_path / "c.pt")
    steps(third, 1)


def test_an_optimizers_state_loaded_by_hand_is_no_way_to_resume(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    kept = copy.deepcopy(private.optimizer.state_dict())
    private.detach()
    again = start(tmp_path)
    with pytest.raises(TrainingError, match=r"private\.resume"):
        again.optimizer.load_state_dict(kept)
    assert not again.optimizer.state
    again.detach()
    again.optimizer.load_state_dict(kept)


@pytest.mark.parametrize("how", ["export", "save"])
@pytest.mark.parametrize("other", ["goes on", "has released", "has let go"])
def test_what_was_detached_leaves_only_if_nobody_went_on(how, other, tmp_path, monkeypatch):
    """Both have used the noise of step 2, for two sums."""
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "one")
    steps(private, 2)
    private.detach()
    second = start(tmp_path, module=oracle.model())
    second.load(tmp_path / "one")
    steps(second, 1)
    if other == "has released":
        second.save(tmp_path / "two")
    if other != "goes on":
        second.detach()

    def release(which, name):
        export(which, tmp_path / name) if how == "export" else which.save(tmp_path / name)

    if other == "has let go":  # then the first to release is the one
        release(private, "release")
        release(private, "again")
        with pytest.raises(LedgerError, match="another process went on"):
            release(second, "other")
        return
    monkeypatch.setattr("lambdacgd.training.run._ORPHANS_S", 0.0)
    with pytest.raises(LedgerError, match=r"in use|another process went on"):
        release(private, "release")
    assert not (tmp_path / "release").exists()


def test_a_step_that_failed_half_way_is_not_begun_again_behind_the_operator(tmp_path, monkeypatch):
    private = start(tmp_path)

    def half(parameters, gradients, *args, **options):
        parameters[0].sub_(gradients[0])
        raise RuntimeError("half-way")

    x, y = next(iter(private.loader))
    torch.nn.functional.cross_entropy(private.model(x), y).backward()
    monkeypatch.setattr(sys.modules[torch.optim.SGD.__module__], "sgd", half)
    with pytest.raises(RuntimeError, match="half-way"):
        private.optimizer.step()
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "release")
    private.detach()
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "release")


def test_two_processes_that_no_lock_kept_apart_do_not_both_release(tmp_path):
    """As on a file system without locks, or where a cleaner removed the file."""
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "one")
    for lock in tmp_path.glob("*.lock"):
        lock.unlink()
    second = start(tmp_path)
    second.load(tmp_path / "one")
    steps(second, 1)
    second.save(tmp_path / "two")
    steps(private, 2)
    with pytest.raises(LedgerError, match="another process went on"):
        private.save(tmp_path / "three")
    with pytest.raises(LedgerError, match="another process went on"):
        export(private, tmp_path / "release")
    steps(second, 1)
    second.save(tmp_path / "two")
