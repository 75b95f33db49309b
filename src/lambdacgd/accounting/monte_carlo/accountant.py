"""The Monte Carlo accountant for Balls-in-Bins: any mechanism with C ≥ 0; estimates, and certificates.

**Certificates** are upper bounds on δ that fail with a stated, tiny probability; the proof is in docs/monte-carlo.md.
Sampled from a proposal that contains the envelope with share w_0, a weight x lies in [0, M] with M = Δ/w_0 *proven*,
and has mean δ(ε, σ). Fix m and a stake c ≤ 1/M beforehand. If δ(ε, σ) ≥ m were true, every factor 1 + c(m − x) would be
non-negative with mean at most 1 (in a round, components are strata: then the factors' means average to at most 1,
and so their product's mean is at most 1 by the inequality of the means). The product over the rounds is then a
non-negative supermartingale that starts at 1, and by Ville's inequality ever reaches 1/β with probability at most β.
So when it does, δ(ε, σ) < m is certified, and the sampling may stop.

**A certified σ** comes from an estimate of σ by a sweep from bold to safe, each step with fresh randomness.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lambdacgd import cache
from lambdacgd.accounting.certificate import (
    SMALLEST_EPSILON,
    Calibration,
    Certificate,
    Direction,
    OneWay,
    progress,
)
from lambdacgd.accounting.monte_carlo.estimate import Estimate, Estimator, SigmaEstimate, add_bound
from lambdacgd.accounting.monte_carlo.gram import gram_of
from lambdacgd.accounting.monte_carlo.proposal import Proposal, rounds
from lambdacgd.accounting.root import bisect
from lambdacgd.errors import AccountingError, InvalidInput, integer, number
from lambdacgd.mechanisms import Horizon, Mechanism

METHOD = "monte-carlo"
LARGEST_EPSILON = 300.0
"""beyond it e^ε times a density comes near overflow"""
# A certified ε is tried at these multiples of the estimated one.
_LADDER = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5)


class MonteCarlo:
    """δ, ε and σ of one mechanism over one horizon under Balls-in-Bins with fixed bins, by sampling.

    Args:
        mechanism: any with C ≥ 0.
        horizon: b steps an epoch, k epochs.

    Guarantee
    ---------
    Adjacency is zero-out of one example; both directions count unless one is asked for. ``estimate_…`` are point
    estimates with a standard error and claim nothing. ``certify`` returns a σ for which the mechanism is (ε, δ)-DP
    *including* the probability β that the verification errs: δ(ε, σ) ≤ δ − β holds except with probability β over the
    verifier's own fresh and secret randomness. ``delta`` and ``epsilon`` count β into δ in the same way. Proof:
    docs/monte-carlo.md.
    """

    def __init__(self, mechanism: Mechanism, horizon: Horizon) -> None:
        resolved = mechanism.resolve(horizon)
        self.gram, self.horizon = gram_of(resolved, horizon), horizon
        self._question = resolved.question(horizon.steps) | asdict(horizon)

    @cached_property
    def estimator(self) -> Estimator:
        return Estimator(self.gram)

    def _cached(self, kind: str, question: dict[str, Any], compute: Any) -> Any:
        return cache.cached(f"monte-carlo-{kind}", self._question | question, compute)

    def without_amplification(self, epsilon: float, delta: float) -> float:
        """σ that suffices without any amplification: the largest ‖m_j‖ times the Gaussian mechanism's σ."""
        return self.estimator.widest(epsilon, delta)

    # The protocol of all accountants

    def delta(self, sigma: float, epsilon: float) -> Certificate:
        """A certified δ(ε, σ) that counts its failure probability of 1e-9 in."""
        beta = 1e-9
        bound = min(self.certify_delta(epsilon, sigma, failure_probability=beta) + beta, 1.0)
        return Certificate(METHOD, "both", 1.0 - beta, epsilon, bound, details={"failure_probability": beta})

    def epsilon(self, sigma: float, delta: float) -> Certificate:
        """A certified ε: the first rung above the estimated ε at which a σ of at most this one is certified.

        Every rung may err, all of them together with probability at most β = min(1e-9, δ/1000). So each rung must show
        δ(ε, σ) ≤ δ − β, not only what its own share of β would ask for.

        Raises:
            AccountingError: no rung up to 1.5 times the estimate is certified.
        """
        middle = max(self.estimate_epsilon(sigma, delta), SMALLEST_EPSILON)
        beta = min(1e-9, delta / 1000)
        for factor in _LADDER:
            rung = self.certify(middle * factor, delta, failure_probability=beta / len(_LADDER), reserve=beta)
            if rung.sigma <= sigma:
                details = rung.certificate.details | {"failure_probability": beta}
                return replace(rung.certificate, confidence=1 - beta, details=details)
        raise AccountingError(
            f"sampling estimates ε = {middle:.3g}, but could certify no ε up to {middle * _LADDER[-1]:.3g}"
        )

    def sigma(self, epsilon: float, delta: float, *, estimate: bool = False) -> Calibration:
        """``certify``, or, if ``estimate`` is asked for, a point estimate of σ that claims nothing."""
        if not estimate:
            return self.certify(epsilon, delta)
        drawn = self.estimate_sigma(epsilon, delta)
        details = {
            "sigma_standard_error": drawn.standard_error,
            "delta_relative_error": drawn.delta.relative_error,
            "samples": drawn.delta.samples,
        }
        claim = Certificate(METHOD, "both", 0.5, epsilon, delta, kind="estimate", details=details)
        return Calibration(drawn.sigma, claim)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None, effort: int = 1) -> float:
        """About σ, from ``effort`` times 2048 samples per σ: for comparing mechanisms, whose errors nearly cancel."""
        return Estimator(self.gram, round_size=2048 * effort).quick_sigma(epsilon, delta, start=start)

    # Estimates

    def estimate_delta(
        self, epsilon: float, sigma: float, *, samples: int = 65_536, direction: Direction = "both"
    ) -> Estimate:
        """δ(ε, σ) with its standard error."""
        _check(epsilon=epsilon, sigma=sigma, direction=direction)
        integer("samples", samples)
        question = {"epsilon": epsilon, "sigma": sigma, "samples": samples, "direction": direction}

        def compute() -> dict[str, Any]:
            return asdict(self.estimator.delta(epsilon, sigma, samples=samples, direction=direction))

        return Estimate(**self._cached("delta", question, compute))

    def estimate_epsilon(self, sigma: float, delta: float, *, samples: int = 32_768) -> float:
        """ε with δ(ε, σ) = ``delta``."""
        _check(delta=delta, sigma=sigma)
        integer("samples", samples)
        question = {"delta": delta, "sigma": sigma, "samples": samples}
        return float(self._cached("epsilon", question, lambda: self.estimator.epsilon(delta, sigma, samples=samples)))

    def estimate_sigma(
        self, epsilon: float, delta: float, *, relative_error: float = 0.018, max_samples: int = 131_072
    ) -> SigmaEstimate:
        """σ(ε, δ), from as many samples as bring δ's relative standard error down to ``relative_error``."""
        _check(epsilon=epsilon, delta=delta)
        number("relative_error", relative_error, above=0, below=1)
        integer("max_samples", max_samples, minimum=4096)
        how: dict[str, Any] = {"relative_error": relative_error, "max_samples": max_samples}

        def compute() -> dict[str, Any]:
            return asdict(self.estimator.sigma(epsilon, delta, **how))

        drawn = self._cached("sigma", {"epsilon": epsilon, "delta": delta} | how, compute)
        return SigmaEstimate(**(drawn | {"delta": Estimate(**drawn["delta"])}))

    # Certificates

    def certify(
        self,
        epsilon: float,
        delta: float,
        *,
        failure_probability: float | None = None,
        reserve: float | None = None,
        max_samples: int = 20_000_000,
    ) -> Calibration:
        """A certified σ, in both directions.

        Args:
            epsilon: ε, from 0.001 to 300.
            delta: δ.
            failure_probability: β, the probability that the verification errs; by default min(1e-9, δ/1000).
            reserve: how much of δ is kept for errors, by default β. A caller that makes several claims and uses one of
                them reserves what all of them may err by together.
            max_samples: samples at most for one test (there may be several).

        Returns:
            σ and its certificate.

        Raises:
            AccountingError: so many samples cannot certify δ; the message says how many could.
        """
        _check(epsilon=epsilon, delta=delta, certified=True)
        beta = min(1e-9, delta / 1000) if failure_probability is None else failure_probability
        number("failure_probability", beta, above=0, below=delta)
        reserve = number("reserve", beta if reserve is None else reserve, above=0, below=delta)
        integer("max_samples", max_samples, minimum=4096)
        question = {"epsilon": epsilon, "delta": delta, "failure": beta, "reserve": reserve, "max_samples": max_samples}

        def compute() -> dict[str, Any]:
            estimate = self.estimate_sigma(epsilon, delta)
            limit = delta - max(reserve, beta)
            return certified_sigma(self.estimator, estimate, delta, limit=limit, beta=beta, max_samples=max_samples)

        answer = self._cached("certificate", question, compute)
        claim = Certificate(METHOD, "both", 1.0 - beta, epsilon, delta, details=answer["details"])
        return Calibration(answer["sigma"], claim)

    def certify_delta(
        self, epsilon: float, sigma: float, *, failure_probability: float = 1e-9, samples: int = 1_000_000
    ) -> float:
        """An upper bound on δ(ε, σ) in both directions that fails with probability at most ``failure_probability``."""
        _check(epsilon=epsilon, sigma=sigma, certified=True)
        number("failure_probability", failure_probability, above=0, below=1)
        integer("samples", samples, minimum=4096)

        def bound(way: OneWay) -> float:
            return upper_bound(self.estimator, epsilon, sigma, way, failure=0.5 * failure_probability, samples=samples)

        remove, analytic = bound("remove"), add_bound(self.gram, epsilon, sigma)
        return remove if analytic <= remove else max(remove, min(bound("add"), analytic))


def _check(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    sigma: float | None = None,
    direction: Direction = "both",
    certified: bool = False,
) -> None:
    if epsilon is not None:
        number("epsilon", epsilon, above=0, below=LARGEST_EPSILON)
        if certified and epsilon < SMALLEST_EPSILON:
            raise InvalidInput("epsilon", epsilon, f"certificates are given from {SMALLEST_EPSILON:g} on")
    if delta is not None:
        number("delta", delta, above=0, below=1)
    if sigma is not None:
        number("sigma", sigma, above=0)
    if direction not in ("both", "remove", "add"):
        raise InvalidInput("direction", direction, "it must be 'both', 'remove' or 'add'")


# A test of one claim

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

    @property
    def top(self) -> float:
        """No weight, rounding included, exceeds this."""
        return self.proposal.largest_weight * (1.0 + 2 * _ROUNDING)


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


def settle(
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
        weights = np.minimum(weights * (1.0 + _ROUNDING), wager.top)
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
    stake = min(wager.stake, 0.999 / wager.top)  # 1 + c(m − x) ≥ 0 for every m ≥ 0
    target = math.log(1.0 / failure) * (1.0 + 1e-9)
    seeds = np.random.SeedSequence(secrets.randbits(256))
    weights = np.concatenate(list(rounds(wager.proposal, seeds, max(1, samples // wager.proposal.round))))
    weights = np.minimum(weights * (1.0 + _ROUNDING), wager.top)

    def certified(m: float) -> bool:
        return float(np.log1p(stake * (m - weights)).sum()) >= target

    if not certified(wager.top):
        return min(1.0, wager.proposal.envelope.bound * (1.0 + _ROUNDING))  # δ ≤ Δ always
    return bisect(certified, 0.0, wager.top, most=60)


# From an estimate of σ to a certified one

_GAPS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)  # log of (δ asked for / δ expected): what a step may give away
_ATTEMPTS = 4
# G is computed to a relative accuracy far better than 2e-9, and δ(G, σ) grows with every entry of G (Kahane): so the
# true δ at σ·(1 + 1e-9) is at most the δ of the computed G at σ, which is what was tested.
_ROUNDING_OF_GRAM = 1.0 + 1e-9
_RESERVE = 4  # a test is started if it is expected to end within a quarter of the samples allowed
# A test that gives away less than this share of σ may take a quarter of them: bold ones are a luxury.
_LITTLE, _LUXURY = 0.012, 0.25


def certified_sigma(
    estimator: Estimator, estimate: SigmaEstimate, delta: float, *, limit: float, beta: float, max_samples: int
) -> dict[str, Any]:
    """``{"sigma", "details"}`` with δ(ε, σ) ≤ ``limit`` in both directions, except with probability ``beta``.

    Every test may err with its own probability: half of β for each direction, and of these 1/2, 1/4, … for the
    first, second, … attempt, so that all of them together err with probability at most β, however they turn out.
    Where every attempt fails, the σ that needs no amplification is the answer, by a theorem.
    """
    started = time.monotonic()
    epsilon, widest = estimate.delta.epsilon, estimator.widest(estimate.delta.epsilon, delta)
    tests: list[dict[str, Any]] = []
    attempts, needed = 0, math.inf
    for gap in _GAPS:
        sigma = estimate.sigma * math.exp(gap / estimate.slope)
        if sigma >= widest or attempts == _ATTEMPTS:
            break
        analytic = add_bound(estimator.gram, epsilon, sigma) <= limit
        ways: tuple[OneWay, ...] = ("remove",) if analytic else ("remove", "add")
        failure = 0.5 * beta * 0.5 ** (attempts + 1)
        wagers = [prepare(estimator, epsilon, sigma, way, limit=limit, failure=failure) for way in ways]
        reserved = _RESERVE * max(wager.expected_samples for wager in wagers)
        needed = min(needed, reserved)
        if reserved > max_samples * (_LUXURY if gap < _LITTLE * estimate.slope else 1.0):
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
    wagers: list[Wager],
    sigma: float,
    failure: float,
    max_samples: int,
    tests: list[dict[str, Any]],
) -> bool:
    """Run the tests of one σ in turn and record them; the first failure ends it."""
    for way, wager in zip(ways, wagers, strict=True):
        budget = int(min(max_samples, 6 * wager.expected_samples + 65_536))
        with progress(f"certifying σ = {sigma:.4g} ({way})", budget) as tick:
            outcome = settle(wager, failure=failure, max_samples=budget, tick=tick)
        tests.append({"direction": way, "sigma": sigma, "passed": outcome.passed, "samples": outcome.samples})
        if not outcome.passed:
            return False
    return True


def _seconds_a_sample(estimator: Estimator, epsilon: float, sigma: float) -> float:
    started = time.monotonic()
    drawn = estimator.one_way(epsilon, sigma, "remove", samples=1)
    return (time.monotonic() - started) / drawn.samples
