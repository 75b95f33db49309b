"""The probe sees examples that mix, and nothing else: every way past the clipper that was found, and what is none."""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from lambdacgd.clipping import ClippingError, attach, convert
from lambdacgd.clipping import probe as the_probe
from tests.clipping.small import step

pytestmark = pytest.mark.usefixtures("seeded")


class Net(nn.Module):
    """Two layers; ``run`` is the forward."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run, self.first, self.last = run, nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.memory, self.peak, self.calls = torch.zeros(4), 0.0, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.run(self, x)


@dataclass
class Answer:
    scores: Tensor
    note: str = ""


def _standardised(h: Tensor, *, detach: bool = False) -> Tensor:
    mean, std = h.mean(0), h.std(0) + 1e-5
    return (h - mean.detach()) / std.detach() if detach else (h - mean) / std


def _quantised(h: Tensor) -> Tensor:
    scale = h.detach().abs().max() / 7
    return h + ((h / scale).round() * scale - h).detach()


def _mixup(m: Any, x: Tensor) -> Tensor:
    if random.random() < 0.5:
        x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
    return m.last(m.first(x).tanh())  # type: ignore[no-any-return]


MIXING: dict[str, Callable[[Any, Tensor], Any]] = {
    "raw input's mean": lambda m, x: m.last(m.first(x - x.mean(0)).tanh()),
    "raw input's deviation": lambda m, x: m.last(m.first(x / x.std()).tanh()),
    "raw input's maximum, at the end": lambda m, x: m.last(m.first(x).tanh()) * x.abs().max(),
    "statistics": lambda m, x: m.last(_standardised(m.first(x)).tanh()),
    "detached statistics": lambda m, x: m.last(_standardised(m.first(x), detach=True).tanh()),
    "detached statistics of the last layer": lambda m, x: _standardised(m.last(m.first(x).tanh()), detach=True),
    "fake quantisation": lambda m, x: m.last(_quantised(m.first(x)).tanh()),
    "fake quantisation of the last layer": lambda m, x: _quantised(m.last(m.first(x).tanh())),
    "cumulative sum": lambda m, x: m.last(m.first(x).cumsum(0).tanh()),
    "cumulative sum at the end": lambda m, x: m.last(m.first(x).tanh()).cumsum(0),
    "cumulative sum from behind": lambda m, x: m.last(m.first(x).flip(0).cumsum(0).flip(0).tanh()),
    "neighbour": lambda m, x: m.last(m.first(x) + 0.1 * m.first(x).roll(1, 0)),
    "attention over the batch": lambda m, x: m.last(torch.softmax(m.first(x) @ m.first(x).t(), 1) @ x),
    "maximum over the batch": lambda m, x: m.last(m.first(x) / m.first(x).amax(0).detach()),
    "mixup": lambda m, x: m.last(m.first(0.7 * x + 0.3 * x[torch.randperm(len(x))]).tanh()),
    "dropout of the whole batch's mean": lambda m, x: m.last(m.first(F.dropout(x, 0.5) - x.mean(0))),
}


@pytest.mark.parametrize("batch", [2, 3, 8, 64])
@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_seen(name: str, batch: int) -> None:
    model = Net(MIXING[name])
    clipper = attach(model)
    for _ in range(2):
        with pytest.raises(ClippingError, match="mixes the examples"):
            step(model, torch.randn(batch, 4))
    assert clipper.norms.numel() == 0


class Zero(nn.Module):
    """A branch whose parameters are zero, so that no output shows what it was given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 3)
        made: dict[str, Callable[[], nn.Module]] = {
            "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
            "first states": lambda: nn.RNN(4, 4, batch_first=True),
            "bags": lambda: nn.EmbeddingBag(8, 4, mode="sum"),
            "weighted bags": lambda: nn.EmbeddingBag(8, 4, mode="sum"),
            "lookup": lambda: nn.Embedding(8, 4),
            "bilinear": lambda: nn.Bilinear(4, 4, 4),
        }
        self.branch = made.get(kind, nn.Identity)()
        self.weight = nn.Parameter(torch.empty(4, 4))
        for p in (self.weight, *self.branch.parameters()):
            nn.init.zeros_(p)
        convert(self)

    def forward(self, x: Tensor) -> Tensor:
        h, bag = self.first(x), torch.arange(8).expand(len(x), 8)
        mixed = h.detach() - h.detach().mean(0)
        kinds: dict[str, Callable[[], Tensor]] = {
            "linear": lambda: F.linear(mixed, self.weight),
            "einsum": lambda: torch.einsum("bi,ij->bj", mixed, self.weight),
            "mean of all": lambda: self.weight[0] * x.mean(0),
            "number of all": lambda: self.weight[0] * x.mean(),
            "LSTM": lambda: self.branch(mixed.unsqueeze(1))[1][0][0],
            "first states": lambda: self.branch(x.unsqueeze(1), mixed.unsqueeze(0))[1][0],
            "bags": lambda: self.branch((mixed > 0).long()),
            "weighted bags": lambda: self.branch(bag, per_sample_weights=mixed.repeat(1, 2)),
            "lookup": lambda: self.branch((x.mean(0) > 0).long()).sum(0),
            "bilinear": lambda: self.branch(h, mixed),
        }
        out: Tensor = self.last(h + kinds[self.kind]() + 0 * self.weight[0])
        return out


ZERO = "linear, einsum, bilinear, mean of all, number of all, LSTM, first states, bags, weighted bags, lookup"


@pytest.mark.parametrize("kind", ZERO.split(", "))
def test_mixing_behind_which_everything_is_zero(kind: str) -> None:
    """A zero weight's gradient holds its input whole, and nothing behind it shows that input."""
    model = Zero(kind)
    attach(model)
    with pytest.raises(ClippingError, match="mixes the examples"):
        step(model, torch.randn(8, 4))


@pytest.mark.parametrize("name", ["statistics", "detached statistics", "fake quantisation"])
@pytest.mark.parametrize("shape", ["dataclass", "dict", "flat", "time first"])
def test_whatever_the_output_is(name: str, shape: str) -> None:
    """A batch norm by hand behind the last layer, where only the output shows it."""

    def run(m: Any, x: Tensor) -> Any:
        h = m.last(m.first(x).tanh())
        h = _quantised(h) if name == "fake quantisation" else _standardised(h, detach=name != "statistics")
        if shape == "dataclass":
            return Answer(h)
        if shape == "dict":
            return {"scores": [h]}
        return h.flatten(0, 1) if shape == "flat" else h.transpose(0, 1)

    model = Net(run)
    attach(model)
    out = model(torch.randn(6, 5, 4))
    scores = out.scores if shape == "dataclass" else out["scores"][0] if shape == "dict" else out
    with pytest.raises(ClippingError, match="mixes the examples"):
        scores.square().sum().backward()


def test_outputs_of_any_shape_that_keep_examples_apart() -> None:
    for run in (
        lambda m, x: Answer(m.last(m.first(x))),
        lambda m, x: m.last(m.first(x)).flatten(0, 1),
        lambda m, x: m.last(m.first(x)).transpose(0, 1),
        lambda m, x: m.last(m.first(x)).permute(2, 1, 0),
        lambda m, x: (m.last(m.first(x)), x.mean(), x.mean(0)),  # which the loss does not use
    ):
        model = Net(run)
        attach(model)
        out = model(torch.randn(6, 5, 4))
        out = out.scores if isinstance(out, Answer) else out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mean": (lambda h, x: h.square().sum((1, 2)).mean(), True),
    "root of the mean": (lambda h, x: h.square().sum((1, 2)).mean().sqrt(), False),
    "square": (lambda h, x: h.square().sum((1, 2)).mean() ** 2, False),
    "relative": (lambda h, x: (v := h.square().sum((1, 2)).mean()) / v.detach(), False),
    "mean over tokens": (lambda h, x: h.square().sum(2)[x[..., 0] > 0].mean(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_the_model_returns(name: str) -> None:
    loss, fine = LOSSES[name]
    model = Net(lambda m, x: {"loss": loss(h := m.last(m.first(x).tanh()), x), "scores": h})
    attach(model)
    x = torch.randn(6, 5, 4)
    model(x)["scores"].square().sum((1, 2)).mean().backward()  # the loss is not used
    if fine:
        model(x)["loss"].backward()
    else:
        with pytest.raises(ClippingError, match="loss that the model returns is not"):
            model(x)["loss"].backward()


def test_a_loss_alone() -> None:
    model = Net(lambda m, x: m.last(_standardised(m.first(x))).square().sum(1).mean())
    attach(model)
    with pytest.raises(ClippingError, match="mixes"):
        model(torch.randn(6, 4)).backward()


def _train(model: nn.Module, steps: int, batch: int = 6) -> None:
    for _ in range(steps):
        step(model, torch.randn(batch, 4))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("where", ["before", "behind"])
def test_hooks_on_the_model_itself_are_looked_at(where: str, late: bool) -> None:
    model = Net(lambda m, x: m.last(m.first(x).tanh()))
    if late:
        attach(model)
    if where == "before":
        model.register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(0),))
    else:
        model.register_forward_hook(lambda m, args, out: _standardised(out).tanh())
    if not late:
        attach(model)
    with pytest.raises(ClippingError, match="mixes"):
        step(model, torch.randn(6, 4))


def test_hooks_on_the_model_itself_that_keep_examples_apart() -> None:
    model = Net(lambda m, x: m.last(m.first(x).tanh()))
    model.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    clipper, x = attach(model, math.inf, loss_reduction="sum"), torch.randn(6, 4)
    model(x).square().sum().backward()
    sums = {name: total.clone() for name, total in clipper.take().items()}
    clipper.detach()
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(sums[name], p.grad)


class Slots:
    __slots__ = ("scores",)

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


HIDDEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "closure": (lambda h: lambda: h, lambda out: out()),
    "generator": (lambda h: iter([h]), next),
    "slots": (Slots, lambda out: out.scores),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_outputs_that_cannot_be_seen_are_refused_where_a_gradient_comes_from_them(name: str) -> None:
    hide, find = HIDDEN[name]
    model = Net(lambda m, x: hide(_standardised(m.last(m.first(x).tanh()))))
    clipper = attach(model)
    out = model(torch.randn(6, 4))
    with pytest.raises(ClippingError, match="could not be seen"):
        find(out).tanh().sum(1).mean().backward()
    assert clipper.norms.numel() == 0
    model.run = lambda m, x: m.last(m.first(x)).argmax(1)  # no gradient comes from it
    model(torch.randn(6, 4))


#: Where a module keeps a loss: how it puts it there, and how the loop takes it out.
KEPT: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[Any], Tensor]]] = {
    "attribute": (lambda m, loss: setattr(m, "balance", loss), lambda m: m.balance),
    "list of a child": (lambda m, loss: setattr(m.first, "losses", [loss]), lambda m: m.first.losses[0]),
    "list that the loop empties": (lambda m, loss: m.losses.append(loss), lambda m: m.losses.pop()),
    "list in a dictionary": (lambda m, loss: m.lists["balance"].append(loss), lambda m: m.lists["balance"].pop()),
    "object": (lambda m, loss: setattr(m.record, "balance", loss), lambda m: m.record.balance),
    "queue": (lambda m, loss: m.queue.append(loss), lambda m: m.queue[-1]),
    "set": (lambda m, loss: setattr(m, "kept", {loss}), lambda m: next(iter(m.kept))),
    "deep": (lambda m, loss: setattr(m, "kept", {"a": {"b": [loss]}}), lambda m: m.kept["a"]["b"][0]),
}


@pytest.mark.parametrize("where", KEPT)
@pytest.mark.parametrize("mixes", [True, False])
def test_losses_that_modules_keep(where: str, mixes: bool) -> None:
    """The balancing loss of a mixture of experts, which the loop adds to its own."""
    keep, find = KEPT[where]

    def run(m: Any, x: Tensor) -> Tensor:
        gates = m.first(x).softmax(1)
        keep(m, gates.mean(0).square().sum() if mixes else gates.square().sum(1).mean())
        return m.last(gates)  # type: ignore[no-any-return]

    model: Any = Net(run)
    model.losses, model.lists, model.record, model.queue = [], {"balance": []}, SimpleNamespace(), deque(maxlen=2)
    clipper = attach(model)
    for count in (6, 8):
        loss = model(torch.randn(count, 4)).square().sum(1).mean()
        balance = find(model)
        if mixes:
            loss.backward(retain_graph=True)  # what is not used does no harm
            clipper.zero()
            loss = model(torch.randn(count, 4)).square().sum(1).mean()
            balance = find(model)
            with pytest.raises(ClippingError, match="not the declared mean or sum"):
                (loss + balance).backward()
        else:
            (loss + balance).backward()
            assert clipper.take()["first.weight"].any()


def test_a_pass_that_is_not_probed_does_not_search_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that returns a dataclass or a dictionary: that took a fifth of a BERT's step."""
    model = Net(lambda m, x: {"scores": m.last(m.first(x))})
    clipper = attach(model)
    x = torch.randn(6, 4)
    for _ in range(3):
        model(x)["scores"].square().sum(1).mean().backward()
    monkeypatch.setattr(the_probe, "_held", lambda model: pytest.fail("the modules were searched"))
    model(x)["scores"].square().sum(1).mean().backward()
    assert clipper.examples == 24


class Counted(TorchDispatchMode):
    """How many operations run."""

    operations = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return operation(*args, **(kwargs or {}))


def test_a_probe_of_twice_as_many_layers_takes_twice_as_long() -> None:
    """Of a BERT it took a million operations, each a launch on CUDA: with the square of the layers."""
    counts = []
    for layers in (10, 20):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        attach(model)
        with Counted() as counted:
            model(torch.randn(6, 4))
        counts.append(counted.operations)
    assert 1.5 < counts[1] / counts[0] < 2.1


def test_what_a_probe_leaves_in_a_list_is_not_added() -> None:
    """A list of the loop's own, outside the model: the losses of the probe's passes are in it, too."""
    losses: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        losses.append(h.square().sum(1).mean())
        m.losses.append(losses[-1])
        return m.last(h)  # type: ignore[no-any-return]

    model: Any = Net(run)
    model.losses = []
    clipper = attach(model, math.inf)
    x = torch.randn(5, 4)
    model(x)
    assert len(losses) > 1
    assert len(model.losses) == 1, "what is in the model is taken back"
    torch.stack(losses).sum().backward()
    losses.clear()
    together = clipper.take()["first.weight"].clone()
    clipper.detach()
    model(x)
    losses[0].backward()
    torch.testing.assert_close(together, 5 * model.first.weight.grad)


def test_what_happens_every_third_time() -> None:
    model = Net(lambda m, x: m.last(m.first(x - x.mean(0) if m.calls % 3 == 0 else x)))
    attach(model)
    with pytest.raises(ClippingError, match="mixes"):
        _train(model, 3)


def test_a_mode_in_which_a_few_examples_fail() -> None:
    """That they did well in another mode tells nothing of this one."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh()
        if not m.training:
            if len(x) < 16:
                raise ValueError("too few")
            h = h - h.mean(0)
        out: Tensor = m.last(h)
        return out

    model = Net(run)
    attach(model)
    step(model, torch.randn(16, 4))
    model.eval()
    with pytest.raises(ClippingError, match="too few"):
        step(model, torch.randn(16, 4))


def test_what_begins_later() -> None:
    """A probe is repeated at passes 1, 2, 3, 5, 8, …"""
    model = Net(lambda m, x: m.last(m.first(x - x.mean(0) if m.calls > 5 else x)))
    attach(model)
    _train(model, 5)
    with pytest.raises(ClippingError, match="mixes"):
        _train(model, 4)


@pytest.mark.parametrize("alike", ["the first rows", "all views of an example", "all"])
def test_equal_examples_tell_nothing(alike: str) -> None:
    """Exchanging equal rows changes nothing: those that differ are looked at, or the next batch."""
    x = torch.randn(40, 4)
    x[:10] = 0.0 if alike == "all" else x[0]
    if alike == "all views of an example":
        x = x[10:15].repeat_interleave(8, 0)
    model = Net(lambda m, x: m.last(m.first(x - x.mean(0))))
    attach(model)
    if alike == "all":
        for count in (8, 2, 9):
            step(model, x[:count])
    with pytest.raises(ClippingError, match="mixes"):
        step(model, x)


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: x / x.amax(),
    "range": lambda x: (x - x.amin()) / (x.amax() - x.amin()),
}


@pytest.mark.parametrize("pixels", [torch.float32, torch.uint8])
@pytest.mark.parametrize("name", IMAGES)
def test_statistics_in_which_all_examples_agree(name: str, pixels: torch.dtype) -> None:
    """Every image has a black pixel and a white one, but a next one may be brighter than white."""
    x = torch.rand(32, 4)
    x[:, 0], x[:, 1] = 0, 1
    x = (255 * x).to(pixels)
    model = Net(lambda m, x: m.last(m.first(IMAGES[name](x.float() + 1)).tanh()))
    attach(model)
    with pytest.raises(ClippingError, match="mixes"):
        step(model, x)


def _carry_hidden(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    h = (h + m.memory if m.memory.shape == h.shape else h).tanh()
    m.memory = h.detach()  # as long as the batch: a cache, as far as values tell
    return m.last(h)  # type: ignore[no-any-return]


def _subtract_last(m: Any, x: Tensor) -> Tensor:
    before, m.memory = m.memory, x.detach()
    return m.last(m.first(x - before.mean(0)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [_carry_hidden, _subtract_last], ids=["hidden state", "the last batch's mean"])
def test_an_earlier_pass_is_forgotten(run: Any) -> None:
    model = Net(run)
    attach(model)
    with pytest.raises(ClippingError, match="examples of an earlier one"):
        step(model, torch.randn(6, 4))


def test_what_happens_now_and_then() -> None:
    random.seed(1)
    model = Net(_mixup)
    attach(model)
    with pytest.raises(ClippingError, match="mixes"):  # missed with probability 2⁻⁷
        _train(model, 64)


def _into_frozen(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.frozen.mul_(0.9).add_(0.1 * x.mean(0))
    return m.last(m.first(x))  # type: ignore[no-any-return]


def _into_data(m: Any, x: Tensor) -> Tensor:
    """As the teachers of BYOL and MoCo are written: no version counts it."""
    m.frozen.data.mul_(0.9).add_(0.1 * x.mean(0))
    return m.last(m.first(x))  # type: ignore[no-any-return]


def _new_data(m: Any, x: Tensor) -> Tensor:
    m.frozen.data = 0.9 * m.frozen.data + 0.1 * x.mean(0)
    return m.last(m.first(x))  # type: ignore[no-any-return]


def _into_attribute(m: Any, x: Tensor) -> Tensor:
    m.memory = 0.9 * m.memory + 0.1 * x.detach().mean(0)
    return m.last(m.first(x))  # type: ignore[no-any-return]


def _into_number(m: Any, x: Tensor) -> Tensor:
    m.peak = max(m.peak, float(x.abs().max()))
    return m.last(m.first(x))  # type: ignore[no-any-return]


def _into_buffer(m: Any, x: Tensor) -> Tensor:
    m.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return m.last(m.first(x))  # type: ignore[no-any-return]


def _count(m: Any, x: Tensor) -> Tensor:
    """Drawn batch sizes are not for a state_dict."""
    m.seen += len(x)
    return m.last(m.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (_count, "buffer 'seen'"),
        (_into_frozen, "parameter 'frozen'"),
        (_into_data, "parameter 'frozen'"),
        (_new_data, "parameter 'frozen'"),
        (_into_attribute, "attribute 'memory'"),
        (_into_number, "attribute 'peak'"),
        (_into_buffer, "buffer 'average'"),
    ],
    ids=["count", "frozen parameter", "its data", "new data", "attribute", "number", "buffer"],
)
def test_state_that_forward_writes(run: Any, what: str) -> None:
    model = Net(run)
    attach(model)
    for _ in range(2):
        with pytest.raises(ClippingError, match=what):
            step(model, torch.randn(6, 4))
    assert not model.memory.any()
    assert not model.peak
    if run is _into_frozen:
        with pytest.raises(ClippingError, match=what), torch.no_grad():
            model(torch.randn(6, 4))


@pytest.mark.parametrize("when", ["in large batches", "in other passes than those that are probed"])
def test_a_buffer_that_no_probe_sees_written(when: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if len(x) > 8 if when == "in large batches" else m.calls in range(14, 60, 2):
            m.average.add_(x.detach().mean(0))
        return m.last(m.first(x))  # type: ignore[no-any-return]

    model = Net(run)
    attach(model)
    with pytest.raises(ClippingError, match=r"buffer 'average'"):
        _train(model, 33, batch=16)
    with pytest.raises(ClippingError, match=r"buffer 'average'"):
        step(model, torch.randn(16, 4))


def test_counts_of_examples_in_passes_without_gradients_are_refused() -> None:
    """How often each entry of a codebook was chosen, while somebody evaluates: an export would hold it."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.last(m.first(x))
        if not torch.is_grad_enabled():
            m.seen += 1
            if m.calls % 2:
                m.usage += torch.bincount(h.argmax(1), minlength=3)
        return h  # type: ignore[no-any-return]

    model: Any = Net(run)
    model.register_buffer("usage", torch.zeros(3, dtype=torch.long))
    attach(model)
    step(model, torch.randn(6, 4))
    model.calls = 1
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert model.seen == 1, "a counter"
    with pytest.raises(ClippingError, match="buffer 'usage'"), torch.no_grad():
        model(torch.randn(6, 4))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_table_that_is_renormalised_where_it_is_read(frozen: bool) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 3))
    model[0].weight.requires_grad_(not frozen)
    attach(model)
    with pytest.raises(ClippingError, match="max_norm"):
        step(model, torch.randint(0, 9, (6, 5)))


# --- no false alarms --------------------------------------------------------------------------------------------------


class StochasticDepth(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1)) < 0.5
        return x + keep * self.inner(x)  # type: ignore[no-any-return]


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class OwnNoise(nn.Module):
    """A generator of the module's own, of whatever device and type."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator).to(x)


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5 or float(torch.rand(())) < 0.5:
                x = layer(x).tanh()
        return x


class Counting(nn.Module):
    """Counters, caches and what a probe must put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.kept = nn.Linear(8, 8), 0, None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        assert self.kept is None or self.calls > 1  # the probe leaves no cache, and no attribute less
        self.kept = x.detach()  # as long as the batch
        return self.layer(x) * (1 + 1 / self.calls)  # type: ignore[no-any-return]


def _residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        StochasticDepth(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Dropout2d(0.3), nn.Hardswish())),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.AlphaDropout(0.2),
        nn.Linear(8, 5),
    )


def _transformer(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, **options)
    return convert(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


FINE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.1)), (8,)),
    "residual": (_residual, (3, 9, 9)),
    "stochastic depth": (lambda: nn.Sequential(*(StochasticDepth(nn.Linear(8, 8)) for _ in range(3))), (7, 8)),
    "noise": (lambda: nn.Sequential(Noisy(), nn.Linear(8, 8), Noisy(), nn.LayerNorm(8)), (7, 8)),
    "own noise": (lambda: nn.Sequential(nn.Linear(8, 8), OwnNoise(), nn.Linear(8, 8)), (8,)),
    "layer drop": (LayerDrop, (8,)),
    "counters": (Counting, (8,)),
    "transformer": (lambda: _transformer(batch_first=True), (6, 8)),
    "transformer, norm first": (lambda: _transformer(batch_first=True, norm_first=True), (6, 8)),
    "deep": (
        lambda: nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)))),
        (8,),
    ),
    "one unit": (lambda: nn.Sequential(nn.Linear(8, 1), nn.Tanh(), nn.Linear(1, 8)), (8,)),
    "zero": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardshrink(9.0)), (8,)),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast", "float64"])
@pytest.mark.parametrize("name", FINE)
def test_no_false_alarm(name: str, precision: str) -> None:
    for seed, batch in enumerate((2, 5, 33)):
        torch.manual_seed(seed)
        random.seed(seed)
        make, shape = FINE[name]
        model, x = make(), torch.randn(batch, *shape) * (1 + 3 * torch.rand(batch, *[1] * len(shape)))
        if precision == "bfloat16":
            model, x = model.bfloat16(), x.bfloat16()
        elif precision == "float64":
            model, x = model.double(), x.double()
        attach(model)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                out = model(x)
            out.float().square().flatten(1).sum(1).mean().backward()


@pytest.mark.parametrize("name", ["statistics", "fake quantisation", "mean times a hundredth"])
def test_mild_mixing_is_seen_under_autocast(name: str) -> None:
    """The probe looks in float32: 16 bits would hide it."""
    mild = lambda m, x: m.last(m.first(x - 0.01 * x.mean(0)).tanh())  # noqa: E731
    model = Net(MIXING.get(name, mild))
    attach(model)
    with pytest.raises(ClippingError, match="mixes"), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(64, 4))


def test_kernels_for_16_bits_alone_are_probed_under_autocast() -> None:
    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.dtype != torch.bfloat16:
                raise RuntimeError("bfloat16 only")
            return self.last(h)  # type: ignore[no-any-return]

    model = Low()
    clipper = attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(6, 4))
    out.float().square().sum(1).mean().backward()
    assert clipper.norms.numel() == 6


def test_random_numbers_and_counters_are_put_back() -> None:
    """Training goes on as if no probe had been."""
    outputs = []
    for probe in (True, False):
        torch.manual_seed(3)
        random.seed(3)
        model = nn.Sequential(Counting(), nn.Dropout(0.5), LayerDrop(), Noisy())
        attach(model).allow_probe(probe)
        outputs.append([model(torch.randn(5, 8)) for _ in range(5)])
        assert model[0].calls == 5
        assert int(model[0].steps) == 5
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)


class Unpadded(nn.Module):
    """Tokens one behind the other, with dropout: how much is drawn depends on the examples' lengths."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.table, self.drop, self.first, self.last = nn.Embedding(50, 8), nn.Dropout(0.1), *_two(8)
        self.mixes = mixes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.table(x)
        tokens = self.drop(h[mask])
        tokens = tokens - tokens.mean(0) if self.mixes else tokens
        h = torch.zeros_like(h).masked_scatter(mask.unsqueeze(2).expand_as(h), tokens)
        h = self.first(h).tanh() * mask.unsqueeze(2)
        return self.last(h.sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


def _two(width: int) -> tuple[nn.Linear, nn.Linear]:
    return nn.Linear(width, width), nn.Linear(width, 3)


@pytest.mark.parametrize("mixes", [True, False])
def test_dropout_over_as_many_tokens_as_there_are(mixes: bool) -> None:
    model = Unpadded(mixes=mixes)
    attach(model, 1.0)
    mask = torch.arange(12) < torch.randperm(12)[:8].unsqueeze(1) + 1
    with pytest.raises(ClippingError, match="mixes the examples") if mixes else contextlib.nullcontext():
        for _ in range(3):
            model(torch.randint(0, 50, (8, 12)), mask).square().sum(1).mean().backward()
    assert model.drop.training


def test_packed_sequences_know_their_batch() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: PackedSequence) -> Tensor:
            return self.last(pad_packed_sequence(self.net(x)[0], batch_first=True)[0].sum(1))  # type: ignore[no-any-return]

    model = convert(Tagger())
    clipper = attach(model)
    for lengths in ((2, 5, 3, 1), (4, 4), (1, 2, 3, 4, 5, 6)):
        step(model, pack_sequence([torch.randn(n, 3) for n in lengths], enforce_sorted=False))  # type: ignore[arg-type]
        assert clipper.norms.numel() == len(lengths)
        clipper.zero()


def test_long_rows_are_compared_in_part() -> None:
    """Of rows too long to keep, some numbers of every step and all norms, whatever the longest example is."""

    class Long(nn.Module):
        def __init__(self, *, mixes: bool) -> None:
            super().__init__()
            self.net, self.mixes = nn.GRU(3, 64, batch_first=True), mixes
            self.last = nn.Linear(64, 64, bias=False)  # padding stays zero

        def forward(self, x: PackedSequence) -> Tensor:
            h = self.last(pad_packed_sequence(self.net(x)[0], batch_first=True)[0])
            return (h - h.mean((0, 1)) if self.mixes else h).square().sum(1)  # type: ignore[no-any-return]

    x = pack_sequence([torch.randn(n, 3) for n in (20, 60, 35, 2)], enforce_sorted=False)
    step(attach(convert(Long(mixes=False))).model, x)  # type: ignore[arg-type]
    with pytest.raises(ClippingError, match="mixes"):
        step(attach(convert(Long(mixes=True))).model, x)  # type: ignore[arg-type]
