"""Does a run do what its plan says? Tests of what was released, each with the law that it has if so (docs/audit.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lambdacgd.auditing.bounds import Array, in_blocks, likelihood_ratios, strategy_matrix
from lambdacgd.auditing.canaries import LINEAR, Recording
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson

LOWEST_WEIGHT = 0.99
"""Automatic clipping, and the room that clipping leaves below ζ, weigh a little less than ζ."""
LARGEST_LAG = 64
SHIFTS = (1, 2, 16, 256)
SMALLEST_BIN = 20
KOLMOGOROV_SAMPLE = 100_000


@dataclass(frozen=True)
class Check:
    """One test: what was measured, and how likely something as extreme is if the run does what the plan says."""

    name: str
    p_value: float
    measured: str

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Measured:
    """A recording with what the tests ask of it.

    Attributes:
        scores: The canaries' log likelihood ratios.
        taking_part: X, 1 where a canary that is in takes part in a step.
        residual: R = W − CX/σ, independent standard normals if the run does what the plan says.
        bins: For each epoch, the step in it (from 0) at which each example was seen; −1 where none or several.
    """

    def __init__(self, plan: Plan, recording: Recording, max_grad_norm: float) -> None:
        matrix = strategy_matrix(plan)
        whitened = in_blocks(plan, matrix, recording.released) / (max_grad_norm * plan.sigma)
        seen = [_without_stand_in(plan, recording.seen, step) for step in range(plan.steps)]
        self.drawn = np.array([len(ids) for ids in seen])
        self.times = np.zeros((plan.epochs, plan.examples), dtype=np.int64)
        self.bins = np.full((plan.epochs, plan.examples), -1)
        self.taking_part = np.zeros(whitened.shape, dtype=bool)
        column = np.full(plan.examples, -1)
        column[recording.ids[recording.present]] = np.flatnonzero(recording.present)
        for step, ids in enumerate(seen):
            epoch, place = divmod(step, plan.steps_per_epoch)
            self.times[epoch, ids] += 1
            self.bins[epoch, ids] = place
            columns = column[ids]
            self.taking_part[step, columns[columns >= 0]] = True
        self.bins[self.times != 1] = -1
        self.residual: Array = whitened - in_blocks(plan, matrix, self.taking_part.astype(np.float64)) / plan.sigma
        places = self.bins[0, recording.ids] if isinstance(plan.sampling, Cyclic) else None
        self.scores = likelihood_ratios(plan, whitened, places)


def _without_stand_in(plan: Plan, seen: Sequence[NDArray[np.int64]], step: int) -> NDArray[np.int64]:
    """Where nobody takes part loaders hand out example 0 at weight zero: it is seen elsewhere in the epoch, too."""
    ids = seen[step]
    if not (len(ids) == 1 and ids[0] == 0) or isinstance(plan.sampling, Cyclic):
        return ids
    first = step - step % plan.steps_per_epoch
    others = [t for t in range(first, first + plan.steps_per_epoch) if t != step]
    elsewhere = isinstance(plan.sampling, Poisson) or any(0 in seen[t] for t in others)
    return ids[:0] if elsewhere else ids


def checks(plan: Plan, runs: Sequence[Measured]) -> list[Check]:
    """All tests of runs that are whole. See docs/audit.md for statistics and laws."""
    answers: list[Check] = []
    for test in (_noise, _over_steps, _over_coordinates, _over_runs, _weights, _bins, _division):
        answers.extend(test(plan, runs))
    return answers


def _noise(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    squares = np.array([(run.residual**2).sum(1) for run in runs])  # a row per run, a column per step
    count = runs[0].residual.shape[1]
    total, freedom = float(squares.sum()), squares.size * count
    yield Check(
        "noise scale", _two_sided(stats.chi2, total, freedom), f"σ is {math.sqrt(total / freedom):.5f} of the plan's"
    )
    by_step = squares.sum(0)
    p_values = [_two_sided(stats.chi2, value, count * len(runs)) for value in by_step]
    worst = int(np.argmin(p_values))
    ratio = math.sqrt(by_step[worst] / (count * len(runs)))
    yield Check("noise scale by step", _least(p_values), f"at worst {ratio:.5f} of the plan's, at step {worst + 1}")
    largest = max(float(np.abs(run.residual).max()) for run in runs)
    yield Check(
        "largest residual", min(1.0, freedom * 2 * stats.norm.sf(largest)), f"{largest:.2f} standard deviations"
    )
    values = np.concatenate([run.residual.ravel() for run in runs])
    values = values[:: -(-len(values) // KOLMOGOROV_SAMPLE)]
    kolmogorov = stats.kstest(values, "norm")
    yield Check("law of the noise", float(kolmogorov.pvalue), f"distance {kolmogorov.statistic:.5f} to N(0, 1)")


def _over_steps(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    n = plan.steps
    if n < 2:
        return
    worst, pair = 0.0, (0, 0)
    lags = np.zeros(min(LARGEST_LAG, n - 1))
    for run in runs:
        products = run.residual @ run.residual.T
        normal = np.tril(products / np.sqrt(np.diag(products))[None, :], -1)  # of rows t and s < t
        where = np.unravel_index(int(np.argmax(np.abs(normal))), normal.shape)
        if abs(normal[where]) > worst:
            worst, pair = float(abs(normal[where])), (int(where[1]) + 1, int(where[0]) + 1)
        lags += [np.trace(normal, -lag) / math.sqrt(n - lag) for lag in range(1, len(lags) + 1)]
    pairs = len(runs) * n * (n - 1) / 2
    correlation = worst / math.sqrt(runs[0].residual.shape[1])
    yield Check(
        "noise over steps",
        min(1.0, pairs * 2 * stats.norm.sf(worst)),
        f"largest correlation {correlation:.4f}, of steps {pair[0]} and {pair[1]}",
    )
    lags /= math.sqrt(len(runs))
    lag = int(np.argmax(np.abs(lags)))
    yield Check("noise over steps, by lag", _least(_normal(lags)), f"{lags[lag]:+.2f} at lag {lag + 1}")


def _over_coordinates(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    count = runs[0].residual.shape[1]
    shifts = [shift for shift in (*SHIFTS, count - min(LINEAR, count // 2)) if shift < count]  # the last: by layers
    if not shifts:
        return
    sums = np.zeros(len(shifts))
    for run in runs:
        lengths = np.sqrt((run.residual**2).sum(0))
        for row, shift in enumerate(shifts):
            products = (run.residual[:, shift:] * run.residual[:, :-shift]).sum(0)
            sums[row] += float((products / lengths[:-shift]).sum()) / math.sqrt(len(products))
    sums /= math.sqrt(len(runs))
    worst = int(np.argmax(np.abs(sums)))
    yield Check("noise over coordinates", _least(_normal(sums)), f"{sums[worst]:+.2f} at shift {shifts[worst]}")


def _over_runs(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    if len(runs) < 2:
        return
    normal = np.array([(a.residual * b.residual).sum(1) / np.sqrt((a.residual**2).sum(1)) for a, b in pairwise(runs)])
    together = float(normal.sum()) / math.sqrt(normal.size)
    p_value = min(1.0, 2 * min(_least(_normal(normal.ravel())), float(_normal(together))))
    yield Check("noise over runs", p_value, f"{together:+.2f} over all steps, {np.abs(normal).max():.2f} at worst")


def _weights(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    n, b, k = plan.steps, plan.steps_per_epoch, plan.epochs
    matrix = strategy_matrix(plan)
    lengths = np.tile((matrix**2).sum(0), n // len(matrix))  # ‖C[:, t]‖² for each step
    excess, size, late, late_size = np.zeros((4, k))
    for run in runs:
        scores = in_blocks(plan, matrix.T, run.residual)
        excess += (run.taking_part * scores).sum(1).reshape(k, b).sum(1)
        size += (run.taking_part.sum(1) * lengths).reshape(k, b).sum(1)
        next_scores, next_lengths = np.roll(scores, -1, axis=0), np.roll(lengths, -1)
        next_scores[-1], next_lengths[-1] = 0, 0  # nothing follows the last step
        late += (run.taking_part * next_scores).sum(1).reshape(k, b).sum(1)
        late_size += (run.taking_part.sum(1) * next_lengths).reshape(k, b).sum(1)
    if not size.all():
        yield Check("weight in an epoch", 0.0, "no canary took part in an epoch")
        return
    weight = 1 + plan.sigma * excess / size
    above = stats.norm.sf(excess / np.sqrt(size))
    below = stats.norm.cdf((excess + (1 - LOWEST_WEIGHT) * size / plan.sigma) / np.sqrt(size))
    epoch = int(np.argmin(np.minimum(above, below)))
    margin = plan.sigma / math.sqrt(size[epoch])
    yield Check(
        "weight in an epoch",
        _least(np.concatenate([above, below])),
        f"at worst {weight[epoch]:.4f} ± {margin:.4f} clipping norms, in epoch {epoch + 1}",
    )
    late, late_size = late[late_size > 0], late_size[late_size > 0]
    if len(late):
        values = late / np.sqrt(late_size)
        epoch = int(np.argmax(np.abs(values)))
        margin = plan.sigma / math.sqrt(late_size[epoch])
        measured = f"at worst {values[epoch] * margin:+.4f} ± {margin:.4f} clipping norms, from epoch {epoch + 1}"
        yield Check("weight a step late", _least(_normal(values)), measured)


def _bins(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    b, n, examples = plan.steps_per_epoch, plan.steps, plan.examples
    drawn = np.array([run.drawn for run in runs])
    if isinstance(plan.sampling, Poisson):
        p_value = _binomial(int(drawn.sum()), drawn.size * examples, 1 / b)
        yield Check(
            "participation", p_value, f"{drawn.mean():.2f} examples a step on average, {examples / b:.2f} planned"
        )
        return
    times = np.array([run.times for run in runs])
    if isinstance(plan.sampling, Cyclic):
        wrong = (times > 1).sum() + (drawn != plan.batch_size).sum()
    else:
        wrong = (times != 1).sum()
    yield Check("participation", float(wrong == 0), f"{wrong} examples not once in an epoch, {n * len(runs)} steps")
    fixed = not isinstance(plan.sampling, BallsInBins) or plan.sampling.bins == "fixed"
    same = [sum(int((run.bins[lag:] == run.bins[:-lag]).sum()) for run in runs) for lag in range(1, plan.epochs)]
    tried = [len(runs) * examples * (plan.epochs - lag) for lag in range(1, plan.epochs)]
    if fixed and same:
        moved = sum(tried) - sum(same)
        yield Check("bins over epochs", float(moved == 0), f"{moved} examples changed their place from epoch to epoch")
    elif same and b > 1:
        p_values = [_binomial(count, total, 1 / b) for count, total in zip(same, tried, strict=True)]
        lag = int(np.argmin(p_values))
        share = same[lag] / tried[lag]
        yield Check("bins over epochs", _least(p_values), f"{share:.4f} stay after {lag + 1} epochs, 1/b = {1 / b:.4f}")
    if not isinstance(plan.sampling, BallsInBins) or b == 1:
        return
    epochs = 1 if fixed else plan.epochs
    joined = -(-b * SMALLEST_BIN // examples)  # so many bins are counted as one
    if b // joined >= 2:
        expected = np.bincount(np.arange(b) // joined) * examples / b
        counts = drawn.reshape(len(runs), plan.epochs, b)[:, :epochs]
        sizes = np.add.reduceat(counts, np.arange(0, b, joined), axis=2)
        pearson = float(((sizes - expected) ** 2 / expected).sum())
        freedom = len(runs) * epochs * (len(expected) - 1)
        p_value = _two_sided(stats.chi2, pearson, freedom)
        yield Check("bins are uniform", p_value, f"χ² = {pearson:.1f} with {freedom} degrees of freedom")
    if len(runs) > 1:
        kept = sum(int((one.bins[:epochs] == other.bins[:epochs]).sum()) for one, other in pairwise(runs))
        total = (len(runs) - 1) * epochs * examples
        measured = f"{kept / total:.4f} of the examples in the same place, 1/b = {1 / b:.4f}"
        yield Check("bins over runs", _binomial(kept, total, 1 / b), measured)


def _division(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    inverse = np.linalg.inv(strategy_matrix(plan))
    covariance, size = inverse @ inverse.T, len(inverse)
    variances = np.diag(covariance)
    correlations = covariance / np.sqrt(variances[:, None] * variances[None, :])
    count = runs[0].residual.shape[1]
    score, squares, largest, effect = 0.0, 0.0, 0.0, 0.0
    for run in runs:
        h = (plan.batch_size / np.maximum(run.drawn, 1)) ** 2 - 1
        h = h - h.mean()
        sums = (in_blocks(plan, inverse, run.residual) ** 2).sum(1) / np.tile(variances, plan.steps // size)
        score += float(h @ (sums - count))
        blocks = h.reshape(-1, size)
        squares += count * float(np.einsum("bi,ij,bj->", blocks, correlations**2, blocks))
        largest = max(largest, float(np.abs(h).max() * np.abs(correlations).sum(1).max()))
        effect += count * float(h @ h)
    if effect > 0:
        # Laurent and Massart 2000: the score is Σ a_i(χ²_i − 1), so P(|score| ≥ 2√(x·Σa²) + 2x·max|a|) ≤ 2e⁻ˣ.
        root = (math.sqrt(squares + 2 * largest * abs(score)) - math.sqrt(squares)) / (2 * largest)
        measured = f"slope {score / effect:+.3f}: 0 divides by {plan.batch_size:g}, 1 by the drawn size"
        yield Check("division", min(1.0, 2 * math.exp(-(root**2))), measured)


def _two_sided(law: Any, value: float, freedom: float) -> float:
    return float(min(1.0, 2 * min(law.cdf(value, freedom), law.sf(value, freedom))))


def _binomial(count: int, trials: int, share: float) -> float:
    below, above = stats.binom.cdf(count, trials, share), stats.binom.sf(count - 1, trials, share)
    return float(min(1.0, 2 * min(below, above)))


def _normal(values: Any) -> Any:
    return 2 * stats.norm.sf(np.abs(values))


def _least(p_values: Any) -> float:
    """Bonferroni's: the smallest of several p-values, times their number."""
    return float(min(1.0, len(p_values) * np.min(p_values)))
