"""A rule of one's own is kept if its sums are right, and not otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lambdacgd.clipping import ClippingError, Layer, Record, Stored, attach, outer, register, tap
from lambdacgd.clipping.rules import RULES

pytestmark = pytest.mark.usefixtures("seeded")


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def scale(layer: Layer, x: Tensor) -> Tensor:
    def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
        yield Stored(layer.names["weight"], (gradient * x).flatten(1, -2).sum(1))
        yield Stored(layer.names["bias"], gradient.flatten(1, -2).sum(1))

    return tap(layer, layer.hidden(x), recorder, x)


def forgets_the_bias(layer: Layer, x: Tensor) -> Tensor:
    def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
        yield Stored(layer.names["weight"], (gradient * x).flatten(1, -2).sum(1))

    return tap(layer, layer.hidden(x), recorder, x)


def doubles(layer: Layer, x: Tensor) -> Tensor:
    def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
        yield Stored(layer.names["weight"], 2 * (gradient * x).flatten(1, -2).sum(1))
        yield Stored(layer.names["bias"], gradient.flatten(1, -2).sum(1))

    return tap(layer, layer.hidden(x), recorder, x)


def example() -> tuple[nn.Module, Tensor]:
    return Scale(3), torch.randn(5, 4, 3)


def test_a_right_rule_is_kept(oracle: Callable[..., None]) -> None:
    try:
        calls = []

        def counted(layer: Layer, x: Tensor) -> Tensor:
            calls.append(layer.path)
            return scale(layer, x)

        register(Scale, example=example, pointwise=True)(counted)
        seen = len(calls)
        oracle(nn.Sequential(nn.Linear(4, 3), Scale(3), nn.Tanh()), torch.randn(4, 2, 4).double(), 4)
        assert len(calls) > seen
        folded = nn.Sequential(nn.Flatten(0, 1), Scale(4), nn.Unflatten(0, (-1, 6)))
        oracle(folded, torch.randn(5, 6, 2, 4).double(), 5)
    finally:
        RULES.pop(Scale, None)


def misnames(layer: Layer, x: Tensor) -> Tensor:
    def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
        yield Stored("weight", (gradient * x).flatten(1, -2).sum(1))

    return tap(layer, layer.hidden(x), recorder, x)


def of_sequences_only(layer: Layer, x: Tensor) -> Tensor:
    def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
        yield Stored(layer.names["weight"], (gradient * x).sum(1))
        yield Stored(layer.names["bias"], gradient.sum(1))

    return tap(layer, layer.hidden(x), recorder, x)


def of_rows_only(layer: Layer, x: Tensor) -> Tensor:
    def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
        first = (slice(None), *[0] * (x.dim() - 2))
        yield Stored(layer.names["weight"], (gradient * x)[first])
        yield Stored(layer.names["bias"], gradient.flatten(1, -2).sum(1) if x.dim() > 2 else gradient)

    return tap(layer, layer.hidden(x), recorder, x)


@pytest.mark.parametrize(
    ("rule", "shape", "said"),
    [
        (forgets_the_bias, (5, 4, 3), "rule for Scale gives other gradients for 'bias' than autograd"),
        (doubles, (5, 4, 3), "rule for Scale gives other gradients for '"),
        (misnames, (5, 4, 3), r"no name in layer\.names"),
        (of_sequences_only, (5, 4, 3), r"have shape \(\).*on an input of shape \(5, 3\)"),
        (of_rows_only, (5, 3), r"other gradients for 'weight' than .* shape \(5, 2, 3\)"),
    ],
)
def test_a_wrong_rule_is_refused(rule: Any, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ClippingError, match=said):
        register(Scale, example=lambda: (Scale(3), torch.randn(shape)))(rule)
    assert Scale not in RULES
    model = nn.Sequential(Scale(3))
    attach(model)  # without a rule it is followed
    model(torch.randn(3, 3)).square().sum(1).mean().backward()


def test_an_example_of_another_class_is_refused() -> None:
    with pytest.raises(ClippingError, match="no plain Scale"):
        register(Scale, example=lambda: (nn.Tanh(), torch.randn(3, 3)))(scale)


def test_records_of_matrices(oracle: Callable[..., None]) -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t()

    try:

        @register(Bilinear, example=lambda: (Bilinear(), torch.randn(5, 2, 4)))
        def bilinear(layer: Layer, x: Tensor) -> Tensor:
            def recorder(gradient: Tensor, x: Tensor) -> Iterator[Record]:
                yield outer(layer.names["weight"], x, gradient, torch.Size((3, 4)))

            return tap(layer, layer.hidden(x), recorder, x)

        oracle(nn.Sequential(Bilinear(), nn.Tanh()), torch.randn(4, 6, 4).double(), 4)
    finally:
        RULES.pop(Bilinear, None)
