"""Point estimates of δ, ε and σ with their standard errors. They are not privacy claims: see ``certificate``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lambdacgd.accounting.base import AccountingError, Direction
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_sigma
from lambdacgd.accounting.monte_carlo.engine import Pilot, stratified, weights_of
from lambdacgd.accounting.monte_carlo.envelope import OneWay
from lambdacgd.accounting.monte_carlo.gram import Gram
from lambdacgd.accounting.monte_carlo.progress import progress
from lambdacgd.accounting.monte_carlo.proposal import levels_of

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SigmaEstimate:
    """σ(ε, δ) as sampled. ``slope`` is −d log δ / d log σ, which carries the error of δ over to σ."""

    sigma: float
    standard_error: float
    slope: float
    delta: Estimate

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def add_bound(gram: Gram, epsilon: float, sigma: float) -> float:
    """A bound on δ_add without sampling: by Jensen W ≥ e^Y with Y the mean of X, one Gaussian.

    Y ~ N(−g/2, v), g the mean of G_jj/σ² and v ≤ g the variance of the mean; E (1 − Ke^Y)₊ is the δ of a Gaussian
    mechanism of sensitivity √v at ε + (v − g)/2.
    """
    level = float(gram.diagonal.mean()) / sigma**2
    variance = gram.mean_variance() / sigma**2
    return gaussian_delta(epsilon + 0.5 * (variance - level), 1.0 / math.sqrt(variance)) * (1.0 + 1e-9)


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
        weights = weights_of(proposal, np.random.SeedSequence([self._seed, 7]), count)
        value, error = stratified(weights, proposal)
        return Estimate(value, error, direction, epsilon, sigma, weights.size)

    def delta(self, epsilon: float, sigma: float, *, samples: int, direction: Direction) -> Estimate:
        if direction != "both":
            return self.one_way(epsilon, sigma, direction, samples=samples)
        remove = self.one_way(epsilon, sigma, "remove", samples=samples)
        if add_bound(self.gram, epsilon, sigma) <= remove.value:
            return remove
        add = self.one_way(epsilon, sigma, "add", samples=samples)
        return add if add.value > remove.value else remove

    def sigma(
        self,
        epsilon: float,
        delta: float,
        *,
        relative_error: float,
        max_samples: int,
        direction: Direction,
    ) -> SigmaEstimate:
        """σ with δ(ε, σ) = ``delta``: a search with few samples, then secant steps with as many as the error asks."""
        with progress(f"estimating σ for ε = {epsilon:g}") as tick:
            return self._sigma(epsilon, delta, relative_error, max_samples, direction, tick)

    def _sigma(
        self,
        epsilon: float,
        delta: float,
        relative_error: float,
        max_samples: int,
        direction: Direction,
        tick: Callable[[int], None],
    ) -> SigmaEstimate:
        widest = math.sqrt(float(self.gram.diagonal.max())) * gaussian_sigma(epsilon, delta)

        def gap(log_sigma: float, samples: int) -> tuple[float, Estimate | None]:
            tick(1)
            try:
                found = self.delta(epsilon, math.exp(log_sigma), samples=samples, direction=direction)
            except AccountingError:  # σ so small that δ is nearly 1
                return -math.log(delta), None
            return math.log(max(found.value, 1e-300) / delta), found

        few = self.pilot.round
        at = find_root(lambda s: gap(s, few)[0], math.log(widest), step=-0.35, tolerance=0.05)
        below, above = gap(at - 0.03, few)[0], gap(at + 0.03, few)[0]
        slope = max((below - above) / 0.06, 1.0)  # common random numbers: the same samples on both sides
        samples = few
        found: Estimate | None = None
        for _ in range(5):
            miss, found = gap(at, samples)
            if found is None or not math.isfinite(found.relative_error):
                raise AccountingError(
                    f"σ for ε = {epsilon:g}, δ = {delta:g} could not be estimated: no sample reached ε"
                )
            enough = found.relative_error <= relative_error or samples >= max_samples
            if enough and abs(miss) < max(0.25 * found.relative_error, 1e-4):
                break
            if not enough:
                needed = 1.2 * samples * (found.relative_error / relative_error) ** 2
                samples = int(np.clip(needed, few, max_samples))
            at += miss / slope
        assert found is not None
        sigma = math.exp(at)
        return SigmaEstimate(sigma, sigma * found.relative_error / slope, slope, found)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """σ of the remove direction from one round: for comparing mechanisms, whose errors nearly cancel."""
        few = self.pilot.round
        at = math.log(start or math.sqrt(float(self.gram.diagonal.max())) * gaussian_sigma(epsilon, delta))

        def gap(log_sigma: float) -> float:
            try:
                found = self.delta(epsilon, math.exp(log_sigma), samples=few, direction="remove")
            except AccountingError:  # σ so small that δ is nearly 1
                return -math.log(delta)
            return math.log(max(found.value, 1e-300) / delta)

        if start is None:
            return math.exp(find_root(gap, at, step=-0.35, tolerance=0.01))
        slope, before = 22.0, (at, gap(at))
        for _ in range(8):
            if abs(before[1]) < 0.1:  # the last step below is within the slope's error
                break
            at = before[0] + float(np.clip(before[1] / slope, -0.3, 0.3))
            miss = gap(at)
            slope = float(np.clip((before[1] - miss) / (at - before[0]), 3.0, 100.0))
            before = (at, miss)
        return math.exp(before[0] + before[1] / slope)

    def epsilon(self, delta: float, sigma: float, *, samples: int, direction: Direction) -> float:
        """ε with δ(ε, σ) = ``delta`` (0 if none is needed)."""
        norm = math.sqrt(float(self.gram.diagonal.max()))
        high, floor = gaussian_epsilon(sigma / norm, delta), 1e-6

        def gap(log_epsilon: float) -> float:
            found = self.delta(math.exp(log_epsilon), sigma, samples=samples, direction=direction)
            return math.log(max(found.value, 1e-300) / delta)

        if high <= floor or gap(math.log(floor)) <= 0:
            return 0.0
        return math.exp(find_root(gap, math.log(high), step=-0.3, tolerance=2e-3))


def find_root(function: Callable[[float], float], start: float, *, step: float, tolerance: float) -> float:
    """Root of a function that rises along ``step`` from about 0 or below at ``start``: regula falsi, Illinois rule."""
    right, value_right = start, function(start)
    while value_right > 0:
        right -= 0.2 * step
        value_right = function(right)
    left, value_left = right, value_right
    while value_left <= 0:
        right, value_right = left, value_left
        left += step
        step *= 1.3
        value_left = function(left)
    middle = left
    for _ in range(60):
        middle = left + (right - left) * min(max(value_left / (value_left - value_right), 0.05), 0.95)
        value = function(middle)
        if abs(value) < tolerance or right - left < 1e-9:
            break
        if value > 0:
            left, value_left, value_right = middle, value, 0.5 * value_right
        else:
            right, value_right, value_left = middle, value, 0.5 * value_left
    return middle
