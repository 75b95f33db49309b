"""Figures of the planner, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backend_bases import FigureCanvasBase

from lambdacgd.accounting import accountant_for
from lambdacgd.accounting.certificate import SMALLEST_EPSILON
from lambdacgd.mechanisms import LambdaCGD, maxse, rmse
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins
from lambdacgd.validation import InvalidInput


def check_ending(path: Path) -> None:
    """Refuse a kind of file that cannot be drawn."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InvalidInput("plot", str(path), f"its ending must be one of {', '.join(sorted(known))}")


@contextmanager
def _figure(path: Path, **how: Any) -> Iterator[Any]:
    check_ending(path)
    figure, axes = plt.subplots(**how)
    try:
        yield axes
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def plan_figure(plan: Plan, path: Path) -> None:
    """RMSE and MaxSE over λ with the plan's own point and, where it is computed exactly, δ over ε at the plan's σ."""
    bounds = _trade_off(plan)
    if not bounds:
        with _figure(path, figsize=(6, 4)) as axes:
            _errors_over_lambda(plan, axes)
        return
    with _figure(path, ncols=2, figsize=(11, 4)) as (left, right):
        _errors_over_lambda(plan, left)
        right.semilogy(*zip(*bounds, strict=True), label="the larger of both directions")
        right.plot(plan.epsilon, plan.delta, "k*", label="this plan")
        right.set_xlabel("ε")
        right.set_ylabel("δ, an upper bound")
        right.set_title(f"privacy at σ = {plan.sigma:.4g}")
        right.legend()


def _trade_off(plan: Plan) -> list[tuple[float, float]]:
    """(ε, δ) at the plan's σ where they are computed exactly; nothing elsewhere."""
    if not isinstance(plan.sampling, BallsInBins) or not plan.certificate.method.startswith("transfer-matrix"):
        return []
    epsilons = [float(e) for e in np.linspace(0.25, 1.25, 11) * plan.epsilon if SMALLEST_EPSILON <= e <= 20]
    return accountant_for(plan.mechanism, plan.sampling).curve(plan.sigma, epsilons, plan.delta)


def _errors_over_lambda(plan: Plan, axes: Any) -> None:
    memories = np.geomspace(1, max(10.0, 4.0 * plan.steps), 200)  # 1/(1−λ), the paper's scale
    scale = plan.sigma / plan.sensitivity
    for name, error in {"RMSE": rmse, "MaxSE": maxse}.items():
        values = [
            error(LambdaCGD(1 - 1 / memory), plan.horizon, restart_every=plan.restart_every) * scale
            for memory in memories
        ]
        (line,) = axes.loglog(memories, values, label=f"{name} of λCGD at this σ / sensitivity")
        best = int(np.argmin(values))
        axes.plot(memories[best], values[best], "o", color=line.get_color())
    if isinstance(plan.mechanism, LambdaCGD):
        here = 1 / (1 - plan.mechanism.lam)
        axes.plot([here, here], [plan.rmse, plan.maxse], "k*", label=f"this plan, λ = {plan.mechanism.lam:.4g}")
    axes.set_xlabel("1 / (1 − λ)")
    axes.set_ylabel("error, in clipping norms")
    axes.set_title(f"N = {plan.examples}, b = {plan.steps_per_epoch}, k = {plan.epochs}, ε = {plan.epsilon:g}")
    axes.legend()


def comparison_figure(plans: list[Plan], path: Path) -> None:
    """RMSE of each mechanism as bars: blue where no noise is stored, grey where it is."""
    from lambdacgd.cli.planner import describe

    ordered = sorted(plans, key=lambda plan: -plan.rmse)
    labels = [f"{describe(plan.mechanism)}, {plan.sampling.kind.split(', ')[-1]}" for plan in ordered]
    colors = ["tab:blue" if plan.mechanism.regenerates(plan.block.steps) else "tab:gray" for plan in ordered]
    with _figure(path, figsize=(8, 0.45 * len(plans) + 1.5)) as axes:
        axes.barh(labels, [plan.rmse for plan in ordered], color=colors)
        for row, plan in enumerate(ordered):
            axes.text(plan.rmse, row, f" {plan.rmse:.3g}", va="center")
        axes.set_xlabel("RMSE in clipping norms; blue: no noise stored")
        axes.set_title(f"ε = {plans[0].epsilon:g}, δ = {plans[0].delta:g}, n = {plans[0].steps}")
        axes.margins(x=0.12)
