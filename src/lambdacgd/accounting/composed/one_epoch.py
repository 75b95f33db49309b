"""The certified δ(ε) of one epoch of λCGD, at nodes chosen as the curve is walked, as a dominating discrete pair."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Array, OneWay
from lambdacgd.accounting.composed.composition import DiscretePair, dominating_pair
from lambdacgd.accounting.exact.accountant import LARGEST_EPSILON, TransferMatrix, settled, walk
from lambdacgd.accounting.exact.evaluation import FINE, Evaluation, Precision, Scale, jensen
from lambdacgd.accounting.gaussian import one_bin_delta
from lambdacgd.errors import AccountingError

Nodes = Callable[[float | None, float], list[float]]
Values = dict[int, Evaluation]

ANALYTIC = "analytic bounds"
"""slack of the nodes where a Gaussian bound stands in for the lattice"""


@dataclass(frozen=True)
class Resolution:
    """How finely one epoch is computed. None of it affects validity."""

    smoothing: float
    """κ where δ is near 1, where most of the composed loss comes from; it widens as δ^{−1/6} to four times as much"""
    gap: float
    """distance of nodes in units of 1/slope: chords add about gap²/8 of δ between them"""
    lattice: float
    """the share of δ that the Poisson factors may add, and the shared scales"""
    slack: float
    """the share of δ that all inequalities together may add at a node"""
    work: float
    """the most real operations spent on one direction's curve; from there on analytic bounds take over"""

    def precision(self, delta: float) -> Precision:
        widening = min(4.0, max(1.0, (0.1 / delta) ** (1 / 6)))
        return replace(
            FINE, smoothing=self.smoothing * widening, lattice=self.lattice, scales=self.lattice, extended=False
        )

    def coarse_tail(self, delta: float) -> Precision:
        """The same where δ is large; below a thousandth three times the smoothing and ten times the lattice's share."""
        fine = self.precision(delta)
        if delta > 1e-3:
            return fine
        lattice = min(10 * self.lattice, 1e-2)
        return replace(fine, smoothing=min(3 * fine.smoothing, 0.4), lattice=lattice, scales=lattice)


QUICK = Resolution(smoothing=0.1, gap=0.3, lattice=2e-3, slack=0.3, work=1.5e11)
FINAL = Resolution(smoothing=0.05, gap=0.08, lattice=2e-4, slack=0.05, work=6e11)
AFFORDABLE = 4e8
"""real operations a frequency before a dominating chain is taken: a curve has a thousand frequencies"""

SMALLEST_CELL = 1e-7
"""of the losses: e^loss differs from one cell to the next by a billion units in the last place"""
CELLS = 6
"""cells of the loss grid to a gap at ε = 0, where the slope is smallest"""
ADD_FLOOR = 10.0
"""δ_add is followed down to this many floors only. It seldom decides ε, and its far tail costs the most."""
SHALLOW_FLOOR = 200.0
"""and down to this many, coarsely, where it is only to be seen that it does not decide; then analytic bounds follow"""


def one_epoch(
    accountant: TransferMatrix, sigma: float, *, floor: float, resolution: Resolution, shallow: bool = False
) -> DiscretePair:
    """A pair that dominates one epoch's (P₁, Q₁) at this σ, down to δ = ``floor`` (add: ten times that).

    ``shallow``: the lattice is left for analytic bounds earlier on the side of add, whose far tail costs the most.

    Guarantee
    ---------
    Every node's value is a proven bound: the transfer-matrix accountant's, or, where that is larger, the Gaussian
    mechanism's without amplification (convexity), or for add the Gaussian one of Lemma 6.
    """
    if accountant.epochs != 1:
        raise AccountingError("one epoch at a time is composed")
    # Where there is much noise the losses of one epoch are small: ε is near 0 where it is small beside them.
    spread = math.sqrt(accountant.chain(sigma).mean_loss[1])
    scale = accountant.settle(sigma, min(SMALLEST_EPSILON, 0.05 * spread), affordable=AFFORDABLE)
    quantum = max(resolution.gap / scale.slope / CELLS, SMALLEST_CELL)
    remove = _curve(accountant, sigma, scale, quantum, floor, floor, resolution, "remove")
    leave = (SHALLOW_FLOOR if shallow else ADD_FLOOR) * floor
    add = _curve(accountant, sigma, scale, quantum, ADD_FLOOR * floor, leave, resolution, "add")
    pair = dominating_pair(
        quantum, {i: value.delta for i, value in remove.items()}, {i: value.delta for i, value in add.items()}
    )
    return replace(pair, slack=_slack(pair, remove, add))


def _slack(pair: DiscretePair, remove: Values, add: Values) -> dict[str, Array]:
    """The nodes' budgets, as they count in h: δ_add is h's put divided by x. At most all of a value is slack."""
    slack: dict[str, Array] = {}
    for at, i in enumerate(pair.index.tolist()):
        value, unit = (remove[i], 1.0) if i > 0 else (add[-i], math.exp(i * pair.quantum))
        unit *= min(1.0, value.delta / value.added) if value.added else 0.0
        for name, amount in value.budget.items():
            slack.setdefault(name, np.zeros(len(pair.index)))[at] = unit * amount
    return slack


def _nodes(quantum: float, gap: float) -> Nodes:
    """Multiples of ``quantum``, gap/slope apart, the first one at most half as far from 0; as many as a panel takes."""

    def choose(latest: float | None, slope: float) -> list[float]:
        step = max(1, round(gap / slope / quantum))
        at = max(1, step // 2) if latest is None else round(latest / quantum) + step
        chosen: list[float] = []
        while len(chosen) < 200 and at * quantum <= LARGEST_EPSILON:
            chosen.append(at * quantum)
            at += step
        return chosen

    return choose


@lru_cache(maxsize=4)
def _curve(
    accountant: TransferMatrix,
    sigma: float,
    scale: Scale,
    quantum: float,
    floor: float,
    leave: float,
    resolution: Resolution,
    direction: OneWay,
) -> Values:
    """Bounds on δ at nodes down to ``floor``: the lattice's as far as it goes or down to ``leave``, then analytic ones.

    The last few are remembered, for an evaluation that goes deeper on the other side.
    """
    chain = accountant.chain(sigma)
    alone = math.sqrt(chain.loss_variance)

    def analytic(epsilon: float) -> float:
        gaussian = one_bin_delta(epsilon, alone)
        return gaussian if direction == "remove" else min(jensen(chain, epsilon).delta, gaussian)

    choose = _nodes(quantum, resolution.gap)
    bounds: Values = {}
    slope, latest = scale.slope, None
    with contextlib.suppress(AccountingError):  # the analytic bound takes over
        if direction == "add":
            first = choose(None, scale.slope)[0]
            guess = Scale(math.exp(-first), scale.delta, max(scale.slope, 1.0))
            scale = settled(accountant, sigma, guess, "add", affordable=AFFORDABLE)
        coarse = leave > floor
        by_size = resolution.coarse_tail if coarse else resolution.precision
        # Where even the largest δ of an epoch is small (many epochs), that one counts as near 1.
        largest = min(scale.delta / 0.1, 1.0)
        slack = QUICK.slack if coarse else resolution.slack
        for epsilon, value in walk(
            accountant,
            sigma,
            choose,
            scale,
            direction,
            precision=lambda delta: by_size(delta / largest),
            slack=slack,
            floor=leave,
            affordable=AFFORDABLE,
            work=resolution.work,
        ):
            smaller = _smaller(value, analytic(epsilon))
            bounds[round(epsilon / quantum)] = smaller
            latest, slope = epsilon, value.slope
            reached = value if direction == "remove" else smaller  # remove is followed as far as the lattice goes
            if reached.delta <= leave or value.budget["rounding"] > 0.5 * value.delta:
                break
    return _continued(bounds, analytic, choose, latest, slope, quantum, floor)


def _smaller(value: Evaluation, analytic: float) -> Evaluation:
    """The smaller bound. No more of an analytic one is slack than of the lattice's, which lies above it."""
    slack = min(analytic, value.added)
    return value if value.delta <= analytic else Evaluation(analytic, value.slope, {ANALYTIC: slack}, "analytic")


def _continued(
    bounds: Values,
    analytic: Callable[[float], float],
    choose: Nodes,
    latest: float | None,
    slope: float,
    quantum: float,
    floor: float,
) -> Values:
    """``bounds`` with further nodes, at which δ is at most an analytic bound and at most what it was before."""
    while not bounds or bounds[max(bounds)].delta > floor:
        ahead = choose(latest, slope)
        if not ahead:
            break
        latest = ahead[0]
        before = bounds[max(bounds)].delta if bounds else 1.0
        value = max(min(before, analytic(latest) * (1 + 1e-9)), 1e-300)
        bounds[round(latest / quantum)] = Evaluation(value, slope, {ANALYTIC: value}, "analytic")
    return bounds
