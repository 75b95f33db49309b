"""A run that is resumed, after whatever end, goes on exactly."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import CheckpointError, checkpoint
from tests.faults import fault
from tests.training import oracle, resumable
from tests.training.saved import equal, start, steps


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
    one, two = (checkpoint.read(f / "checkpoint") for f in (folder, folder / "whole"))
    assert one["step"] == two["step"] == 20
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
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_killed_at_random_moments(tmp_path, bins):
    kill_and_compare(tmp_path, kills=4, seed=11, workers=0, bins=bins)


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
    private = start(tmp_path)
    steps(private, 99)
    private.save(tmp_path / "checkpoint")
    private.detach()
    again = start(tmp_path, module=oracle.model(seed=9))
    assert again.resume(tmp_path / "checkpoint") is not None
    assert list(again.loader) == []
    assert list(again.epochs()) == []
    lc.export(again, tmp_path / "release")
