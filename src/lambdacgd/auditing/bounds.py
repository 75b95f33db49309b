"""Lower bounds on ε from scores of canaries, and the best score there is: the likelihood ratio of the dominating pair.

No torch, and nothing of the library but what a plan says: the attacker's own arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, stats
from scipy.special import logsumexp

from lambdacgd.errors import number
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins, Poisson

Array = NDArray[np.float64]
CHUNK = 4_000_000
"""Numbers in the largest temporary array."""


def strategy_matrix(plan: Plan) -> Array:
    """C over the stretch in which the plan's noise is correlated: the whole run, or an epoch with fresh bins."""
    n = plan.block.steps
    column, scales = plan.mechanism.strategy(n), plan.mechanism.column_scales(n)
    matrix = linalg.toeplitz(column, np.zeros(n))
    return matrix if scales is None else matrix / np.asarray(scales)[None, :]


def in_blocks(plan: Plan, matrix: Array, values: Array) -> Array:
    """``matrix`` times each stretch of correlated steps of ``values``, which has a row per step."""
    size = plan.block.steps
    blocks = values.reshape(plan.steps // size, size, -1)
    return np.matmul(matrix, blocks).reshape(plan.steps, -1)


def likelihood_ratios(plan: Plan, whitened: Array, places: NDArray[np.int64] | None = None) -> Array:
    """log P(W | canary in) / P(W | zeroed out) for each canary, the most powerful score by Neyman and Pearson.

    W = CY/(ζσ) has a row per step and a column per canary. ``places`` tells what the sampling does not hide of each
    canary: its step in an epoch, from 0, and −1 where it never takes part (``Cyclic``); its group (``Poisson``).
    """
    sigma, b = plan.sigma, plan.steps_per_epoch
    if isinstance(plan.sampling, Poisson):
        matrix, rate = strategy_matrix(plan) / sigma, plan.sampling.rate
        exponents = matrix.T @ whitened - 0.5 * (matrix**2).sum(0)[:, None]
        step = np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + exponents)
        return np.asarray(step.sum(0) if places is None else (step * _in_group(plan, places)).sum(0))
    size = plan.block.steps
    means = strategy_matrix(plan).reshape(size, size // b, b).sum(1).T / sigma  # a row per bin: m_j / σ
    halves = 0.5 * (means**2).sum(1)[:, None]
    total = np.zeros(whitened.shape[1])
    width = max(1, CHUNK // b)
    for first in range(0, whitened.shape[1], width):
        part = slice(first, first + width)
        for start in range(0, plan.steps, size):
            exponents = means @ whitened[start : start + size, part] - halves
            if places is None:
                total[part] += logsumexp(exponents, axis=0) - math.log(b)
            else:
                place = places[part]
                total[part] += np.where(place < 0, 0.0, exponents[place, np.arange(len(place))])
    return total


def _in_group(plan: Plan, groups: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each step (a row), whether it draws from these groups of Poisson sampling."""
    assert isinstance(plan.sampling, Poisson)
    return (np.arange(plan.steps)[:, None] - groups[None, :]) % max(1, plan.sampling.groups) == 0


def ideal_scores(plan: Plan, canaries: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Scores of simulated canaries, in and zeroed out: what a mechanism that does exactly what the plan says shows."""
    n, b, k = plan.steps, plan.steps_per_epoch, plan.epochs
    matrix, scores, coins = strategy_matrix(plan), [], rng.random(canaries) < 0.5
    for present in np.array_split(coins, math.ceil(canaries * n / CHUNK)):
        size, places = len(present), None
        if isinstance(plan.sampling, Poisson):
            places = rng.integers(0, max(1, plan.sampling.groups), size)
            x = ((rng.random((n, size)) < plan.sampling.rate) & _in_group(plan, places)).astype(np.float64)
        else:
            bins = rng.integers(0, b, (k, size)) if plan.restart_every else np.tile(rng.integers(0, b, size), (k, 1))
            x = (bins[:, None, :] == np.arange(b)[None, :, None]).reshape(n, size).astype(np.float64)
            places = None if isinstance(plan.sampling, BallsInBins) else bins[0]
        x[:, ~present] = 0
        whitened = in_blocks(plan, matrix, x) / plan.sigma + rng.standard_normal((n, size))
        scores.append(likelihood_ratios(plan, whitened, places))
    score = np.concatenate(scores)
    return score[coins], score[~coins]


@dataclass(frozen=True)
class LowerBound:
    """ε is at least ``epsilon`` with this confidence, for the δ that was asked about."""

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    details: dict[str, Any]


def lower_bound(included: Array, excluded: Array, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """Bound ε from below by a threshold on scores of independent canaries.

    The threshold is chosen on every other canary of either kind and judged on the rest, so that the Clopper–Pearson
    limits are those of a threshold fixed in advance. Both directions are tried, each with half of the error.

    Args:
        included: Scores of canaries that took part; higher means that the attacker believes so.
        excluded: Scores of canaries that were zeroed out.
        delta: The δ of the claim.
        confidence: Of the bound.

    Returns:
        The larger bound of the two directions; 0 where the scores show nothing.

    Guarantee
    ---------
    If scores of canaries are independent and the mechanism is (ε, δ)-DP, the bound exceeds ε with probability at most
    1 − ``confidence``.
    """
    number("delta", delta, above=0, below=1, include=(0,))
    number("confidence", confidence, above=0, below=1)
    best, details = 0.0, {"direction": "none", "tpr": 0.0, "fpr": 0.0}
    for direction, hits, misses in (("remove", included, excluded), ("add", -excluded, -included)):
        if min(len(hits), len(misses)) < 4:
            continue
        threshold = _threshold(hits[::2], misses[::2], delta)
        hits, misses = hits[1::2], misses[1::2]
        right, wrong = int((hits >= threshold).sum()), int((misses >= threshold).sum())
        bound = bound_of_counts(right, len(hits), wrong, len(misses), delta=delta, error=(1 - confidence) / 2)
        if bound > best:
            best = bound
            details = {"direction": direction, "tpr": right / len(hits), "fpr": wrong / len(misses)}
    return LowerBound(best, delta, confidence, len(included) + len(excluded), details)


def bound_of_counts(right: int, hits: int, wrong: int, misses: int, *, delta: float, error: float) -> float:
    """log((TPR − δ)/FPR) at Clopper–Pearson limits, each with half of the error, of a test that was fixed before."""
    low = stats.beta.ppf(error / 2, right, hits - right + 1) if right else 0.0
    high = stats.beta.ppf(1 - error / 2, wrong + 1, misses - wrong) if wrong < misses else 1.0
    return max(0.0, math.log((low - delta) / high)) if low > delta else 0.0


def _threshold(hits: Array, misses: Array, delta: float) -> float:
    """The threshold whose bound, with limits two standard errors away, is the largest on these scores."""
    hits, misses = np.sort(hits), np.sort(misses)
    both = np.concatenate([hits, misses])
    tail = np.geomspace(1e-2, min(1e-2, 4 / len(both)), 60)
    candidates = np.quantile(both, np.concatenate([np.linspace(0.01, 0.99, 99), 1 - tail]))
    right = 1 - np.searchsorted(hits, candidates) / len(hits)
    wrong = 1 - np.searchsorted(misses, candidates) / len(misses)
    low = right - 2 * np.sqrt(right * (1 - right) / len(hits))
    high = wrong + 2 * np.sqrt(np.maximum(wrong, 1 / len(misses)) / len(misses)) + 2 / len(misses)
    return float(candidates[np.argmax(np.maximum(low - delta, 1e-12) / high)])
