"""How graphs are captured, kept and thrown away, on stand-ins for CUDA's (`graphs`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.clipping import backward as records
from lambdacgd.training import TrainingError, privatize
from lambdacgd.training.captured import _check
from tests.training import oracle
from tests.training.graphs import Captured, Graphs, graphs  # noqa: F401

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01),
}
PLAN = oracle.binned_plan(96, 12, 3)


def loss(model, x, y):
    return F.cross_entropy(model(x), y)


def convolutions():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 1), nn.Tanh(), nn.Conv1d(4, 12, 3), nn.Flatten(), nn.Linear(36, 3)
    )


def build(optimizer="sgd", p=PLAN, module=None, key=None):
    module = module or oracle.model()
    data = oracle.data(p.examples)
    private = privatize(
        module, OPTIMIZERS[optimizer](module.parameters()), data, p, max_grad_norm=0.7, key=key or oracle.key()
    )
    if key is None:
        private.run._id = "one"
    return private, data.tensors


def looped(*args, **kwargs):
    private, _ = build(*args, **kwargs)
    oracle.loop(private, private.model, private.optimizer)
    return private


def captured(graphs, *args, padded=None, **kwargs):  # noqa: F811
    private, data = build(*args, **kwargs)
    graphs.step = Captured(private, loss, data, padded)
    return private, graphs.step


def agree(one, two):
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # sums that differ by a rounding may be a Δ apart


@pytest.mark.parametrize(
    ("padded", "bins"), [(None, "fresh"), (5, "fixed"), (5, "fresh"), (14, "fresh"), (96, "fixed")]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_capturing_leaves_no_trace(graphs: Graphs, optimizer, padded, bins):  # noqa: F811
    """Padding, splitting and counting included: one step, six, and the rest."""
    p = oracle.binned_plan(96, 12, 3, bins=bins)
    private, step = captured(graphs, optimizer, p=p, padded=padded)
    step()
    step.run(6)
    assert private.steps_taken == 7
    step.run()
    assert private.finished
    agree(looped(optimizer, p=p), private)


def test_parts_of_different_widths_add_to_one_sum(graphs: Graphs, monkeypatch):  # noqa: F811
    """A small convolution's gradients are kept for eight rows, and lie beside other small ones; for twelve they are
    not.
    """
    monkeypatch.setattr(records, "_KEPT_PATCHES", 1500)
    p = oracle.binned_plan(96, 8, 3)
    private, step = captured(graphs, p=p, module=convolutions(), padded=12)
    step.run()
    assert {(True, False, 12), (False, True, 8)} <= step._graphs.keys()
    assert step.kinds.count((False, True, 8)) == 4, "kernels that add must be compiled before they are captured"
    agree(looped(p=p, module=convolutions()), private)


class Disturbed(Exception):
    pass


@pytest.mark.parametrize("when", [1, 2, 3, 4])  # three times while warming up, then while capturing
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_failure_while_capturing_leaves_no_trace(graphs: Graphs, optimizer, when):  # noqa: F811
    """Out of memory, Ctrl-C, a loss that waits for the device: whoever goes on uses every z once, on the plan's own
    sum.
    """
    private, step = captured(graphs, optimizer)
    before = oracle.weights(private.model)

    def disturb(work):
        if work == when:
            raise Disturbed

    step.disturb = disturb
    with pytest.raises(Disturbed):
        step.run()
    for name, value in oracle.weights(private.model).items():
        assert torch.equal(value, before[name])
    assert private.between_steps
    step.run()
    assert graphs.steps == list(range(1, PLAN.steps + 1)), "one z serves one sum"
    agree(looped(optimizer), private)


def test_weights_that_cannot_be_put_back_are_of_no_use(graphs: Graphs, tmp_path, monkeypatch):  # noqa: F811
    key = oracle.key()
    key.save(tmp_path / "run.key")
    private, step = captured(graphs, key=key)

    def fails(*args):
        raise Disturbed

    monkeypatch.setattr(step, "_restore", fails)
    with pytest.raises(Disturbed):
        step.run()
    with pytest.raises(TrainingError, match="putting the weights back"):
        step.run()
    with pytest.raises(TrainingError, match="putting the weights back"):
        private.save(tmp_path / "c.pt")


def test_graphs_do_not_outlive_the_memory_they_know(graphs: Graphs, tmp_path):  # noqa: F811
    key = oracle.key()
    key.save(tmp_path / "run.key")
    private, step = captured(graphs, "momentum", key=key)
    step.run(5)
    private.save(tmp_path / "c.pt")
    old = list(private.optimizer.state.values())  # kept: their addresses cannot come back by chance
    kept = dict(step._graphs)
    step.run(2)
    assert all(step._graphs[kind] is graph for kind, graph in kept.items())
    private.load(tmp_path / "c.pt")
    new = private.optimizer.state.values()
    assert all(a["momentum_buffer"] is not b["momentum_buffer"] for a, b in zip(old, new, strict=True))
    step.run(1)
    assert not any(step._graphs.get(kind) is graph for kind, graph in kept.items())
    kept = dict(step._graphs)
    for p in private.model.parameters():
        p.data = p.data.clone()
    step.run(1)
    assert not any(step._graphs.get(kind) is graph for kind, graph in kept.items())


def test_a_gradient_kept_from_an_ordinary_step_never_shows_sums_without_noise(graphs: Graphs):  # noqa: F811
    """Capturing begins with parts of steps, which wrote their sums where it lay."""
    private, step = captured(graphs, padded=5)
    x, y = next(iter(private.loader))
    loss(private.model, x, y).backward()
    private.optimizer.step()
    kept = [p.grad for p in private.model.parameters()]
    before = [x.clone() for x in kept]
    private.optimizer.zero_grad()
    same = []
    step.disturb = lambda n: same.append(all(map(torch.equal, kept, before)))
    step.run(2)
    assert same
    assert all(same)
    assert all(map(torch.equal, kept, before))


def test_a_rate_in_host_memory_is_a_constant_too(graphs: Graphs):  # noqa: F811
    private, step = captured(graphs)
    group = private.optimizer.param_groups[0]
    group["lr"] = torch.tensor(0.5)
    step.run(3)
    kept = dict(step._graphs)
    group["lr"].fill_(0.1)
    step.run(1)
    assert not any(step._graphs.get(kind) is graph for kind, graph in kept.items())


def test_parameters_that_are_not_clipped_are_refused(graphs: Graphs):  # noqa: F811
    private, step = captured(graphs)
    stranger = nn.Parameter(torch.zeros(2))
    stranger.grad = torch.ones(2)
    private.optimizer.add_param_group({"params": [stranger]})
    with pytest.raises(TrainingError, match="not clipped"):
        step.run()
    assert not stranger.any()


def test_another_device_than_the_current_one_is_refused(monkeypatch):
    """``torch.cuda.graph`` records one device's streams: work on another would be done at capture and never again."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tensor = SimpleNamespace(device=torch.device("cuda", 1))
    loop = SimpleNamespace(clipper=SimpleNamespace(parameters={"w": tensor}))
    with pytest.raises(lc.InvalidInput, match="on cuda:1, and a graph captures work of the current device, cuda:0"):
        _check(loop, PLAN, (tensor,))


def of_views(model, x, y):
    """A loss that makes views of neighbouring rows that are alike."""
    number = torch.arange(len(x), device=x.device) % 3
    return F.cross_entropy(model(x * (0.5 + number.to(x)).unsqueeze(1)), y)


@pytest.mark.parametrize("padded", [None, 5])
def test_views_are_neighbouring_rows_as_in_the_loop(graphs, padded):  # noqa: F811
    runs = []
    for steps in ("loop", "captured"):
        module, data = oracle.model(), oracle.data(PLAN.examples)
        optimizer = OPTIMIZERS["sgd"](module.parameters())
        private = privatize(module, optimizer, data, PLAN, max_grad_norm=0.7, key=oracle.key(), augmentations=3)
        private.run._id = "one"
        runs.append(private)
        if steps == "loop":
            for x, y in private.loader:
                assert torch.equal(x[0::3], x[1::3])
                of_views(module, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            graphs.step = Captured(private, of_views, data.tensors, padded)
            graphs.step.run()
        assert private.finished
    agree(*runs)
