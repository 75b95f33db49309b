"""The slow twin: one example at a time through plain autograd. What every fast path is tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lambdacgd.clipping.factors import AUTOMATIC_STABILITY, Mode

#: loss(model, batch) -> scalar, for a batch of any number of examples
Loss = Callable[[nn.Module, Any], Tensor]


def example(batch: Any, i: int) -> Any:
    """The batch that holds example ``i`` alone."""
    return tree_map(lambda x: x[i : i + 1] if isinstance(x, Tensor) and x.dim() > 0 else x, batch)


def per_example_gradients(model: nn.Module, loss: Loss, batch: Any, examples: int) -> list[dict[str, Tensor]]:
    """g_i for every example: the gradient of the loss of the batch that holds it alone."""
    found = []
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for i in range(examples):
        value = loss(model, example(batch, i))
        gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        found.append(
            {
                n: torch.zeros_like(p) if g is None else g.to_dense()  # Embedding(sparse=True)
                for (n, p), g in zip(parameters.items(), gradients, strict=True)
            }
        )
    return found


def clipped_sum(gradients: list[dict[str, Tensor]], max_grad_norm: float, *, mode: Mode = "flat") -> dict[str, Tensor]:
    """Σ_i of the clipped gradients, as `attach` defines its modes."""
    total: dict[str, Tensor] = {}
    for g in gradients:
        groups: dict[str, list[str]] = {}
        for name in g:
            groups.setdefault(name.rpartition(".")[0] if mode == "per-layer" else "", []).append(name)
        for names in groups.values():
            norm = torch.stack([g[n].square().sum() for n in names]).sum().sqrt()
            if mode == "automatic":
                factor = max_grad_norm / (norm + AUTOMATIC_STABILITY)
            else:
                factor = (max_grad_norm / len(groups) ** 0.5 / norm).clamp_max(1.0)
            for n in names:
                total[n] = total.get(n, 0) + factor * g[n]
    return total
