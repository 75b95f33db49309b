"""Sums over a lattice in place of integrals between neighbouring bins, with a two-sided error (Lemmas 2 and 3).

Between bins j and j+1 a half-step variable v is inserted; given all of them the bins are independent. As a function of
v the integrand is a Gaussian of variance τ², so summing over ΔZ instead of integrating changes it by a factor within
1 ± η, whatever the bins' values. The closing relation gets one more such variable, w. One epoch: the chain is open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.chain import Chain
from lambdacgd.mechanisms.base import Array

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

    # Entries are honest conditional densities: nothing overflows, and what underflows weighs less than 1e-300.
    variance = (1 - lam) * (1 + lam)
    interior = Site(
        spacing / math.sqrt(2 * math.pi * variance) * np.exp(-((v[:, None] - lam * v[None, :]) ** 2) / (2 * variance)),
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
