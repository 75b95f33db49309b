"""The slow twin: samples in all n dimensions, straight from C, without Gram matrix or importance sampling."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lambdacgd.mechanisms.base import Horizon, Mechanism

Array = NDArray[np.float64]


def dense_strategy(mechanism: Mechanism, horizon: Horizon) -> Array:
    """C = T·D⁻¹ as an n×n matrix (small n only)."""
    n = horizon.steps
    column = mechanism.strategy(n)
    strategy = np.zeros((n, n))
    for step in range(n):
        strategy[step:, step] = column[: n - step]
    scales = mechanism.column_scales(n)
    return strategy if scales is None else strategy / scales[None, :]


def brute_force_delta(
    strategy: Array, horizon: Horizon, epsilon: float, sigma: float, *, samples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """δ and its standard error in each direction: remove sampled from P, add from Q, at n-dimensional points."""
    n, b, k = horizon.steps, horizon.steps_per_epoch, horizon.epochs
    centres = np.zeros((b, n))
    for j in range(b):
        for epoch in range(k):
            centres[j] += strategy[:, j + epoch * b]
    rng = np.random.default_rng(seed)

    def loss(points: Array) -> Array:
        exponents = (points @ centres.T - 0.5 * (centres**2).sum(axis=1)) / sigma**2
        peak = exponents.max(axis=1)
        return np.log(np.exp(exponents - peak[:, None]).mean(axis=1)) + peak

    noise = sigma * rng.standard_normal((samples, n))
    add = np.maximum(-np.expm1(epsilon + loss(noise)), 0.0)
    remove = np.maximum(-np.expm1(epsilon - loss(noise + centres[rng.integers(b, size=samples)])), 0.0)
    return {
        way: (float(values.mean()), float(values.std()) / math.sqrt(samples))
        for way, values in (("remove", remove), ("add", add))
    }
