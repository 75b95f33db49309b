"""Small models and steps that several tests clip."""

from __future__ import annotations

import math

from torch import Tensor, nn


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().flatten(1).sum(1).mean().backward()


def total_norm(sums: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(s.double().square().sum()) for s in sums.values()))
