"""δ(ε) at many ε for one σ: neighbouring ε share one lattice and one set of transforms, a panel at a time."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.evaluate import (
    Evaluation,
    add_at,
    evaluate_add,
    governing_budget,
    jensen,
    remove_at,
)
from lambdacgd.accounting.transfer_matrix.measure import COARSE, FINE, SLACK_SHARE, Precision, Scale, measure

if TYPE_CHECKING:
    from lambdacgd.accounting.transfer_matrix.accountant import Bound, TransferMatrix

NEGLIGIBLE = 1e-3
"""share of δ_remove below which δ_add is not made tighter"""
PANEL = 2.3
"""a panel ends where δ has fallen by e^PANEL"""
WIDEST_PANEL = 0.6
"""or where ε has grown by this much"""


def evaluate_curve(accountant: TransferMatrix, sigma: float, epsilons: list[float], *, tight_add: bool) -> list[Bound]:
    """Bounds in the order of ``epsilons``; both directions tight if ``tight_add``."""
    from lambdacgd.accounting.transfer_matrix.accountant import Bound

    ordered = sorted(set(epsilons))
    if accountant.steps_per_epoch == 1 or not tight_add:
        found = {}
        for epsilon in ordered:
            found[epsilon] = accountant.delta(sigma, epsilon)
        return [found[epsilon] for epsilon in epsilons]
    remove = dict(walk(accountant, sigma, among(ordered), accountant.settle(sigma, ordered[0]), "remove"))
    chain = accountant.chain(sigma)
    by_jensen = {epsilon: jensen(chain, epsilon) for epsilon in ordered}
    # Where Jensen's bound is already negligible beside remove, nothing finer is needed.
    open_end = [e for e in ordered if by_jensen[e].delta > NEGLIGIBLE * remove[e].delta]
    add = dict(by_jensen)
    if open_end:
        scale = settle_add(accountant, sigma, open_end[0], remove[open_end[0]], by_jensen[open_end[0]])
        reached, latest = open_end[0], add[open_end[0]]
        with contextlib.suppress(AccountingError):  # from there on Jensen's bound stands
            for epsilon, value in walk(accountant, sigma, among(open_end), scale, "add"):
                latest = min(value, add[epsilon], key=lambda item: item.delta)
                reached, add[epsilon] = epsilon, latest
                if latest.delta <= NEGLIGIBLE * remove[epsilon].delta:
                    break
        # δ_add falls with ε, so the last value bounds all later ones.
        for epsilon in ordered:
            if epsilon > reached:
                add[epsilon] = min(latest, add[epsilon], key=lambda item: item.delta)
    bounds = {}
    for epsilon in ordered:
        one, other = remove[epsilon], add[epsilon]
        budget = governing_budget(one, other)
        details: dict[str, str | float] = {"remove": one.method, "add": other.method}
        bounds[epsilon] = Bound(sigma, epsilon, one.delta, other.delta, budget, details, one.slope)
    return [bounds[epsilon] for epsilon in epsilons]


def walk(
    accountant: TransferMatrix,
    sigma: float,
    choose: Callable[[float | None, float], list[float]],
    scale: Scale,
    direction: Literal["remove", "add"],
    *,
    precision: Callable[[float], Precision] = lambda delta: FINE,
    slack: float = SLACK_SHARE,
    floor: float = 0.0,
) -> Iterator[tuple[float, Evaluation]]:
    """Panel after panel; a panel that turns out steeper than expected is cut short and the next starts there.

    ``choose(latest, slope)`` names increasing ε beyond the latest one done, those of one panel at most being used, or
    none to end. ``precision`` is asked for at the size of δ where a panel starts. Values below ``floor`` need no
    relative accuracy: slack of that size is accepted there.
    """
    evaluate: Callable[..., Iterator[Evaluation]] = remove_at if direction == "remove" else add_at
    sign = 1.0 if direction == "remove" else -1.0
    done, tries = None, 0
    while ahead := choose(done, scale.slope):
        first = ahead[0]
        panel = [e for e in ahead if (e - first) * scale.slope <= PANEL and e - first <= WIDEST_PANEL]
        scales = [
            Scale(math.exp(sign * e), max(scale.delta * math.exp(-scale.slope * (e - first)), floor), scale.slope)
            for e in panel
        ]
        chain, _ = accountant.working_chain(sigma, scale.slope, coarse=False)
        how = precision(scales[0].delta)
        # The law is tuned to the narrowest smoothing and the smallest δ of the panel.
        finest = Scale(min(s.strike for s in scales), scales[-1].delta, scale.slope)
        law = measure(chain, finest, how, direction=direction, device=accountant.device_asked_for())
        latest = None
        for epsilon, value in zip(panel, evaluate(law, scales, how), strict=True):
            if value.added > slack * value.delta + floor:
                break
            yield epsilon, value
            latest, done, tries = (epsilon, value), epsilon, 0
        if latest is not None:
            following = choose(done, scale.slope)
            step = following[0] - latest[0] if following else 0.0
            slope = max(latest[1].slope, 0.3)
            scale = Scale(
                math.exp(sign * (latest[0] + step)), max(latest[1].delta * math.exp(-slope * step), floor), slope
            )
        else:
            tries += 1
            if tries > 4:
                raise AccountingError(f"the bound at σ = {sigma:g}, ε = {first:g} stayed loose; slack {value.budget}")
            slope = min(max(value.slope, scale.slope / 3, 0.3), 3 * scale.slope)
            scale = replace(scale, delta=min(max(value.core, value.delta * 1e-3, floor), 1.0), slope=slope)


def among(ordered: list[float]) -> Callable[[float | None, float], list[float]]:
    """``choose`` for ``walk``: those of ``ordered`` that are left."""

    def left(latest: float | None, _: float) -> list[float]:
        return ordered if latest is None else ordered[bisect.bisect_right(ordered, latest) :]

    return left


def settle_add(accountant: TransferMatrix, sigma: float, epsilon: float, remove: Evaluation, best: Evaluation) -> Scale:
    """How large and how steep δ_add is at ``epsilon``, from coarse evaluations."""
    scale = Scale(math.exp(-epsilon), min(remove.delta, best.delta), max(remove.slope, 1.0))
    chain, _ = accountant.working_chain(sigma, scale.slope, coarse=True)
    for _ in range(6):
        law = measure(chain, scale, COARSE, direction="add", device=accountant.device_asked_for())
        value = evaluate_add(law, scale, COARSE)
        size = min(max(value.core, value.delta * 1e-3), 1.0)
        slope = min(max(value.slope, scale.slope / 3, 0.3), 3 * scale.slope)
        settled = abs(math.log(size / scale.delta)) < 1 and abs(math.log(slope / scale.slope)) < 0.3
        scale = replace(scale, delta=size, slope=slope)
        if settled:
            break
    return scale
