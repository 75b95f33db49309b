"""The privacy loss as a Markov chain on a lattice: the chain, its lattice, and what each bin adds to W.

**The chain** (Lemma 1). For every bin j the privacy loss needs u_j ∝ ⟨x, m_j⟩ with x ~ N(0, σ²I). Scaled by
√((1−λ²)/k)/σ these numbers satisfy u_j = λ u_{j+1} + ξ_j for j ≤ b−2, and one closing relation p·u_{b−1} − q·u_0 = ϱ
ties the cycle's end to its start. Nothing here is approximate; the dominating chains are larger in Kahane's order
(Lemma 7).

**The lattice** (Lemmas 2 and 3). Between bins j and j+1 a half-step variable v is inserted; given all of them the bins
are independent. Summing over a lattice of v instead of integrating changes the integral by a factor within 1 ± η,
whatever the bins' values. The closing relation gets one more such variable, w. For one epoch the chain is open, and for
λ = 0 there is no lattice at all.

**The emissions** (Lemma 4). Given its lattice neighbours, a bin adds a lognormal to W. It is rounded onto a grid, the
mean preserved, which is larger in convex order. Above the top of the grid the value is cut off: that lowers W, so a put
only grows, and for a call the lost E (Y − top)₊ is added.

**The transfer product** (Lemma 5) is E e^{zW} over the truncated lattice, for many z at once: the trace of a product of
matrices. Bins whose scale c_j is (rounded to be) equal share one, and a stretch of n equal ones costs log n products.

**Extended precision** (x87, 64-bit mantissa) is slow, and 2000 times more accurate than float64. It serves where the
rounding margin of float64 would be too large beside δ (large ε, small δ), and as the yardstick with which that margin
was measured. The float64 tables and kernels define the (slightly perturbed) measure in either precision; only what is
computed from them, and cancels, is carried further. The z that are asked for bring their precision along.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.signal import lfilter
from scipy.special import log_ndtr, ndtr

from lambdacgd.accounting.certificate import Array, OneWay
from lambdacgd.accounting.root import bisect
from lambdacgd.errors import AccountingError

TOO_LARGE = "use a smaller λ, or a larger ε or δ"
REPORT = "please report this as an error in lambdacgd"


@dataclass(frozen=True)
class Chain:
    """u_0 … u_{b−1} with correlation ``lam`` between neighbours, seen over ``epochs`` repetitions of ``bins`` bins.

    The privacy loss of bin j is X_j = √gain·u_j + √nugget·z_j − Var(X_j)/2 with independent z_j ~ N(0, 1). ``tail``
    says what follows the last step: 1 nothing (the true Gram matrix of λCGD), 0 a stationary continuation (G_ext, which
    dominates it), values between lie between. Each of the ``bins`` sites may hold ``repeat`` bins (Lemma 8b).

    ``runs`` (one epoch): bins of Var(u) = 1 whose correlation changes along the epoch (Lemma 1c). A run of ``count``
    bins has a number r; the correlation of two neighbours is the geometric mean of theirs, and ``lam`` is the
    largest r. ``amplitudes`` (no nugget): one number a_j a bin, X_j = √gain·a_j·u_j − Var(X_j)/2 (Lemma 7c).

    ``second`` (one epoch, with a nugget): λ and gain of another chain, stationary, that X_j has besides. The first
    chain then has one place for every ``hold`` bins and takes one step from place to place (Lemma 2b).
    """

    lam: float
    bins: int
    epochs: int
    gain: float
    tail: float
    nugget: float = 0.0
    repeat: int = 1
    runs: tuple[tuple[int, float], ...] = ()
    amplitudes: tuple[float, ...] = ()
    second: tuple[float, ...] = ()
    hold: int = 1

    @cached_property
    def parts(self) -> tuple[Chain, Chain]:
        """The two chains, each over its own places."""
        lam, gain = self.second
        return Chain(self.lam, -(-self.bins // self.hold), 1, self.gain, self.tail), Chain(lam, self.bins, 1, gain, 0.0)

    @property
    def all_bins(self) -> int:
        return self.bins * self.repeat

    @property
    def loss_variance(self) -> float:
        """The largest Var(X_j)."""
        return max(self.emission(j)[1] for j in range(len(self.amplitudes) or 1))

    def emission(self, j: int) -> tuple[float, float]:
        """What multiplies u_j in X_j, and Var(X_j). Without amplitudes all bins share bin 0's: see ``log_scales``."""
        if self.second:
            return math.sqrt(self.gain), sum(part.emission(0)[1] for part in self.parts) + self.nugget
        j, a = (j, self.amplitudes[j]) if self.amplitudes else (0, 1.0)
        return math.sqrt(self.gain) * a, self.gain * a**2 * self.variance(j) + self.nugget

    @property
    def stationary(self) -> Chain:
        """The chain of one correlation that dominates this one of normalised columns (Lemma 7)."""
        if self.amplitudes:
            return Chain(self.lam, self.bins, self.epochs, self.gain * (1 - self.lam) * (1 + self.lam), 0.0)
        return replace(self, runs=())

    @cached_property
    def alpha(self) -> float:
        """Σ_{m≥0} (1 − m/k) λ^{mb}; also the p of the closing relation."""
        return 1.0 + self.gamma * self.lam**self.bins

    @cached_property
    def gamma(self) -> float:
        """(1/k) Σ_{e=1}^{k−1} (1 − λ^{eb})/(1 − λ^b), written as a sum of positive terms."""
        repeats = np.arange(1, self.epochs)
        return float(np.sum((1 - repeats / self.epochs) * self.lam ** ((repeats - 1.0) * self.bins)))

    def covariance(self, distance: ArrayLike) -> Array:
        """Cov(u_i, u_j) of the stationary continuation at |i − j| = ``distance`` (half steps allowed)."""
        d = np.asarray(distance, dtype=float)
        return self.alpha * self.lam**d + self.gamma * self.lam ** (self.bins - d)

    def end_effect(self, position: ArrayLike) -> Array:
        """h(s) with Cov(u_s, u_s') = covariance(|s − s'|) − tail·h(s)·h(s'): what the end of training takes away."""
        if self.lam == 0:
            return np.zeros(np.shape(position))
        log_lam = math.log(self.lam)
        ratio = math.expm1(self.epochs * self.bins * log_lam) / math.expm1(self.bins * log_lam)
        return self.lam ** (self.bins - np.asarray(position, dtype=float)) * (ratio / math.sqrt(self.epochs))

    def variance(self, position: float) -> float:
        """Var(u_j), which falls with j."""
        return float(self.covariance(0.0) - self.tail * self.end_effect(position) ** 2)

    def largest_shift(self, distance: ArrayLike) -> Array:
        """An upper bound on how far drawing a bin J moves the mean of what lies at this distance from it, over √gain.

        That is a_J (c(d) − tail·h_J²λ^d), as h falls by λ a bin, each part at its largest.
        """
        d, a = np.asarray(distance, dtype=float), np.array(self.amplitudes or (1.0,))
        near = float(np.max(a * (self.alpha - self.tail * self.end_effect(np.arange(len(a))) ** 2)))
        return np.asarray(max(near, 0.0) * self.lam**d + float(a.max()) * self.gamma * self.lam ** (self.bins - d))

    @cached_property
    def log_scales(self) -> Array:
        """log c_j ≥ 0, increasing in j: e^{X_j} = c_j · exp(√gain·u_j − gain·Var(u_0)/2)."""
        if self.amplitudes:
            return np.zeros(self.bins)
        if self.second:
            return np.repeat(self.parts[0].log_scales, self.hold)[: self.bins]
        h = self.end_effect(np.arange(self.bins))
        return 0.5 * self.gain * self.tail * (h - h[0]) * (h + h[0])

    @property
    def closing(self) -> tuple[float, float, float]:
        """(p, q, v) of Lemma 1: p·u_{b−1} − q·u_0 ~ N(0, v), independent of the ξ_j. One epoch: p = 1, q = 0."""
        q = self.gamma * self.lam
        last = self.variance(self.bins - 1.0)
        return self.alpha, q, last - q * q * -math.expm1(2 * (self.bins - 1) * math.log(self.lam))

    @cached_property
    def mean_loss(self) -> tuple[float, float]:
        """Mean and variance of (1/b) Σ_j X_j, a Gaussian."""
        if self.runs:
            spread = self.gain * self._mean_correlation
            return -(self.gain + self.nugget) / 2, spread + self.nugget / self.bins
        if self.amplitudes or self.second:
            dense = self.gram()
            return -float(np.diag(dense).mean()) / 2, float(dense.mean())
        h = self.end_effect(np.arange(self.bins))
        diagonal = float(self.covariance(0.0)) - self.tail * float(np.mean(h * h))
        d = np.arange(1, self.bins)
        total = self.bins * float(self.covariance(0.0)) + 2 * float(np.sum((self.bins - d) * self.covariance(d)))
        spread = (total - self.tail * float(h.sum()) ** 2) / self.bins**2
        # Bins of one site share all of u but a part of variance τ², at the two ends 1 − λ.
        own = (self.bins - 2) * (1 - self.lam) / (1 + self.lam) + 2 * (1 - self.lam)
        spread -= (1 - 1 / self.repeat) * own / self.bins**2
        return -(self.gain * diagonal + self.nugget) / 2, self.gain * max(spread, 0.0) + self.nugget / self.all_bins

    @cached_property
    def _mean_correlation(self) -> float:
        """The mean over all pairs of bins of a chain of runs."""
        pairs, earlier, before = 0.0, 0.0, 0.0  # earlier: the sum of a bin's correlations with those before it
        for count, r in self.runs:
            earlier = math.sqrt(before * r) * (earlier + 1) if before else 0.0
            # Within the run the sum goes towards its fixed point r/(1 − r), by a factor r a bin.
            fixed, left = r / (1 - r), -math.expm1(count * math.log(r))
            pairs += count * fixed + (earlier - fixed) * left / (1 - r)
            earlier, before = fixed + (earlier - fixed) * r ** (count - 1), r
        return (self.bins + 2 * pairs) / self.bins**2

    def lumped(self, group: int) -> Chain:
        """Lemma 8: ``group`` neighbouring bins made equal; dominates this chain. The bins must divide evenly.

        With a nugget their chain variables alone share a site, and what the longer chain adds to the variance is taken
        out of the nugget as far as it goes (Lemma 8b; one epoch and its stationary continuation).
        """
        if self.bins % group:
            raise AccountingError(f"{self.bins} bins cannot be lumped in groups of {group}; use a divisor")
        stretch = self.lam ** (group - 1)
        if self.nugget:
            if self.epochs > 1 or self.repeat > 1:
                raise AccountingError("bins with a nugget are lumped once, and for one epoch only")
            gain = self.gain / stretch
            nugget = max(self.nugget - (gain - self.gain), 0.0)
            return Chain(self.lam**group, self.bins // group, 1, gain, 0.0, nugget, group)
        return Chain(self.lam**group, self.bins // group, self.epochs, self.gain / stretch, self.tail * stretch)

    def shortened(self, bins: int) -> Chain:
        """Lemma 9: fewer bins amplify less; dominates this chain (through its stationary continuation)."""
        return self if bins == self.bins else replace(self, bins=bins, tail=0.0)

    def gram(self) -> Array:
        """Cov(X) as a dense matrix, for references and tests."""
        j = np.arange(self.bins)
        if self.runs:
            logs = log_correlations(self.runs)
            chain = self.gain * np.exp(-np.abs(logs[:, None] - logs[None]))
            return np.asarray(chain + self.nugget * np.eye(self.bins))
        if self.second:
            (first, second), place = (part.gram() for part in self.parts), j // self.hold
            return np.asarray(first[place[:, None], place] + second + self.nugget * np.eye(self.bins))
        h = self.end_effect(j)
        chain = self.gain * (self.covariance(np.abs(j[:, None] - j[None])) - self.tail * np.outer(h, h))
        if self.amplitudes:
            chain = chain * np.outer(self.amplitudes, self.amplitudes)
        return np.asarray(chain + self.nugget * np.eye(self.bins))


def log_correlations(runs: tuple[tuple[int, float], ...]) -> Array:
    """log Corr(u_0, u_j) of a chain of runs; bins i < j correlate by e to the power of the difference of theirs."""
    r = np.log(np.repeat([r for _, r in runs], [count for count, _ in runs]))
    return np.append(0.0, np.cumsum(0.5 * (r[1:] + r[:-1])))


def plain_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """The exact chain of C_λ: gain k/((1−λ²)σ²), nothing after the last step."""
    return Chain(lam, bins, epochs, epochs / ((1 - lam) * (1 + lam) * sigma**2), 1.0)


@dataclass(frozen=True)
class Columns:
    """⟨C_s, C_t⟩ = chain·(λ^{|s−t|} − tail·λ^{2n−s−t}) + nugget·[s = t] + shared for steps s, t = 0 … n−1.

    ``tail`` = 0 are columns that do not feel the last step. The λ is its accountant's. What all columns share is a
    Gaussian mechanism of its own, with which ``FreshBins`` composes the chain. With ``runs``, of one epoch, the
    correlations of the chain are theirs in place of λ^{|s−t|}, and λ is the largest (see ``Chain``). With ``second`` =
    (μ, c), of one epoch, c·μ^{|s−t|} comes on top, and s and t of the chain are ⌊s/hold⌋ and ⌊t/hold⌋.
    """

    chain: float = 1.0
    nugget: float = 0.0
    tail: float = 0.0
    shared: float = 0.0
    runs: tuple[tuple[int, float], ...] = ()
    second: tuple[float, ...] = ()
    hold: int = 1

    def __post_init__(self) -> None:
        positive = self.chain >= 0 and self.nugget >= 0 and 0 < self.chain + self.nugget < math.inf
        if self.second:
            lam, chain = self.second
            positive &= (
                0 < lam < 1
                and 0 < chain < math.inf
                and min(self.chain, self.nugget) > 0
                and self.hold >= 1
                and not self.runs
            )
        if not (positive and 0 <= self.tail <= 1 and 0 <= self.shared < math.inf):
            raise AccountingError(f"{self!r} are no columns: no part is negative, and a tail is at most 1")

    @classmethod
    def of(cls, lam: float, zero: float, *, scale: float = 1.0) -> Columns:
        """The columns of √scale·(1 − φx)/(1 − λx), 0 ≤ φ = ``zero`` < λ: exactly these (Lemma 1b)."""
        weight, energy = lam - zero, (1 - lam) * (1 + lam)
        chain = weight / lam + weight**2 / energy
        return cls(scale * chain, scale * zero / lam, weight / (lam * energy + lam**2 * weight))

    def times(self, factor: float) -> Columns:
        """All parts times ``factor``."""
        chain, nugget, shared = factor * self.chain, factor * self.nugget, factor * self.shared
        second = (*self.second[:1], *(factor * c for c in self.second[1:]))
        return replace(self, chain=chain, nugget=nugget, shared=shared, second=second)

    def over(self, lam: float, bins: int, epochs: int, sigma: float) -> Chain:
        """Their chain at noise σ; it has no room for what they share."""
        if self.shared:
            raise AccountingError("a chain holds nothing that all columns share: compose it with a Gaussian mechanism")
        if self.second and (lam == 0 or epochs > 1):
            raise AccountingError(f"two chains are of one epoch, with λ above 0; {REPORT}")
        if lam == 0:
            return Chain(0.0, bins, epochs, epochs * (self.chain + self.nugget) / sigma**2, 0.0)
        gain, nugget = epochs * self.chain / sigma**2, epochs * self.nugget / sigma**2
        if self.runs:
            largest, all_bins = max(r for _, r in self.runs), sum(count for count, _ in self.runs)
            if (lam, bins, epochs) != (largest, all_bins, 1) or self.tail:
                raise AccountingError(f"these columns are of one epoch of {all_bins} steps, without a tail; {REPORT}")
        second = self.times(sigma**-2).second
        return Chain(lam, bins, epochs, gain, self.tail, nugget, runs=self.runs, second=second, hold=self.hold)


def normalized_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """Dominates C_λD⁻¹, whose columns s < s' have as inner product the product of ρ_s … ρ_{s'−1} (Lemma 7).

    ρ_s = λ d_{s+1}/d_s with d_s² ∝ 1 − λ^{2(n−s)} falls with s. Over one epoch the chain follows it in runs (Lemma 1c),
    over several short ones it is that of C_λ with an amplitude for every bin (Lemma 7c), and else the stationary chain
    of ρ_0, which is λ but for short runs.
    """
    short = bins <= FEW_BINS and bins * (1 - lam) < LONG_EPOCH and bins**2 * epochs <= LARGEST_COLUMNS
    if epochs > 1 and bins > 1 and short:
        plain = plain_chain(lam, bins, epochs, sigma)
        return replace(plain, amplitudes=normalized_amplitudes(lam, bins, epochs))
    if epochs > 1 or bins == 1:
        largest = float(_falling_correlations(lam, bins * epochs, 1)[0])
        return Chain(min(lam, largest), bins, epochs, epochs / sigma**2, 0.0)
    runs = normalized_runs(lam, bins)
    return Chain(max(r for _, r in runs), bins, 1, 1 / sigma**2, 0.0, runs=runs if len(runs) > 1 else ())


FEW_BINS = 64  #: bins up to which each has an amplitude of its own
LONG_EPOCH = 6.0  #: epochs of more than so many 1/(1 − λ) lose little by a stationary chain
LARGEST_COLUMNS = 2_000_000  #: numbers in the sums of a bin's columns


@lru_cache(maxsize=64)
def normalized_amplitudes(lam: float, bins: int, epochs: int) -> tuple[float, ...]:
    """a_j such that ⟨m_i, m_j⟩ of normalised columns is at most a_i a_j times that of C_λ, for all bins (Lemma 7c)."""
    steps = bins * epochs
    norms = np.sqrt(-np.expm1(2 * np.arange(steps, 0, -1) * math.log(lam)) / ((1 - lam) * (1 + lam)))
    columns = np.zeros((steps, bins))
    columns[np.arange(steps), np.arange(steps) % bins] = 1 / norms
    sums = np.asarray(lfilter([1.0], [1.0, -lam], columns, axis=0))
    normalized, plain = sums.T @ sums, plain_chain(lam, bins, epochs, 1.0).gram()
    amplitudes = np.sqrt(np.diag(normalized) / np.diag(plain))
    amplitudes *= math.sqrt(float(np.max(normalized / (plain * np.outer(amplitudes, amplitudes)))))
    return tuple((amplitudes * (1 + 1e-9)).tolist())


RUNS_LOSS = 2e-3  #: what runs of one correlation may add to σ, about
MOST_RUNS = 32  #: the most runs, each of which has its own kernel and table


@lru_cache(maxsize=64)
def normalized_runs(lam: float, bins: int) -> tuple[tuple[int, float], ...]:
    """The runs of normalised λCGD."""
    return falling_runs(_falling_correlations(lam, bins, bins - 1))


def falling_runs(rho: Array) -> tuple[tuple[int, float], ...]:
    """Numbers r_j with r_j r_{j+1} ≥ ρ_j², constant over as few runs of bins as ``RUNS_LOSS`` allows (Lemma 1c).

    ``rho`` holds ρ_0, ρ_1, …, each at most the one before it.
    """
    bins = len(rho) + 1
    # A bin's correlations with all others add up to about twice this, so that is what rounding ρ up should not move.
    sums = 1 / (1 - np.append(rho, 0.0))
    total = np.append(0.0, np.cumsum(sums))

    def cut(allowed: float) -> list[int]:
        """Where the longest runs that add at most ``allowed`` each begin, and the last of MOST_RUNS ends."""
        cuts = [0]
        while cuts[-1] < bins and len(cuts) <= MOST_RUNS:
            first = cuts[-1]

            def added(stop: int, first: int = first) -> float:
                return float((stop - first) * sums[first] - (total[stop] - total[first]))

            cuts.append(first + max(1, bisect_right(range(first + 1, bins + 1), allowed, key=added)))
        return cuts

    allowed = bins * float(sums[0])
    cuts = cut(allowed) if bins > MOST_RUNS else list(range(bins + 1))
    while np.diff(cuts) @ sums[cuts[:-1]] > (1 + 2 * RUNS_LOSS) * total[-1]:
        allowed *= 0.8
        if (finer := cut(allowed))[-1] < bins:
            break
        cuts = finer
    runs: list[tuple[int, float]] = []
    start = 0
    for count in np.diff(cuts).tolist():
        inside = float(rho[start]) if count > 1 or start == 0 else 0.0
        across = float(rho[start - 1]) ** 2 / runs[-1][1] if runs else 0.0
        runs.append((count, max(inside, across) * (1 + 1e-12)))
        start += count
    return tuple(runs)


def _falling_correlations(lam: float, steps: int, count: int) -> Array:
    """The first ``count`` of ρ_0, ρ_1, …, rounded up."""
    left, rate = steps - 1 - np.arange(count), 2 * math.log(lam)
    return np.asarray(lam * np.sqrt(np.expm1(left * rate) / np.expm1((left + 1) * rate)) * (1 + 1e-12))


def value_grid(fine: float, ratio: float, top: float, *, limit: int = 20_000) -> Array:
    """0, then steps of ``fine``, then steps of relative size ``ratio``, until at least ``top``.

    Rounding a value y adds a variance of at most step²/4, about step²/6 on average: small values need only a fine
    absolute step (there are b of them), large ones a fine relative step (few of them make up W).
    """
    turn = fine / ratio
    steps = math.ceil(min(turn, top) / fine)
    more = max(0, math.ceil(math.log(top / (steps * fine)) / math.log1p(ratio))) if top > steps * fine else 0
    if steps + more > limit:
        raise AccountingError(f"the emission grid needs {steps + more} points; ask for a smaller ε or a larger σ")
    uniform = fine * np.arange(steps + 1)
    return np.concatenate([uniform, uniform[-1] * np.exp(math.log1p(ratio) * np.arange(1, more + 1))])


def lognormal_excess(mean: Array | float, deviation: float, threshold: float) -> Array:
    """E (Y − threshold)₊ for log Y ~ N(mean, deviation²)."""
    z = (np.asarray(mean, dtype=float) - math.log(threshold)) / deviation
    average = np.asarray(mean) + deviation**2 / 2
    upper = average + log_ndtr(z + deviation)
    return np.asarray(np.exp(upper) * -np.expm1(np.minimum(math.log(threshold) + log_ndtr(z) - upper, 0.0)))


def grid_top(log_mean: float, deviation: float, allowed: float) -> float:
    """The smallest top (to 1%) at which E (Y − top)₊ ≤ ``allowed``, for log Y ~ N(log_mean, deviation²)."""

    def passes(log_top: float) -> bool:
        return bool(lognormal_excess(log_mean, deviation, math.exp(log_top)) <= allowed)

    return math.exp(bisect(passes, log_mean, log_mean + deviation * (deviation + 40) + 1, width=0.01))


def round_lognormal(log_means: Array, deviation: float, grid: Array) -> Array:
    """Probabilities of the grid points (one row per mean) after mean-preserving rounding of lognormals (Lemma 4)."""
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
    """Φ(z_{i+1}) − Φ(z_i) along the rows, z rising, from the tails, which keep their digits."""
    tails, right = ndtr(-np.abs(z)), z > 0
    between = np.abs(tails[:, 1:] - tails[:, :-1])
    across = right[:, 1:] & ~right[:, :-1]
    between[across] = 1 - (tails[:, 1:] + tails[:, :-1])[across]
    return np.asarray(between)


Indices = NDArray[np.int64]


def poisson_eta(ratio: float) -> float:
    """Lemma 2: η = 2 Σ_{m≥1} e^{−2π²m²/ratio²} for spacing ``ratio``·τ, the remainder of the sum included."""
    q = math.exp(-2 * math.pi**2 / ratio**2)
    if q >= 0.1:
        raise AccountingError(f"lattice spacing of {ratio:g} τ is too coarse to bound; use at most 2.9 τ")
    return 2 * (q + q**4 + q**9 / (1 - q**7))  # m² ≥ 9 + 7(m − 3) from the third term on


def spacing_ratio(links: int, tolerance: float) -> float:
    """The largest spacing (in units of τ) at which all links together cost at most ``tolerance``."""
    return math.sqrt(2 * math.pi**2 / math.log(2 * max(links, 1) / tolerance * 1.001))


WIDEST_SYMMETRIC = 1200.0  #: v² up to which matrices are made symmetric: √φ(v) stays above e^{−300}


@dataclass(frozen=True)
class Site:
    """The law of u at one kind of bin, given its lattice neighbours: N(scale·n, deviation²) for an integer index n."""

    kernel: Array  #: weight of every (row, column) pair of lattice neighbours
    strides: tuple[int, int]  #: the pair (row, column) has its mean at position strides · (row, column) of ``means``
    means: Array
    deviation: float
    repeat: int = 1  #: how many such bins the site holds, independent given the lattice
    table: Array = field(default_factory=lambda: np.zeros((0, 0)))  #: emissions: grid point by lattice neighbourhood

    def matrices(self, transforms: NDArray[Any]) -> NDArray[Any]:
        """One transfer matrix per z: kernel(v, v')·E[e^{zcY} | v, v']."""
        # The mean depends on an integer combination of row and column only: a strided view, not a gather.
        row, item = transforms.strides
        steps = (row, item * self.strides[0], item * self.strides[1])
        spread = np.lib.stride_tricks.as_strided(transforms, (len(transforms), *self.kernel.shape), steps)
        return np.asarray(self.kernel * spread)

    def transform(self, waves: Waves) -> NDArray[Any]:
        """E[e^{zcY}]^repeat: one row per frequency z, one column per lattice neighbourhood."""
        total = self.table.sum(axis=0, dtype=waves.departure.dtype)
        departure = waves.departure @ self.table
        real = total + departure
        if (small := departure <= -0.5).any():
            real[small] = (waves.damping @ self.table)[small]
        departure, real = (departure + (total - 1))[waves.which], real[waves.which]
        if waves.turned is None:
            return real if self.repeat == 1 else _power(departure, real, self.repeat)
        turned = waves.turned @ self.table
        result = np.empty(real.shape, dtype=np.result_type(real, np.complex64))
        result.real, result.imag = real + turned[: len(real)], turned[len(real) :]
        if self.repeat == 1:
            return result
        return _power(departure + turned[: len(real)] + 1j * turned[len(real) :], result, self.repeat)


def _power(departure: NDArray[Any], whole: NDArray[Any], exponent: int) -> NDArray[Any]:
    """whole^exponent, where ``whole`` = 1 + ``departure``: near 1 the rounding of the 1 is not repeated so often."""
    near = np.abs(departure) < 0.5
    x = np.where(near, departure.real, 0)
    if np.iscomplexobj(whole):
        y = np.where(near, departure.imag, 0)
        logarithm = 0.5 * np.log1p(x * (2 + x) + y * y) + 1j * np.arctan2(y, 1 + x)
    else:
        logarithm = np.log1p(x)
    return np.asarray(np.where(near, np.exp(exponent * logarithm), whole**exponent))


@dataclass(frozen=True)
class Lattice:
    """Everything the transfer product needs, and what truncating the lattice can have lost."""

    interior: tuple[Site, ...]  #: one kind of bin, or one for each run of the chain
    left: Site
    right: Site
    links: int
    eta: float
    exit_remove: float  #: bound on E W over paths that leave the lattice
    exit_add: float  #: bound on the probability of such paths

    @property
    def inflation(self) -> float:
        """(1 − η)^−links (Lemma 2)."""
        return (1 - self.eta) ** -self.links

    @property
    def growth(self) -> float:
        """(1 + η)^links: the most by which the lattice can exceed the truth."""
        return (1 + self.eta) ** self.links

    @property
    def states(self) -> int:
        return self.left.kernel.shape[1]

    @property
    def closing_states(self) -> int:
        return self.left.kernel.shape[0]


def lattice(chain: Chain, ratio: float, reach: float, *, shifted: bool = True) -> Lattice:
    """Build the lattice with spacing ``ratio``·τ that reaches ``reach`` standard deviations beyond every mean.

    ``shifted``: cover the means under P too (remove); otherwise only Q counts (add), and ``exit_remove`` is infinite.
    """
    lam, bins = chain.lam, chain.bins
    if lam == 0:  # one bin, and b − 1 like it
        one = Site(np.ones((1, 1)), (0, 0), np.zeros(1), 1.0)
        return Lattice((), one, replace(one, repeat=bins - 1), 0, 0.0, 0.0, 0.0)
    spacing, eta = ratio * math.sqrt((1 - lam) / (1 + lam)), poisson_eta(ratio)
    links = bins if chain.epochs > 1 else bins - 1
    shift = math.sqrt(chain.gain) if shifted else 0.0
    deviation = math.sqrt(chain.variance(0.0))
    first = math.floor(-reach * deviation / spacing)
    last = math.ceil((reach * deviation + shift * max(float(chain.largest_shift(0.5)), 0.0)) / spacing)
    n = np.arange(first, last + 1)
    v = np.asarray(n * spacing, dtype=np.float64)

    # Entries are conditional densities of v given v', times √φ(v')/√φ(v), which makes them symmetric; the ends take
    # that back. Nothing overflows, and what underflows weighs less than 1e-300.
    root_density = np.exp(-(v**2) / 4) if np.max(v**2) < WIDEST_SYMMETRIC else None

    def interior(r: float) -> Site:
        variance = (1 - r) * (1 + r)
        there = (v[:, None] - r * v[None, :]) ** 2
        squares = there if root_density is None else 0.5 * (there + there.T)
        return Site(
            spacing / math.sqrt(2 * math.pi * variance) * np.exp(-squares / (2 * variance)),
            (1, 1),
            math.sqrt(r) / (1 + r) * spacing * np.arange(2.0 * first, 2.0 * last + 1),
            math.sqrt((1 - r) / (1 + r)),
        )

    along = [r for _, r in chain.runs] or [lam] * max(1, len(chain.amplitudes))
    p, q, v_end = chain.closing
    if not v_end > 0:
        raise AccountingError(f"the closing variance came out as {v_end:g}; λ = {lam:g} is too close to 1 for float64")
    exit_low, exit_high, exit_add = _interior_exits(chain, v[0], v[-1], deviation, shift)
    if chain.epochs == 1:
        left, right = _open_ends(n, spacing, along[0], along[-1], v_end)
    else:
        left, right, w, w_spread, w_shift = _closing_ends(chain, n, spacing, ratio, reach, p, q, v_end, shift)
        exit_high += float(ndtr(-(w[-1] - w_shift) / w_spread))
        exit_low += float(ndtr(w[0] / w_spread))
        exit_add += float(ndtr(-w[-1] / w_spread) + ndtr(w[0] / w_spread))
    if root_density is not None:
        left = replace(left, kernel=left.kernel * root_density)
        right = replace(right, kernel=right.kernel / root_density[:, None])
    # Lemma 3: the other links are summed over the whole lattice, at most (1 + η) times the integral each.
    grown = (1 + eta) ** links
    exit_remove = (exit_low + exit_high) * grown if shifted else math.inf
    kinds = {r: interior(r) for r in along}
    return Lattice(tuple(kinds[r] for r in along), left, right, links, eta, exit_remove, exit_add * grown)


def _interior_exits(
    chain: Chain, low: float, high: float, deviation: float, shift: float
) -> tuple[float, float, float]:
    """Lemma 3: union bound over the half-step variables, under P (shifted by the bin that was drawn) and under Q.

    The marginal density decreases beyond the last lattice point (which lies above its mean), so the lattice sum over
    the points beyond is at most the integral from the last point on.
    """
    d = np.arange(chain.bins - 1) + 0.5
    means = shift * chain.largest_shift(d)
    if high < np.max(means, initial=0.0) or low > 0:
        raise AccountingError(f"the lattice does not cover its own means; {REPORT}")
    # At most 2(b − d) of the b(b − 1) pairs (link, drawn bin) lie at distance d, each with probability 1/b.
    above = 2 * float(np.sum(ndtr(-(high - means) / deviation)))
    below = chain.bins * float(ndtr(low / deviation))
    return below, above, chain.bins * float(ndtr(-high / deviation)) + below


def _open_ends(n: Indices, spacing: float, first: float, lam: float, v_end: float) -> tuple[Site, Site]:
    """One epoch: bin 0 sees only the link on its right, bin b−1 only the one on its left, through √r each."""
    rho = math.sqrt(lam)
    v = np.asarray(n * spacing, dtype=np.float64)
    total = lam * v_end + 1 - lam
    precision = lam / (1 - lam) + 1 / v_end
    right = Site(
        (spacing / math.sqrt(2 * math.pi * total) * np.exp(-(v**2) / (2 * total)))[:, None],
        (1, 0),
        rho / (1 - lam) * v / precision,
        1 / math.sqrt(precision),
    )
    left = Site(np.ones((1, len(n))), (0, 1), math.sqrt(first) * v, math.sqrt(1 - first))
    return left, right


def _closing_ends(
    chain: Chain, n: Indices, spacing: float, ratio: float, reach: float, p: float, q: float, v_end: float, shift: float
) -> tuple[Site, Site, Array, float, float]:
    """The closing relation, split as φ(p·u_{b−1} − w; v₁) φ(w − q·u_0; v₂) with v₁ : v₂ = p : q.

    With this ratio both end bins see w through the same integer combination m·n_v + n_w, so one table serves each.
    """
    lam = chain.lam
    rho = math.sqrt(lam)
    v1, v2 = v_end * p / (p + q), v_end * q / (p + q)
    tau_w = math.sqrt(v1 * v2 / v_end)
    whole = v_end * rho * spacing / ((1 - lam) * (p + q))
    m = max(1, math.ceil(whole / (ratio * tau_w)))
    step = whole / m
    # w given u is N(pq/(p+q)·(u_0 + u_{b−1}), τ_w²).
    weight = p * q / (p + q)
    j = np.arange(chain.bins)
    h = chain.end_effect(j)
    with_ends = chain.covariance(j) + chain.covariance(chain.bins - 1 - j) - chain.tail * h * (h[0] + h[-1])
    w_spread = math.sqrt(weight**2 * float(with_ends[0] + with_ends[-1]) + tau_w**2)
    w_shift = shift * weight * float(np.max(np.array(chain.amplitudes or 1.0) * with_ends))
    nw = np.arange(math.floor(-reach * w_spread / step), math.ceil((reach * w_spread + w_shift) / step) + 1)
    v = np.asarray(n * spacing, dtype=np.float64)
    w = np.asarray(nw * step, dtype=np.float64)
    combined = m * n[:, None] + nw[None, :]
    lowest = m * n[0] + nw[0]
    pull = rho * spacing / ((1 - lam) * m)
    indices = np.arange(lowest, m * n[-1] + nw[-1] + 1)

    precision1 = lam / (1 - lam) + p * p / v1
    exponent1 = v[:, None] ** 2 / (1 - lam) + w[None, :] ** 2 / v1 - (pull * combined) ** 2 / precision1
    right = Site(
        spacing / math.sqrt(2 * math.pi * precision1 * (1 - lam) * v1) * np.exp(-exponent1 / 2),
        (m, 1),
        pull * indices / precision1,
        1 / math.sqrt(precision1),
    )
    precision0 = 1 / (1 - lam) + q * q / v2
    exponent0 = lam * v[:, None] ** 2 / (1 - lam) + w[None, :] ** 2 / v2 - (pull * combined) ** 2 / precision0
    left = Site(
        (step / math.sqrt(2 * math.pi * precision0 * (1 - lam) * v2) * np.exp(-exponent0 / 2)).T,
        (1, m),
        pull * indices / precision0,
        1 / math.sqrt(precision0),
    )
    return left, right, w, w_spread, w_shift


# The transfer product

AVAILABLE = bool(np.finfo(np.longdouble).eps < 1e-18)  #: whether there is extended precision
MEMORY = 384 * 2**20  #: bytes that one evaluation may use at once
IN_CACHE = 2**19  #: bytes of matrices that are multiplied together
BATCH = 64  #: frequencies whose emissions are transformed together
NEVER = 1e-30  #: a grid point less likely than this, whatever the lattice says, is left out: far below rounding
LARGEST_TABLE = 10_000_000  #: numbers in one emission table; a few temporaries of this size exist while it is made
SQUARING = 0.5  #: what squaring a matrix takes, in units of multiplying it by as many vectors as it has rows


@dataclass(frozen=True)
class Stretch:
    """``count`` neighbouring bins that share one scale: log c rounded up (remove) or down (add) by monotonicity."""

    count: int
    up: float
    down: float
    site: int = 0  #: which of the lattice's kinds of bins


def stretches(chain: Chain, allowed: float) -> list[Stretch]:
    """Cut the interior bins 1 … b−2 into stretches, from the end of the cycle to its start: the runs, if there are any.

    log c_j falls geometrically away from the end, so far bins are all alike: one long stretch; then groups as long as
    they fit; then single bins. ``allowed`` bounds Σ_j (log c rounded up − log c_j).
    """
    if chain.runs:
        counts = [count for count, _ in chain.runs]
        counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
        return [Stretch(count, 0.0, 0.0, site) for site, count in enumerate(counts) if count][::-1]
    if chain.amplitudes:
        return [Stretch(1, 0.0, 0.0, site) for site in range(chain.bins - 2, 0, -1)]
    interior: Array = chain.log_scales[1:-1] if chain.lam else np.zeros(0)
    n = len(interior)
    if n == 0:
        return []
    total = np.concatenate([[0.0], np.cumsum(interior)])

    def longest(start: int, budget: float) -> int:
        """How many bins from ``start`` on fit into one stretch (its cost grows with its length)."""

        def fits(length: int) -> bool:
            cost = length * interior[start + length - 1] - (total[start + length] - total[start])
            return bool(cost <= budget)

        return n - start - bisect_left(range(n - start, 1, -1), True, key=fits)

    cuts, start = [], 0
    budget = allowed / 2
    while start < n:
        length = longest(start, budget)
        if length < 4:  # too short to pay: the remaining bins one by one, exactly
            cuts += [(j, 1) for j in range(start, n)]
            break
        cuts.append((start, length))
        start += length
        budget = allowed / 8 if len(cuts) <= 4 else 0.0
    return [Stretch(m, float(interior[j + m - 1]), float(interior[j])) for j, m in reversed(cuts)]


def power_cost(count: int, size: int, columns: int) -> tuple[float, int]:
    """The cheapest way to M^count R (M size×size, R size×columns).

    Returns:
        Its cost, in units of a matrix times a vector, and how many squarings to spend before multiplying by the powers
        one by one.
    """
    costs = [(float(count * columns), 0)]
    for s in range(1, count.bit_length()):
        products = (count >> s) + (count & ((1 << s) - 1)).bit_count()
        costs.append((SQUARING * s * size + products * columns, s))
    return min(costs)


def rounding_unit(bins: int) -> float:
    """Rounding margin of one transform relative to E' e^{−θW'}: more than twice the largest ever measured.

    A product of b matrices carries up to b times the rounding of one (see docs/exact-accountant.md).
    """
    return 2e-14 + 4e-16 * bins


class TransferProduct:
    """E e^{zW'} on the lattice, W' the sum of the rounded emissions, bins scaled up or down."""

    def __init__(self, chain: Chain, lattice: Lattice, grid: Array, plan: list[Stretch]) -> None:
        self.lattice, self.plan, self.bins = lattice, plan, chain.all_bins
        self.ends = float(chain.log_scales[0]), float(chain.log_scales[-1])
        sites = (*lattice.interior, lattice.left, lattice.right)
        longest = max(len(site.means) for site in sites)
        if longest * len(grid) > LARGEST_TABLE:
            raise AccountingError(f"an emission table of {longest}×{len(grid)} numbers is too large; {TOO_LARGE}")
        emissions = []
        for site, j in zip(sites, (*range(len(lattice.interior)), 0, chain.bins - 1), strict=True):
            shift, variance = chain.emission(j)
            log_means = shift * site.means - 0.5 * variance - np.log(chain.all_bins)
            deviation = math.hypot(shift * site.deviation, chain.nugget**0.5)
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays, and is refused when used
                emissions.append(round_lognormal(log_means, deviation, grid))
        # Where W hardly varies most of the grid is never met.
        met = ~(np.max([table.max(axis=0) for table in emissions], axis=0) <= NEVER)
        self.grid = grid[met]
        tables = [
            replace(site, table=np.ascontiguousarray(table[:, met].T), repeat=site.repeat * chain.repeat)
            for site, table in zip(sites, emissions, strict=True)
        ]
        self.interior, self.left, self.right = tables[:-2], tables[-2], tables[-1]

    @cached_property
    def symmetric(self) -> bool:
        """Whether the interior's matrices are: their means depend on the sum of row and column."""
        site = self.lattice.interior[0]
        return site.strides == (1, 1) and np.array_equal(site.kernel, site.kernel.T)

    def flops(self) -> float:
        """Real operations for one complex z."""
        size, columns = self.lattice.states, self.lattice.closing_states
        cost = 8.0 * size**2 * sum(power_cost(stretch.count, size, columns)[0] for stretch in self.plan)
        ends = 16.0 * size * columns
        tables = self.left.table.shape[1] + self.right.table.shape[1]
        tables += sum(self.interior[stretch.site].table.shape[1] for stretch in self.plan)
        return cost + ends + 4.0 * len(self.grid) * tables

    def __call__(self, z: NDArray[Any], direction: OneWay, *, extended: bool = False) -> NDArray[Any]:
        """E e^{zW'} for every z (real z are four times cheaper than complex ones), in extended precision if asked to.

        Shared scales are rounded up for remove, down for add.
        """
        if extended:
            z = z.astype(np.clongdouble if np.iscomplexobj(z) else np.longdouble)
        batch = self._batch()
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            values = np.concatenate(
                [self._evaluate(z[first : first + batch], direction) for first in range(0, len(z), batch)]
            )
        if not np.all(np.isfinite(values)):
            raise AccountingError("the transfer product overflowed; σ is too small for this ε, ask for a larger σ")
        return values

    def _batch(self) -> int:
        """How many z are evaluated together."""
        size = max(self.lattice.states, self.lattice.closing_states)
        each = 16 * (5 * size * self.lattice.states + 4 * len(self.grid))
        if each > MEMORY:
            raise AccountingError(f"{self.lattice.states} lattice states need {each >> 20} MiB each; {TOO_LARGE}")
        return min(BATCH, int(MEMORY // each))

    def _evaluate(self, z: NDArray[Any], direction: OneWay) -> NDArray[Any]:
        first, last = self.ends
        waves = Waves(self.grid, z, last)
        strips = self.right.matrices(self.right.transform(waves))
        some = max(1, IN_CACHE // (16 * self.lattice.states**2))
        before: tuple[int, float] | None = None
        for stretch in self.plan:
            waves = waves.at(stretch.up if direction == "remove" else stretch.down)
            if before != (stretch.site, waves.log_scale):
                before = stretch.site, waves.log_scale
                transforms = self.interior[stretch.site].transform(waves)
            for part in (slice(i, i + some) for i in range(0, len(z), some)):
                matrices = self.interior[stretch.site].matrices(transforms[part])
                strips[part] = apply_power(matrices, stretch.count, strips[part], symmetric=self.symmetric)
        ends = self.left.matrices(self.left.transform(waves.at(first)))
        return np.asarray((ends.transpose(0, 2, 1) * strips).sum(axis=(1, 2)))


class Waves:
    """e^{zcy} at the grid's points y, for every frequency z, split so that little of it is rounded.

    b bins repeat the rounding of one, so it is kept out where it can be: a transform at real z is 1 + Σ p (e^{zy} − 1)
    where that is close to 1 (and a sum of positive terms where it is small, which keeps its digits), and the departure
    from it at complex z is added as −2 sin²(ωy/2) and sin(ωy). All frequencies of a Fourier series share their real
    part, which is computed once.
    """

    def __init__(self, grid: Array, z: NDArray[Any], log_scale: float) -> None:
        self.grid, self.z, self.log_scale = grid, z, log_scale
        values = grid.astype(z.real.dtype) * float(np.exp(log_scale))
        reals, self.which = np.unique(z.real, return_inverse=True)
        exponents = np.outer(reals, values)
        self.damping, self.departure = np.exp(exponents), np.expm1(exponents)
        self.turned: Array | None = None
        if np.iscomplexobj(z):
            half = np.outer(0.5 * z.imag, values)
            sine, damped = np.sin(half), self.damping[self.which] if len(reals) > 1 else self.damping
            self.turned = np.concatenate([-2 * damped * sine * sine, 2 * damped * sine * np.cos(half)])

    def at(self, log_scale: float) -> Waves:
        return self if log_scale == self.log_scale else Waves(self.grid, self.z, log_scale)


def apply_power(matrix: Any, count: int, strip: Any, *, symmetric: bool = False) -> Any:
    """matrix^count · strip, of one matrix or a batch of them."""
    _, s = power_cost(count, matrix.shape[-1], strip.shape[-1])
    for bit in range(s):
        if count >> bit & 1:
            strip = matrix @ strip
        matrix = _square(matrix) if symmetric else matrix @ matrix
    for _ in range(count >> s):
        strip = matrix @ strip
    return strip


def _square(matrix: NDArray[Any]) -> NDArray[Any]:
    """matrix², of a batch of symmetric matrices: blocks on and above the diagonal are computed, the others copied."""
    size = matrix.shape[-1]
    cuts = np.linspace(0, size, 1 + min(4, max(1, size // 40))).astype(int)
    square = np.empty_like(matrix)
    for first, stop in itertools.pairwise(cuts.tolist()):
        np.matmul(matrix[..., first:stop, :], matrix[..., first:], out=square[..., first:stop, first:])
        square[..., stop:, first:stop] = square[..., first:stop, stop:].swapaxes(-1, -2)
    return square
