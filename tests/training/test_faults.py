"""What fails under a loop that is right: overflow, Ctrl-C, an optimizer, a worker. Nothing is lost or noised twice."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lambdacgd.clipping import attach, gpu
from lambdacgd.noise import NoiseField, NonFiniteSum
from lambdacgd.training import TrainingError
from lambdacgd.training.loop import Gradients
from tests.faults import fault
from tests.training import oracle
from tests.training.disturbed import backward, check_same_end, start


@fault(
    "Numbers that are not finite",
    "A sum of gradients overflows.",
    shows="`NonFiniteSum`. The sum is dropped; the weights, the noise and the position are as before.",
    loses="Nothing: the same loop yields the batch again.",
)
def test_a_sum_that_is_not_finite():
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    private.clipper.sums["0.weight"][0, 0] = float("inf")
    before = oracle.weights(module)
    with pytest.raises(NonFiniteSum):
        optimizer.step()
    assert private.steps_taken == 0
    assert all(q.grad is None for q in module.parameters())
    assert all(torch.equal(v, before[n]) for n, v in oracle.weights(module).items())
    backward(module, next(batches))  # the same loop yields the batch of step 1 again
    optimizer.step()
    assert private.steps_taken == 1
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)


def test_sums_that_follow_from_finite_norms_are_not_waited_for(monkeypatch):
    """As on CUDA: the host waits for the norms; for the noised sums where somebody may have changed them since."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    with monkeypatch.context() as patched:
        patched.setattr(NoiseField, "check", lambda self: pytest.fail("it waits for the sums"))
        optimizer.step()
    optimizer.zero_grad()
    backward(module, next(batches))
    private.clipper.sums["0.weight"][0, 0] = float("inf")
    with pytest.raises(NonFiniteSum):
        optimizer.step()
    check_same_end(private, module, optimizer)


def test_a_clipping_norm_near_the_largest_number_is_waited_for(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    module = oracle.model()
    clipper = attach(module, 2.0**41)
    backward(module, next(iter(DataLoader(oracle.data(), batch_size=4))))
    assert not clipper.hopes


def test_a_sum_that_is_not_finite_without_noise():
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        private, module, optimizer = start(p=oracle.plan(epsilon=float("inf")))
    backward(module, next(iter(private.loader)))
    private.clipper.sums["0.weight"][0, 0] = float("nan")
    with pytest.raises(NonFiniteSum):
        optimizer.step()


def test_ctrl_c_while_noise_is_added(monkeypatch):
    private, module, optimizer = start()
    backward(module, next(iter(private.loader)))

    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(private.private_step, "add_noise_", pressed)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    assert private.steps_taken == 0
    check_same_end(private, module, optimizer)


def test_ctrl_c_twice_while_sums_are_formed_again(monkeypatch):
    """The second one while the first is handled: what is in p.grad then has noise, or is nothing."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    private, module, optimizer = start()
    x, y = next(iter(private.loader))
    losses = F.cross_entropy(module(x), y, reduction="none")
    losses.mul(torch.where(torch.arange(len(x)) == 0, float("nan"), 1.0)).mean().backward()

    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(private.clipper.totals, "finish", pressed)
    monkeypatch.setattr(Gradients, "clear", pressed)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(p.grad is None for p in module.parameters())


class Fails(torch.optim.SGD):
    """An optimizer that has no memory while it is ``broken``."""

    broken = True

    def step(self, closure=None):
        if self.broken:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_an_optimizer_that_fails_halfway():
    module = oracle.model()
    private, module, optimizer = start(module, optimizer=Fails(module.parameters(), lr=0.5))
    backward(module, next(iter(private.loader)))
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    with pytest.raises(TrainingError, match="half updated"):
        next(iter(private.loader))
    optimizer.broken = False
    optimizer.step()  # the same noised gradients, used once
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)


class Dies(TensorDataset):
    """Kills the worker that reads example 7 while ``armed``, a file, exists."""

    armed: str

    def __getitem__(self, i):
        if i == 7 and os.path.exists(self.armed):
            os.unlink(self.armed)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


@fault(
    "Workers and ranks that die",
    "A process that reads data is killed.",
    shows="torch's error: “DataLoader worker (pid …) is killed by signal”.",
    loses=("Nothing: a new loop over `private.loader` begins with the same step, and the run ends with the same bits."),
)
def test_a_worker_that_dies(tmp_path):
    armed = tmp_path / "armed"
    armed.touch()
    dataset = Dies(*oracle.data().tensors)
    dataset.armed = str(armed)
    private, module, optimizer = start(dataset=dataset, num_workers=1, max_physical_batch_size=5)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        oracle.loop(private, module, optimizer)
    assert not private.finished
    check_same_end(private, module, optimizer, max_physical_batch_size=5)


def test_a_backward_pass_between_a_failed_step_and_its_retry():
    module = oracle.model()
    private, module, optimizer = start(module, optimizer=Fails(module.parameters(), lr=0.5))
    batch = next(iter(private.loader))
    backward(module, batch)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    noised = {n: p.grad.clone() for n, p in module.named_parameters()}
    with pytest.raises(TrainingError, match="half updated"):  # its sums would lie where the noised gradients are
        backward(module, batch)
    assert all(torch.equal(p.grad, noised[n]) for n, p in module.named_parameters())
    optimizer.broken = False
    optimizer.step()
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)
