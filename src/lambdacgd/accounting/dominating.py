"""A chain with a nugget that dominates a mechanism: columns C' whose δ is at least that of the mechanism's C.

δ of Balls-in-Bins depends on the Gram matrix G of the m_j alone (what bin j adds over all epochs between two restarts),
and grows with it in two orders (Lemma 7 of docs/exact-accountant.md): entry by entry (Kahane), and by positive
semidefinite matrices (Jensen: more independent noise in the losses). So G' dominates G if G' − G is a sum of a matrix
without negative entries and a positive semidefinite one. Such G' are searched for, among those of the columns

    chain·(λ^{|s−t|} − tail·λ^{2n−s−t}) + nugget·[s = t] + shared

whose chain the transfer-matrix accountant computes, and whose shared part is a Gaussian mechanism beside it (Lemma 9b).
Where a memory has several time scales within one epoch a second chain takes the place of the shared part (Lemma 2b).

- ``_by_program``: entry by entry where G' is the larger, and where it is not, what it lacks is added to the diagonal
  (a diagonally dominant matrix is positive semidefinite), after one more positive semidefinite matrix was added to G:
  tapers (1 − |s−t|/reach)₊ times Σ_q a_q cos ω_q(s − t), a_q ≥ 0, added up over the epochs of a bin. A linear program
  finds the a_q and all parts. Every pair of bins is looked at.
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
from lambdacgd.accounting.exact.accountant import LARGEST_LAMBDA, SMALLEST_LAMBDA, cost
from lambdacgd.accounting.exact.lattice import Chain, Columns, log_correlations
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.root import bisect
from lambdacgd.accounting.scaled import followed, followed_sigma, unit_column
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import BufferedToeplitz, Horizon, Mechanism
from lambdacgd.mechanisms.error import participation_sum

LARGEST_DENSE = 6000  #: scaled columns of one epoch whose inner products are kept as a matrix
MOST_STEPS = 100_000
FEW_STEPS = 200  #: up to which columns of norm 1 are also dominated by a chain that does not follow them
MOST_PAIRWISE = 10_000  #: bins up to which every pair of them is looked at; beyond, C must be Toeplitz
NONE = 2e-3  #: a shared part below this share of the largest entry is left out
WORTH, WORTH_TWO = 0.015, 0.03  #: losses of σ from which a shared part with fixed bins, and two chains, are tried
GAIN, GAIN_TWO = 0.01, 0.03  #: of σ, for which these are taken; a plane may take six times as long as a line
HELD = 0.03  #: the slower of two chains stays for so many of its memories 1/(1 − λ)
DEAREST_PLANE = 1e9  #: operations a frequency from which two chains are not computed with
LEAST = 0.02  #: of the diagonal, of each of two chains and of their nugget, on which their lattices' spacings depend
SAFETY = 1 + 1e-9  #: for the rounding of sums of non-negative terms, and of powers of λ
GRID = 64  #: points on the unit circle a coefficient: the maximum of |r|² exceeds that on the grid by .12% at most
_SAMPLED_ROWS = 64
_FREQUENCIES, _NEAR = 48, 192
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
        norm = math.sqrt(c.chain + sum(c.second[1:]) + c.nugget + c.shared)
        parts = {"nugget": c.nugget, "tail": c.tail, "shared": c.shared}
        if c.second:
            parts |= {"second_lam": c.second[0], "second": c.second[1], "hold": float(c.hold)}
        return {"lam": self.lam, "norm": norm, **parts, "sigma_loss": self.loss}


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
    mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float, restarts: bool = True, two: bool = True
) -> Dominating:
    """The columns that should need the least noise for (ε, δ), judged by E W² after all epochs.

    Args:
        mechanism: resolved, for one epoch or, without restarts, for all. Where C has negative entries, |C| is dominated
            (Lemma 0).
        horizon: b and k.
        epsilon: ε near which they are to be good.
        delta: likewise δ.
        restarts: whether the noise restarts every epoch (fresh bins).
        two: whether there may be two chains.

    Returns:
        λ and columns for ``FreshBins``, or without restarts for ``TransferMatrix``.

    Raises:
        AccountingError: C is not finite, or an epoch has too many steps.

    Guarantee
    ---------
    Whatever is chosen, G' − G is a matrix without negative entries plus a positive semidefinite one.
    """
    block = replace(horizon, epochs=1) if restarts else horizon
    if (exact := exact_columns(mechanism, block.steps)) is not None:
        return exact
    allowed = gaussian_sigma(epsilon, delta) ** -2
    choices = []
    of_one_epoch = block.epochs == 1 and block.steps <= MOST_PAIRWISE
    if of_one_epoch and (column := unit_column(mechanism, block.steps)) is not None:
        along = followed(column, allowed / horizon.epochs)
        choices = [Dominating(along.lam, along.columns, along.loss)]
        if block.steps > FEW_STEPS:  # where memories are short beside the epoch it is the best
            return choices[0]
    inner = _Inner(mechanism, block)
    goal = _Goal(inner, allowed / horizon.epochs if restarts else allowed)  # epochs compose
    best = goal.best(choices + _ways(inner, goal, shared=restarts))
    # What is shared is composed with a whole curve of δ, and two chains take a lattice in the plane.
    if not restarts and best.loss > WORTH:
        best = goal.better(best, goal.best(_ways(inner, goal, shared=True)), GAIN)
    if two and of_one_epoch and best.loss > WORTH_TWO:
        found = _by_program(inner, goal, shared=False, one=best.lam)
        if cost(found.columns.over(found.lam, inner.bins, 1, goal.precision**-0.5), 5.0) <= DEAREST_PLANE:
            best = goal.better(best, goal.best([found]), GAIN_TWO)
    return best


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


def _ways(inner: _Inner, goal: _Goal, *, shared: bool) -> list[Dominating]:
    """One chain with a nugget, and with a shared part if that is allowed."""
    return [_by_program(inner, goal, shared=shared)] + ([_by_norm(inner, goal)] if inner.toeplitz else [])


class _Inner:
    """The inner products of the m_j of |C|: what a bin adds over all epochs of ``block``."""

    def __init__(self, mechanism: Mechanism, block: Horizon) -> None:
        column = np.abs(np.asarray(mechanism.strategy(block.steps), dtype=np.float64))
        scales = mechanism.column_scales(block.steps)
        self.block, self.column, self.toeplitz = block, column, scales is None
        self.bins = block.steps_per_epoch
        if not np.isfinite(column).all():
            raise AccountingError("C has entries that are not finite numbers")
        dense = scales is not None and block.steps * self.bins**2 > LARGEST_DENSE**3
        if block.steps > MOST_STEPS or dense:
            raise AccountingError(f"{mechanism.name} correlates {block.steps} steps, too many to certify")
        self._dense = None if scales is None else scaled_gram(column, np.asarray(scales, dtype=np.float64), block)

    def from_last(self) -> Iterator[tuple[int, Array]]:
        """(i, G_ii, G_i,i+1, …) for i = b−1 … 0, rounded up."""
        if self._dense is not None:
            for i in range(self.bins - 1, -1, -1):
                yield i, self._dense[i, i:] * SAFETY
            return
        # m_j is m_0 moved down by j, and cut off at the end.
        centre, n, b = participation_sum(self.column, self.block), self.block.steps, self.bins
        with_last, by_distance = np.correlate(centre, centre[: n - b + 1]), np.zeros(0)
        for i in range(b - 1, -1, -1):
            # One step more than row i + 1 has, and the last bin, which is one further away.
            by_distance += centre[n - 1 - i] * centre[n - b + 1 : n - i][::-1]
            by_distance = np.append(by_distance, with_last[b - 1 - i])
            yield i, by_distance * SAFETY

    @cached_property
    def by_distance(self) -> Array:
        """Those with bin 0: of Toeplitz C the largest at each distance, none being cut off."""
        if self._dense is not None:
            return np.asarray(self._dense[0] * SAFETY)
        centre = participation_sum(self.column, self.block)
        return np.asarray(np.correlate(np.append(centre, np.zeros(self.bins - 1)), centre) * SAFETY)


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
        self.block, b = inner.block, inner.bins
        rows = _spread(b)
        if b > MOST_PAIRWISE:
            self.upper = {int(i): inner.by_distance[: b - i] for i in rows}
        else:
            wanted = set(rows.tolist())
            self.upper = {i: row for i, row in inner.from_last() if i in wanted}
        self.budget, self.precision = budget, _at_budget(self.upper, b, budget)

    def best(self, choices: list[Dominating]) -> Dominating:
        """The choice of the least E W², with its loss."""
        best = min(choices, key=lambda choice: self.excess(choice.lam, choice.columns))
        return replace(best, loss=self.loss(best.lam, best.columns))

    def better(self, simple: Dominating, dear: Dominating, gain: float) -> Dominating:
        """The dear one if it gains so much."""
        return dear if dear.loss < simple.loss - gain else simple

    def loss(self, lam: float, columns: Columns) -> float:
        """About how much more σ these columns need, relatively."""

        def enough(x: float) -> bool:
            return self.excess(lam, columns.times(math.exp(-2 * x))) <= self.budget * (1 + 1e-6)

        return math.expm1(bisect(enough, 0.0, 3.0, width=1e-4))

    def excess(self, lam: float, columns: Columns) -> float:
        """log E W² of these columns: the less the better."""
        row = _rows(lam, columns, self.block)
        shared = columns.shared * self.block.epochs**2 * self.precision
        if float(row(0)[0]) * self.precision > 650:
            return math.inf
        return (
            _log_moment(
                {i: row(i) - shared / self.precision for i in self.upper}, self.block.steps_per_epoch, self.precision
            )
            + shared
        )


def _rows(lam: float, columns: Columns, block: Horizon) -> Callable[[int], Array]:
    """i → G'_ii, G'_i,i+1, … of the bins."""
    b, k = block.steps_per_epoch, block.epochs
    if columns.runs:  # of one epoch, and without a tail
        logs, nugget = log_correlations(columns.runs), columns.nugget * (np.arange(b) == 0)
        return lambda i: columns.chain * np.exp(logs[i:] - logs[i]) + nugget[: b - i] + columns.shared
    chain, d = Chain(lam, -(-b // columns.hold), k, 1.0, columns.tail), np.arange(b)
    places = d // columns.hold
    by_place = k * columns.chain * chain.covariance(d) if lam else np.where(d == 0, k * columns.chain, 0.0)
    others = np.where(d == 0, k * columns.nugget, 0.0) + k**2 * columns.shared
    if columns.second:
        others += columns.second[1] * columns.second[0] ** d
    ends = math.sqrt(k * columns.chain * columns.tail) * chain.end_effect(places)

    def row(i: int) -> Array:
        return np.asarray(by_place[places[i:] - places[i]] + others[: b - i] - ends[i] * ends[i:])

    return row


def _lacking(inner: _Inner, above: Callable[[int], Array] | None = None, less: Array | None = None) -> float:
    """What ``above``, ``less`` taken off at each distance, lacks to dominate: the largest sum of a row.

    So much on the diagonal makes it dominate. Beyond MOST_PAIRWISE bins (tail 0) the first row stands for all.
    """

    def lacking(i: int, row: Array) -> Array:
        row = row if above is None else row - above(i)
        return row if less is None else row + less[: len(row)]

    if inner.bins > MOST_PAIRWISE:
        first = lacking(0, inner.by_distance)
        return max(float(first[0]) + 2 * float(np.maximum(first[1:], 0.0).sum()), 0.0)
    sums = np.zeros(inner.bins)
    for i, row in inner.from_last():
        own = lacking(i, row)
        off = np.maximum(own[1:], 0.0)
        sums[i] += float(own[0]) + float(off.sum())
        sums[i + 1 :] += off
    return max(float(sums.max()), 0.0)


def _by_program(inner: _Inner, goal: _Goal, *, shared: bool, one: float = 0.0) -> Dominating:
    """The best λ, with the other parts and cosines from a linear program whose costs are E W²'s, linearised.

    ``shared`` allows a shared part; ``one``, the λ of the best chain, asks for two in its place (one epoch).
    """
    two = one > 0
    b, k, needed = inner.bins, inner.block.epochs, inner.by_distance
    pairwise, distance, waves = b <= MOST_PAIRWISE, np.arange(b), _waves(inner)
    least = LEAST * needed[0] if two else 0.0
    # λ = 0: a diagonal that outweighs its rows; for diagonal C that loses nothing but what differs along it.
    alone = Columns(0.0, _lacking(inner) / k)

    def columns(lams: list[float], passes: int) -> Dominating:
        hold = max(1, round(HELD / (1 - lams[0]))) if two else 1
        places, whole = distance // hold, Chain(lams[0] ** hold, -(-b // hold), k, 1.0, 1.0)
        ends = whole.end_effect(places)

        def shapes(first: NDArray[np.int64], apart: NDArray[np.int64]) -> Array:
            """What the parts have at these pairs of bins; the first part is what the tail takes away."""
            last = first + apart
            chain, others = whole.covariance(places[last] - places[first]), [lam**apart for lam in lams[1:]]
            return np.column_stack([-ends[first] * ends[last], chain, *others, apart == 0, np.ones(len(apart))])

        # Where G' and the cosines are compared: at all short distances from the first bin, and at some others.
        far = np.unique(np.geomspace(1, b, 100).astype(int))
        compared = {0: np.unique(np.concatenate([distance[:_NEAR], far - 1, b - far]))}
        for left in np.unique(np.geomspace(1, max(0.8 * b, 1), 9).astype(int)).tolist() if pairwise and b > 1 else []:
            compared[b - left] = np.unique(np.geomspace(1, left, 24).astype(int)) - 1
        # A held chain is the smallest where the earlier bin is the last of its place.
        ends_of = {i: min(i // hold * hold + hold, b) - 1 for i in compared}
        compared = {ends_of[i]: d[d < b - ends_of[i]] for i, d in compared.items()}
        rows = {i: row for i, row in inner.from_last() if i in compared} if pairwise else {0: needed}
        start = np.repeat(list(compared), [len(d) for d in compared.values()])
        apart = np.concatenate(list(compared.values()))
        right = -np.append(np.concatenate([rows[i][d] for i, d in compared.items()]), 0.0)
        # What these have beyond the cosines is at least what is needed, and so on the diagonal; a tail is at most 1.
        left = -np.hstack([shapes(start, apart), -waves[apart]])
        left = np.vstack([left, np.append([1.0, -1.0], np.zeros(left.shape[1] - 2))])
        bounds = [(0.0, None if pairwise else 0.0)] + [(least, None)] * (len(lams) + 1)
        bounds += [(0.0, None if shared else 0.0)] + [(0.0, None)] * waves.shape[1]
        parts = {i: shapes(np.full(b - i, i), distance[: b - i]) for i in goal.upper}
        above, best = dict(goal.upper), alone
        x = np.zeros(left.shape[1])
        for step in range(passes):
            costs = np.zeros(left.shape[1])
            for i, row in above.items():
                own = np.exp(np.minimum(row * goal.precision, 600.0))
                own[1:] *= 2
                costs[: parts[i].shape[1]] += own @ parts[i]
            solved = linprog(costs / costs[1], A_ub=left, b_ub=right, bounds=bounds, method="highs")
            if not solved.success:
                break
            # Frank and Wolfe: what lies between two solutions is one, and E W² is convex.
            x += 2 / (step + 2) * (np.maximum(solved.x, 0.0) - x)
            taken, chain, *second = x[: 1 + len(lams)].tolist()
            nugget, alike, *shares = x[1 + len(lams) :].tolist()
            tail = min(taken / chain, 1.0) if chain else 0.0
            made = Columns(chain / k, nugget / k, tail, alike / k**2 if alike > NONE * needed[0] else 0.0)
            if two:
                made = replace(made, second=(lams[1], second[0]), hold=hold)
            wave = waves @ shares + (2e-12 + 2e-15 * b) * sum(shares)
            lacking = _lacking(inner, _rows(whole.lam, made, inner.block), wave)
            made = replace(made, nugget=made.nugget + lacking / k)
            best = min(best, made, key=lambda choice: goal.excess(whole.lam, choice))
            above = {i: _rows(whole.lam, made, inner.block)(i) for i in above}
        return Dominating(whole.lam if best.chain else 0.0, best.times(SAFETY))

    def score(x: Array) -> float:
        if two and x[1] >= x[0]:
            return math.inf
        tried = columns([_lam(y) for y in x], 3 if two else 4)
        return goal.excess(tried.lam, tried.columns)

    scaled = [math.log(-math.log1p(-lam)) for lam in ((one, 1 - (1 - one) / 1.5) if two else _LAMBDAS[::2])]
    starts = [np.array([x, *y]) for x in scaled for y in (((x - 0.15,), (x - 0.7,), (x - 1.5,)) if two else ((),))]
    return columns([_lam(y) for y in _improve(score, starts, 0.3 if two else 0.2, most=24 if two else 16)], 12)


def _waves(inner: _Inner) -> Array:
    """Positive semidefinite matrices of bins, a column each, whose entries depend on the distance (the row) alone."""
    b, k, distance = inner.bins, inner.block.epochs, np.arange(float(inner.bins))

    def tapered(reach: int, angles: Array) -> Array:
        """Such matrices of steps, added up over the epochs of a bin: k pairs in one epoch, k − 1 across."""
        apart = np.stack([distance, b - distance])
        waves = np.maximum(1 - apart / reach, 0.0)[..., None] * np.cos(apart[..., None] * angles)
        return np.asarray(waves[0] + (1 - 1 / k) * waves[1])

    # From here on these cosines mirror what they were: what is large near by would be large far away again.
    short = tapered(min(b, _FREQUENCIES), math.pi * np.arange(_FREQUENCIES + 1) / _FREQUENCIES)
    long = tapered(b, np.geomspace(math.pi / b, 0.2, 16))
    whole = np.cos(np.outer(distance, 2 * math.pi / b * np.arange(1, min(b // 2, 8) + 1)))
    # −1 at some distances, all of them made up for on the diagonal.
    cuts = np.unique(np.geomspace(1, b, 32).astype(int))
    taken = -1.0 * ((distance[:, None] >= cuts[:-1]) & (distance[:, None] < cuts[1:]))
    taken[0] = 2.0 * np.diff(cuts)
    return np.hstack([short, long, whole, taken])


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
        steps = len(inner.column)
        points = 1 << (grid * steps - 1).bit_length()
        rounding = 1e-13 * float(inner.column.sum()) / (1 - zero)  # of the filter, which cancels, and of the transform
        largest = (float(np.max(np.abs(np.fft.rfft(ratio, points)))) + rounding) ** 2
        return largest / math.cos(math.pi * steps / points) * SAFETY

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
