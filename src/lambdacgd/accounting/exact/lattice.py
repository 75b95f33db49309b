"""The privacy loss as a Markov chain on a lattice: the chain, its lattice, and what each bin adds to W.

**The chain** (Lemma 1). For every bin j the privacy loss needs u_j ∝ ⟨x, m_j⟩ with x ~ N(0, σ²I). Scaled by
√((1−λ²)/k)/σ these numbers satisfy u_j = λ u_{j+1} + ξ_j for j ≤ b−2, and one closing relation p·u_{b−1} − q·u_0 = ζ
ties the cycle's end to its start. Nothing here is approximate; the dominating chains are larger in Kahane's order
(Lemma 7).

**The lattice** (Lemmas 2 and 3). Between bins j and j+1 a half-step variable v is inserted; given all of them the bins
are independent. As a function of v the integrand is a Gaussian of variance τ², so summing over ΔZ instead of
integrating changes it by a factor within 1 ± η, whatever the bins' values. The closing relation gets one more such
variable, w. For one epoch the chain is open.

**The emissions** (Lemma 4). Given its lattice neighbours, a bin adds a lognormal to W. It is rounded onto a grid: mass
is split between the two neighbouring grid points so that the mean is preserved. That is larger in convex order, so
every expectation of a convex function of W can only grow. Above the top of the grid the value is cut off: that lowers
W, so a put only grows, and for a call the lost E (Y − top)₊ is added.

**The transfer product** (Lemma 5) is E e^{zW} over the truncated lattice, for many z at once: the trace of a product of
matrices. Bins whose scale c_j is (rounded to be) equal share one, and a stretch of n equal ones costs log n products.

**Extended precision** (x87, 64-bit mantissa) is slow, and 2000 times more accurate than float64. It serves where the
rounding margin of float64 would be too large beside δ (large ε, small δ), and as the yardstick with which that margin
was measured. It uses the same float64 tables and kernels, which define the (slightly perturbed) measure; only what is
computed from them, and cancels, is carried further.

**In the cache.** Products of a matrix and a vector read the whole matrix for two operations a number. A few frequencies
at a time, whose matrices fit into a core's cache, are multiplied five times as fast as all of them together.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, ndtr

from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.root import bisect
from lambdacgd.errors import AccountingError


@dataclass(frozen=True)
class Chain:
    """u_0 … u_{b−1} with correlation ``lam`` between neighbours, seen over ``epochs`` repetitions of ``bins`` bins.

    The privacy loss of bin j is X_j = √gain·u_j + √nugget·z_j − Var(X_j)/2 with independent z_j ~ N(0, 1). ``tail``
    says what follows the last step: 1 nothing (the true Gram matrix of λCGD), 0 a stationary continuation (G_ext, which
    dominates it), values between lie between. Each of the ``bins`` sites may hold ``repeat`` bins (Lemma 8b).
    """

    lam: float
    bins: int
    epochs: int
    gain: float
    tail: float
    nugget: float = 0.0
    repeat: int = 1

    @property
    def all_bins(self) -> int:
        return self.bins * self.repeat

    @property
    def loss_variance(self) -> float:
        """The largest Var(X_j)."""
        return self.gain * self.peak_variance + self.nugget

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

    @cached_property
    def peak_variance(self) -> float:
        """The largest Var(u_j): that of bin 0."""
        return self.peak_covariance(0.0)

    def peak_covariance(self, distance: float) -> float:
        """An upper bound on Cov(u_i, u_j) over all pairs at this distance (h increases along the cycle)."""
        return float(self.covariance(distance) - self.tail * self.end_effect(0.0) ** 2)

    @cached_property
    def log_scales(self) -> Array:
        """log c_j ≥ 0, increasing in j: e^{X_j} = c_j · exp(√gain·u_j − gain·peak_variance/2)."""
        h = self.end_effect(np.arange(self.bins))
        return 0.5 * self.gain * self.tail * (h - h[0]) * (h + h[0])

    @property
    def closing(self) -> tuple[float, float, float]:
        """(p, q, v) of Lemma 1: p·u_{b−1} − q·u_0 ~ N(0, v), independent of the ξ_j. One epoch: p = 1, q = 0."""
        q = self.gamma * self.lam
        h = float(self.end_effect(self.bins - 1.0))
        last = float(self.covariance(0.0)) - self.tail * h * h
        return self.alpha, q, last - q * q * -math.expm1(2 * (self.bins - 1) * math.log(self.lam))

    @cached_property
    def mean_loss(self) -> tuple[float, float]:
        """Mean and variance of (1/b) Σ_j X_j, a Gaussian."""
        h = self.end_effect(np.arange(self.bins))
        diagonal = float(self.covariance(0.0)) - self.tail * float(np.mean(h * h))
        d = np.arange(1, self.bins)
        total = self.bins * float(self.covariance(0.0)) + 2 * float(np.sum((self.bins - d) * self.covariance(d)))
        spread = (total - self.tail * float(h.sum()) ** 2) / self.bins**2
        # Bins of one site share all of u but a part of variance τ², at the two ends 1 − λ.
        own = (self.bins - 2) * (1 - self.lam) / (1 + self.lam) + 2 * (1 - self.lam)
        spread -= (1 - 1 / self.repeat) * own / self.bins**2
        return -(self.gain * diagonal + self.nugget) / 2, self.gain * max(spread, 0.0) + self.nugget / self.all_bins

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
        h = self.end_effect(j)
        chain = self.gain * (self.covariance(np.abs(j[:, None] - j[None])) - self.tail * np.outer(h, h))
        return np.asarray(chain + self.nugget * np.eye(self.bins))


def plain_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """The exact chain of C_λ: gain k/((1−λ²)σ²), nothing after the last step."""
    return Chain(lam, bins, epochs, epochs / ((1 - lam) * (1 + lam) * sigma**2), 1.0)


@dataclass(frozen=True)
class Columns:
    """⟨C_s, C_t⟩ = chain·(λ^{|s−t|} − tail·λ^{2n−s−t}) + nugget·[s = t] for steps s, t = 0 … n−1.

    ``tail`` = 0 are columns that do not feel the last step. The λ is its accountant's.
    """

    chain: float = 1.0
    nugget: float = 0.0
    tail: float = 0.0

    def __post_init__(self) -> None:
        positive = self.chain >= 0 and self.nugget >= 0 and 0 < self.chain + self.nugget < math.inf
        if not (positive and 0 <= self.tail <= 1):
            raise AccountingError(f"{self!r} are no columns: chain and nugget are not negative, a tail is at most 1")

    @classmethod
    def of(cls, lam: float, zero: float, *, scale: float = 1.0) -> Columns:
        """The columns of √scale·(1 − φx)/(1 − λx), 0 ≤ φ = ``zero`` < λ: exactly these (Lemma 1b)."""
        weight, energy = lam - zero, (1 - lam) * (1 + lam)
        chain = weight / lam + weight**2 / energy
        return cls(scale * chain, scale * zero / lam, weight / (lam * energy + lam**2 * weight))

    def over(self, lam: float, bins: int, epochs: int, sigma: float) -> Chain:
        """Their chain at noise σ."""
        if lam == 0:
            return Chain(0.0, bins, epochs, epochs * (self.chain + self.nugget) / sigma**2, 0.0)
        return Chain(lam, bins, epochs, epochs * self.chain / sigma**2, self.tail, epochs * self.nugget / sigma**2)


def stationary_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """Columns of norm 1 with inner products λ^{|s−s'|}, whatever follows the last step."""
    return Chain(lam, bins, epochs, epochs / sigma**2, 0.0)


def normalized_chain(lam: float, bins: int, epochs: int, sigma: float) -> Chain:
    """Dominates C_λD⁻¹: the stationary chain of its largest correlation between neighbours (Lemma 7).

    Columns s < s' of C_λ have inner product λ^{s'−s} d_{s'}², d_s² ∝ 1 − λ^{2(n−s)}, so those of norm 1 have
    λ^{s'−s} d_{s'}/d_s, a product of ρ_s = λ d_{s+1}/d_s; these fall with s. ρ_0 is λ but for short runs.
    """
    steps, rate = bins * epochs, 2 * math.log(lam)
    if steps > 1:
        largest = lam * math.sqrt(math.expm1((steps - 1) * rate) / math.expm1(steps * rate))
        lam = min(lam, largest * (1 + 1e-12))
    return stationary_chain(lam, bins, epochs, sigma)


def value_grid(fine: float, ratio: float, top: float, *, limit: int = 20_000) -> Array:
    """0, then steps of ``fine``, then steps of relative size ``ratio``, until at least ``top``.

    Rounding a value y adds a variance of at most step²/4, about step²/6 on average: small values need only a fine
    absolute step (there are b of them), large ones a fine relative step (few of them make up W).
    """
    turn = fine / ratio
    steps = math.ceil(min(turn, top) / fine)
    more = max(0, math.ceil(math.log(top / (steps * fine)) / math.log1p(ratio))) if top > steps * fine else 0
    if steps + more > limit:
        raise AccountingError(
            f"the emission grid would need {steps + more} points (limit {limit}); ask for a smaller ε or a larger σ"
        )
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
    """Φ(z_{i+1}) − Φ(z_i) along the rows, from the tail that keeps its digits."""
    low, high = z[:, :-1], z[:, 1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


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


WIDEST_SYMMETRIC = 1200.0
"""v² up to which matrices are made symmetric: √φ(v) stays above e^{−300}"""


@dataclass(frozen=True)
class Site:
    """The law of u at one kind of bin, given its lattice neighbours: N(scale·n, deviation²) for an integer index n."""

    kernel: Array
    """weight of every (row, column) pair of lattice neighbours"""
    strides: tuple[int, int]
    """the pair (row, column) has its mean at position strides · (row, column) of ``means``"""
    means: Array
    deviation: float


@dataclass(frozen=True)
class Lattice:
    """Everything the transfer product needs, and what truncating the lattice can have lost."""

    interior: Site
    left: Site
    right: Site
    links: int
    eta: float
    exit_remove: float
    """bound on E W over paths that leave the lattice"""
    exit_add: float
    """bound on the probability of such paths"""

    @property
    def states(self) -> int:
        return self.interior.kernel.shape[0]

    @property
    def closing_states(self) -> int:
        return self.left.kernel.shape[0]


def lattice(chain: Chain, ratio: float, reach: float, *, shifted: bool = True) -> Lattice:
    """Build the lattice with spacing ``ratio``·τ that reaches ``reach`` standard deviations beyond every mean.

    ``shifted``: cover the means under P too (remove); otherwise only Q counts (add), and ``exit_remove`` is infinite.
    """
    lam, bins = chain.lam, chain.bins
    rho, tau = math.sqrt(lam), math.sqrt((1 - lam) / (1 + lam))
    spacing, eta = ratio * tau, poisson_eta(ratio)
    links = bins if chain.epochs > 1 else bins - 1
    shift = math.sqrt(chain.gain) if shifted else 0.0
    deviation = math.sqrt(chain.peak_variance)
    first = math.floor(-reach * deviation / spacing)
    last = math.ceil((reach * deviation + shift * max(chain.peak_covariance(0.5), 0.0)) / spacing)
    n = np.arange(first, last + 1)
    v = np.asarray(n * spacing, dtype=np.float64)

    # Entries are conditional densities of v given v', times √φ(v')/√φ(v), which makes them symmetric; the ends take
    # that back. Nothing overflows, and what underflows weighs less than 1e-300.
    variance = (1 - lam) * (1 + lam)
    there = (v[:, None] - lam * v[None, :]) ** 2
    root_density = np.exp(-(v**2) / 4) if np.max(v**2) < WIDEST_SYMMETRIC else None
    squares = there if root_density is None else 0.5 * (there + there.T)
    interior = Site(
        spacing / math.sqrt(2 * math.pi * variance) * np.exp(-squares / (2 * variance)),
        (1, 1),
        rho / (1 + lam) * spacing * np.arange(2.0 * first, 2.0 * last + 1),
        tau,
    )
    p, q, v_end = chain.closing
    if not v_end > 0:
        raise AccountingError(f"the closing variance came out as {v_end:g}; λ = {lam:g} is too close to 1 for float64")
    exit_low, exit_high, exit_add = _interior_exits(chain, v[0], v[-1], deviation, shift)
    if chain.epochs == 1:
        left, right = _open_ends(n, spacing, lam, v_end)
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
    return Lattice(interior, left, right, links, eta, exit_remove, exit_add * grown)


def _interior_exits(
    chain: Chain, low: float, high: float, deviation: float, shift: float
) -> tuple[float, float, float]:
    """Lemma 3: union bound over the half-step variables, under P (shifted by the bin that was drawn) and under Q.

    The marginal density decreases beyond the last lattice point (which lies above its mean), so the lattice sum over
    the points beyond is at most the integral from the last point on.
    """
    d = np.arange(chain.bins - 1) + 0.5
    means = shift * (chain.covariance(d) - chain.tail * float(chain.end_effect(0.0)) ** 2)
    if high < np.max(means, initial=0.0) or low > 0:
        raise AccountingError(
            "the lattice does not cover its own means; this is an error in lambdacgd, please report it"
        )
    # At most 2(b − d) of the b(b − 1) pairs (link, drawn bin) lie at distance d, each with probability 1/b.
    above = 2 * float(np.sum(ndtr(-(high - means) / deviation)))
    below = chain.bins * float(ndtr(low / deviation))
    return below, above, chain.bins * float(ndtr(-high / deviation)) + below


def _open_ends(n: Indices, spacing: float, lam: float, v_end: float) -> tuple[Site, Site]:
    """One epoch: bin 0 sees only the link on its right, bin b−1 only the one on its left."""
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
    left = Site(np.ones((1, len(n))), (0, 1), rho * v, math.sqrt(1 - lam))
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
    both_ends = chain.peak_variance + chain.peak_covariance(chain.bins - 1.0)
    w_spread = math.sqrt(2 * weight**2 * both_ends + tau_w**2)
    w_shift = shift * weight * both_ends
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

Rounding = Literal["up", "down"]
MEMORY = 384 * 2**20
"""bytes that one evaluation may use at once"""
IN_CACHE = 2**19
"""bytes of matrices that are multiplied together"""
BATCH = 64
"""frequencies whose emissions are transformed together"""
NEVER = 1e-30
"""a grid point less likely than this, whatever the lattice says, is left out: far below the tables' own rounding"""
LARGEST_TABLE = 10_000_000
"""numbers in one emission table; a few temporaries of this size exist while it is made"""


SQUARING = 0.5
"""what squaring a matrix takes, in units of multiplying it by as many vectors as it has rows, one by one"""


@dataclass(frozen=True)
class Stretch:
    """``count`` neighbouring bins that share one scale: log c rounded up (remove) or down (add) by monotonicity."""

    count: int
    up: float
    down: float

    def log_scale(self, rounding: Rounding) -> float:
        return self.up if rounding == "up" else self.down


def stretches(log_scales: Array, allowed: float) -> list[Stretch]:
    """Cut the interior bins 1 … b−2 into stretches, from the end of the cycle to its start.

    log c_j falls geometrically away from the end, so far bins are all alike: one long stretch; then groups as long as
    they fit; then single bins. ``allowed`` bounds Σ_j (log c rounded up − log c_j).
    """
    interior = log_scales[1:-1]
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
        shift = chain.gain**0.5
        base = -0.5 * chain.loss_variance - np.log(chain.all_bins)
        longest = max(len(site.means) for site in (lattice.interior, lattice.left, lattice.right))
        if longest * len(grid) > LARGEST_TABLE:
            raise AccountingError(
                f"an emission table of {longest}×{len(grid)} numbers is beyond the cap of {LARGEST_TABLE:,}; use a "
                "smaller λ, a larger ε or δ, or the Monte Carlo accountant"
            )
        sites = (lattice.interior, lattice.left, lattice.right)
        emissions = [
            round_lognormal(shift * site.means + base, math.hypot(shift * site.deviation, chain.nugget**0.5), grid)
            for site in sites
        ]
        # Where W hardly varies most of the grid is never met.
        met = np.max([table.max(axis=0) for table in emissions], axis=0) > NEVER
        self.grid = grid[met]
        self.interior, self.left, self.right = (
            _Tables.of(site, table[:, met], chain.repeat) for site, table in zip(sites, emissions, strict=True)
        )

    @cached_property
    def symmetric(self) -> bool:
        """Whether the interior's matrices are: their means depend on the sum of row and column."""
        kernel = self.lattice.interior.kernel
        return self.lattice.interior.strides == (1, 1) and np.array_equal(kernel, kernel.T)

    def flops(self) -> float:
        """Real operations for one complex z."""
        size, columns = self.lattice.states, self.lattice.closing_states
        cost = 8.0 * size**2 * sum(power_cost(stretch.count, size, columns)[0] for stretch in self.plan)
        ends = 16.0 * size * columns
        tables = self.left.table.shape[1] + self.right.table.shape[1] + self.interior.table.shape[1] * len(self.plan)
        return cost + ends + 4.0 * len(self.grid) * tables

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        """E e^{zW'} for every z (real z are four times cheaper than complex ones)."""
        batch = self._batch()
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
            values = np.concatenate(
                [self._evaluate(z[first : first + batch], rounding) for first in range(0, len(z), batch)]
            )
        if not np.all(np.isfinite(values)):
            raise AccountingError("the transfer product overflowed; σ is too small for this ε, ask for a larger σ")
        return values

    def _batch(self) -> int:
        """How many z are evaluated together."""
        size = max(self.lattice.states, self.lattice.closing_states)
        each = 16 * (5 * size * self.lattice.states + 4 * len(self.grid))
        if each > MEMORY:
            raise AccountingError(
                f"{self.lattice.states} lattice states need {each / 2**20:.0f} MiB each (cap {MEMORY / 2**20:.0f}); "
                "lump bins or ask for a smaller λ"
            )
        return min(BATCH, int(MEMORY // each))

    def _evaluate(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        first, last = self.ends
        strips = self.right.matrices(self.right.transform(self.grid, z, last))
        some = max(1, IN_CACHE // (16 * self.lattice.states**2))
        scale, transforms = None, None
        for stretch in self.plan:
            if transforms is None or stretch.log_scale(rounding) != scale:
                scale = stretch.log_scale(rounding)
                transforms = self.interior.transform(self.grid, z, scale)
            for part in (slice(i, i + some) for i in range(0, len(z), some)):
                matrices = self.interior.matrices(transforms[part])
                strips[part] = apply_power(matrices, stretch.count, strips[part], symmetric=self.symmetric)
        ends = self.left.matrices(self.left.transform(self.grid, z, first))
        return np.asarray((ends.transpose(0, 2, 1) * strips).sum(axis=(1, 2)))


@dataclass(frozen=True)
class _Tables:
    """A Site with its emission table."""

    kernel: Array
    table: Array
    """one row a grid point, one column a lattice neighbourhood"""
    total: Array
    strides: tuple[int, int]
    repeat: int
    """how many such bins the site holds, independent given the lattice"""

    @classmethod
    def of(cls, site: Site, emissions: Array, repeat: int) -> _Tables:
        return cls(site.kernel, np.ascontiguousarray(emissions.T), emissions.sum(axis=1), site.strides, repeat)

    def matrices(self, transforms: NDArray[Any]) -> NDArray[Any]:
        """One transfer matrix per z: kernel(v, v')·E[e^{zcY} | v, v']."""
        # The mean depends on an integer combination of row and column only: a strided view, not a gather.
        row, item = transforms.strides
        steps = (row, item * self.strides[0], item * self.strides[1])
        spread = np.lib.stride_tricks.as_strided(transforms, (len(transforms), *self.kernel.shape), steps)
        return np.asarray(self.kernel * spread)

    def transform(self, grid: Array, z: NDArray[Any], log_scale: float) -> NDArray[Any]:
        """E[e^{zcY}]^repeat: one row per frequency z, one column per lattice neighbourhood.

        b bins repeat the rounding of one, so it is kept out where it can be: the part at real z is 1 + Σ p (e^{zy} − 1)
        where that is close to 1 (and a sum of positive terms where it is small, which keeps its digits), and the
        departure from it at complex z is added as −2 sin²(ωy/2) and sin(ωy). All frequencies of a Fourier series share
        their real part, which is computed once.
        """
        values = grid * float(np.exp(log_scale))
        reals, which = np.unique(z.real, return_inverse=True)
        exponents = np.outer(reals, values)
        damping = np.exp(exponents)
        departure = np.expm1(exponents) @ self.table
        real = self.total + departure
        if (small := departure <= -0.5).any():
            real[small] = (damping @ self.table)[small]
        real = real[which]
        if not np.iscomplexobj(z):
            return power(real, self.repeat)
        half = np.outer(0.5 * z.imag, values)
        sine, damped = np.sin(half), damping[which] if len(reals) > 1 else damping
        turned = np.concatenate([-2 * damped * sine * sine, 2 * damped * sine * np.cos(half)]) @ self.table
        result = np.empty(real.shape, dtype=np.complex128)
        result.real = real + turned[: len(z)]
        result.imag = turned[len(z) :]
        return power(result, self.repeat)


def power(base: NDArray[Any], exponent: int) -> NDArray[Any]:
    """base^exponent, entry by entry, by repeated squaring: fewer roundings than through logarithms."""
    result = base
    for bit in bin(exponent)[3:]:
        result = result * result * base if bit == "1" else result * result
    return result


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


class IndependentProduct:
    """λ = 0: the bins are independent, so E e^{zW'} is a power of one bin's transform."""

    def __init__(self, bins: int, gain: float, grid: Array) -> None:
        self.bins, self.grid = bins, grid
        deviation = gain**0.5
        self.table = round_lognormal(np.array([-gain / 2 - np.log(bins)]), deviation, grid)[0]

    def flops(self) -> float:
        return 8.0 * len(self.grid)

    def __call__(self, z: NDArray[Any], rounding: Rounding) -> NDArray[Any]:
        values = power_of_transform(z, self.grid, self.table, self.bins)
        if not np.all(np.isfinite(values)):
            raise AccountingError("the transfer product overflowed; σ is too small for this ε, ask for a larger σ")
        return values


def power_of_transform(z: NDArray[Any], grid: NDArray[Any], table: NDArray[Any], power: int) -> NDArray[Any]:
    """(Σ_i table_i e^{z·grid_i})^power in the precision of its arguments.

    Near 1 it goes through s = Σ table·(e^{zy} − 1), so that the rounding of the 1 is not repeated ``power`` times.
    """
    exponents = np.outer(z, grid)
    direct = np.exp(exponents) @ table
    departure = np.expm1(exponents) @ table
    small = np.abs(departure) < 0.5
    s = np.where(small, departure, 0)
    if np.iscomplexobj(z):
        logarithm = 0.5 * np.log1p(s.real * (2 + s.real) + s.imag**2) + 1j * np.arctan2(s.imag, 1 + s.real)
    else:
        logarithm = np.log1p(s)
    return np.where(small, np.exp(power * logarithm), direct**power)


# Extended precision

AVAILABLE = bool(np.finfo(np.longdouble).eps < 1e-18)


def extended_transform(
    product: TransferProduct | IndependentProduct, z: NDArray[Any], rounding: Rounding
) -> NDArray[Any]:
    """E e^{zW'} in extended precision."""
    wide = np.clongdouble if np.iscomplexobj(z) else np.longdouble
    grid = product.grid.astype(np.longdouble)
    if isinstance(product, TransferProduct):
        return np.array([_extended_product(product, grid, wide(value), rounding) for value in z])
    return power_of_transform(z.astype(wide), grid, product.table.astype(np.longdouble), product.bins)


def _extended_product(product: TransferProduct, grid: NDArray[Any], z: Any, rounding: Rounding) -> Any:
    first, last = product.ends
    strip = _extended_matrix(product.right, grid, z, last)
    for stretch in product.plan:
        matrix = _extended_matrix(product.interior, grid, z, stretch.log_scale(rounding))
        strip = apply_power(matrix, stretch.count, strip)
    return (_extended_matrix(product.left, grid, z, first).T * strip).sum()


def _extended_matrix(site: _Tables, grid: NDArray[Any], z: Any, log_scale: float) -> NDArray[Any]:
    scale = np.longdouble(np.exp(log_scale))
    transform = power(np.exp(z * (scale * grid)) @ site.table.astype(np.longdouble), site.repeat)
    size = transform.itemsize
    rows, columns = site.kernel.shape
    view = np.lib.stride_tricks.as_strided(transform, (rows, columns), (size * site.strides[0], size * site.strides[1]))
    return np.asarray(site.kernel * view)
