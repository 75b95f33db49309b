"""Point estimates of δ, ε and σ with their standard errors. They are not privacy claims: see ``accountant``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lambdacgd.accounting.certificate import Direction, OneWay, progress
from lambdacgd.accounting.gaussian import gaussian_epsilon, gaussian_sigma, jensen_add
from lambdacgd.accounting.monte_carlo.gram import Gram
from lambdacgd.accounting.monte_carlo.proposal import Pilot, levels_of, rounds, stratified
from lambdacgd.accounting.root import RegulaFalsi, Secant, find_root
from lambdacgd.errors import AccountingError

_ENVELOPE_SHARE = 0.05


@dataclass(frozen=True)
class Estimate:
    """δ(ε, σ) as sampled: the larger direction's value and its standard error."""

    value: float
    standard_error: float
    direction: OneWay
    epsilon: float
    sigma: float
    samples: int

    @property
    def relative_error(self) -> float:
        return self.standard_error / self.value if self.value > 0 else math.inf


@dataclass(frozen=True)
class SigmaEstimate:
    """σ(ε, δ) as sampled. ``slope`` is −d log δ / d log σ, which carries the error of δ over to σ."""

    sigma: float
    standard_error: float
    slope: float
    delta: Estimate


def add_bound(gram: Gram, epsilon: float, sigma: float) -> float:
    """A bound on δ_add without sampling: Jensen's, from the mean of all losses."""
    level = float(gram.diagonal.mean()) / sigma**2
    return jensen_add(-level / 2, gram.mean_variance() / sigma**2, epsilon)


class Estimator:
    """Estimates for one Gram matrix with common random numbers: answers are smooth in ε and σ."""

    def __init__(self, gram: Gram, *, seed: int = 0, round_size: int = 4096) -> None:
        self.gram = gram
        self.levels = levels_of(gram)
        self.pilot = Pilot(gram, self.levels, seed=seed, most=round_size)
        self._seed = seed

    def one_way(self, epsilon: float, sigma: float, direction: OneWay, *, samples: int) -> Estimate:
        proposal = self.pilot.proposal(epsilon, sigma, direction, envelope_share=_ENVELOPE_SHARE)
        count = max(1, math.ceil(samples / proposal.round))
        weights = np.stack(list(rounds(proposal, np.random.SeedSequence([self._seed, 7]), count)))
        value, error = stratified(weights, proposal)
        return Estimate(value, error, direction, epsilon, sigma, weights.size)

    def delta(self, epsilon: float, sigma: float, *, samples: int, direction: Direction = "both") -> Estimate:
        if direction != "both":
            return self.one_way(epsilon, sigma, direction, samples=samples)
        remove = self.one_way(epsilon, sigma, "remove", samples=samples)
        if add_bound(self.gram, epsilon, sigma) <= remove.value:
            return remove
        add = self.one_way(epsilon, sigma, "add", samples=samples)
        return add if add.value > remove.value else remove

    def widest(self, epsilon: float, delta: float) -> float:
        """σ that suffices without any amplification: the largest ‖m_j‖ times the Gaussian mechanism's σ."""
        return math.sqrt(float(self.gram.diagonal.max())) * gaussian_sigma(epsilon, delta)

    def sigma(self, epsilon: float, delta: float, *, relative_error: float, max_samples: int) -> SigmaEstimate:
        """σ with δ(ε, σ) = ``delta``: a search with few samples, then steps with as many as the error asks for."""
        few = self.pilot.round
        with progress(f"estimating σ for ε = {epsilon:g}") as tick:

            def gap(log_sigma: float, samples: int = few) -> float:
                tick(1)
                return self._gap(log_sigma, epsilon, delta, samples)[0]

            at = _root(gap, math.log(self.widest(epsilon, delta)), step=0.35, tolerance=0.05)
            # common random numbers: the same samples on both sides
            slope = max((gap(at - 0.03) - gap(at + 0.03)) / 0.06, 1.0)
            samples = few
            for _ in range(5):
                tick(1)
                miss, estimate = self._gap(at, epsilon, delta, samples)
                if estimate is None or not math.isfinite(estimate.relative_error):
                    raise AccountingError(
                        f"σ for ε = {epsilon:g}, δ = {delta:g} could not be estimated: no sample reached ε"
                    )
                enough = estimate.relative_error <= relative_error or samples >= max_samples
                if enough and abs(miss) < max(0.25 * estimate.relative_error, 1e-4):
                    break
                if not enough:
                    needed = 1.2 * samples * (estimate.relative_error / relative_error) ** 2
                    samples = int(np.clip(needed, few, max_samples))
                at += miss / slope
        assert estimate is not None
        sigma = math.exp(at)
        return SigmaEstimate(sigma, sigma * estimate.relative_error / slope, slope, estimate)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """σ of the remove direction from one round: for comparing mechanisms, whose errors nearly cancel."""

        def gap(log_sigma: float) -> float:
            return self._gap(log_sigma, epsilon, delta, self.pilot.round, "remove")[0]

        if start is None:
            return math.exp(_root(gap, math.log(self.widest(epsilon, delta)), step=0.35, tolerance=0.01))
        secant = Secant(-22.0)
        at, miss = find_root(gap, math.log(start), secant, lambda value: abs(value) < 0.1, most=9)
        return math.exp(at - miss / secant.slope)  # within the slope's error

    def _gap(
        self, log_sigma: float, epsilon: float, delta: float, samples: int, direction: Direction = "both"
    ) -> tuple[float, Estimate | None]:
        """log δ/target at this σ, and the estimate behind it."""
        try:
            estimate = self.delta(epsilon, math.exp(log_sigma), samples=samples, direction=direction)
        except AccountingError:  # σ so small that δ is nearly 1
            return -math.log(delta), None
        return math.log(max(estimate.value, 1e-300) / delta), estimate

    def epsilon(self, delta: float, sigma: float, *, samples: int) -> float:
        """ε with δ(ε, σ) = ``delta`` (0 if none is needed)."""
        norm = math.sqrt(float(self.gram.diagonal.max()))
        high, floor = gaussian_epsilon(sigma / norm, delta), 1e-6

        def gap(log_epsilon: float) -> float:
            estimate = self.delta(math.exp(log_epsilon), sigma, samples=samples)
            return math.log(max(estimate.value, 1e-300) / delta)

        if high <= floor or gap(math.log(floor)) <= 0:
            return 0.0
        return math.exp(_root(gap, math.log(high), step=0.3, tolerance=2e-3))


def _root(gap: Callable[[float], float], start: float, *, step: float, tolerance: float) -> float:
    """The root of a smooth falling function that is about 0 or below at ``start``."""
    search = RegulaFalsi(step)

    def near(value: float) -> bool:
        return search.refining and (abs(value) < tolerance or search.width < 1e-9)

    return find_root(gap, start, search, near, most=200)[0]
