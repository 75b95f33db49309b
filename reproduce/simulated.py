"""Fresh bins simulated straight from C: losses of one epoch are sampled, then summed over all epochs.

An estimate that claims nothing, and the tests' oracle.

It shares no code with the certificates: neither Gram matrices nor discrete pairs. Losses of one epoch are drawn in all
b coordinates, from P₁ and from P₁ with its centres moved further out (weighted back by exact densities), because
rare large losses of one epoch matter. The pool is then convolved with itself, k times, which adds no noise of its own
and is smooth in σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.signal import fftconvolve, lfilter

from lambdacgd.accounting.certificate import Array, OneWay
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.root import Secant, find_root
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import Horizon, Mechanism

AMPLITUDES = (1.0, 1.5, 2.0)
"""how far the centres are moved: 1 is P₁ itself"""
_SLAB = 1 << 20


@dataclass(frozen=True)
class Pool:
    """Losses of one epoch with weights that add up to about 1: under P₁, and −L under Q₁."""

    losses: dict[OneWay, Array]
    weights: dict[OneWay, Array]

    def tilt(self, way: OneWay, epochs: int, epsilon: float) -> tuple[float, float]:
        """The saddle point θ of P(sum of losses > ε), and log E e^{θL}."""
        losses, weights = self.losses[way], self.weights[way]
        peak = float(losses.max())

        def log_mgf(theta: float) -> float:
            return theta * peak + math.log(float(weights @ np.exp(theta * (losses - peak))))

        most = 300.0 / max(abs(peak), float(np.abs(losses).max()))
        saddle = minimize_scalar(lambda t: epochs * log_mgf(t) - t * epsilon, bounds=(0.0, most), method="bounded")
        return float(saddle.x), log_mgf(float(saddle.x))

    def delta(self, way: OneWay, epochs: int, epsilon: float, *, cells: int = 400) -> float:
        """δ(ε) of sums of ``epochs`` losses: the pool convolved with itself, each loss split between two cells."""
        losses, weights = self.losses[way], self.weights[way]
        if epochs * float(losses.max()) <= epsilon:
            return 0.0
        theta, log_mgf = self.tilt(way, epochs, epsilon)
        tilted = weights * np.exp(theta * losses - log_mgf)
        mean = float(tilted @ losses)
        # Fine beside the tilted spread, but never so fine that a transform is longer than two million.
        finest = epochs * float(np.ptp(losses)) / 2**21
        cell = max(4 * math.sqrt(float(tilted @ (losses - mean) ** 2)) / cells, finest, 1e-12)
        low = math.floor(float(losses.min()) / cell)
        at = losses / cell - low
        first = np.floor(at).astype(np.intp)
        size = int(first.max()) + 2
        share = at - first
        masses = np.bincount(first, tilted * (1 - share), size) + np.bincount(first + 1, tilted * share, size)
        length = 1 << (epochs * size).bit_length()
        sums = np.fft.irfft(np.fft.rfft(masses, length) ** epochs, length)[: epochs * (size - 1) + 1]
        values = (np.arange(len(sums)) + epochs * low) * cell
        above = values > epsilon
        kept = values[above]
        return float(np.sum(-np.expm1(epsilon - kept) * np.exp(epochs * log_mgf - theta * kept) * sums[above]))


class Simulation:
    """One mechanism (resolved for one epoch) over one epoch of ``steps`` steps."""

    def __init__(self, mechanism: Mechanism, steps: int) -> None:
        self.steps = steps
        self.column = np.asarray(mechanism.strategy(steps), dtype=np.float64)
        self.noising = np.asarray(mechanism.noising(steps), dtype=np.float64)
        scales = mechanism.column_scales(steps)
        self.divisors = np.ones(steps) if scales is None else np.asarray(scales, dtype=np.float64)
        if (self.column < 0).any():
            raise AccountingError("the simulation is of C ≥ 0")
        # ‖C[:, j]‖² for j = 0 … b−1: column j is the first one, cut off at the end
        self.squares = np.cumsum(self.column**2)[::-1] / self.divisors**2

    def inner(self, points: Array) -> Array:
        """⟨x, C[:, j]⟩ for every j: Cᵀx, by the inverse's recurrence where that is short."""
        turned = points[:, ::-1]
        if len(self.noising) <= 64:
            products = lfilter([1.0], self.noising, turned, axis=1)
        else:
            products = fftconvolve(turned, self.column[None, :], axes=1)[:, : self.steps]
        return np.asarray(products[:, ::-1] / self.divisors)

    def pool(self, sigma: float, *, samples: int, seed: int) -> Pool:
        """``samples`` losses each way; the same seed gives the same noise at every σ."""
        rng = np.random.default_rng(seed)
        losses: dict[OneWay, list[Array]] = {"remove": [], "add": []}
        weights: list[Array] = []
        slab = max(1, min(samples, _SLAB // self.steps))
        amplitudes = np.asarray(AMPLITUDES)
        for first in range(0, samples, slab):
            count = min(slab, samples - first)
            noise = sigma * rng.standard_normal((count, self.steps))
            own, at = amplitudes[(first + np.arange(count)) % len(amplitudes)], rng.integers(self.steps, size=count)
            centres = np.zeros((count, self.steps))
            for row, j in enumerate(at):
                centres[row, j:] = self.column[: self.steps - j]
            centres /= self.divisors[at][:, None]
            quiet = self.inner(noise)
            moved = quiet + own[:, None] * self.inner(centres)
            losses["add"].append(-self._log_ratio(quiet, 1.0, sigma))
            under_p = self._log_ratio(moved, 1.0, sigma)
            others = np.stack([self._log_ratio(moved, a, sigma) for a in AMPLITUDES], axis=1)
            mixture = np.log(np.exp(others - under_p[:, None]).mean(axis=1))
            losses["remove"].append(under_p)
            weights.append(np.exp(-mixture))
        total = np.concatenate(weights)
        return Pool(
            {way: np.concatenate(parts) for way, parts in losses.items()},
            {"remove": total / total.sum(), "add": np.full(samples, 1.0 / samples)},
        )

    def _log_ratio(self, inner: Array, amplitude: float, sigma: float) -> Array:
        """log of the density, over Q₁, of P₁ with its centres moved out to ``amplitude`` times themselves."""
        exponents = (amplitude * inner - 0.5 * amplitude**2 * self.squares) / sigma**2
        peak = exponents.max(axis=1)
        return np.asarray(peak + np.log(np.exp(exponents - peak[:, None]).mean(axis=1)))


def simulate(
    mechanism: Mechanism, horizon: Horizon, *, sigma: float, epsilon: float, samples: int = 200_000, seed: int = 0
) -> dict[str, float]:
    """δ(ε) over all epochs with its standard error, the larger direction, from 20 independent pools.

    It is a cross-check, not a privacy claim. Composing a pool k times is convex in its error: δ leans upwards.
    """
    if not (math.isfinite(sigma) and sigma > 0):
        raise AccountingError(f"σ is {sigma!r}; it must be positive and finite")
    groups = 20
    simulation = Simulation(mechanism, horizon.steps_per_epoch)
    drawn = np.zeros((groups, 2))
    for group in range(groups):
        pool = simulation.pool(sigma, samples=max(samples // groups, 100), seed=seed * groups + group)
        drawn[group] = pool.delta("remove", horizon.epochs, epsilon), pool.delta("add", horizon.epochs, epsilon)
    larger = drawn[:, int(np.argmax(drawn.mean(axis=0)))]
    return {"delta": float(larger.mean()), "standard_error": float(larger.std(ddof=1) / math.sqrt(groups))}


@dataclass(frozen=True)
class SimulatedSigma:
    """σ(ε, δ) over all epochs as simulated. ``slope`` is −d log δ / d log σ."""

    sigma: float
    standard_error: float
    slope: float
    samples: int


def estimate_sigma(
    mechanism: Mechanism,
    horizon: Horizon,
    *,
    epsilon: float,
    delta: float,
    samples: int = 98_304,
    start: float | None = None,
    seed: int = 0,
) -> SimulatedSigma:
    """σ with δ(ε, σ) = ``delta``: few common random numbers first, then all ``samples``, in 8 pools.

    A little too large by design of the mean over pools: composing a pool k times is convex in its error (up to 1% of σ
    for small ε or many epochs).
    """
    simulation, k = Simulation(mechanism, horizon.steps_per_epoch), horizon.epochs
    peak = float(simulation.squares.max())
    smallest, widest = math.log(math.sqrt(peak / 300.0)), math.log(math.sqrt(k * peak) * gaussian_sigma(epsilon, delta))

    def ratios(x: float, pools: range, size: int) -> Array:
        values = []
        for pool_seed in pools:
            pool = simulation.pool(math.exp(x), samples=size, seed=seed * 1000 + pool_seed)
            values.append(max(pool.delta("remove", k, epsilon), pool.delta("add", k, epsilon)))
        return np.asarray(values) / delta

    def few(x: float) -> float:
        return math.log(max(float(ratios(x, range(1), max(2048, samples // 24))[0]), 1e-6))

    size, error = max(samples // 8, 1024), math.inf

    def many(x: float) -> float:
        nonlocal error
        drawn = ratios(x, range(1, 9), size)
        error = float(drawn.std(ddof=1) / drawn.mean() / math.sqrt(len(drawn)))
        return math.log(max(float(drawn.mean()), 1e-6))

    strategy = Secant(-14.0, limits=(smallest, widest))
    x = strategy.within_limits(math.log(start) if start else 0.5 * (max(smallest, widest - 2.0) + widest))
    # A second point, however good the first one is: the secant through them carries errors of δ over to σ.
    find_root(few, x, strategy, lambda value: len(strategy.points) > 1 and abs(value) < 0.05, most=14)
    x = strategy.next()
    strategy.restart()
    x, value = find_root(many, x, strategy, lambda value: abs(value) < max(0.2 * error, 1e-3), most=6)
    slope = -strategy.slope
    sigma = math.exp(strategy.within_limits(x + value / slope))
    return SimulatedSigma(sigma, sigma * error / slope, slope, 8 * size)
