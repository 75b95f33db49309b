"""What one bin adds to W, given its lattice neighbours: a lognormal, rounded onto a grid without changing its mean.

Lemma 4: splitting mass between the two neighbouring grid points, mean preserved, is larger in convex order, so every
expectation of a convex function of W can only grow. Above the top of the grid the value is cut off: that lowers W, so a
put only grows, and for a call the lost E (Y − top)₊ is added.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr, ndtr

from lambdacgd.accounting.base import AccountingError
from lambdacgd.mechanisms.base import Array


def value_grid(fine: float, ratio: float, top: float, *, limit: int = 20_000) -> Array:
    """0, then steps of ``fine``, then steps of relative size ``ratio``, until at least ``top``.

    Rounding a value y adds a variance of at most step²/4, about step²/6 on average: small values need only a fine
    absolute step (there are b of them), large ones a fine relative step (few of them make up W).
    """
    turn = fine / ratio
    steps = math.ceil(min(turn, top) / fine)
    more = max(0, math.ceil(math.log(top / (steps * fine)) / math.log1p(ratio))) if top > steps * fine else 0
    if steps + more > limit:
        raise AccountingError(
            f"the emission grid would need {steps + more} points (limit {limit}); ask for a smaller ε or a larger σ"
        )
    uniform = fine * np.arange(steps + 1)
    return np.concatenate([uniform, uniform[-1] * np.exp(math.log1p(ratio) * np.arange(1, more + 1))])


def lognormal_excess(mean: Array | float, deviation: float, threshold: float) -> Array:
    """E (Y − threshold)₊ for log Y ~ N(mean, deviation²)."""
    z = (np.asarray(mean, dtype=float) - math.log(threshold)) / deviation
    average = np.asarray(mean) + deviation**2 / 2
    upper = average + log_ndtr(z + deviation)
    return np.asarray(np.exp(upper) * -np.expm1(np.minimum(math.log(threshold) + log_ndtr(z) - upper, 0.0)))


def grid_top(log_mean: float, deviation: float, allowed: float) -> float:
    """Smallest top (to 1%) at which E (Y − top)₊ ≤ ``allowed``, for log Y ~ N(log_mean, deviation²)."""
    low, high = log_mean, log_mean + deviation * (deviation + 40) + 1
    while high - low > 0.01:
        middle = (low + high) / 2
        if lognormal_excess(log_mean, deviation, math.exp(middle)) <= allowed:
            high = middle
        else:
            low = middle
    return math.exp(high)


def round_lognormal(log_means: Array, deviation: float, grid: Array) -> Array:
    """Probabilities of the grid points (one row a mean) after mean-preserving rounding of lognormals (Lemma 4)."""
    with np.errstate(divide="ignore"):
        edges = np.log(grid)
    z = (edges[None, :] - log_means[:, None]) / deviation
    mass = _between(z)
    first_moment = np.exp(log_means + deviation**2 / 2)[:, None] * _between(z - deviation)
    # Clipping only removes rounding noise: exactly, 0 ≤ up ≤ mass.
    up = np.clip((first_moment - grid[None, :-1] * mass) / np.diff(grid)[None, :], 0.0, mass)
    probabilities = np.zeros((len(log_means), len(grid)))
    probabilities[:, 1:] += up
    probabilities[:, :-1] += mass - up
    probabilities[:, -1] += ndtr(-z[:, -1])
    return probabilities


def _between(z: Array) -> Array:
    """Φ(z_{i+1}) − Φ(z_i) along the rows, from the tail that keeps its digits."""
    low, high = z[:, :-1], z[:, 1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
