"""Examples that have several rows in a layer: frames, windows, tokens, time before batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lambdacgd.clipping import ClippingError, attach
from tests.clipping.small import step

pytestmark = pytest.mark.usefixtures("seeded")
Oracle = Callable[..., None]


class Net(nn.Module):
    """A first layer, folded as ``run`` says, and a last one on [batch, …]."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.run, self.layer, self.scale, self.last = run, layer, nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, x).tanh())  # type: ignore[no-any-return]


def _windows(m: Any, x: Tensor) -> Tensor:
    b, t, d = x.shape
    return m.layer(x.reshape(b, t // 2, 2, d).flatten(0, 1)).unflatten(0, (b, t // 2)).flatten(1, 2)  # type: ignore[no-any-return]


FOLDED = {
    "tokens": lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
    "windows": _windows,
    "time first": lambda m, x: m.layer((2 * x).transpose(0, 1)).transpose(0, 1),
    "time first, flat": lambda m, x: m.layer(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (6, -1)).transpose(0, 1),
    "a scale of tokens": lambda m, x: (x.flatten(0, 1) * m.scale).unflatten(0, x.shape[:2]),
    "a scale, time first": lambda m, x: (m.layer(x.transpose(0, 1)) * m.scale).transpose(0, 1),
}


@pytest.mark.parametrize("batch", [2, 4, 5, 6])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
@pytest.mark.parametrize("run", FOLDED)
def test_rows_of_an_example_are_added_up(oracle: Oracle, run: str, kind: Any, batch: int) -> None:
    layer = kind(4) if kind is nn.LayerNorm else kind(4, 4)
    model = Net(FOLDED[run], layer)  # type: ignore[arg-type]
    if run == "a scale of tokens":
        layer.requires_grad_(False)
    oracle(model, torch.randn(batch, 6, 4).double(), batch)


@pytest.mark.parametrize("kind", ["conv", "embedding", "group norm"])
def test_other_layers(oracle: Oracle, kind: str) -> None:
    """Frames of a video one behind the other."""
    layers = {"conv": nn.Conv1d(4, 4, 3, padding=1), "embedding": nn.Embedding(9, 4), "group norm": nn.GroupNorm(2, 4)}

    def run(m: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        y = m.layer(flat) if kind == "embedding" else m.layer(flat.transpose(1, 2)).transpose(1, 2)
        return y.unflatten(0, x.shape[:2])  # type: ignore[no-any-return]

    x = torch.randint(0, 9, (4, 3, 5)) if kind == "embedding" else torch.randn(4, 3, 5, 4).double()
    oracle(Net(run, layers[kind]), x, 4)


def test_embedding_of_time_first(oracle: Oracle) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.layer(x.t()).transpose(0, 1)  # type: ignore[no-any-return]

    oracle(Net(run, nn.Embedding(9, 4)), torch.randint(0, 9, (5, 5)), 5)


def test_lengths_that_change_from_batch_to_batch() -> None:
    """How many rows an example has is not learnt: only that it has several, and how they are put together."""
    model = Net(FOLDED["tokens"], nn.Linear(4, 4))  # type: ignore[arg-type]
    clipper = attach(model, float("inf"), loss_reduction="sum")
    for tokens, batch in ((3, 5), (7, 3), (4, 4), (1, 6), (6, 1)):
        x = torch.randn(batch, tokens, 4)
        model(x).square().sum().backward()
        sums = {n: s.clone() for n, s in clipper.take().items()}
        clipper.detach()
        plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
        for (name, _), g in zip(model.named_parameters(), plain, strict=True):
            if g is not None:
                torch.testing.assert_close(sums[name], g, rtol=1e-4, atol=1e-4)
        clipper = attach(model, float("inf"), loss_reduction="sum")
        step(model, torch.randn(5, 2, 4))
        clipper.zero()


def test_rows_that_are_not_a_multiple_of_the_batch_are_refused() -> None:
    """Tokens picked by their values (a mixture of experts): how many an example has is not known."""

    def picked(m: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        where = (flat[:, 0] > 0).nonzero().squeeze(1)
        return torch.zeros_like(flat).index_copy(0, where, m.layer(flat[where])).unflatten(0, x.shape[:2])

    model = Net(picked, nn.Linear(4, 4))
    attach(model)
    with pytest.raises(ClippingError, match="layer"):
        step(model, torch.randn(5, 7, 4))


@pytest.mark.parametrize("often", [2, 9])
def test_rows_that_are_put_together_in_two_ways_are_refused(often: int) -> None:
    """Two crops of every example, neighbours in train mode and one behind the other in eval mode: what was seen last
    was taken for the next pass, so an example moved a sum by 1.98 clipping norms.
    """

    def crops(m: Any, x: Tensor) -> Tensor:
        dim = 1 if m.training else 0
        return (
            m.layer(torch.stack([x, x.flip(1)], dim).flatten(0, 1)).unflatten(0, (-1, 2) if dim else (2, -1)).sum(dim)
        )  # type: ignore[no-any-return]

    model = Net(crops, nn.Linear(4, 4))
    attach(model)
    for _ in range(often):
        step(model, torch.randn(6, 4))
    model.eval()
    with pytest.raises(ClippingError, match="Put them together in one way"):
        step(model, torch.randn(6, 4))
