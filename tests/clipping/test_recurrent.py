"""Private LSTM, GRU and RNN against the originals: clipped sums, packed sequences, computed weights, refusals."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from lambdacgd.clipping import attach, convert
from lambdacgd.clipping.layers import recurrent
from lambdacgd.clipping.layers.recurrent import Span, fused, plain
from lambdacgd.errors import ClippingError

Oracle = Callable[..., None]
KINDS: list[Any] = [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)]
SEED = 31
MODES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
quick = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Around(nn.Module):
    """Everything a recurrent layer returns, from an input and initial states that carry gradients."""

    def __init__(self, layer: Any, initial: bool, used: tuple[bool, ...]) -> None:
        super().__init__()
        self.layer, self.initial, self.used = layer, initial, used
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        width = layer.num_layers * (2 if layer.bidirectional else 1)
        self.start = nn.Linear(layer.input_size, width * layer.hidden_size).double()

    def forward(self, batch: Any) -> Tensor:
        x, lengths = batch if isinstance(batch, tuple) else (batch, None)
        layer, x = self.layer, x * self.scale
        hx = None
        if self.initial:
            h = self.start(x.mean(1)).tanh().view(len(x), -1, layer.hidden_size).transpose(0, 1).contiguous()
            hx = (h, h * 0.7) if layer.mode == "LSTM" else h
        given: Any = x if layer.batch_first else x.transpose(0, 1)
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, batch_first=layer.batch_first, enforce_sorted=False)
        y, last = layer(given, hx)
        if lengths is not None:
            y = pad_packed_sequence(y, batch_first=layer.batch_first, total_length=x.shape[1])[0]
        last = last if isinstance(last, tuple) else (last,)
        y = y if layer.batch_first else y.transpose(0, 1)
        outputs = [y, *(s.transpose(0, 1) for s in last)]
        parts = [o for o, use in zip(outputs, self.used, strict=False) if use] or [y]
        return torch.cat([x.sum(1), *(o.flatten(1) for o in parts)], 1)  # x: ReLU units may all be dead


@settings(quick, max_examples=20)
@given(st.data())
@pytest.mark.parametrize("run", [plain, fused])
@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu"])
def test_layers_against_the_originals(oracle: Oracle, kind: Any, run: Any, data: Any) -> None:
    """Outputs, and (through ``scale`` and ``start``) input gradients and per-example weight gradients: the oracle's
    gradients are those of the original kernel.
    """
    torch.manual_seed(SEED)
    batch, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    flags = [data.draw(st.booleans()) for _ in range(4)]
    layer = kind(
        3, data.draw(st.integers(1, 4)), num_layers=data.draw(st.integers(1, 2)),
        bidirectional=flags[0], bias=flags[1], batch_first=flags[2],
    ).double()  # fmt: skip
    x: Any = torch.randn(batch, steps, 3, dtype=torch.float64)
    if data.draw(st.booleans()):
        x = (x, torch.tensor([data.draw(st.integers(1, steps)) for _ in range(batch)]))
    model = Around(layer, flags[3], tuple(data.draw(st.lists(st.booleans(), min_size=3, max_size=3))))
    wanted = model(x)
    convert(model)
    with mock.patch.object(recurrent, "plain", run):
        oracle(model, x, batch, probe=False)
        clipper = attach(model, math.inf)
        clipper.allow_probe(False)
        torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-12)
        clipper.detach()


def test_packed_sequences_under_another_default_device() -> None:
    """``torch.set_default_device("cuda")``: lengths stay on the CPU."""
    packed = pack_padded_sequence(torch.randn(5, 3, 2), torch.tensor([2, 5, 1]), enforce_sorted=False)
    with torch.device("meta"):
        span = Span.of(packed)
        x = torch.arange(15.0, device="cpu").view(5, 3, 1)
        there = span.restore(span.arrange(x.clone(), True), True)
    assert torch.equal(there, x)


@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu"])
def test_unbatched_input(kind: Any) -> None:
    """The original takes it, where nobody clips; a private model has a batch."""
    torch.manual_seed(SEED)
    layer = kind(3, 4, num_layers=2, bidirectional=True).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    wanted = layer(x)
    convert(layer)
    torch.testing.assert_close(layer(x), wanted)
    attach(layer).allow_probe(False)
    with pytest.raises(ValueError, match="3 dimensions"):
        layer(x)


# --- where nobody clips -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu"])
def test_without_a_clipper_the_original_runs(kind: Any, training: bool) -> None:
    torch.manual_seed(SEED)
    original = kind(3, 4, num_layers=2, batch_first=True).train(training)
    layer, x = convert(copy.deepcopy(original)), torch.randn(2, 5, 3)
    with mock.patch.object(recurrent, "layered", side_effect=AssertionError):
        outputs = [m(x)[0] for m in (original, layer, pickle.loads(pickle.dumps(layer)))]
    gradients = [
        torch.autograd.grad(y.square().sum(), m.parameters()) for y, m in zip(outputs, (original, layer), strict=False)
    ]
    assert all(torch.equal(y, outputs[0]) for y in outputs)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_new_parameters_are_the_layers_own() -> None:
    """Loaded by assignment, or tied: the original's kernel still runs, with them."""
    torch.manual_seed(SEED)
    layer, other = convert(nn.LSTM(3, 4, batch_first=True)), nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    layer.load_state_dict(other.state_dict(), assign=True)
    layer.weight_hh_l0 = other.weight_hh_l0
    with mock.patch.object(recurrent, "layered", side_effect=AssertionError):
        for _ in range(2):
            assert torch.equal(layer(x)[0], other(x)[0])


def test_other_weights_in_place_of_the_layers_own() -> None:
    torch.manual_seed(SEED)
    original = nn.GRU(3, 4, batch_first=True).double()
    layer, x = convert(copy.deepcopy(original)), torch.randn(2, 5, 3, dtype=torch.float64)
    twice = {name: (2 * p).detach().requires_grad_() for name, p in original.named_parameters()}
    y = torch.func.functional_call(layer, twice, (x,))[0]
    gradients = torch.autograd.grad(y.square().sum(), list(twice.values()))
    with torch.no_grad():
        for p in original.parameters():
            p.mul_(2)
    wanted = original(x)[0]
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted.square().sum(), list(original.parameters())))


# --- attached ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)  # type: ignore[no-any-return]


def layer_of(kind: Any, **options: Any) -> Any:
    torch.manual_seed(SEED)
    return convert(kind(4, 4, batch_first=True, **options))


@pytest.mark.parametrize("kind", KINDS[:3], ids=["lstm", "gru", "rnn"])
def test_uses_of_a_layer(oracle: Oracle, kind: Any) -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    token = nn.Parameter(torch.randn(1, 1, 4))
    several = {"num_layers": 2, "bidirectional": True}

    def learned(m: Any, x: Tensor) -> Tensor:
        h = m.token.expand(len(x), 1, 4).transpose(0, 1)
        return m.net(x, (h, h) if kind is nn.LSTM else h)[0]  # type: ignore[no-any-return]

    oracle(Net(lambda m, x: m.second(x.flip(1), m.net(x)[1])[0], net=layer_of(kind), second=layer_of(kind)), x, 3)
    oracle(Net(lambda m, x: m.net(m.net(x)[0])[0], net=layer_of(kind)), x, 3)
    oracle(Net(lambda m, x: torch.relu_(m.net(x)[0]), net=layer_of(kind)), x, 3)  # the output is written over
    oracle(Net(learned, net=layer_of(kind), token=token), x, 3)
    again = Net(lambda m, x: checkpoint(lambda z: m.net(z)[0], x, use_reentrant=False), net=layer_of(kind, **several))
    oracle(again, x, 3)
    normed = nn.utils.parametrizations.weight_norm(layer_of(kind), "weight_hh_l0")
    oracle(Net(lambda m, x: m.net(x)[0], net=normed), x, 3)


class Dropped(nn.Module):
    """One of a layer's weights made anew in every forward pass from a parameter of this module's own (weight drop)."""

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__()
        self.layer, self.name, self.raw = layer, name, nn.Parameter(getattr(layer, name).detach().clone())
        del layer._parameters[name]

    def forward(self, batch: Any) -> Tensor:
        setattr(self.layer, self.name, self.raw * 0.9)
        return packed_outputs(self.layer, batch)


def packed_outputs(layer: Any, batch: Any) -> Tensor:
    x, lengths = batch
    y = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
    return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("computed", ["", "weight_hh_l0", "weight_ih_l0", "bias_ih_l0", "bias_hh_l0"])
@pytest.mark.parametrize("kind", KINDS[:3], ids=["lstm", "gru", "rnn"])
def test_computed_weights_on_sequences_of_any_length(oracle: Oracle, kind: Any, computed: str) -> None:
    """Example i is row i wherever a record is made, whatever the order that the recurrence likes; and as many steps as
    examples are no reason to doubt which is which.
    """
    layer = layer_of(kind, bidirectional=True)
    if computed:
        model: nn.Module = Dropped(layer, computed)
    else:
        model = Net(
            lambda m, b: packed_outputs(m.net, b), net=nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
        )
    clipper = attach(model.double(), math.inf)  # the probe sees sequences that are in order, and later ones are not
    for steps, lengths in ((3, [3, 3, 3]), (5, [1, 5, 2]), (2, [1, 2]), (3, [1, 3, 2])):
        x = torch.randn(len(lengths), steps, 4, dtype=torch.float64)
        model((x, torch.tensor(lengths))).square().mean(1).sum().backward()
    clipper.detach()
    x = torch.randn(3, 5, 4, dtype=torch.float64) * torch.tensor([0.2, 1.0, 3.0]).view(3, 1, 1)
    oracle(model, (x, torch.tensor([1, 5, 2])), 3)
    oracle(model, (x, torch.tensor([1, 5, 2])), 3, probe=False)


@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l0", "bias_ih_l0", "bias_hh_l0"])
def test_pruned_weights(oracle: Oracle, name: str) -> None:
    model = Net(lambda m, x: m.net(x)[0], net=prune.l1_unstructured(layer_of(nn.LSTM).double(), name, 1))
    oracle(model, torch.randn(3, 5, 4, dtype=torch.float64), 3)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
@pytest.mark.parametrize("kind", KINDS[:3], ids=["lstm", "gru", "rnn"])
def test_frozen_parts(oracle: Oracle, kind: Any, frozen: str) -> None:
    layer = layer_of(kind)
    getattr(layer, frozen).requires_grad_(False)
    oracle(Net(lambda m, x: m.net(x)[0], net=layer), torch.randn(3, 5, 4, dtype=torch.float64), 3)


@pytest.mark.parametrize("run", [plain, fused])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu"])
def test_autocast_stays_near_float32(kind: Any, dtype: torch.dtype, run: Any) -> None:
    model = Net(lambda m, x: m.net(x)[0].float().mean(1), net=layer_of(kind, bidirectional=True))
    clipper, x, totals = attach(model, math.inf), torch.randn(6, 9, 4), []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled), mock.patch.object(recurrent, "plain", run):
            loss = model(x).square().sum(1).mean()
        loss.backward()
        totals.append(torch.cat([t.flatten().clone() for t in clipper.take().values()]))
    assert totals[1].dtype == torch.float32
    assert float((totals[1] - totals[0]).norm()) <= 0.08 * float(totals[0].norm())


def test_gradients_of_inputs_alone_and_what_is_refused() -> None:
    model = Net(lambda m, x: m.net(x)[0], net=layer_of(nn.GRU))
    x = torch.randn(3, 5, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
    clipper = attach(model, 1.0)
    (found,) = torch.autograd.grad(model(x).square().sum(), x, retain_graph=True)
    torch.testing.assert_close(found, wanted)
    assert not clipper.sums
    with pytest.raises(ClippingError, match="create_graph"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    model.function = lambda m, x: m.net(x[:, :0])[0]
    with pytest.raises((RuntimeError, ClippingError), match="step"):
        model(x)
    model.function = lambda m, x: m.net(x, torch.zeros(1, 1, 4))[0]
    with pytest.raises((RuntimeError, ClippingError), match="hidden size"):
        model(x)
    model.function = lambda m, x: m.net(x, torch.zeros(1, len(x), 4, dtype=torch.float64))[0]
    with pytest.raises((RuntimeError, ClippingError), match="one type"):
        model(x)


@pytest.mark.parametrize("run", [plain, fused])
def test_activations_go_with_the_graph_while_the_loss_lives(run: Any) -> None:
    steps, losses = 23, []
    x = torch.randn(3, steps, 4, requires_grad=True)
    for kind in KINDS[:3]:
        model = Net(lambda m, x: m.net(x)[0].mean(1), net=layer_of(kind, bidirectional=True))
        clipper = attach(model, 1.0)
        for inputs in (None, [x]):  # for the parameters, and for the inputs alone
            with mock.patch.object(recurrent, "plain", run):
                losses.append(model(x).square().sum(1).mean())
            losses[-1].backward(inputs=inputs)
            clipper.take()
    x.grad = None
    gc.collect()
    kept = [o.shape for o in gc.get_objects() if issubclass(type(o), Tensor) and o is not x and steps in o.shape]
    assert not kept


def test_an_example_that_is_not_finite_stays_alone() -> None:
    model = Net(lambda m, x: m.net(x)[0].mean(1), net=layer_of(nn.LSTM))
    x = torch.randn(4, 5, 4)
    clipper = attach(model, 0.5, loss_reduction="sum")
    model(x[:3]).square().sum().backward()
    wanted = {name: t.clone() for name, t in clipper.take().items()}
    x[3, 2] = math.nan
    model(x).square().sum().backward()
    assert clipper.dropped == 1
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu"])
def test_clipped_sums_on_cuda_are_those_on_the_cpu(kind: Any) -> None:
    torch.manual_seed(SEED)
    layer = kind(3, 8, num_layers=2, bidirectional=True, batch_first=True).double()
    model, x = convert(Around(layer, True, (True, True, True))), torch.randn(5, 7, 3, dtype=torch.float64)
    lengths, totals = torch.tensor([3, 7, 1, 7, 5]), []
    for device in ("cpu", "cuda"):
        twin = copy.deepcopy(model).to(device)
        clipper = attach(twin, 0.3)
        twin((x.to(device), lengths)).square().sum(1).mean().backward()
        twin(x.to(device)).square().sum(1).mean().backward()
        totals.append({name: t.cpu() for name, t in clipper.take().items()})
    for name, total in totals[0].items():
        torch.testing.assert_close(totals[1][name], total, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=["lstm", "gru", "rnn", "relu"])
def test_an_example_that_is_not_finite_stays_alone_in_cudnn(kind: Any, bad: float) -> None:
    model = Net(lambda m, b: packed_outputs(m.net, b).mean(1), net=layer_of(kind, bidirectional=True)).double().cuda()
    x, lengths = torch.randn(4, 5, 4, dtype=torch.float64, device="cuda"), torch.tensor([2, 5, 3, 4])
    clipper = attach(model, 0.5, loss_reduction="sum")
    model((x[:3], lengths[:3])).square().sum().backward()
    wanted = {name: t.clone() for name, t in clipper.take().items()}
    x[3, 2] = bad
    model((x, lengths)).square().sum().backward()
    assert clipper.dropped == 1
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name], rtol=1e-6, atol=1e-9)


# --- recurrences over time, against autograd through ordinary operations ----------------------------------------------


def span_of(lengths: list[int] | None) -> Span:
    """Of sequences that are sorted, the longest having all steps; None: all have."""
    return Span() if lengths is None else Span(torch.tensor(lengths))


def problem(mode: str, batch: int, steps: int, hidden: int, bias: bool, **kind: Any) -> list[Any]:
    """px, h, c, W_hh, b_hh of a recurrence; the first three need gradients."""
    torch.manual_seed(SEED)
    gates = MODES[mode] * hidden
    first = [torch.randn(steps, batch, gates, **kind), torch.randn(batch, hidden, **kind)]
    first.append(torch.randn(batch, hidden, **kind) if mode == "LSTM" else None)  # type: ignore[arg-type]
    first = [None if x is None else x.requires_grad_() for x in first]  # type: ignore[misc]
    weight = torch.randn(gates, hidden, **kind) / hidden**0.5
    return [*first, weight, torch.randn(gates, **kind) if bias else None]


def solved(run: Any, mode: str, given: list[Any], span: Span, used: tuple[bool, ...]) -> list[Tensor]:
    """What comes out, and the gradients of what went in, where some of the outputs are used."""
    px, h, c, w, b = given
    y, last = run(mode, px, (h,) if c is None else (h, c), w, b, span)
    outputs = [y, *last]
    parts = [x for x, use in zip(outputs, used, strict=False) if use] or [y]
    total = sum((x * torch.linspace(-1, 2, x.numel()).to(x).view(x.shape)).sum() for x in parts)
    needed = [x for x in (px, h, c) if x is not None]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(total, needed))  # type: ignore[arg-type]


@quick
@given(st.data())
@pytest.mark.parametrize("mode", list(MODES))
def test_states_and_gradients_are_those_of_ordinary_operations(mode: str, data: Any) -> None:
    batch, steps, hidden = (data.draw(st.integers(1, n)) for n in (4, 6, 5))
    lengths = None
    if data.draw(st.booleans()):
        lengths = [
            steps,
            *sorted(data.draw(st.lists(st.integers(1, steps), min_size=batch - 1, max_size=batch - 1)))[::-1],
        ]
    span, used = span_of(lengths), tuple(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    given = problem(mode, batch, steps, hidden, data.draw(st.booleans()), dtype=torch.float64)
    wanted = solved(recurrent.plain, mode, given, span, used)
    for x, y in zip(solved(fused, mode, given, span, used), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


# --- cuDNN ------------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Of the norm: rounding, and for TF32 and 16 bits that of the operands and states over forty steps.
BOUNDS = {"float64": 1e-10, "float32": 1e-4, "tf32": 2e-2, "bfloat16": 0.1, "float16": 2e-2}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("error:RNN module weights")  # not in one piece: copied at every call
@pytest.mark.parametrize("precision", list(BOUNDS))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", list(MODES))
def test_cudnn_gives_what_the_loop_gives(mode: str, packed: bool, precision: str) -> None:
    if mode == "RNN_RELU" and precision not in ("float64", "float32"):
        pytest.skip("rounding switches ReLU units on and off")
    steps, batch, hidden = 40, 16, 64
    span = span_of([steps - 2 * i for i in range(batch)] if packed else None)
    given = problem(mode, batch, steps, hidden, packed, device="cuda", dtype=torch.float64)
    kind = torch.float32 if precision == "tf32" else getattr(torch, precision)
    low = [None if x is None else x.detach().to(kind).requires_grad_(x.requires_grad) for x in given]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        found = solved(fused, mode, low, span, (True, True, True))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    exact = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in low]
    for x, y in zip(found, solved(plain, mode, exact, span, (True, True, True)), strict=True):
        assert x.dtype == kind
        assert float((x.double() - y).norm()) <= BOUNDS[precision] * float(y.norm())
