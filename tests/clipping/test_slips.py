"""Ways past the rules: gradients that no record would hold, or that would count twice. Each is exact or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lambdacgd.clipping import ClippingError, attach, backward, check_model, convert, gpu
from tests.clipping.small import mlp, step, total_norm

pytestmark = pytest.mark.usefixtures("seeded")
Oracle = Callable[..., None]


class Net(nn.Module):
    """A model whose forward is the given function of itself and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def parameter(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size))


# --- parameters used where no rule sees them --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: F.linear(m.encoder(x).tanh(), m.encoder.weight.t(), m.b),
        lambda m, x: (m.encoder(x).tanh() @ m.encoder.weight) * m.b,
        lambda m, x: m.norm(m.encoder.weight).sum(0) * x * m.b,
    ],
    ids=["transposed", "product", "normalised"],
)
def test_a_weight_that_another_module_reads(oracle: Oracle, run: Any) -> None:
    """Tied heads, relative positions: the gradients of both uses are one."""
    tied = Net(run, encoder=nn.Linear(4, 3), b=parameter(4), norm=nn.LayerNorm(4))
    oracle(tied, torch.randn(3, 4).double(), 3)
    oracle(tied, torch.randn(6, 2, 4).double(), 6)


def _scaled(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.last.weight.norm()
    return m.last(m.first(x).tanh() / size) * m.w.norm()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.last(m.first(x).type_as(m.last.weight)),
        lambda m, x: m.last(m.first(x).tanh().to(m.w) * m.w),
        lambda m, x: m.last(m.first(x).tanh().to(m.w.device, m.last.weight.dtype)) * m.w.sum(),
        _scaled,
    ],
    ids=["another module's", "its own", "by name", "its size"],
)
def test_a_parameter_that_lends_its_type_or_its_size(oracle: Oracle, run: Any) -> None:
    """No gradient comes to it there, and what it lends it to keeps its batch."""
    model = Net(run, first=nn.Linear(4, 4), last=nn.Linear(4, 3), w=parameter(4))
    oracle(model, torch.randn(5, 4).double(), 5)


def test_results_that_have_names(oracle: Oracle) -> None:
    model = Net(lambda m, x: x[:, m.w.topk(3).indices] * m.w.sort().values[:3], w=parameter(5))
    oracle(model, torch.randn(4, 5).double(), 4)


@pytest.mark.parametrize(
    "statistic",
    [lambda h: h.std(), lambda h: h.square().mean().sqrt(), lambda h: h.abs().max()],
    ids=["std", "rms", "max"],
)
@pytest.mark.parametrize("probe", [True, False])
def test_a_statistic_of_the_batch_without_dimensions_is_refused(
    statistic: Callable[[Tensor], Tensor], probe: bool
) -> None:
    """``gamma / h.std()`` looks like a parameter divided by a constant; what it takes from every example would get no
    gradient, and one outlier would move the others' contributions by many times ζ.
    """

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.inner(x)
        return h * (m.gamma / statistic(h))

    model = Net(run, inner=nn.Linear(4, 3), gamma=parameter(3))
    clipper = attach(model, 1e-3)
    clipper.allow_probe(probe)
    with pytest.raises(ClippingError, match=r"gamma.*depends on the examples but does not have the batch"):
        step(model, torch.randn(6, 4))
    assert clipper.norms.numel() == 0


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _table(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(2, 4)
    table[:1] = m.w
    return x + table


def _copied(m: Any, x: Tensor) -> Tensor:
    row = torch.zeros(len(x), 1, 4)
    row.copy_(m.w)
    return x + row


def _filled(m: Any, x: Tensor) -> Tensor:
    h = x.clone()
    h.masked_fill_(x > 0, m.w.sum())
    return h


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda m, x: x * Rounded.apply(m.w), "autograd.Function"),
        (_table, "__setitem__"),
        (_copied, "copy_"),
        (_filled, "masked_fill_"),
        (lambda m, x: torch.cat([torch.stack([m.w[0]] * len(x)), x[:, 0]], 1), "one example at a time"),
    ],
    ids=["function", "setitem", "copy", "fill", "stack"],
)
def test_what_cannot_be_followed_is_refused(run: Any, why: str) -> None:
    model = Net(run, w=parameter(1, 4))
    attach(model)
    with pytest.raises(ClippingError, match=why):
        step(model, torch.randn(5, 2, 4))


def test_tensors_changed_between_forward_and_backward_are_noticed() -> None:
    """What an operation is run on again in the backward pass is what it was run on."""
    scale = torch.ones(4)
    model = Net(lambda m, x: torch.einsum("bi,ij,j->bj", x, m.w, scale), w=parameter(4, 4))
    attach(model)
    for changed in (scale, model.w):
        loss = model(torch.randn(3, 4)).square().sum(1).mean()
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Standardised(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2), keepdim=True), bias)


def test_a_layer_that_changes_what_its_forward_calls(oracle: Oracle) -> None:
    oracle(nn.Sequential(Standardised(2, 3, 2), nn.Tanh()), torch.randn(4, 2, 5).double(), 4)
    layer = nn.Conv1d(2, 3, 2)
    plain = layer._conv_forward
    layer._conv_forward = lambda x, w, b: plain(x, w.tanh(), b)  # type: ignore[method-assign]
    oracle(nn.Sequential(layer, nn.Tanh()), torch.randn(4, 2, 5).double(), 4)


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.Linear(4, 4), nn.GroupNorm(1, 3)], ids=lambda m: type(m).__name__
)
def test_computed_biases(oracle: Oracle, layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Softplus())
    oracle(nn.Sequential(layer, nn.Tanh()), torch.randn(4, 3, 4).double(), 4)


WITH_BIAS = {
    "linear": lambda: nn.Linear(4, 3),
    "conv": lambda: nn.Conv1d(3, 2, 2),
    "group norm": lambda: nn.GroupNorm(3, 3),
    "layer norm": lambda: nn.LayerNorm(4),
}


@pytest.mark.parametrize("kind", WITH_BIAS)
def test_a_pruned_bias(oracle: Oracle, kind: str) -> None:
    """A hook makes it before the forward pass: its share must not vanish."""
    layer = prune.l1_unstructured(WITH_BIAS[kind]().double(), "bias", 1)
    oracle(nn.Sequential(layer, nn.Tanh()), torch.randn(4, 3, 4).double(), 4)


def test_a_model_that_is_one_pruned_layer(oracle: Oracle) -> None:
    """Its hook runs beside those of the clipper."""
    oracle(prune.l1_unstructured(nn.Linear(4, 3).double(), "bias", 1), torch.randn(4, 4).double(), 4)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", [k for k in WITH_BIAS if k != "linear"])
def test_what_a_module_around_a_layer_computes_for_it(oracle: Oracle, kind: str, name: str) -> None:
    """Not there yet when clipping is attached."""

    def run(m: Any, x: Tensor) -> Tensor:
        setattr(m.layer, name, m.raw * 0.9)
        y: Tensor = m.layer(x).tanh() * torch.linspace(-1, 2, x.shape[-1] - (kind == "conv"))
        delattr(m.layer, name)
        return y

    layer = WITH_BIAS[kind]()
    raw = nn.Parameter(torch.randn_like(getattr(layer, name)))
    delattr(layer, name)
    oracle(Net(run, layer=layer, raw=raw), torch.randn(4, 3, 4, dtype=torch.float64), 4)


def test_recurrent_layers_that_share_weights(oracle: Oracle) -> None:
    net = nn.LSTM(4, 4, batch_first=True)
    net.weight_ih_l0 = net.weight_hh_l0
    oracle(Net(lambda m, x: m.net(x)[0], net=convert(net)), torch.randn(3, 5, 4).double(), 3)


def test_empty_parameters_and_sparse_gradients(oracle: Oracle) -> None:
    model = Net(lambda m, x: m.embed(x) + m.none.sum(), embed=nn.Embedding(5, 3, sparse=True), none=parameter(0, 2))
    oracle(model, torch.randint(0, 5, (3, 4)), 3)


def test_operations_that_need_autocast_in_the_backward_pass_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4))
    clipper = attach(model, math.inf)
    x, totals = torch.randn(3, 4), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(x).float().square().sum(1).mean()
        loss.backward()
        totals.append(clipper.take()["1.weight"].clone())
    torch.testing.assert_close(totals[1], totals[0], rtol=0.05, atol=0.05)


# --- examples that leave their place ----------------------------------------------------------------------------------


def _sorted(m: Any, x: Tensor) -> Tensor:
    order = x.sum((1, 2)).argsort()
    return m.last(m.first(x[order])[order.argsort()])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [
        _sorted,
        lambda m, x: m.first(x[:, 0]) @ m.last(x[:, 0]).t(),
    ],
    ids=["sorted", "compared"],
)
def test_examples_that_are_sorted_or_mixed_are_refused(run: Any) -> None:
    """Layers whose rows are different examples would clip the sum of their gradients: up to twice the norm each."""
    model = Net(run, first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    clipper = attach(model)
    for _ in range(2):
        with pytest.raises(ClippingError, match="mixes the examples"):
            step(model, torch.randn(8, 2, 4))
    clipper.detach()
    with pytest.raises(ClippingError):
        check_model(model, torch.randn(8, 2, 4), loss=lambda m, x: m(x).square().flatten(1).sum(1).mean())


def test_the_probe_under_checkpointing_of_the_whole_model(oracle: Oracle) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda t: model(t).square().flatten(1).sum(1).mean(), x, use_reentrant=False)  # type: ignore[no-any-return]

    oracle(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6)), torch.randn(3, 2, 4).double(), 3, loss=loss)


# --- backward passes --------------------------------------------------------------------------------------------------


def test_gradients_of_inputs_alone_add_nothing() -> None:
    """Adversarial training: torch.autograd.grad leaves p.grad alone, so it must leave the sums alone."""
    model, x = mlp(), torch.randn(1, 4, requires_grad=True)
    clipper = attach(model, 1e-3)
    loss = model(x).square().sum(1).mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert clipper.norms.numel() == 0
    loss.backward()
    assert clipper.norms.numel() == 1
    assert total_norm(clipper.take()) <= 1e-3 * (1 + clipper.sensitivity_tolerance)
    with pytest.raises(ClippingError, match="create_graph"):  # a penalty on gradients
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_two_forward_passes_in_one_backward_pass_are_refused() -> None:
    """Row i of two batches may be two examples, which would share one clipping norm: one alone then moves it by 2ζ."""
    model, x = mlp(), torch.randn(4, 4)
    clipper = attach(model)
    with pytest.raises(ClippingError, match="two forward passes"):
        (model(x[:2]).square().sum(1).mean() + model(x[2:]).square().sum(1).mean()).backward()
    assert clipper.norms.numel() == 0
    step(model, x)


def test_layers_called_outside_the_model_are_refused() -> None:
    """What they see need not be the examples that the model saw."""
    model, x = mlp(), torch.randn(4, 4)
    attach(model)
    for _ in range(2):
        with pytest.raises(ClippingError, match="outside the model"):
            model[0](x)
        with pytest.raises(ClippingError, match="outside the model"):
            model.forward(x)
        step(model, x)


def test_a_forward_pass_that_raised_is_over() -> None:
    """Layers called after it would pass for the model's own, two batches of them for one."""
    model, x = mlp(), torch.randn(4, 4)
    attach(model)
    step(model, x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 5))
        with pytest.raises(ClippingError, match="outside the model"):
            model[0](x)
    step(model, x)


def test_a_sum_that_failed_half_way_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory after half of the layers: the second try would add these examples once more to that half."""
    model, x = mlp(), torch.randn(1, 4)
    clipper = attach(model, 1e-3)
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        patched.setattr(clipper.totals, "add_pack", fail)  # the biases, after the weights
        with pytest.raises(torch.OutOfMemoryError):
            step(model, x)
    step(model, x)
    assert clipper.norms.numel() == 1
    assert total_norm(clipper.take()) <= 1e-3 * (1 + clipper.sensitivity_tolerance)


def test_sums_that_do_not_stand_are_formed_again_by_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the layers' records are kept; no longer than to the next forward pass."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    model, x = mlp(), torch.randn(3, 4)
    clipper = attach(model, 1.0)
    step(model, x[1:])
    wanted = {name: total.clone() for name, total in clipper.take().items()}
    ways: list[Callable[[], object]] = [clipper.settle, clipper.take, lambda: clipper.sums, lambda: model(x)]
    for ask in ways:
        rows = model(x).square().sum(1)
        (rows * torch.tensor([float("nan"), 1.0, 1.0])).mean().backward()
        assert clipper._hoped is not None
        found = ask()
        assert clipper._hoped is None
        for name, total in (found if isinstance(found, dict) else clipper.sums).items():
            torch.testing.assert_close(total, wanted[name])
        clipper.zero()


class Table(nn.Module):
    """Indices to one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(90, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().sum((1, 2)).unsqueeze(1)


@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding"])
@pytest.mark.parametrize("late", [False, True])
def test_an_input_buffer_that_is_filled_anew_after_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, kind: str, late: bool
) -> None:
    """Sums formed again would multiply a batch's clip factors with the next one's inputs: 4878 ζ from 7 examples."""
    model: nn.Module
    if kind == "linear":
        model, x = nn.Linear(6, 5), torch.randn(8, 6)
    elif kind == "convolution":
        monkeypatch.setattr(backward, "_KEPT_PATCHES", 0)
        model, x = nn.Conv2d(2, 64, 3, bias=False), torch.randn(8, 2, 5, 5)
    else:
        model, x = Table(), torch.randint(90, (8, 3))
    clipper = attach(model, 1.0, loss_reduction="sum")
    rows = model(x).flatten(1).square().sum(1)
    if late:
        monkeypatch.setattr(gpu, "DEVICE", "cpu")
    (rows * torch.where(torch.arange(8) == 3, float("nan"), 1.0)).sum().backward()
    assert (clipper._hoped is not None) == late
    x.copy_(x.flip(0) if kind == "embedding" else x * 1000)
    if late:
        with pytest.raises(ClippingError, match="changed in place"):
            clipper.take()
        assert clipper.examples == 0
    else:
        assert total_norm(clipper.take()) <= 7 * (1 + clipper.sensitivity_tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_that_is_changed_after_the_backward_pass(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """A LayerNorm of rows has its output's gradient as its bias's, which a hook scales: 2706 ζ from 7 examples."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(backward, "_PACKS", 0)
    layer = nn.LayerNorm(6)
    layer.weight.requires_grad_(packed)
    model = nn.Sequential(layer)
    clipper = attach(model, 1.0, loss_reduction="sum")
    seen: list[Tensor] = []
    y = model(torch.randn(8, 6))
    y.register_hook(seen.append)
    (y.square().sum(1) * torch.where(torch.arange(8) == 3, float("nan"), 1.0)).sum().backward()
    seen[0].mul_(1000)
    with pytest.raises(ClippingError, match="changed in place"):
        clipper.take()


def _gram_norms(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[list[int], Tensor, gpu.Rounding]]:
    """`gpu.gram_norms` by its slow twin, at once."""
    found = []
    for k, (a, b) in enumerate(pairs):
        square, trace_a, trace_b, gram_a, gram_b = backward.gram_parts(a, b)
        grams = torch.stack([square, trace_a, trace_b, gram_a.square(), gram_b.square()], 1)
        found.append(([k], grams.unsqueeze(0), (2.0**-18, 2.0**-22, False)))
    return found


def test_a_hook_that_changes_a_gradient_whose_norm_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that are added up share it. On CUDA norms of models of many layers are taken as they come: 1.4 ζ."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "may_use_tables", lambda: True)
    monkeypatch.setattr(gpu, "gram_norms", _gram_norms)
    monkeypatch.setattr(backward, "_TOGETHER", 1)

    def run(m: Any, x: Tensor) -> Tensor:
        first = m.first(x)
        first.register_hook(lambda gradient: gradient.mul_(10))
        return first + m.last(x)  # type: ignore[no-any-return]

    layers = {name: nn.Linear(20, 20, bias=False) for name in ("first", "last")}
    clipper = attach(Net(run, **layers), 1.0, loss_reduction="sum")
    clipper.model(torch.randn(1, 3, 20)).square().sum().backward()
    assert total_norm(clipper.take()) <= 1 + clipper.sensitivity_tolerance


# --- models that change while attached --------------------------------------------------------------------------------


def _replace(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.randn(3, 6))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m[0].requires_grad_(True), "unfrozen"),
        (lambda m: m.double(), "type"),
        (_replace, "another tensor"),
        (lambda m: m[2].weight.register_hook(lambda g: 2 * g), "register_hook"),
    ],
    ids=["unfrozen", "double", "replaced", "hook"],
)
def test_changes_after_attaching_are_refused(change: Callable[[nn.Sequential], object], why: str) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    attach(model)
    change(model)
    with pytest.raises(ClippingError, match=why):
        step(model, torch.randn(3, 4).to(model[0].weight.dtype))
    assert all(p.grad is None for p in model.parameters())


def test_weights_passed_in_from_outside_are_refused() -> None:
    model = mlp()
    attach(model)
    with pytest.raises(ClippingError, match="functional_call"):
        torch.func.functional_call(model, {n: 2 * p for n, p in model.named_parameters()}, (torch.randn(3, 4),))


def test_attaching_twice_and_empty_batches_are_refused() -> None:
    model = mlp()
    clipper = attach(model)
    with pytest.raises(ClippingError, match="attached already"):
        attach(model)
    with pytest.raises(ClippingError, match="empty"):
        model(torch.randn(0, 4))
    step(model, torch.randn(3, 4))
    assert clipper.norms.numel() == 3
    clipper.detach()
    attach(model)
