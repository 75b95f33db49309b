"""Every layer family, hypothesis-drawn shapes, float64: equal to one-example-at-a-time autograd to 1e-9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import ClippingError, attach, convert
from lambdacgd.clipping.backward import Stored
from lambdacgd.clipping.rules import register, tap

quick = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
small = st.integers(1, 5)
Oracle = Callable[..., None]


def seeded(*size: int) -> Tensor:
    torch.manual_seed(sum(s * 31**k for k, s in enumerate(size)) % 2**31)
    return torch.randn(*size, dtype=torch.float64)


class Wrapped(nn.Module):
    """A layer in the middle, so that both its input and its output carry gradients."""

    def __init__(self, layer: nn.Module, features: int | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.layer = layer

    def forward(self, x: Any) -> Any:
        out = self.layer(x * self.scale if x.is_floating_point() else x)
        return (out[0] if isinstance(out, tuple) else out) * self.scale


@quick
@given(small, st.lists(small, max_size=3), small, small, st.booleans())
def test_linear(oracle: Oracle, batch: int, middle: list[int], inner: int, outer: int, bias: bool) -> None:
    oracle(Wrapped(nn.Linear(inner, outer, bias=bias)), seeded(batch, *middle, inner), batch)


@settings(quick, max_examples=40)
@given(st.data())
def test_convolution(oracle: Oracle, data: Any) -> None:
    dims, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    kernel, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    dilation, mode = (
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )
    padding: Any = data.draw(st.integers(0, 1))
    if stride == 1 and data.draw(st.booleans()):
        padding = data.draw(st.sampled_from(["same", "valid"]))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = kind(
        2 * groups, 2 * groups * data.draw(st.integers(1, 2)), kernel, stride=stride, padding=padding,
        dilation=dilation, groups=groups, bias=data.draw(st.booleans()), padding_mode=mode,
    )  # fmt: skip
    oracle(Wrapped(layer), seeded(3, 2 * groups, *([6, 5, 7][:dims])), 3)


@settings(quick, max_examples=25)
@given(st.data())
def test_transposed_convolution(oracle: Oracle, data: Any) -> None:
    dims, groups, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dilation = data.draw(st.integers(1, 2))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    layer = kind(
        2 * groups, 3 * groups, data.draw(st.integers(1, 3)), stride=stride, padding=data.draw(st.integers(0, 1)),
        output_padding=data.draw(st.integers(0, max(stride, dilation) - 1)), groups=groups, dilation=dilation,
    )  # fmt: skip
    oracle(Wrapped(layer), seeded(2, 2 * groups, *([4, 3, 3][:dims])), 2)


@quick
@given(small, st.lists(small, max_size=2), st.booleans())
def test_embedding(oracle: Oracle, batch: int, rest: list[int], padded: bool) -> None:
    """Of one index an example, of a row of them, of a matrix."""
    torch.manual_seed(batch)
    oracle(Wrapped(nn.Embedding(4, 3, padding_idx=1 if padded else None)), torch.randint(0, 4, (batch, *rest)), batch)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_bag(oracle: Oracle, mode: str, padding: int | None) -> None:
    torch.manual_seed(1)
    oracle(Wrapped(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)), torch.randint(0, 6, (4, 5)), 4)


def test_embedding_bag_with_offsets_is_refused() -> None:
    bag = nn.EmbeddingBag(6, 3)
    attach(bag, 0.2, batch_of=lambda args, kwargs: len(args[1]))
    with pytest.raises(ClippingError, match="bags as a matrix"):
        bag(torch.randint(0, 6, (9,)), torch.tensor([0, 4, 5, 5]))


@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_bag_with_weights(oracle: Oracle, padding: int | None) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3, mode="sum", padding_idx=padding)

        def forward(self, x: Any) -> Tensor:
            return self.bag(x[0], per_sample_weights=x[1])

    oracle(Weighted(), (torch.randint(0, 6, (4, 5)), seeded(4, 5)), 4)


@quick
@given(small, st.lists(small, max_size=2), st.integers(2, 6), st.booleans())
def test_layer_and_rms_norm(oracle: Oracle, batch: int, middle: list[int], size: int, affine: bool) -> None:
    x = seeded(batch, *middle, size)
    oracle(Wrapped(nn.LayerNorm(size, bias=affine)), x, batch)
    oracle(Wrapped(nn.RMSNorm(size)), x, batch)
    if middle:
        oracle(Wrapped(nn.LayerNorm((middle[-1], size))), x, batch)


@quick
@given(small, st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_group_and_instance_norm(oracle: Oracle, batch: int, groups: int, spatial: int, bias: bool) -> None:
    x = seeded(batch, 2 * groups, *([3, 4][:spatial]))
    norm = nn.GroupNorm(groups, 2 * groups)
    if not bias:
        norm.register_parameter("bias", None)
    oracle(Wrapped(norm), x, batch)
    if spatial:
        kind = (nn.InstanceNorm1d, nn.InstanceNorm2d)[spatial - 1]
        oracle(Wrapped(kind(2 * groups, affine=True)), x, batch)


@pytest.mark.parametrize("shape", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_computed_weights(oracle: Oracle, shape: Any) -> None:
    torch.manual_seed(9)
    oracle(Wrapped(nn.Sequential(shape(nn.Linear(3, 3)), nn.Tanh())), seeded(4, 2, 3), 4)


def test_a_rule_that_gives_gradients_of_another_shape_is_refused() -> None:
    """A kernel would read them as if they had the parameter's: other examples' numbers."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    @register(Scale)
    def scale(layer: Any, x: Tensor) -> Tensor:
        return tap(layer, layer.hidden(x), lambda gradient, x: [Stored(layer.names["by"], gradient * x)], x)

    model = Wrapped(Scale())
    clipper = attach(model)
    with pytest.raises(ClippingError, match=r"'layer.by' have shape \(4,\)"):
        model(torch.randn(3, 4)).sum(1).mean().backward()
    assert not clipper.sums


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(oracle: Oracle, kind: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]

    torch.manual_seed(4)
    net, x = Twice().double(), seeded(3, 4, 3)
    before = net(x)
    torch.testing.assert_close(convert(net)(x), before)
    oracle(net, x, 3)


@pytest.mark.parametrize("self_attention", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 6, "vdim": 5}]
)
@pytest.mark.parametrize("first", [True, False])
def test_multihead_attention(oracle: Oracle, self_attention: bool, options: dict[str, Any], first: bool) -> None:
    if self_attention and "kdim" in options:
        pytest.skip("self-attention needs equal widths")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=first, **options)

        def forward(self, batch: Any) -> Tensor:
            q, k, v = batch if not self_attention else (batch[0],) * 3
            if not first:
                q, k, v = (q.transpose(0, 1),) * 3 if self_attention else (t.transpose(0, 1) for t in (q, k, v))
            out = self.attention(q, k, v, need_weights=False)[0]
            return out if first else out.transpose(0, 1)

    torch.manual_seed(5)
    net = Net().double()
    batch = (seeded(3, 4, 8), seeded(3, 5, options.get("kdim", 8)), seeded(3, 5, options.get("vdim", 8)) + 1)
    before = net(batch)
    convert(net)
    torch.testing.assert_close(net(batch), before)
    oracle(net, batch, 3)


def _pieces(width: int) -> dict[str, Callable[[], nn.Module]]:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.gain = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.einsum("btd,de->bte", x, self.mix.tanh()) * self.gain[None]

    class Conv(nn.Conv1d):
        def __init__(self) -> None:
            super().__init__(width, width, 3, padding=1)

    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Conv.__mro__[1](width, width, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x.transpose(1, 2)), inplace=True).transpose(1, 2)

    return {
        "linear": lambda: nn.Linear(width, width),
        "norm": lambda: nn.LayerNorm(width),
        "rms": lambda: nn.RMSNorm(width),
        "gelu": lambda: nn.GELU(),
        "own": Own,
        "conv": Swap,
    }


@settings(quick, max_examples=25)
@given(st.lists(st.sampled_from(["linear", "norm", "rms", "gelu", "own", "conv"]), min_size=1, max_size=5), st.data())
def test_random_compositions_with_shared_layers(oracle: Oracle, names: list[str], data: Any) -> None:
    torch.manual_seed(len(names))
    made = {name: make() for name, make in _pieces(4).items()}
    # Used twice under one name: shared. Drawn anew: layers of their own.
    layers = [made[n] if data.draw(st.booleans()) else _pieces(4)[n]() for n in names]
    oracle(Wrapped(nn.Sequential(*layers)), seeded(3, 5, 4), 3)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 6), (3, 4)),
        (lambda: nn.Linear(4, 6), (3, 5, 4)),
        (lambda: nn.Linear(4, 6, bias=False), (3, 5, 4)),
        (lambda: nn.Linear(4, 6), (3, 2, 5, 4)),
        (lambda: nn.Conv1d(4, 6, 3), (3, 4, 8)),
        (lambda: nn.Conv2d(4, 6, 3), (3, 4, 5, 5)),
        (lambda: nn.LayerNorm(4), (3, 5, 4)),
        (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    ],
)
def test_the_output_of_a_layer_may_be_written_over(oracle: Oracle, layer: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(8)
    oracle(nn.Sequential(nn.Identity(), layer(), nn.ReLU(inplace=True)), seeded(*shape), 3)


@pytest.mark.parametrize("mode", ["flat", "per-layer", "automatic"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_modes_and_reductions(oracle: Oracle, mode: str, reduction: str) -> None:
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        each = (model(x) ** 2).sum(-1).flatten(1).mean(1)
        return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" or len(x) == 1 else each

    def one(model: nn.Module, x: Tensor) -> Tensor:
        value = loss(model, x)
        return value.reshape(1) if reduction == "none" and len(x) == 1 else value

    oracle(net, seeded(5, 3, 4), 5, loss=one, mode=mode, loss_reduction=reduction)
