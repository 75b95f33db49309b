"""Slow, plain computations of what the accountants bound: the oracle of their tests and benchmarks.

``gram``, ``quadrature`` and ``sampled`` serve the exact accountant, ``dense_strategy`` those of other mechanisms.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from lambdacgd.accounting.certificate import Array
from lambdacgd.mechanisms import Horizon, Mechanism


def gram(lam: float, bins: int, epochs: int, *, normalized: bool = False) -> Array:
    """⟨m_i, m_j⟩ with m_j = Σ_e C[:, j + eb], straight from the matrix C."""
    n = bins * epochs
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    strategy = np.where(lag >= 0, float(lam) ** np.maximum(lag, 0), 0.0)
    if normalized:
        strategy = strategy / np.linalg.norm(strategy, axis=0)
    sums = strategy.reshape(n, epochs, bins).sum(axis=1)
    return np.asarray(sums.T @ sums)


def quadrature(gram_matrix: Array, sigma: float, epsilon: float, *, step: float = 0.3) -> tuple[float, float]:
    """(δ_remove, δ_add) by the trapezoidal rule in all dimensions but one, which is done in closed form.

    The integrand is analytic, so the rule converges faster than any power of ``step``; for b ≤ 5.
    """
    covariance = gram_matrix / sigma**2
    b = len(covariance)
    factor = np.linalg.cholesky(covariance)
    reach = 8.5
    axes = [np.arange(-reach, reach + math.sqrt(covariance[i, i]) * 1.3, step) for i in range(b - 1)]
    mesh = np.meshgrid(*axes, indexing="ij", sparse=True)
    weight = np.ones([1] * (b - 1))
    for axis in mesh:
        weight = weight * (step / math.sqrt(2 * math.pi) * np.exp(-(axis**2) / 2))
    others = np.zeros([1] * (b - 1))
    for i in range(b - 1):
        loss = sum((factor[i, j] * mesh[j] for j in range(i + 1)), start=np.zeros([1] * (b - 1)))
        others = others + np.exp(loss - covariance[i, i] / 2) / b
    # The last bin given the others: lognormal with log-mean m and log-deviation s.
    m = sum((factor[b - 1, j] * mesh[j] for j in range(b - 1)), start=np.zeros([1] * (b - 1)))
    m = m - covariance[b - 1, b - 1] / 2 - math.log(b)
    s = factor[b - 1, b - 1]
    mean = np.exp(m + s * s / 2)

    def call(strike: float) -> Array:
        gap = strike - others
        positive = np.maximum(gap, 1e-300)
        z = (m - np.log(positive)) / s
        return np.where(gap > 0, mean * ndtr(z + s) - gap * ndtr(z), mean - gap)

    def put(strike: float) -> Array:
        gap = strike - others
        positive = np.maximum(gap, 1e-300)
        z = (np.log(positive) - m) / s
        return np.where(gap > 0, gap * ndtr(z) - mean * ndtr(z - s), 0.0)

    remove = float(np.sum(weight * call(math.exp(epsilon))))
    add = math.exp(epsilon) * float(np.sum(weight * put(math.exp(-epsilon))))
    return remove, add


def sampled(
    gram_matrix: Array, sigma: float, epsilon: float, *, samples: int, seed: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """((δ_remove, standard error), (δ_add, standard error)): remove sampled under P, add under Q."""
    covariance = gram_matrix / sigma**2
    b = len(covariance)
    rng = np.random.default_rng(seed)
    values, vectors = np.linalg.eigh(covariance)
    noise = rng.standard_normal((samples, b)) @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    half = np.diag(covariance) / 2

    def log_ratio(u: Array) -> Array:
        x = u - half
        top = x.max(axis=1)
        return np.asarray(top + np.log(np.mean(np.exp(x - top[:, None]), axis=1)))

    under_p = log_ratio(noise + covariance[rng.integers(b, size=samples)])
    under_q = log_ratio(noise)
    remove = np.maximum(-np.expm1(np.minimum(epsilon - under_p, 0.0)), 0.0)
    add = np.maximum(-np.expm1(np.minimum(epsilon + under_q, 0.0)), 0.0)

    def summary(x: Array) -> tuple[float, float]:
        return float(x.mean()), float(x.std() / math.sqrt(samples))

    return summary(remove), summary(add)


def dense_strategy(mechanism: Mechanism, horizon: Horizon) -> Array:
    """C = T·D⁻¹ as an n×n matrix (small n only)."""
    n = horizon.steps
    column = mechanism.strategy(n)
    strategy = np.zeros((n, n))
    for step in range(n):
        strategy[step:, step] = column[: n - step]
    scales = mechanism.column_scales(n)
    return strategy if scales is None else strategy / scales[None, :]
