"""The proposal that Monte Carlo samples from, the weights it gives, and drawing many of them.

**The envelope** is a proposal under which every importance weight is provably small. δ_remove = E_Q (W − K)₊ with
W = (1/b) Σ_j e^{X_j} and K = e^ε, and δ_add = E_Q (1 − KW)₊. Both functions are convex in W, so Jensen's inequality
bounds them by the average over the bins of the same function of e^{X_j} alone:

    (W − K)₊ ≤ (1/b) Σ_j (e^{X_j} − K)₊,   with Q-mean Δ = (1/b) Σ_j δ_Gauss(ε, σ/√G_jj).

The right-hand side, divided by Δ, is a density with respect to Q: the envelope S. Sampled from S, the weight
(W − K)₊ / (dS/dQ) lies in [0, Δ], and Δ is no more than δ *without* amplification: a few hundred to a few thousand
times δ, where a sample from P itself only gives [0, 1].

**The proposal** R mixes the envelope with tilts of windows of bins. A tilt moves the Gaussian along the mean of m_j
over a window: windows of one bin are right where one bin carries the loss (large ε), the window of all bins where all
do (small ε, λ near 1), and those between cover the rest. R = w_0 S + Σ_l w_l R_l with R_l the average over the
windows of length r_l, so that

    dR_l/dQ = average over windows of exp(a·T̄ − a²v/2),   T̄ the window's mean of T, v its variance,

is exact and costs O(b). T = u/σ ~ N(0, G/σ²) is the sample throughout, X = T − diag/2, W = mean of e^X.

**Rounds** of a fixed size are drawn slab by slab on all cores, the same on any number of them.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri_exp

from lambdacgd.accounting.certificate import Array, OneWay
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.monte_carlo.gram import Gram, window_sums
from lambdacgd.accounting.root import between
from lambdacgd.errors import AccountingError

Index = NDArray[np.intp]


def excess(likelihood_ratio: Array, epsilon: float, direction: OneWay) -> Array:
    """(W − K)₊ or (1 − KW)₊."""
    strike = math.exp(epsilon)
    if direction == "remove":
        return np.maximum(likelihood_ratio - strike, 0.0)
    return np.maximum(1.0 - strike * likelihood_ratio, 0.0)


@dataclass(frozen=True)
class Envelope:
    """The envelope of one direction at one (ε, σ). ``bound`` is Δ."""

    gram: Gram
    epsilon: float
    sigma: float
    direction: OneWay
    bound: float
    chances: Array  # of each bin: δ_Gauss of that bin over the sum

    @classmethod
    def of(cls, gram: Gram, epsilon: float, sigma: float, direction: OneWay) -> Envelope:
        norms, inverse = np.unique(np.sqrt(gram.diagonal), return_inverse=True)
        deltas = np.array([gaussian_delta(epsilon, sigma / norm) for norm in norms])[inverse]
        mean = float(deltas.mean())
        chances = deltas / deltas.sum() if mean > 0 else np.full(len(deltas), 1.0 / len(deltas))
        return cls(gram, epsilon, sigma, direction, mean, chances)

    def density(self, ratios: Array) -> Array:
        """dS/dQ from e^{X_j} (one sample per row)."""
        strike = math.exp(self.epsilon)
        above = ratios - strike if self.direction == "remove" else 1.0 - strike * ratios
        np.maximum(above, 0.0, out=above)
        return above.mean(axis=1) / self.bound

    def shift(self, rng: np.random.Generator, samples: Array) -> None:
        """Turn draws of N(0, G/σ²) into draws of S, in place: one bin gets its envelope law, the rest follow it."""
        count = len(samples)
        bins = rng.choice(len(self.chances), size=count, p=self.chances)
        rows = self.gram.rows(bins, 1) / self.sigma**2
        variances = self.gram.diagonal[bins] / self.sigma**2
        strike = 0.5 * variances  # X_j = t − g/2 equals ±ε at t = g/2 ± ε
        if self.direction == "remove":
            target = strike + self.epsilon + overshoot(rng, self.epsilon, variances)
        else:
            target = strike - self.epsilon - overshoot(rng, self.epsilon, variances)
        samples += ((target - samples[np.arange(count), bins]) / variances)[:, None] * rows


def overshoot(rng: np.random.Generator, epsilon: float, variances: Array) -> Array:
    """Draws of density ∝ (1 − e^{−y}) exp(−κy − y²/2g) on y > 0, κ = (ε − g/2)/g: how far one bin passes the strike.

    This is (e^{t−g/2} − K)₊ φ(t; g) in terms of y = t − g/2 − ε, and (1 − Ke^{t−g/2})₊ φ(t; g) in terms of
    y = g/2 − ε − t. Rejection sampling, exact; which proposal is cheap depends on κ√g.
    """
    overshoots = np.empty(len(variances))
    left = np.arange(len(variances))
    while len(left):
        g = variances[left]
        slope = (epsilon - 0.5 * g) / g
        edge = slope * np.sqrt(g)
        y = np.empty(len(left))
        log_chance = np.empty(len(left))
        steep, below = edge >= 1.0, edge < 0.0
        gentle = ~steep & ~below
        y[steep] = rng.standard_gamma(2.0, int(steep.sum())) / slope[steep]
        log_chance[steep] = -0.5 * y[steep] ** 2 / g[steep]
        y[gentle] = np.sqrt(2.0 * g[gentle] * rng.standard_exponential(int(gentle.sum())))
        log_chance[gentle] = -slope[gentle] * y[gentle]
        log_tail = log_ndtr(-edge[below]) - rng.standard_exponential(int(below.sum()))
        y[below] = np.sqrt(g[below]) * (-ndtri_exp(log_tail) - edge[below])
        np.maximum(y, 1e-300, out=y)
        log_chance[below] = np.log(y[below])
        accepted = -rng.standard_exponential(len(left)) < log_chance + np.log(-np.expm1(-y) / y)
        overshoots[left[accepted]] = y[accepted]
        left = left[~accepted]
    return overshoots


# The proposal

_WIDENING = 3  # ratio of neighbouring window lengths
_LARGEST_EXPONENT = 600.0
_DEAR = 25.0  # nats


@dataclass(frozen=True)
class Level:
    """All windows of one length: where they start, the variance of u's mean over each, its covariance with u's mean."""

    length: int
    starts: Index
    variances: Array
    covariances: Array

    def means(self, samples: Array, cumulative: Array) -> Array:
        if self.length == 1:
            return samples
        if len(self.starts) == 1:
            return cumulative[:, -1:] / self.length
        hop = int(self.starts[1])
        ends = cumulative[:, self.length :: hop]  # windows that do not wrap, by slices
        whole = ends.shape[1]
        sums = np.empty((len(samples), len(self.starts)))
        np.subtract(ends, cumulative[:, : hop * whole : hop], out=sums[:, :whole])
        if whole < len(self.starts):
            sums[:, whole:] = window_sums(cumulative, self.starts[whole:], self.length, axis=1)
        sums /= self.length
        return sums


def levels_of(gram: Gram) -> tuple[Level, ...]:
    """Levels from single bins to all bins, each three times as wide as the last."""
    b = len(gram.diagonal)
    lengths = [1]
    while lengths[-1] * _WIDENING < b:
        lengths.append(lengths[-1] * _WIDENING)
    if b > 1:
        lengths.append(b)
    whole = gram.rows(np.zeros(1, dtype=np.intp), b)
    sums = np.concatenate([np.zeros((1, 1)), np.cumsum(whole, axis=1)], axis=1)
    levels = []
    for length in lengths:
        starts = np.arange(0, b, max(1, length // 3)) if length < b else np.zeros(1, dtype=np.intp)
        covariances = window_sums(sums, starts, length, axis=1)[0] / length
        levels.append(Level(length, starts, gram.variances(starts, length), covariances))
    return tuple(levels)


@dataclass(frozen=True)
class Tilt:
    """The component R_l: one window of ``level``, drawn uniformly, moved by ``local``, and all bins by ``common``.

    ``whole`` is the variance of u's mean over all bins.
    """

    level: Level
    local: float
    common: float = 0.0
    whole: float = 0.0

    def penalties(self) -> Array:
        """Variance of local·(window's mean of u) + common·(mean of u), for each window."""
        return self.local**2 * self.level.variances + self.common * (
            2 * self.local * self.level.covariances + self.common * self.whole
        )

    def density(self, means: Array, whole: Array, sigma: float) -> Array:
        """dR_l/dQ from the windows' means and the mean of all bins."""
        exponents = self.local * means
        exponents -= (0.5 / sigma**2) * self.penalties()
        if self.common:
            exponents += self.common * whole
        # A cap on the exponent makes the density smaller, so the weight larger: the safe side.
        np.minimum(exponents, _LARGEST_EXPONENT, out=exponents)
        return np.exp(exponents, out=exponents).mean(axis=1)


@dataclass(frozen=True)
class Proposal:
    """R at one (ε, σ, direction). ``shares`` are w_0 (the envelope's), then one for each tilt."""

    envelope: Envelope
    tilts: tuple[Tilt, ...]
    shares: tuple[float, ...]
    round: int = 0

    @property
    def largest_weight(self) -> float:
        """A proven bound on every weight: Δ/w_0."""
        return self.envelope.bound / self.shares[0]

    def counts(self, total: int) -> tuple[int, ...]:
        """How many of ``total`` samples come from each component."""
        cumulative = np.round(np.cumsum(self.shares) * total).astype(int)
        return tuple(int(c) for c in np.diff(np.concatenate([[0], cumulative])))

    def rounded(self, total: int) -> Proposal:
        """The same with shares that are whole numbers of samples out of ``total`` (the envelope gets at least one)."""
        counts = list(self.counts(total))
        if counts[0] == 0:
            counts[int(np.argmax(counts))] -= 1
            counts[0] = 1
        return Proposal(self.envelope, self.tilts, tuple(c / total for c in counts), total)

    def draw(self, rng: np.random.Generator, total: int, *, first: int = 0, stop: int | None = None) -> Array:
        """Samples ``first … stop−1`` out of ``total``, which come component after component, as ``shares`` orders."""
        gram, sigma = self.envelope.gram, self.envelope.sigma
        stop = total if stop is None else stop
        samples = gram.sample(rng, stop - first)
        samples /= sigma
        bounds = np.concatenate([[0], np.cumsum(self.counts(total))])
        bounds = np.clip(bounds, first, stop) - first
        if bounds[1] > bounds[0]:
            self.envelope.shift(rng, samples[bounds[0] : bounds[1]])
        for i, tilt in enumerate(self.tilts, start=1):
            if (count := int(bounds[i + 1] - bounds[i])) > 0:
                chosen = tilt.level.starts[rng.integers(len(tilt.level.starts), size=count)]
                here = samples[bounds[i] : bounds[i + 1]]
                here += (tilt.local / sigma**2) * gram.rows(chosen, tilt.level.length)
                if tilt.common:
                    here += (tilt.common / sigma**2) * gram.rows(np.zeros(1, dtype=np.intp), samples.shape[1])
        return samples

    def densities(self, samples: Array) -> tuple[Array, Array]:
        """W for each sample, and dR_l/dQ for each component (columns in the order of ``shares``)."""
        gram, sigma = self.envelope.gram, self.envelope.sigma
        ratios = np.exp(samples - (0.5 / sigma**2) * gram.diagonal)
        densities = np.zeros((len(samples), len(self.shares)))
        densities[:, 0] = self.envelope.density(ratios)
        likelihood_ratio = ratios.mean(axis=1)
        cumulative = np.empty((len(samples), samples.shape[1] + 1))
        cumulative[:, 0] = 0.0
        np.cumsum(samples, axis=1, out=cumulative[:, 1:])
        whole = cumulative[:, -1:] / samples.shape[1]
        means: dict[int, Array] = {}
        for column, tilt in enumerate(self.tilts, start=1):
            if self.shares[column] > 0.0:
                length = tilt.level.length
                if length not in means:
                    means = {length: tilt.level.means(samples, cumulative)}  # tilts of a level are neighbours
                densities[:, column] = tilt.density(means[length], whole, sigma)
        return likelihood_ratio, densities

    def weights(self, samples: Array) -> Array:
        """x = (W − K)₊ / (dR/dQ) (or the add direction's): their mean is δ."""
        likelihood_ratio, densities = self.densities(samples)
        above = excess(likelihood_ratio, self.envelope.epsilon, self.envelope.direction)
        # where the numerator is positive so is the envelope's density; elsewhere 0/0 would be possible
        return np.divide(above, densities @ np.asarray(self.shares), out=np.zeros_like(above), where=above > 0)


def tilted(
    gram: Gram, levels: tuple[Level, ...], epsilon: float, sigma: float, direction: OneWay, *, pilot: Array
) -> Proposal:
    """A proposal with equal shares, each tilt such that the mean loss of ``pilot`` (draws of N(0, G)) sits at ±ε.

    Every window comes twice: alone, and with all bins moved half the way.
    """
    largest = float(gram.diagonal.max()) / sigma**2
    if largest / 2 + 12 * math.sqrt(largest) > _LARGEST_EXPONENT or epsilon > _LARGEST_EXPONENT / 2:
        raise AccountingError(
            f"σ = {sigma:g} is too small to account for: δ would be above .99; ask for a larger σ or δ"
        )
    envelope = Envelope.of(gram, epsilon, sigma, direction)
    if envelope.bound <= 0.0:
        raise AccountingError(
            f"δ at ε = {epsilon:g}, σ = {sigma:g} is below the smallest number; ask for a smaller ε or σ"
        )
    losses = pilot / sigma - (0.5 / sigma**2) * gram.diagonal
    target = epsilon if direction == "remove" else -epsilon
    whole = gram.rows(np.zeros(1, dtype=np.intp), len(gram.diagonal))[0] / sigma**2
    common = _amplitude(losses, whole, 0.5 * (target + _mean_loss(losses)))
    tilts = []
    for level in levels:
        middle = level.starts[len(level.starts) // 2 : len(level.starts) // 2 + 1]
        step = gram.rows(middle, level.length)[0] / sigma**2
        if local := _amplitude(losses, step, target):
            tilts.append(Tilt(level, local))
        if common and level is not levels[-1] and (local := _amplitude(losses + common * whole, step, target)):
            tilts.append(Tilt(level, local, common, gram.mean_variance()))
    # ½ variance − log(number of windows) is the price of a tilt in nats: far from the cheapest is not worth drawing.
    prices = [0.5 * float(t.penalties().mean()) / sigma**2 - math.log(len(t.level.starts)) for t in tilts]
    kept = tuple(tilt for tilt, price in zip(tilts, prices, strict=True) if price < min(prices) + _DEAR)
    shares = np.array([0.2] + [1.0] * len(kept))
    return Proposal(envelope, kept, tuple(shares / shares.sum()))


def _mean_loss(losses: Array) -> float:
    peak = losses.max(axis=1)
    return float((np.log(np.exp(losses - peak[:, None]).mean(axis=1)) + peak).mean())


def _amplitude(losses: Array, step: Array, target: float) -> float:
    """a with mean over the pilot of log mean_j exp(X_j + a·step_j) = target; 0 if no such a exists."""

    def mean_loss(amplitude: float) -> float:
        return _mean_loss(losses + amplitude * step)

    now = mean_loss(0.0)
    if target == now:
        return 0.0
    sign = 1.0 if target > now else -1.0
    low, high = 0.0, sign * 2.0
    at_low, at_high = now, mean_loss(high)
    while (target - at_high) * sign > 0:
        low, at_low, high = high, at_high, 2 * high
        at_high = mean_loss(high)
        if abs(high) > 1e5:
            return 0.0
    for _ in range(8):  # regula falsi on a convex, increasing function: 1% of accuracy is ample for a proposal
        guess = between(low, at_low, high, at_high, target=target)
        value = mean_loss(guess)
        if abs(value - target) < 0.01 * (1.0 + abs(target)):
            return guess
        if (target - value) * sign > 0:
            low, at_low = guess, value
        else:
            high, at_high = guess, value
    return 0.5 * (low + high)


def learned(proposal: Proposal, samples: Array, *, envelope_share: float, floor: float = 0.01) -> Proposal:
    """Shares fitted to ``samples`` (drawn from ``proposal``): the mixture closest to the optimal one.

    The optimal density is proportional to the numerator (W − K)₊; expectation maximisation on the weighted samples
    minimises the Kullback–Leibler divergence from it.
    """
    likelihood_ratio, densities = proposal.densities(samples)
    above = excess(likelihood_ratio, proposal.envelope.epsilon, proposal.envelope.direction)
    shares = np.asarray(proposal.shares)
    hit = above > 0
    if len(shares) == 1 or not hit.any():
        shares = np.concatenate([[envelope_share], np.full(len(shares) - 1, (1.0 - envelope_share))])
        shares[1:] /= max(len(shares) - 1, 1)
        return Proposal(proposal.envelope, proposal.tilts, tuple(shares / shares.sum()))
    densities = densities[hit]
    importance = above[hit] / (densities @ shares)
    importance /= importance.sum()
    for _ in range(50):
        responsibility = densities * shares
        shares = importance @ (responsibility / responsibility.sum(axis=1, keepdims=True))
        shares[0] = 0.0
        shares *= (1.0 - envelope_share) / shares.sum() if shares.sum() > 0 else 0.0
        shares[0] = envelope_share
    # what is hardly used is dropped: it costs more time than it saves variance
    tilts, rest = [], []
    for tilt, share in zip(proposal.tilts, shares[1:], strict=True):
        if share >= floor:
            tilts.append(tilt)
            rest.append(share)
    final = np.concatenate([[envelope_share], np.asarray(rest) * (1.0 - envelope_share) / sum(rest)])
    return Proposal(proposal.envelope, tuple(tilts), tuple(final))


# Rounds

_SLAB = 1 << 20  # numbers held at once by one worker (a few temporaries of this size exist)


def rounds(proposal: Proposal, seeds: np.random.SeedSequence, count: int) -> Iterator[Array]:
    """``count`` rounds of ``proposal.round`` weights; each component has the same places in every round."""
    size = len(proposal.envelope.chances)
    whole = proposal.round
    slab = max(1, min(whole, _SLAB // size))
    cuts = [(first, min(first + slab, whole)) for first in range(0, whole, slab)]

    def work(job: tuple[np.random.SeedSequence, tuple[int, int]]) -> Array:
        seed, (first, stop) = job
        samples = proposal.draw(np.random.default_rng(seed), whole, first=first, stop=stop)
        return proposal.weights(samples)

    workers = max(1, min(os.cpu_count() or 1, 16))
    batch = max(1, math.ceil(workers / len(cuts)))  # rounds in flight
    with ThreadPoolExecutor(workers) as pool:
        for begin in range(0, count, batch):
            now = min(batch, count - begin)
            jobs = [(seed, cut) for cut in cuts * now for seed in seeds.spawn(1)]
            parts = list(pool.map(work, jobs))
            for i in range(now):
                yield np.concatenate(parts[i * len(cuts) : (i + 1) * len(cuts)])


class Pilot:
    """Proposals fitted with a few fixed random numbers, so that neighbouring σ get neighbouring proposals."""

    def __init__(self, gram: Gram, levels: tuple[Level, ...], *, seed: int, most: int = 4096) -> None:
        self.gram, self.levels = gram, levels
        size = len(gram.diagonal)
        self._seed = seed
        self._draws = gram.sample(np.random.default_rng(seed), int(np.clip(400_000 // size, 16, most // 16)))
        self.round = int(np.clip((1 << 22) // size, 512, most))

    def proposal(self, epsilon: float, sigma: float, direction: OneWay, *, envelope_share: float) -> Proposal:
        equal = tilted(self.gram, self.levels, epsilon, sigma, direction, pilot=self._draws)
        equal = equal.rounded(self.round)
        draws = equal.draw(np.random.default_rng(self._seed + 1), self.round)
        return learned(equal, draws, envelope_share=envelope_share).rounded(self.round)


def stratified(weights: Array, proposal: Proposal) -> tuple[float, float]:
    """Mean and its standard error, from whole rounds (a row each): components are strata."""
    edges = np.concatenate([[0], np.cumsum(proposal.counts(proposal.round))])
    variance = 0.0
    for first, stop in itertools.pairwise(edges):
        if stop > first:
            part = weights[:, first:stop]
            spread = float(part.var(ddof=1)) if part.size > 1 else float(part.sum()) ** 2
            variance += ((stop - first) / proposal.round) ** 2 * spread / part.size
    return float(weights.mean()), math.sqrt(variance)
