"""Does a run do what its plan says? Tests of what was released; docs/audit-laws.md has the law of each if it does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg, stats

from lambdacgd.auditing.bounds import Array, in_blocks, likelihood_ratios, strategy_matrix
from lambdacgd.auditing.canaries import LINEAR, Recording
from lambdacgd.clipping.bounds import room_below, sensitivity_tolerance
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson
from lambdacgd.training.step import floating_point_of

LOWEST_WEIGHT = 0.99
"""Of what clipping leaves of ζ: automatic clipping weighs a little less."""
LARGEST_LAG = 64
"""Correlations of the noise are tested between steps up to this far apart."""
SHIFTS = (1, 2, 16, 256)
"""Correlations of the noise are tested between coordinates this far apart."""
SMALLEST_BIN = 20
"""Pearson's test joins bins until this many examples are expected in each."""
KOLMOGOROV_SAMPLE = 100_000
"""At most this many numbers are tested against the normal law."""


class Check(NamedTuple):
    """One test: what was measured, and how likely something as extreme is if the run does what the plan says."""

    name: str
    p_value: float
    measured: str


class Measured:
    """A recording with what the tests ask of it.

    Attributes:
        first: What the first step releases, in units of Δ: multiples of it (docs/noise-proof.md).
        taking_part: X, true where a canary that is in takes part in a step.
        weight: a, an example's mean contribution in units of ζ, between what training leaves of ζ and 1.
        present: Which canaries were in.
        residual: R = W − aCX/σ, independent standard normals if the run does what the plan says.
        scores: The canaries' log likelihood ratios.
        drawn: How many examples each step trained on.
        times: For each epoch, how often each example was seen.
        bins: For each epoch, the step in it (from 0) at which each example was seen; −1 where none or several.
    """

    def __init__(self, plan: Plan, recording: Recording, max_grad_norm: float) -> None:
        matrix = strategy_matrix(plan)
        whitened = in_blocks(plan, matrix, recording.released) / (max_grad_norm * plan.sigma)
        cost, scales = floating_point_of(plan, whitened.shape[1] + 1), plan.mechanism.column_scales(plan.block.steps)
        assert cost is not None  # of one parameter more: the embedding has a row for padding
        size = max_grad_norm * plan.sigma * (1.0 if scales is None else float(scales[0])) * (1 + 2.0**-50)
        self.first = np.ldexp(recording.released[0], cost.fineness - math.frexp(size)[1])
        seen = [_without_stand_in(plan, recording.seen, step) for step in range(plan.steps)]
        self.present = recording.present
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
            self.taking_part[step, column[ids][column[ids] >= 0]] = True
        self.bins[self.times != 1] = -1
        signal = in_blocks(plan, matrix, self.taking_part.astype(np.float64)) / plan.sigma
        fitted = float((whitened * signal).sum() / max(float((signal**2).sum()), 1e-300))
        self.weight = min(max(fitted, _least_weight(plan)), 1.0)
        self.residual: Array = whitened - self.weight * signal
        places = self.bins[0, recording.ids] if isinstance(plan.sampling, Cyclic) else None
        if isinstance(plan.sampling, Poisson):
            places = recording.ids % max(1, plan.sampling.groups)
        self.scores = likelihood_ratios(plan, whitened, places)


def _least_weight(plan: Plan) -> float:
    """What clipping leaves of ζ in large batches (float32 sums)."""
    return 1 / room_below(sensitivity_tolerance(torch.float32), plan.batch_size)


def _without_stand_in(plan: Plan, seen: Sequence[NDArray[np.int64]], step: int) -> NDArray[np.int64]:
    """The ids of a step, without example 0 where it only stood in for an empty batch.

    Where nobody takes part, loaders hand out example 0 at weight zero. It is then seen elsewhere in the epoch, too.
    """
    ids = seen[step]
    if not (len(ids) == 1 and ids[0] == 0) or isinstance(plan.sampling, Cyclic):
        return ids
    first = step - step % plan.steps_per_epoch
    others = [seen[t] for t in range(first, first + plan.steps_per_epoch) if t != step]
    return ids[:0] if isinstance(plan.sampling, Poisson) or any(0 in other for other in others) else ids


def checks(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    """All tests of runs that are whole. See docs/audit-laws.md for statistics and laws."""
    noise = (_noise, _on_lattice, _over_steps, _over_coordinates, _over_runs)
    for test in (*noise, _weights, _participation, _bins, _division):
        yield from test(plan, runs)


def _noise(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    by_step = np.sum([(run.residual**2).sum(1) for run in runs], axis=0)
    count = runs[0].residual.shape[1] * len(runs)  # of each step
    ratio = math.sqrt(by_step.sum() / (plan.steps * count))
    p_value = _two_sided(stats.chi2, by_step.sum(), plan.steps * count)
    yield Check("noise scale", p_value, f"σ is {ratio:.5f} of the plan's")
    p_values = [_two_sided(stats.chi2, value, count) for value in by_step]
    worst = int(np.argmin(p_values))
    measured = f"at worst {math.sqrt(by_step[worst] / count):.5f} of the plan's, at step {worst + 1}"
    yield Check("noise scale by step", _bonferroni(p_values), measured)
    largest = max(float(np.abs(run.residual).max()) for run in runs)
    p_value = min(1.0, plan.steps * count * float(_normal_p(largest)))
    yield Check("largest residual", p_value, f"{largest:.2f} standard deviations")
    values = np.concatenate([run.residual.ravel() for run in runs])
    result = stats.kstest(values[:: -(-len(values) // KOLMOGOROV_SAMPLE)], "norm")
    yield Check("law of the noise", float(result.pvalue), f"distance {result.statistic:.5f} to N(0, 1)")


def _on_lattice(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    """Weights are float32: of a number below 2¹⁶Δ that leaves an error below Δ/16."""
    numbers = np.concatenate([run.first[np.abs(run.first) < 2.0**16] for run in runs])
    misses = int((np.abs(numbers - np.round(numbers)) > 1 / 16).sum())
    yield Check("lattice", float(misses == 0), f"{misses} of {len(numbers)} first releases lie beside it")


def _over_steps(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    n = plan.steps
    if n < 2:
        return
    worst, pair, lags = 0.0, (0, 0), np.zeros(min(LARGEST_LAG, n - 1))
    for run in runs:
        products = run.residual @ run.residual.T
        normal = np.tril(products / np.sqrt(np.diag(products))[None, :], -1)  # of rows t and s < t
        later, earlier = np.unravel_index(int(np.argmax(np.abs(normal))), normal.shape)
        if abs(normal[later, earlier]) > worst:
            worst, pair = float(abs(normal[later, earlier])), (int(earlier) + 1, int(later) + 1)
        lags += [np.trace(normal, -lag) / math.sqrt((n - lag) * len(runs)) for lag in range(1, len(lags) + 1)]
    measured = f"correlation {worst / math.sqrt(runs[0].residual.shape[1]):.4f} at worst, of steps {pair}"
    yield Check("noise over steps", min(1.0, len(runs) * n * (n - 1) / 2 * float(_normal_p(worst))), measured)
    lag = int(np.argmax(np.abs(lags)))
    yield Check("noise over steps, by lag", _bonferroni(_normal_p(lags)), f"{lags[lag]:+.2f} at lag {lag + 1}")


def _over_coordinates(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    count = runs[0].residual.shape[1]
    shifts = [shift for shift in (*SHIFTS, count - min(LINEAR, count // 2)) if shift < count]  # the last: by layers
    normal = np.zeros(len(shifts))
    for run in runs:
        lengths = np.sqrt((run.residual**2).sum(0))
        for row, shift in enumerate(shifts):
            products = (run.residual[:, shift:] * run.residual[:, :-shift]).sum(0)
            normal[row] += (products / lengths[:-shift]).sum() / math.sqrt(len(products) * len(runs))
    worst = int(np.argmax(np.abs(normal)))
    measured = f"{normal[worst]:+.2f} at shift {shifts[worst]}"
    yield Check("noise over coordinates", _bonferroni(_normal_p(normal)), measured)


def _over_runs(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    if len(runs) < 2:
        return
    pairs = [(run.residual, next_run.residual) for run, next_run in pairwise(runs)]
    normal = np.concatenate([(first * second).sum(1) / np.sqrt((first**2).sum(1)) for first, second in pairs])
    together = normal.sum() / math.sqrt(len(normal))
    measured = f"{together:+.2f} over all steps, {np.abs(normal).max():.2f} at worst"
    yield Check("noise over runs", _bonferroni([_bonferroni(_normal_p(normal)), _normal_p(together)]), measured)


def _weights(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    shape, matrix = (plan.epochs, plan.steps_per_epoch), strategy_matrix(plan)
    lengths = np.tile((matrix**2).sum(0), plan.steps // len(matrix))  # ‖C[:, t]‖² for each step
    on_time, late = np.zeros((2, 2, plan.epochs))  # for each epoch ⟨CX, R⟩, on time as if a = 1, and ‖CX‖²
    for run in runs:
        scores = in_blocks(plan, matrix.T, run.residual)
        later = [np.concatenate([values[1:], np.zeros_like(values[:1])]) for values in (scores, lengths)]
        for sums, (products, sizes) in ((on_time, (scores, lengths)), (late, later)):
            sums[0] += (run.taking_part * products).sum(1).reshape(shape).sum(1)
            sums[1] += (run.taking_part.sum(1) * sizes).reshape(shape).sum(1)
        on_time[0] -= (1 - run.weight) * (run.taking_part.sum(1) * lengths).reshape(shape).sum(1) / plan.sigma
    excess, size = on_time
    if not size.all():
        yield Check("weight in an epoch", 0.0, "in some epoch no canary took part")
        return
    above = stats.norm.sf(excess / np.sqrt(size))
    lowest = LOWEST_WEIGHT * _least_weight(plan)
    below = stats.norm.cdf((excess + (1 - lowest) * size / plan.sigma) / np.sqrt(size))
    worst = int(np.argmin(np.minimum(above, below)))
    weight = f"{1 + plan.sigma * excess[worst] / size[worst]:.4f} ± {plan.sigma / math.sqrt(size[worst]):.4f}"
    measured = f"{weight} clipping norms at worst, in epoch {worst + 1}"
    yield Check("weight in an epoch", _bonferroni([*above, *below]), measured)
    excess, size = late[:, late[1] > 0]
    if len(size):
        normal = excess / np.sqrt(size)
        worst = int(np.argmax(np.abs(normal)))
        measured = f"{plan.sigma * excess[worst] / size[worst]:+.4f} ± {plan.sigma / math.sqrt(size[worst]):.4f}"
        yield Check("weight a step late", _bonferroni(_normal_p(normal)), f"{measured} clipping norms at worst")


def _participation(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    drawn, times = np.array([run.drawn for run in runs]), np.array([run.times for run in runs])
    if isinstance(plan.sampling, Poisson):
        groups, ids = max(1, plan.sampling.groups), np.arange(plan.examples)
        coins = sum(len(range(step % groups, plan.examples, groups)) for step in range(plan.steps))
        p_value = _binomial(int(drawn.sum()), len(runs) * coins, plan.sampling.rate)
        yield Check("participation", p_value, f"{drawn.mean():.2f} examples a step, {plan.batch_size:.2f} planned")
        if groups > 1:
            first = plan.steps_per_epoch * np.arange(plan.epochs)[:, None]  # the first step of each epoch
            wrong = sum(int(((run.bins >= 0) & ((first + run.bins - ids) % groups != 0)).sum()) for run in runs)
            yield Check("groups", float(wrong == 0), f"{wrong} times an example was seen outside its group")
        return
    cyclic = isinstance(plan.sampling, Cyclic)
    wrong = int((times > 1).sum() + (drawn != plan.batch_size).sum() if cyclic else (times != 1).sum())
    yield Check("participation", float(wrong == 0), f"{wrong} times an example was not seen once in an epoch")


def _bins(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    b, k, examples = plan.steps_per_epoch, plan.epochs, plan.examples
    if isinstance(plan.sampling, Poisson) or b == 1:
        return
    bins = isinstance(plan.sampling, BallsInBins)
    fresh = plan.restart_every is not None
    lags = range(1, k)
    same = [sum(int((run.bins[lag:] == run.bins[:-lag]).sum()) for run in runs) for lag in lags]
    tried = [len(runs) * examples * (k - lag) for lag in lags]
    if same and fresh:
        p_values = [_binomial(count, total, 1 / b) for count, total in zip(same, tried, strict=True)]
        measured = f"{sum(same) / sum(tried):.4f} of the examples stay, 1/b = {1 / b:.4f}"
        yield Check("bins over epochs", _bonferroni(p_values), measured)
    elif same:
        moved = sum(tried) - sum(same)
        yield Check("bins over epochs", float(moved == 0), f"{moved} times an example changed its place")
    epochs = k if fresh else 1
    joined = -(-b * SMALLEST_BIN // examples)  # neighbouring bins are counted together, this many at a time
    if bins and b // joined >= 2:
        expected = np.bincount(np.arange(b) // joined) * examples / b
        counts = np.array([run.drawn.reshape(k, b)[:epochs] for run in runs])
        sizes = np.add.reduceat(counts, np.arange(0, b, joined), axis=2)
        pearson, freedom = ((sizes - expected) ** 2 / expected).sum(), len(runs) * epochs * (len(expected) - 1)
        measured = f"χ² = {pearson:.1f} with {freedom} degrees of freedom"
        yield Check("bins are uniform", _two_sided(stats.chi2, pearson, freedom), measured)
    if bins and len(runs) > 1:
        kept = sum(int((run.bins[:epochs] == next_run.bins[:epochs]).sum()) for run, next_run in pairwise(runs))
        total = (len(runs) - 1) * epochs * examples
        measured = f"{kept / total:.4f} of the examples in the same place, 1/b = {1 / b:.4f}"
        yield Check("bins over runs", _binomial(kept, total, 1 / b), measured)


def _division(plan: Plan, runs: Sequence[Measured]) -> Iterator[Check]:
    inverse = linalg.inv(strategy_matrix(plan))
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


def _two_sided(law: Any, value: float, *parameters: float) -> float:
    return float(min(1.0, 2 * min(law.cdf(value, *parameters), law.sf(value, *parameters))))


def _binomial(count: int, trials: int, share: float) -> float:
    below, above = stats.binom.cdf(count, trials, share), stats.binom.sf(count - 1, trials, share)
    return float(min(1.0, 2 * min(below, above)))


def _normal_p(values: Any) -> Any:
    """Two-sided p-values of standard normals."""
    return 2 * stats.norm.sf(np.abs(values))


def _bonferroni(p_values: Any) -> float:
    """One p-value for several tests: the smallest of theirs, times their number."""
    return float(min(1.0, len(p_values) * np.min(p_values)))
