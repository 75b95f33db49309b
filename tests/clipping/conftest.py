"""The oracle: clipped sums against one-example-at-a-time autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lambdacgd.clipping import attach
from lambdacgd.clipping.check import clipped_sum, example, gradients_of


def probe_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean over examples of a bent random projection of the output, the same one for every example."""
    out = model(batch)
    flat = out.flatten(1)
    direction = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype) + 0.1
    return torch.tanh(flat @ direction / flat.shape[1] ** 0.5).mean() + (flat**2).mean(1).mean()


def compare(
    model: nn.Module,
    batch: Any,
    examples: int,
    *,
    loss: Any = probe_loss,
    tolerance: float = 1e-9,
    probe: bool = True,
    **options: Any,
) -> None:
    """Clipped sums (clipping about half of the examples) equal the reference's, in whole and in two physical
    batches.
    """
    model = model.double()
    gradients = gradients_of(model, loss, [example(batch, i) for i in range(examples)])
    norms = torch.stack([torch.stack([g.square().sum() for g in e.values()]).sum().sqrt() for e in gradients])
    clip = max(float(norms.median()), 1e-3)
    wanted = clipped_sum(gradients, clip, mode=options.get("mode", "flat"))
    size = torch.stack([w.square().sum() for w in wanted.values()]).sum().sqrt()
    clipper = attach(model, clip, **options)
    clipper.allow_probe(probe)
    try:
        clipper.backward(loss(model, batch))
        assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(clipper.norms, norms, rtol=tolerance, atol=tolerance * float(norms.max()))
        whole = {name: total.clone() for name, total in clipper.take().items()}
        for i in range(examples):
            clipper.backward(loss(model, example(batch, i)))
        parts = clipper.take()
        for name, total in wanted.items():
            assert float((whole[name] - total).norm()) <= tolerance * float(size), name
            assert float((parts[name] - total).norm()) <= tolerance * float(size), name
    finally:
        clipper.detach()
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.fixture
def oracle() -> Callable[..., None]:
    return compare


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(12)
