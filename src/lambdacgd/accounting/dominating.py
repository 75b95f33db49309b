"""A chain with a nugget that dominates a mechanism: columns C' whose δ is at least that of the mechanism's C.

δ of Balls-in-Bins depends on the Gram matrix G of the columns of C alone, and grows with it in two orders
(Lemma 7 of docs/exact-accountant.md): entry by entry (Kahane), and by positive semidefinite matrices (Jensen: more
independent noise in the losses). So G' dominates G if G' − G is a sum of a matrix without negative entries and a
positive semidefinite one. Such G' are searched for, among those that the transfer-matrix accountant computes,

    G'_st = chain·(λ^{|s−t|} − tail·λ^{2n−s−t}) + nugget·[s = t]:

- ``_by_entries``: entry by entry where G' is the larger, and where it is not, what it lacks is added to the diagonal
  (a diagonally dominant matrix is positive semidefinite). Every pair of columns is looked at.
- ``_by_cosines`` (Toeplitz C, tail = 0): the same with one more positive semidefinite matrix, a taper
  (1 − |s−t|/reach)₊ times Σ_q a_q cos ω_q(s − t), a_q ≥ 0; a linear program finds the a_q.
- ``scaled`` (columns of norm 1, one epoch): entry by entry, with a chain whose correlations fall as the columns' do.
- ``_by_norm`` (Toeplitz C): C' = s·(1 − φx)/(1 − λx) with ‖C C'⁻¹‖ ≤ 1, so that G ≤ G' as quadratic forms. The norm is
  at most the maximum of a polynomial on the unit circle, which is bounded from its values on a grid.

The parameters are chosen by E W² (no privacy rests on the choice), the last number is then computed such that the
domination holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize
from scipy.signal import correlate, fftconvolve, lfilter

from lambdacgd.accounting.certificate import Array
from lambdacgd.accounting.exact.accountant import LARGEST_LAMBDA, SMALLEST_LAMBDA
from lambdacgd.accounting.exact.lattice import Columns, log_correlations
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.root import bisect
from lambdacgd.accounting.scaled import followed, followed_sigma, unit_column
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import BufferedToeplitz, Horizon, Mechanism
from lambdacgd.mechanisms.error import participation_sum

LARGEST_DENSE = 6000  #: columns whose inner products are kept as a matrix
MOST_STEPS = 100_000
FEW_STEPS = 200  #: up to which columns of norm 1 are also dominated by a chain that does not follow them
MOST_PAIRWISE = 10_000  #: steps up to which every pair of columns is looked at; beyond, C must be Toeplitz
SAFETY = 1 + 1e-9  #: for the rounding of sums of non-negative terms, and of powers of λ
GRID = 64  #: points on the unit circle a coefficient: the maximum of |r|² exceeds that on the grid by .12% at most
_SAMPLED_ROWS = 64
_FREQUENCIES = 48
_LAMBDAS = 1.0 - np.geomspace(0.7, 0.003, 12)


@dataclass(frozen=True)
class Dominating:
    """The accountants' λ and columns, and by about how much σ grows for them, judged by E W²."""

    lam: float
    columns: Columns
    loss: float = 0.0

    def details(self) -> dict[str, float]:
        """What a certificate says about it."""
        c = self.columns
        norm = math.sqrt(c.chain + c.nugget)
        return {"lam": self.lam, "norm": norm, "nugget": c.nugget, "tail": c.tail, "sigma_loss": self.loss}


def exact_columns(mechanism: Mechanism, steps: int) -> Dominating | None:
    """The chain with a nugget that this mechanism *is*: one buffer, C = 1 + ωx/(1 − θx) with ω ≤ θ (Lemma 1b).

    Columns scaled to norm 1 are dominated by the columns of norm 1 that do not feel the last step.
    """
    recurrence = mechanism.recurrence(steps)
    if not isinstance(recurrence, BufferedToeplitz) or len(recurrence.decays) != 1 or mechanism.foreign:
        return None
    decay, weight = recurrence.decays[0], recurrence.weights[0]
    if not (SMALLEST_LAMBDA <= decay <= LARGEST_LAMBDA and 0 < weight <= decay):
        return None
    columns = Columns.of(decay, decay - weight)
    scales = mechanism.column_scales(steps)
    if scales is None:
        return Dominating(decay, columns)
    norms = np.sqrt(np.cumsum(mechanism.strategy(steps) ** 2))[::-1]
    if not np.allclose(scales, norms, rtol=1e-12, atol=0):
        return None
    total = columns.chain + columns.nugget
    return Dominating(decay, Columns(columns.chain / total * SAFETY, columns.nugget / total * SAFETY))


def dominating(
    mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float, restarts: bool = True
) -> Dominating:
    """The columns that should need the least noise for (ε, δ), judged by E W² after all epochs.

    Args:
        mechanism: resolved, for one epoch or, without restarts, for all. Where C has negative entries, |C| is dominated
            (Lemma 0).
        horizon: b and k.
        epsilon: ε near which they are to be good.
        delta: likewise δ.
        restarts: whether the noise restarts every epoch (fresh bins).

    Returns:
        λ and columns for ``FreshBins``, or without restarts for ``TransferMatrix``.

    Raises:
        AccountingError: C is not finite, or an epoch has too many steps.

    Guarantee
    ---------
    Whatever is chosen, G' − G is a matrix without negative entries plus a positive semidefinite one.
    """
    steps = horizon.steps_per_epoch if restarts else horizon.steps
    if (exact := exact_columns(mechanism, steps)) is not None:
        return exact
    # Epochs compose; with fixed bins all k columns of a bin add up, and n columns have k times as many pairs as b bins.
    allowed = gaussian_sigma(epsilon, delta) ** -2
    k = horizon.epochs
    choices = []
    if (restarts or k == 1) and steps <= MOST_PAIRWISE and (column := unit_column(mechanism, steps)) is not None:
        found = followed(column, allowed / k)
        choices = [Dominating(found.lam, found.columns, found.loss)]
        if steps > FEW_STEPS:  # where memories are short beside the epoch it is the best
            return choices[0]
    inner = _Inner(mechanism, steps)
    goal = _Goal(inner, allowed / k if restarts else math.log1p(math.expm1(allowed) / k))
    if steps <= MOST_PAIRWISE:
        choices += [_independent(inner), _by_entries(inner, goal)]
    if inner.toeplitz:
        choices += [_by_cosines(inner, goal), _by_norm(inner, goal)]
    best = min(choices, key=lambda choice: goal.excess(choice.lam, choice.columns))
    return replace(best, loss=goal.loss(best.lam, best.columns))


def first_guess(
    mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float, restarts: bool = True
) -> float:
    """σ at which a Gaussian mechanism of the same E W² after all epochs would need (ε, δ), rows of G being sampled.

    The arguments are those of ``dominating``. Of columns scaled to norm 1 over one epoch E W² is that of the chain
    which dominates them: so C is chosen for what can be certified.
    """
    b, k = horizon.steps_per_epoch, horizon.epochs
    if (restarts or k == 1) and (unit := unit_column(mechanism, b)) is not None:
        return followed_sigma(unit, gaussian_sigma(epsilon, delta) ** -2 / k)
    folded = Horizon(b, 1) if restarts else horizon
    column = np.abs(np.asarray(mechanism.strategy(folded.steps), dtype=np.float64))
    scales = mechanism.column_scales(folded.steps)
    rows = _spread(b)
    if scales is None:  # m_j is m_0 moved down by j
        centre = participation_sum(column, folded)
        ends = [centre[: folded.steps - i] for i in rows]
        products = {int(i): correlate(end, end)[len(end) - 1 :][: b - i] for i, end in zip(rows, ends, strict=True)}
    else:
        n, weights = folded.steps, 1 / np.asarray(scales, dtype=np.float64)
        products = {}
        for i in map(int, rows):
            places = np.zeros(n)
            places[i::b] = weights[i::b]
            own = fftconvolve(places, column)[:n]  # m_i
            with_all = fftconvolve(own, column[::-1])[n - 1 :] * weights
            products[i] = with_all.reshape(-1, b).sum(axis=0)[i:]
    allowed = gaussian_sigma(epsilon, delta) ** -2
    return _at_budget(products, b, allowed / horizon.epochs if restarts else allowed) ** -0.5


class _Inner:
    """The inner products of the columns of |C|."""

    def __init__(self, mechanism: Mechanism, steps: int) -> None:
        column = np.abs(np.asarray(mechanism.strategy(steps), dtype=np.float64))
        scales = mechanism.column_scales(steps)
        self.steps, self.column, self.toeplitz = steps, column, scales is None
        if not np.isfinite(column).all():
            raise AccountingError("C has entries that are not finite numbers")
        if steps > (MOST_STEPS if scales is None else LARGEST_DENSE):
            raise AccountingError(f"noise of {mechanism.name} correlated over {steps} steps is too long to certify")
        self._dense = None
        if scales is not None:
            self._dense = scaled_gram(column, np.asarray(scales, dtype=np.float64), Horizon(steps, 1))

    def from_last(self) -> Iterator[tuple[int, Array]]:
        """(i, G_ii, G_i,i+1, …) for i = b−1 … 0, rounded up."""
        by_distance = np.zeros(0)
        for i in range(self.steps - 1, -1, -1):
            if self._dense is not None:
                yield i, self._dense[i, i:] * SAFETY
                continue
            # Column i is column i+1 moved up by one, with one entry more at its end.
            last = self.column[self.steps - 1 - i]
            by_distance = np.append(by_distance, 0.0) + last * self.column[self.steps - 1 - i :: -1]
            yield i, by_distance * SAFETY

    @cached_property
    def by_distance(self) -> Array:
        """Of Toeplitz C, the largest inner product at each distance: that of the earliest pair, none cut off."""
        full = np.correlate(self.column, self.column, mode="full")[self.steps - 1 :]
        return np.asarray(full * SAFETY)


def scaled_gram(column: Array, scales: Array, horizon: Horizon) -> Array:
    """⟨m_i, m_j⟩ for C = T·D⁻¹, m_j being what bin j adds over all epochs, without an n×n matrix."""
    n, b, k = horizon.steps, horizon.steps_per_epoch, horizon.epochs
    padded = np.concatenate([np.zeros(n), column])  # padded[n + i − s] = T[i, s]
    gram = np.zeros((b, b))
    weights = 1.0 / np.asarray(scales, dtype=np.float64)
    block = max(1, 4_000_000 // b)
    for top in range(0, n, block):
        rows = np.arange(top, min(top + block, n))
        centres = np.zeros((len(rows), b))
        for epoch in range(k):
            steps = epoch * b + np.arange(b)
            centres += padded[n + rows[:, None] - steps[None, :]] * weights[steps]
        gram += centres.T @ centres
    return gram


def _spread(b: int) -> NDArray[np.int64]:
    """Rows in the middle of equal parts of 0 … b−1, which stand for all."""
    count = min(b, _SAMPLED_ROWS if b <= 2000 else _SAMPLED_ROWS // 4)
    return np.unique(((np.arange(count) + 0.5) * b / count).astype(np.int64))


def _log_moment(upper: dict[int, Array], steps: int, precision: float) -> float:
    """log E W² at σ^−2 = ``precision`` from sampled rows (i, G_ii, G_i,i+1, …)."""
    total = 0.0
    for row in upper.values():
        values = np.expm1(row * precision)
        total += 2 * float(values.sum()) - float(values[0])
    return math.log1p(total / len(upper) / steps)


def _at_budget(upper: dict[int, Array], steps: int, budget: float) -> float:
    """The precision σ^−2 at which log E W² is ``budget``."""
    largest = max(float(row[0]) for row in upper.values())
    low, high = 0.5 * math.log(largest / 600), 0.5 * math.log(largest / min(budget, 1.0)) + 1.0

    def enough(log_sigma: float) -> bool:
        return _log_moment(upper, steps, math.exp(-2 * log_sigma)) <= budget

    return math.exp(-2 * bisect(enough, low, high, most=30))


class _Goal:
    """What is minimised: log E W² at the σ where the mechanism itself meets ``budget``."""

    def __init__(self, inner: _Inner, budget: float) -> None:
        b = self.steps = inner.steps
        rows = _spread(b)
        if b > MOST_PAIRWISE:
            self.upper = {int(i): inner.by_distance[: b - i] for i in rows}
        else:
            wanted = set(rows.tolist())
            self.upper = {i: row for i, row in inner.from_last() if i in wanted}
        self.budget, self.precision = budget, _at_budget(self.upper, b, budget)

    def loss(self, lam: float, columns: Columns) -> float:
        """About how much more σ these columns need, relatively."""

        def enough(x: float) -> bool:
            scale = math.exp(-2 * x)
            less = replace(columns, chain=columns.chain * scale, nugget=columns.nugget * scale)
            return self.excess(lam, less) <= self.budget * (1 + 1e-6)

        return math.expm1(bisect(enough, 0.0, 3.0, width=1e-4))

    def excess(self, lam: float, columns: Columns) -> float:
        """log E W² of these columns: the less the better."""
        if (columns.chain + columns.nugget) * self.precision > 650:
            return math.inf
        if lam == 0:
            return math.log1p(math.expm1((columns.chain + columns.nugget) * self.precision) / self.steps)
        row = _rows(lam, columns, self.steps)
        return _log_moment({i: row(i) for i in self.upper}, self.steps, self.precision)


def _rows(lam: float, columns: Columns, steps: int) -> Callable[[int], Array]:
    """i → G'_ii, G'_i,i+1, …"""
    powers = lam ** np.arange(2 * steps + 1.0)
    logs = log_correlations(columns.runs) if columns.runs else None

    def row(i: int) -> Array:
        left = steps - i
        along = powers[:left] if logs is None else np.exp(logs[i:] - logs[i])
        values = columns.chain * (along - columns.tail * powers[2 * left : left : -1])
        values[0] += columns.nugget
        return np.asarray(values)

    return row


def _independent(inner: _Inner) -> Dominating:
    """λ = 0: a diagonal that outweighs its rows; for diagonal C that loses nothing but what differs along it."""
    sums = np.zeros(inner.steps)
    for i, row in inner.from_last():
        sums[i] += float(row.sum())
        sums[i + 1 :] += row[1:]
    return Dominating(0.0, Columns(0.0, float(sums.max()) * SAFETY))


def _by_entries(inner: _Inner, goal: _Goal) -> Dominating:
    """The best λ, chain and tail, with the least nugget that makes up for the entries that are too small."""
    largest, b = max(float(row[0]) for row in goal.upper.values()), inner.steps

    def chosen(x: Array) -> tuple[float, Columns]:
        tail = 1 / (1 + math.exp(-float(x[2])))
        return _lam(x[0]), Columns(largest * math.exp(min(float(x[1]), 1.0)), 0.0, tail)

    def score(x: Array) -> float:
        """With the nugget that the sampled rows ask for."""
        lam, columns = chosen(x)
        above, nugget = _rows(lam, columns, b), 0.0
        for i, row in goal.upper.items():
            lacking = row - above(i)
            nugget = max(nugget, float(lacking[0]) + 2 * float(np.maximum(lacking[1:], 0.0).sum()))
        return goal.excess(lam, replace(columns, nugget=nugget))

    starts = [
        np.array([math.log(-math.log1p(-lam)), math.log(share), tail])
        for lam in _LAMBDAS
        for share in (0.4, 0.6, 0.8, 1.0)
        for tail in (-3.0, 0.5)
    ]
    lam, columns = chosen(_improve(score, starts, 0.1))
    above, sums = _rows(lam, columns, b), np.zeros(b)
    for i, row in inner.from_last():
        lacking = row - above(i)
        off = np.maximum(lacking[1:], 0.0)
        sums[i] += float(lacking[0]) + float(off.sum())
        sums[i + 1 :] += off
    return Dominating(lam, Columns(columns.chain * SAFETY, max(float(sums.max()), 0.0) * SAFETY, columns.tail))


def _by_cosines(inner: _Inner, goal: _Goal) -> Dominating:
    """The best λ, with chain, nugget and cosines from a linear program whose costs are E W²'s, linearised twice."""
    b, needed = inner.steps, inner.by_distance
    distance = np.arange(float(b))
    pairs = np.concatenate([[1 / b], 2 * (b - distance[1:]) / b**2])
    reach = 4 * int(np.sum(needed > 0.05 * needed[0])) + 4
    angles = math.pi * np.arange(_FREQUENCIES + 1) / _FREQUENCIES
    near = distance[:reach]
    taper = 1 - near / reach
    cosines = taper[:, None] * np.cos(np.outer(near, angles))
    looked_at = slice(1, min(len(near), 4 * _FREQUENCIES))

    def columns(lam: float) -> Columns:
        powers = lam**distance
        # What the chain has beyond the cosines is at least what is needed, and so on the diagonal.
        off = np.column_stack([-powers[looked_at], 0 * powers[looked_at], cosines[looked_at]])
        left = np.vstack([off, np.concatenate([[-1.0, -1.0], np.ones(len(angles))])])
        right = -np.append(needed[looked_at], needed[0])
        at, best = needed, Columns(0.0, float(needed[0] + 2 * needed[1:].sum()))
        for _ in range(2):
            weights = pairs * np.exp(np.minimum(at * goal.precision, 600.0))
            costs = np.concatenate([[float(weights @ powers), weights[0]], np.zeros(len(angles))])
            found = linprog(costs / costs[0], A_ub=left, b_ub=right, bounds=(0, None), method="highs")
            if not found.success:
                return best
            chain, shares = float(found.x[0]), np.maximum(found.x[2:], 0.0)
            lacking = needed - chain * powers
            lacking[: len(near)] += cosines @ shares + (1e-12 + 1e-15 * near) * shares.sum()
            nugget = max(float(lacking[0]) + 2 * float(np.maximum(lacking[1:], 0.0).sum()), 0.0)
            best = min(best, Columns(chain, nugget), key=lambda choice: goal.excess(lam, choice))
            at = chain * powers
            at[0] += nugget
        return best

    def score(x: Array) -> float:
        lam = _lam(x[0])
        return goal.excess(lam, columns(lam))

    lam = _lam(_improve(score, [np.array([math.log(-math.log1p(-lam))]) for lam in _LAMBDAS], 0.1, most=24)[0])
    best = columns(lam)
    return Dominating(lam, Columns(best.chain * SAFETY, best.nugget * SAFETY))


def _lam(x: float) -> float:
    """λ from a number that is searched over all reals: one that the accountants take."""
    return min(max(-math.expm1(-math.exp(min(float(x), 1.9))), SMALLEST_LAMBDA), 0.9985)


def _by_norm(inner: _Inner, goal: _Goal) -> Dominating:
    """The best λ and φ, with the least scale s² ≥ ‖C C'⁻¹‖²."""

    def scale(lam: float, zero: float, grid: int) -> float:
        """max |r|² over the unit circle, r the first b coefficients of c(x)(1 − λx)/(1 − φx).

        |r|² is a trigonometric polynomial of degree below b. Where it is largest it falls no faster than cos(bω)
        (M. Riesz), so the grid point nearest to there, at most π/M away, has at least cos(πb/M) of it.
        """
        ratio = lfilter([1.0, -lam], [1.0, -zero], inner.column)
        points = 1 << (grid * inner.steps - 1).bit_length()
        rounding = 1e-13 * float(inner.column.sum()) / (1 - zero)  # of the filter, which cancels, and of the transform
        largest = (float(np.max(np.abs(np.fft.rfft(ratio, points)))) + rounding) ** 2
        return largest / math.cos(math.pi * inner.steps / points) * SAFETY

    def chosen(x: Array) -> tuple[float, float]:
        lam = _lam(x[0])
        return lam, lam / (1 + math.exp(-float(x[1])))

    def score(x: Array) -> float:
        lam, zero = chosen(x)
        return goal.excess(lam, Columns.of(lam, zero, scale=scale(lam, zero, 8)))

    starts = [
        np.array([math.log(-math.log1p(-lam)), share]) for lam in _LAMBDAS for share in (-3.0, -1.0, 0.0, 1.0, 2.0)
    ]
    lam, zero = chosen(_improve(score, starts, 0.2))
    return Dominating(lam, Columns.of(lam, zero, scale=scale(lam, zero, GRID)))


def _improve(score: Callable[[Array], float], starts: list[Array], step: float, *, most: int = 180) -> Array:
    """The best of ``starts``, improved by Nelder and Mead's search: deterministic."""
    best = min(starts, key=score)
    simplex = np.vstack([best] + [best + step * row for row in np.eye(len(best))])
    options = {"initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-6, "maxfev": most}
    return np.asarray(minimize(score, best, method="Nelder-Mead", options=options).x)
