"""Certificates: an upper bound on δ that fails with a stated, tiny probability. The proof is in docs/monte-carlo.md.

Sampled from a proposal that contains the envelope with share w_0, a weight x lies in [0, M] with M = Δ/w_0 *proven*,
and has mean δ(ε, σ). Fix m and a stake c ≤ 1/M beforehand. If δ(ε, σ) ≥ m were true, every factor 1 + c(m − x) would be
non-negative with mean at most 1 (in a round, components are strata: then the factors' means average to at most 1,
and so their product's mean is at most 1 by the inequality of the means). The product over the rounds is then a
non-negative supermartingale that starts at 1, and by Ville's inequality ever reaches 1/β with probability at most β.
So when it does, δ(ε, σ) < m is certified, and the sampling may stop.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.monte_carlo.engine import rounds
from lambdacgd.accounting.monte_carlo.envelope import OneWay
from lambdacgd.accounting.monte_carlo.estimate import Estimator
from lambdacgd.accounting.monte_carlo.proposal import Proposal

Array = NDArray[np.float64]

# Every quantity in a weight is computed in float64 to a relative accuracy far below this; W is compared with the
# strike e^{ε}·(1 − _ROUNDING) and the weights are scaled up by as much, so that rounding cannot lower the mean.
_ROUNDING = 1e-8


@dataclass(frozen=True)
class Wager:
    """A test of δ(ε, σ) < m, chosen before its samples are drawn: the proposal, the stake, and what it should take."""

    proposal: Proposal
    limit: float
    stake: float
    expected_samples: float


@dataclass(frozen=True)
class Outcome:
    """``passed`` says that δ < m is certified; ``log_capital`` is the logarithm of the product when sampling ended."""

    passed: bool
    samples: int
    log_capital: float


def prepare(
    estimator: Estimator, epsilon: float, sigma: float, direction: OneWay, *, limit: float, failure: float
) -> Wager:
    """Choose the share of the envelope and the stake that a pilot says certify δ(ε, σ) < ``limit`` soonest."""
    target = math.log(1.0 / failure)
    best: Wager | None = None
    safe = epsilon - _ROUNDING
    for share in (0.3, 0.6, 0.9):
        proposal = estimator.pilot.proposal(safe, sigma, direction, envelope_share=share)
        draws = proposal.draw(np.random.default_rng(0), proposal.round)
        weights = proposal.weights(draws) * (1.0 + _ROUNDING)
        top = proposal.largest_weight * (1.0 + 2 * _ROUNDING)
        largest = 1.0 / max(top - limit, limit)
        for stake in largest * np.geomspace(1e-5, 0.999, 40):
            rate = float(np.log1p(stake * (limit - weights)).mean())
            expected = target / rate if rate > 0 else math.inf
            if best is None or expected < best.expected_samples:
                best = Wager(proposal, limit, float(stake), expected)
    assert best is not None
    return best


def run(
    wager: Wager,
    *,
    failure: float,
    max_samples: int,
    tick: Callable[[int], None] | None = None,
    entropy: int | None = None,
) -> Outcome:
    """Sample with fresh, secret randomness until δ < m is certified or ``max_samples`` are spent."""
    seeds = np.random.SeedSequence(secrets.randbits(256) if entropy is None else entropy)
    target = math.log(1.0 / failure)
    capital, drawn = 0.0, 0
    for weights in rounds(wager.proposal, seeds, max(1, max_samples // wager.proposal.round)):
        weights = np.minimum(weights * (1.0 + _ROUNDING), wager.proposal.largest_weight * (1.0 + 2 * _ROUNDING))
        capital += float(np.log1p(wager.stake * (wager.limit - weights)).sum())
        drawn += len(weights)
        if tick is not None:
            tick(len(weights))
        if capital >= target * (1.0 + 1e-9):
            return Outcome(True, drawn, capital)
    return Outcome(False, drawn, capital)


def upper_bound(
    estimator: Estimator, epsilon: float, sigma: float, direction: OneWay, *, failure: float, samples: int
) -> float:
    """The smallest m at which the product with a fixed stake c reaches 1/β: a bound on δ(ε, σ).

    For the true δ the product reaches 1/β with probability at most β, and the product increases with m.
    """
    guess = estimator.one_way(epsilon, sigma, direction, samples=estimator.pilot.round)
    limit = max(2.0 * guess.value, 1e-12 * math.exp(-epsilon))
    wager = prepare(estimator, epsilon, sigma, direction, limit=limit, failure=failure)
    top = wager.proposal.largest_weight * (1.0 + 2 * _ROUNDING)
    stake = min(wager.stake, 0.999 / top)  # 1 + c(m − x) ≥ 0 for every m ≥ 0
    target = math.log(1.0 / failure) * (1.0 + 1e-9)
    seeds = np.random.SeedSequence(secrets.randbits(256))
    weights = np.concatenate(list(rounds(wager.proposal, seeds, max(1, samples // wager.proposal.round))))
    weights = np.minimum(weights * (1.0 + _ROUNDING), top)

    def capital(m: float) -> float:
        return float(np.log1p(stake * (m - weights)).sum())

    low, high = 0.0, top
    if capital(high) < target:
        return min(1.0, wager.proposal.envelope.bound * (1.0 + _ROUNDING))  # δ ≤ Δ always
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if capital(middle) >= target else (middle, high)
    return high
