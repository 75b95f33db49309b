"""From an estimate of σ to a certified one: a sweep from bold to safe, each step with fresh randomness."""

from __future__ import annotations

import math
import time
from typing import Any

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.monte_carlo import certificate
from lambdacgd.accounting.monte_carlo.envelope import OneWay
from lambdacgd.accounting.monte_carlo.estimate import Estimator, SigmaEstimate, add_bound
from lambdacgd.accounting.monte_carlo.progress import progress

_GAPS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)  # log of (δ asked for / δ expected): what a step may give away
_ATTEMPTS = 4
# G is computed to a relative accuracy far better than 2e-9, and δ(G, σ) grows with every entry of G (Kahane): so the
# true δ at σ·(1 + 1e-9) is at most the δ of the computed G at σ, which is what was tested.
_ROUNDING_OF_GRAM = 1.0 + 1e-9
_RESERVE = 4  # a test is started if it is expected to end within a quarter of the samples allowed


def certified_sigma(
    estimator: Estimator, estimate: SigmaEstimate, widest: float, *, delta: float, beta: float, max_samples: int
) -> dict[str, Any]:
    """``{"sigma", "details"}`` with δ(ε, σ) ≤ δ − β in both directions, except with probability β.

    Every test may err with its own probability: half of β for each direction, and of these 1/2, 1/4, … for the
    first, second, … attempt, so that all of them together err with probability at most β, however they turn out.
    ``widest`` is a σ that needs no amplification: where every attempt fails, it is the answer, by a theorem.
    """
    started = time.monotonic()
    epsilon, limit = estimate.delta.epsilon, delta - beta
    tests: list[dict[str, Any]] = []
    attempts, needed = 0, math.inf
    for gap in _GAPS:
        sigma = estimate.sigma * math.exp(gap / estimate.slope)
        if sigma >= widest or attempts == _ATTEMPTS:
            break
        analytic = add_bound(estimator.gram, epsilon, sigma) <= limit
        ways: tuple[OneWay, ...] = ("remove",) if analytic else ("remove", "add")
        failure = 0.5 * beta * 0.5 ** (attempts + 1)
        wagers = [certificate.prepare(estimator, epsilon, sigma, way, limit=limit, failure=failure) for way in ways]
        reserved = _RESERVE * max(wager.expected_samples for wager in wagers)
        needed = min(needed, reserved)
        if reserved > max_samples:
            continue
        attempts += 1
        if _all_pass(ways, wagers, sigma, failure, max_samples, tests):
            details = {
                "failure_probability": beta,
                "estimate": estimate.sigma,
                "estimate_standard_error": estimate.standard_error,
                "add": "Jensen bound" if analytic else "sampled",
                "tests": tests,
                "seconds": round(time.monotonic() - started, 1),
            }
            return {"sigma": sigma * _ROUNDING_OF_GRAM, "details": details}
    if not attempts and math.isfinite(needed):
        seconds = needed * _seconds_a_sample(estimator, epsilon, estimate.sigma)
        raise AccountingError(
            f"δ = {delta:g} at ε = {epsilon:g} cannot be certified with max_samples = {max_samples:,}; "
            f"{math.ceil(needed):,} would do (up to {math.ceil(seconds):,} s here). Allow more, ask for "
            "a larger δ or ε, or use cyclic sampling, which needs no samples"
        )
    details = {"failure_probability": 0.0, "estimate": estimate.sigma, "tests": tests, "fallback": "no amplification"}
    return {"sigma": widest * _ROUNDING_OF_GRAM, "details": details}


def _all_pass(
    ways: tuple[OneWay, ...],
    wagers: list[certificate.Wager],
    sigma: float,
    failure: float,
    max_samples: int,
    tests: list[dict[str, Any]],
) -> bool:
    """Run the tests of one σ in turn and record them; the first failure ends it."""
    for way, wager in zip(ways, wagers, strict=True):
        budget = int(min(max_samples, 6 * wager.expected_samples + 65_536))
        with progress(f"certifying σ = {sigma:.4g} ({way})", budget) as tick:
            outcome = certificate.run(wager, failure=failure, max_samples=budget, tick=tick)
        tests.append({"direction": way, "sigma": sigma, "passed": outcome.passed, "samples": outcome.samples})
        if not outcome.passed:
            return False
    return True


def _seconds_a_sample(estimator: Estimator, epsilon: float, sigma: float) -> float:
    started = time.monotonic()
    found = estimator.one_way(epsilon, sigma, "remove", samples=1)
    return (time.monotonic() - started) / found.samples
