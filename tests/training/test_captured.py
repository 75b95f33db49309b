"""The captured step against the ordinary loop. Needs CUDA, except for what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import TrainingError, privatize
from lambdacgd.training.captured import CapturedStep
from lambdacgd.training.step import PrivateStep
from tests.training import oracle
from tests.training.graphs import on_the_host

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, capturable=True),
}


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def build(optimizer="sgd", p=None, device="cuda", convolution=False, key=None, **options):
    if convolution:
        torch.manual_seed(1)
        module = nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
        )
    else:
        module = oracle.model()
    module.to(device)
    p = p or oracle.binned_plan(96, 12, 3)
    dataset = torch.utils.data.TensorDataset(*(t.to(device) for t in oracle.data(p.examples).tensors))
    chosen = OPTIMIZERS[optimizer](module.parameters())
    private = privatize(module, chosen, dataset, p, max_grad_norm=0.7, key=key or oracle.key(), **options)
    if key is None:
        private.run._id = "one"
    return private, dataset.tensors


def agree(one, two, tolerance=2e-4):
    for (name, a), (_, b) in zip(one.model.named_parameters(), two.model.named_parameters(), strict=True):
        oracle.assert_close_but_for_lattice(a, b, tolerance, msg=name)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("padded", [None, 5, 96])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_the_same_as_the_loop(optimizer, padded, bins):
    p = oracle.binned_plan(96, 12, 3, bins=bins)
    ordinary, _ = build(optimizer, p)
    oracle.loop(ordinary, ordinary.model, ordinary.optimizer)
    captured, data = build(optimizer, p)
    captured.captured_step(loss, data, padded=padded).run()
    assert captured.finished
    agree(ordinary, captured)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("mechanism", [lc.Identity(), lc.LambdaCGD(0.6, normalized=True), lc.BISR(3)], ids=str)
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_mechanisms_layers_and_empty_bins(mechanism, bins):
    p = oracle.binned_plan(12, 1, 3, mechanism=mechanism, bins=bins)
    ordinary, _ = build(p=p, convolution=True)
    oracle.loop(ordinary, ordinary.model, ordinary.optimizer)
    captured, data = build(p=p, convolution=True)
    step = captured.captured_step(loss, data, padded=2)
    while not captured.finished:
        step()
    agree(ordinary, captured)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_mixes_with_the_loop_and_with_schedulers(bins):
    p = oracle.binned_plan(96, 12, 3, bins=bins)
    ordinary, _ = build(p=p)
    captured, data = build(p=p)
    schedules = [torch.optim.lr_scheduler.StepLR(p.optimizer, 5, gamma=0.5) for p in (ordinary, captured)]
    for x, y in ordinary.loader:
        loss(ordinary.model, x, y).backward()
        ordinary.optimizer.step()
        ordinary.optimizer.zero_grad()
        schedules[0].step()
    average = captured.ema(0.5)
    step = captured.captured_step(loss, data)
    for _ in range(7):
        step()
        schedules[1].step()
    for x, y in captured.loader:  # two steps of the ordinary loop in between
        loss(captured.model, x, y).backward()
        captured.optimizer.step()
        captured.optimizer.zero_grad()
        schedules[1].step()
        if captured.steps_taken == 9:
            break
    while not captured.finished:
        step()
        schedules[1].step()
    agree(ordinary, captured)
    assert average._updates == captured.plan.steps


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
@pytest.mark.parametrize("at", [8, 10])
def test_a_checkpoint_goes_on_captured(tmp_path, bins, at):
    key = oracle.key()
    key.save(tmp_path / "run.key")
    p = oracle.binned_plan(96, 12, 3, bins=bins)
    whole, data = build("momentum", p, key=key)
    step = whole.captured_step(loss, data)
    step.run(at)
    whole.save(tmp_path / "c.pt")
    step.run()
    whole.detach()
    again, data = build("momentum", p, key=key)
    again.load(tmp_path / "c.pt")
    again.captured_step(loss, data).run()
    agree(whole, again, 1e-6)


@pytest.mark.gpu
@cuda
def test_the_horizon_is_fixed_here_too():
    private, data = build()
    step = private.captured_step(loss, data)
    with pytest.raises(TrainingError, match="horizon is fixed"):
        step.run(25)
    step.run()
    with pytest.raises(TrainingError, match="horizon is fixed"):
        step()


@pytest.mark.gpu
@cuda
def test_refused_on_cuda():
    private, data = build()
    with pytest.raises(lc.InvalidInput, match="96 rows"):
        private.captured_step(loss, [t[:5] for t in data])
    private, data = build(p=oracle.plan(96, 12, mechanism=lc.BSR(3)))
    with pytest.raises(lc.InvalidInput, match="buffers"):
        private.captured_step(loss, data)


class Eager(CapturedStep):
    """All of the captured step but the graph: table, padding, splitting, counters, on any device."""

    def _capture(self, kind):
        return SimpleNamespace(replay=lambda: self._eager(kind))

    def _eager(self, kind):
        self._loop.resting = True
        self._work(*kind, self._step)
        self._loop.resting = False


def test_a_batch_takes_the_smallest_width_that_holds_it(monkeypatch):
    monkeypatch.setattr("lambdacgd.training.captured._check", lambda loop, plan, data: torch.device("cpu"))
    monkeypatch.setattr(PrivateStep, "add_noise_", on_the_host(PrivateStep.add_noise_))
    private, data = build(p=oracle.binned_plan(96, 12, 3, bins="fresh"), device="cpu")
    seen = []
    step = Eager(private, lambda model, x, y: seen.append(len(x)) or loss(model, x, y), data, None)
    assert step.widths == [16, 24]
    step.run()
    batches = private.plan.sampling.batches(private.run.key, run=private.run.id)
    sizes = [len(next(batches)) for _ in range(private.plan.steps)]
    assert max(sizes) <= 24
    assert min(sizes) <= 16 < max(sizes)
    assert seen == [16 if size <= 16 else 24 for size in sizes]


def test_needs_cuda():
    private, data = build(device="cpu")
    with pytest.raises(lc.InvalidInput, match="one CUDA device"):
        private.captured_step(loss, data)


class Launches:
    """Stands in for the device: notes at which step its counters stood whenever a graph was launched."""

    def __init__(self, step):
        self.step, self.seen, self.fails = step, [], False

    def replay(self):
        self.seen.append(int(self.step._step))
        self.step._step += 1
        if self.fails:
            raise KeyboardInterrupt


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr("lambdacgd.training.captured._check", lambda loop, plan, data: torch.device("cpu"))
    monkeypatch.setattr(PrivateStep, "add_noise_", on_the_host(PrivateStep.add_noise_))
    private, data = build(device="cpu")
    step = private.captured_step(loss, data, padded=96)
    launches = Launches(step)
    step._capture = lambda kind: launches
    return private, step, launches


def test_ordinary_steps_in_between_do_not_leave_the_device_behind(launched):
    private, step, launches = launched
    step.run(2)
    batch = next(iter(private.loader))
    loss(private.model, *batch).backward()
    private.optimizer.step()
    private.optimizer.zero_grad()
    step.run(2)
    assert launches.seen == [1, 2, 4, 5], "one z serves one sum"


def test_ctrl_c_among_launches(launched):
    private, step, launches = launched
    step.run(1)
    launches.fails = True
    with pytest.raises(KeyboardInterrupt):
        step.run()
    launches.fails = False
    with pytest.raises(TrainingError, match="half updated"):  # the device may have done it
        step.run()
    private.optimizer.step()  # counted as done
    step.run()
    assert launches.seen == list(range(1, private.plan.steps + 1)), "one z serves one sum"


@pytest.mark.gpu
@cuda
def test_views_are_neighbouring_rows_as_in_the_loop():
    def of_views(model, x, y):
        number = torch.arange(len(x), device=x.device) % 3
        return F.cross_entropy(model(x * (0.5 + number.to(x)).unsqueeze(1)), y)

    ordinary, _ = build(augmentations=3)
    for x, y in ordinary.loader:
        of_views(ordinary.model, x, y).backward()
        ordinary.optimizer.step()
        ordinary.optimizer.zero_grad()
    captured, data = build(augmentations=3)
    captured.captured_step(of_views, data).run()
    agree(ordinary, captured)
