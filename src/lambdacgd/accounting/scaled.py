"""Columns scaled to norm 1, over one epoch: the chain with a nugget that follows them to its end, and dominates them.

Over one epoch ⟨C_s, C_t⟩ of scaled columns falls with s, slowly at first and fast near the end, where ‖T_s‖ does. A
chain whose neighbours correlate by λ‖T_{s+1}‖/‖T_s‖ falls alike, and is computed in runs of one correlation (Lemma 1c
of docs/exact-accountant.md). Where C is more than λCGD some entries of its Gram matrix still lie above the chain's: a
nugget makes up for them (Lemma 1d). Every pair of columns is looked at.

λ and the chain's share are chosen by E W² (no privacy rests on the choice).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.exact.accountant import SMALLEST_LAMBDA
from lambdacgd.accounting.exact.lattice import Columns, falling_runs, log_correlations
from lambdacgd.accounting.root import bisect
from lambdacgd.mechanisms import Mechanism

SAFETY = 1 + 1e-9  #: for the rounding of sums of non-negative terms, and of products of correlations
_ROWS = 24  #: rows of the Gram matrix that stand for all where parameters are chosen
_LAMBDAS = 1.0 - np.geomspace(0.6, 0.005, 8)


def unit_column(mechanism: Mechanism, steps: int) -> Array | None:
    """The first column of |T| where C = T·D⁻¹ has columns of norm 1; None for other mechanisms."""
    scales = mechanism.column_scales(steps)
    if scales is None or steps < 3:
        return None
    column = np.abs(np.asarray(mechanism.strategy(steps), dtype=np.float64))
    return column if np.allclose(scales, _norms(column), rtol=1e-12, atol=0) else None


def _norms(column: Array) -> Array:
    return np.asarray(np.sqrt(np.cumsum(column**2))[::-1])


@dataclass(frozen=True)
class Followed:
    """The λ and columns that dominate, about the σ that they need, and by how much that is more than C needs."""

    lam: float
    columns: Columns
    sigma: float
    loss: float


def followed(column: Array, budget: float) -> Followed:
    """The columns that should need the least noise.

    Args:
        column: of |T|, over one epoch.
        budget: log E W² of one epoch, at which σ is judged.

    Guarantee
    ---------
    Whatever is chosen, G' − G is a matrix without negative entries plus a diagonally dominant one.
    """
    search = _Search(column, budget)
    lam, chain = search.best(_LAMBDAS, most=120)
    norms = _norms(column)
    rho = lam * norms[1:] / norms[:-1]
    rho = np.maximum.accumulate(rho[::-1])[::-1]  # falling, as runs are made for
    columns = Columns(chain, 0.0, runs=falling_runs(rho))
    lack = _lacking(column, norms, columns) * SAFETY
    _, sigma = search.sigma(lam, chain)
    return Followed(
        max(r for _, r in columns.runs),
        Columns(chain * SAFETY, max(lack, 0.0), runs=columns.runs),
        sigma,
        sigma / search.own_sigma - 1,
    )


def followed_sigma(column: Array, budget: float) -> float:
    """About the σ that these columns need, in milliseconds: for choosing C. It claims nothing."""
    search = _Search(column, budget)
    return search.sigma(*search.best(_LAMBDAS[1::2], most=40))[1]


def _lacking(column: Array, norms: Array, columns: Columns) -> float:
    """The most by which a row of G, diagonal included, exceeds the chain's, what lies below it not counted."""
    b, logs = len(column), log_correlations(columns.runs)
    sums, by_distance = np.zeros(b), np.zeros(0)
    for i in range(b - 1, -1, -1):
        # Column i of T is column i+1 moved up by one, with one entry more at its end.
        by_distance = np.append(by_distance, 0.0) + column[b - 1 - i] * column[b - 1 - i :: -1]
        lacking = by_distance * (SAFETY / norms[i]) / norms[i:] - columns.chain * np.exp(logs[i:] - logs[i])
        off = np.maximum(lacking[1:], 0.0)
        sums[i] += float(lacking[0]) + float(off.sum())
        sums[i + 1 :] += off
    return float(sums.max())


class _Search:
    """λ and the chain's share with the least E W², the nugget being what sampled rows lack."""

    def __init__(self, column: Array, budget: float) -> None:
        b = self.bins = len(column)
        rows = np.unique(((np.arange(_ROWS) + 0.5) * b / _ROWS).astype(np.int64))
        self.distance = np.arange(float(b))
        there = self.distance + rows[:, None]
        inside, at = there < b, np.minimum(there, b - 1).astype(np.int64)
        cut = np.where(inside, column, 0.0)  # column i has b − i entries
        products = np.fft.irfft(np.abs(np.fft.rfft(cut, 2 * b)) ** 2, 2 * b)[:, :b]
        norms = _norms(column)
        #: G_i,i+d and the chain's correlation but for λ^d, zero beyond the epoch
        self.needed = np.where(inside, products / norms[rows][:, None] / norms[at], 0.0)
        self.falling = np.where(inside, norms[at] / norms[rows][:, None], 0.0)
        self.budget = budget
        self.own_sigma = self._sigma(self.needed)
        self.precision = self.own_sigma**-2

    def best(self, lambdas: NDArray[np.float64], *, most: int) -> tuple[float, float]:
        """λ and the chain's share, from the best of some starts, by Nelder and Mead's search: deterministic."""

        def score(x: Array) -> float:
            return self._log_moment(self._dominating(*_given(x)), self.precision)

        starts = [np.array([math.log(-math.log1p(-lam)), share]) for lam in lambdas for share in (0.6, 0.75, 0.9)]
        start = min(starts, key=score)
        simplex = start + np.array([[0.0, 0.0], [0.08, 0.0], [0.0, 0.05]])
        options = {"initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-7, "maxfev": most}
        return _given(minimize(score, start, method="Nelder-Mead", options=options).x)

    def sigma(self, lam: float, chain: float) -> tuple[float, float]:
        """The nugget that sampled rows ask for, and the σ at which E W² meets the budget."""
        above = self._dominating(lam, chain)
        return float(above[0, 0]) - chain, self._sigma(above)

    def _dominating(self, lam: float, chain: float) -> Array:
        above = chain * lam**self.distance * self.falling
        lacking = self.needed - above
        nugget = float(np.max(lacking[:, 0] + 2 * np.maximum(lacking[:, 1:], 0.0).sum(axis=1)))
        above[:, 0] += max(nugget, 0.0)
        return np.asarray(above)

    def _log_moment(self, rows: Array, precision: float) -> float:
        largest = float(rows[:, 0].max()) * precision
        if largest > 650:
            return largest
        values = np.expm1(rows * precision)
        return math.log1p(float(2 * values.sum() - values[:, 0].sum()) / len(rows) / self.bins)

    def _sigma(self, rows: Array) -> float:
        """By ``budget``; about √(diagonal / that) where nothing is amplified."""
        peak = float(rows[:, 0].max())
        low, high = 0.5 * math.log(peak / 600), 0.5 * math.log(peak / min(self.budget, 1.0)) + 1.0

        def enough(log_sigma: float) -> bool:
            return self._log_moment(rows, math.exp(-2 * log_sigma)) <= self.budget

        return math.exp(bisect(enough, low, high, width=1e-6))


def _given(x: Array) -> tuple[float, float]:
    """λ and a share from numbers that are searched over all reals."""
    lam = -math.expm1(-math.exp(min(float(x[0]), 1.9)))
    return min(max(lam, SMALLEST_LAMBDA), 0.9985), min(max(float(x[1]), 1e-3), 1.0)
