"""δ and σ of Balls-in-Bins with fixed bins by importance sampling: estimates with standard errors, no claims.

They serve the paper's table, whose accountant is Monte Carlo too, and the tests as an oracle that shares no code with
the certified bounds. An example in bin j adds m_j = Σ_e C[:, j+eb]; only G_ij = ⟨m_i, m_j⟩ matters. With
T ~ N(0, G/σ²), X = T − diag(G)/(2σ²) and W = mean_j e^{X_j},

    δ_remove = E (W − e^ε)₊,   δ_add = E (1 − e^ε W)₊.

Samples come from a mixture of Gaussians moved along the mean of the m_j over a window of bins: one bin matters at large
ε, all of them at small ε. The move is such that the mean loss sits at ±ε, and a pilot run finds the shares of window
lengths. P itself (add: Q) is always one of them. All densities are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.root import Secant, find_root
from lambdacgd.mechanisms import Horizon, Mechanism

Array = NDArray[np.float64]
Way = Literal["remove", "add"]


def gram_of(mechanism: Mechanism, horizon: Horizon) -> Array:
    """⟨m_i, m_j⟩ straight from the columns of C; the mechanism is resolved."""
    n, b = horizon.steps, horizon.steps_per_epoch
    column, scales = np.asarray(mechanism.strategy(n)), mechanism.column_scales(n)
    sums = np.zeros((n, b))
    for step in range(n):
        sums[step:, step % b] += column[: n - step] / (1.0 if scales is None else scales[step])
    return sums.T @ sums


@dataclass(frozen=True)
class Estimate:
    """δ or σ with its standard error."""

    value: float
    standard_error: float


class Sampled:
    """Estimates for one mechanism with C ≥ 0, resolved, with common random numbers: smooth in ε and σ."""

    def __init__(self, mechanism: Mechanism, horizon: Horizon, *, seed: int = 0) -> None:
        self.gram, self.seed = gram_of(mechanism, horizon), seed
        b = horizon.steps_per_epoch
        lengths = [length for length in (3**i for i in range(12)) if length < b] + [b]
        self.windows = [_windows(b, length) for length in dict.fromkeys(lengths)]
        self.factor = np.linalg.cholesky(self.gram + 1e-12 * self.gram.max() * np.eye(b)).T

    def delta(self, epsilon: float, sigma: float, *, samples: int = 32_768) -> Estimate:
        """δ(ε, σ), the larger direction."""
        ways: tuple[Way, ...] = ("remove", "add")
        return max((self.one_way(epsilon, sigma, way, samples=samples) for way in ways), key=lambda e: e.value)

    def one_way(self, epsilon: float, sigma: float, way: Way, *, samples: int) -> Estimate:
        """δ of one direction."""
        pilot, drawn = np.random.SeedSequence([self.seed, way == "add"]).spawn(2)
        proposal = _Proposal(self, epsilon, sigma, way)
        proposal.learn(np.random.default_rng(pilot), 4096)
        weights = proposal.weights(np.random.default_rng(drawn), samples)
        return Estimate(float(weights.mean()), float(weights.std() / math.sqrt(samples)))

    def sigma(self, epsilon: float, delta: float, *, relative_error: float = 0.02, most: int = 131_072) -> Estimate:
        """σ(ε, δ), from as many samples as bring δ's standard error down to ``relative_error``, or ``most``."""
        widest = math.log(math.sqrt(float(self.gram.diagonal().max())) * gaussian_sigma(epsilon, delta))
        low = 0.5 * math.log(float(self.gram.diagonal().max()) / 300)
        search, x, samples = Secant(-14.0, largest=0.5, limits=(low, widest)), widest - 0.5, 4096
        latest = Estimate(0.0, 0.0)

        def gap(at: float) -> float:
            nonlocal latest
            latest = self.delta(epsilon, math.exp(at), samples=samples)
            return math.log(max(latest.value, 1e-300) / delta)

        x, value = find_root(gap, search.within_limits(x), search, lambda v: abs(v) < 0.05 and len(search.points) > 1)
        error = latest.standard_error / latest.value
        samples = int(np.clip(1.3 * samples * (error / relative_error) ** 2, samples, most))
        search.restart()
        x, value = find_root(gap, x, search, lambda v: abs(v) < 0.02)
        x, error = x - value / search.slope, latest.standard_error / latest.value
        return Estimate(math.exp(x), math.exp(x) * error / -search.slope)


def _windows(b: int, length: int) -> Array:
    """A row for each window of so many bins, taken cyclically: the weights of its mean."""
    starts = np.arange(0, b, max(1, length // 3)) if length < b else np.zeros(1, dtype=np.intp)
    rows = np.zeros((len(starts), b))
    rows[np.arange(len(starts))[:, None], (starts[:, None] + np.arange(length)) % b] = 1 / length
    return rows


class _Proposal:
    """A mixture of windows moved by an amplitude each; component 0 is P (for add: Q) itself."""

    def __init__(self, of: Sampled, epsilon: float, sigma: float, way: Way) -> None:
        self.of, self.epsilon, self.way = of, epsilon, way
        self.covariance, self.factor = of.gram / sigma**2, of.factor / sigma
        self.half = np.diag(self.covariance) / 2
        pilot = np.random.default_rng(of.seed).standard_normal((64, len(self.half))) @ self.factor - self.half
        target = epsilon if way == "remove" else -epsilon
        first = (of.windows[0], 1.0) if way == "remove" else (of.windows[-1], 0.0)
        self.parts = [first] + [(rows, self._amplitude(pilot, rows, target)) for rows in of.windows]
        # The variance of each window's mean, and what its move adds to every bin.
        self.moves = [rows @ self.covariance for rows, _ in self.parts]
        self.variances = [(move * rows).sum(axis=1) for move, (rows, _) in zip(self.moves, self.parts, strict=True)]
        self.shares = np.full(len(self.parts), 1 / len(self.parts))

    def _amplitude(self, pilot: Array, rows: Array, target: float) -> float:
        step = rows[len(rows) // 2] @ self.covariance

        def loss(amplitude: float) -> float:
            return float(_log_mean(pilot + amplitude * step).mean())

        low, high = 0.0, 2.0 if target > loss(0.0) else -2.0
        while (loss(high) - target) * high < 0 and abs(high) < 1e4:
            high *= 2
        for _ in range(20):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if (loss(middle) - target) * high < 0 else (low, middle)
        return high

    def learn(self, rng: np.random.Generator, samples: int) -> None:
        """Shares by expectation maximisation, towards the density ∝ what δ is the mean of."""
        above, densities = self._values(self._draw(rng, samples))
        hit = above > 0
        if not hit.any():
            return
        importance = above[hit] / (densities[hit] @ self.shares)
        importance /= importance.sum()
        for _ in range(40):
            responsibility = densities[hit] * self.shares
            self.shares = importance @ (responsibility / responsibility.sum(axis=1, keepdims=True))
            self.shares = 0.9 * self.shares / self.shares.sum()
            self.shares[0] += 0.1

    def weights(self, rng: np.random.Generator, samples: int) -> Array:
        parts = []
        slab = max(64, 4_000_000 // len(self.half))
        for first in range(0, samples, slab):
            above, densities = self._values(self._draw(rng, min(slab, samples - first)))
            parts.append(above / (densities @ self.shares))
        return np.concatenate(parts)

    def _draw(self, rng: np.random.Generator, samples: int) -> Array:
        drawn = rng.standard_normal((samples, len(self.half))) @ self.factor
        chosen = np.sort(rng.choice(len(self.shares), size=samples, p=self.shares))
        for part, (rows, amplitude) in enumerate(self.parts):
            here = np.flatnonzero(chosen == part)
            drawn[here] += amplitude * self.moves[part][rng.integers(len(rows), size=len(here))]
        return np.asarray(drawn)

    def _values(self, drawn: Array) -> tuple[Array, Array]:
        """(W − K)₊ or (1 − KW)₊, and dR_l/dQ of every component."""
        ratio, strike = np.exp(_log_mean(drawn - self.half)), math.exp(self.epsilon)
        above = np.maximum(ratio - strike if self.way == "remove" else 1 - strike * ratio, 0.0)
        densities = np.empty((len(drawn), len(self.parts)))
        for part, (rows, amplitude) in enumerate(self.parts):
            exponents: Any = amplitude * (drawn @ rows.T) - amplitude**2 / 2 * self.variances[part]
            densities[:, part] = np.exp(np.minimum(exponents, 600.0)).mean(axis=1)
        return above, densities


def _log_mean(x: Array) -> Array:
    top = x.max(axis=1)
    return np.asarray(top + np.log(np.exp(x - top[:, None]).mean(axis=1)))
