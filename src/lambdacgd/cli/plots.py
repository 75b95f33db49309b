"""Figures of the planner. Only this module needs matplotlib; it draws to files, without a display."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from lambdacgd.accounting import accountant_for
from lambdacgd.errors import AccountingError, InvalidInput
from lambdacgd.mechanisms import LambdaCGD, error_norms, sensitivity
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins


def check_ending(path: Path) -> None:
    """Refuse a kind of file that cannot be drawn."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InvalidInput("plot", str(path), f"its ending must be one of {', '.join(sorted(known))}")


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plan_figure(plan: Plan, path: Path) -> None:
    """Draw RMSE and MaxSE over λ through the plan's own point and, where it is computed exactly, δ over ε at its σ.

    Args:
        plan: the plan.
        path: where the figure is written; its ending says of which kind it is.
    """
    bounds = _trade_off(plan)
    figure = Figure(figsize=(11, 4) if bounds else (6, 4))
    left, *others = figure.subplots(ncols=2 if bounds else 1, squeeze=False)[0]
    _errors_over_lambda(plan, left)
    for right in others:
        right.semilogy(*zip(*bounds, strict=True), label="the larger of both directions")
        right.plot(plan.epsilon, plan.delta, "k*", label="this plan")
        right.set_xlabel("ε")
        right.set_ylabel("δ, an upper bound")
        right.set_title(f"privacy at σ = {plan.sigma:.4g}")
        right.legend()
    _save(figure, path)


def _trade_off(plan: Plan) -> list[tuple[float, float]]:
    """(ε, δ) at the plan's σ where they are computed exactly; nothing elsewhere."""
    if not plan.certificate.method.startswith("transfer-matrix"):
        return []
    # Exact accountants take ε from .001 to 20.
    epsilons = [float(e) for e in np.linspace(0.25, 1.25, 11) * plan.epsilon if 1e-3 <= e <= 20]
    return accountant_for(plan.mechanism, plan.sampling).curve(plan.sigma, epsilons, plan.delta)


def _errors_over_lambda(plan: Plan, axes: Any) -> None:
    """RMSE and MaxSE of λCGD over λ at the plan's (ε, δ), and the plan's own point.

    Under Balls-in-Bins σ depends on λ through amplification. The curves then are estimates (~), scaled so that λCGD's
    own pass through the plan's certified point.
    """
    mechanism = plan.mechanism
    normalized = isinstance(mechanism, LambdaCGD) and mechanism.normalized is True
    amplified = isinstance(plan.sampling, BallsInBins) and math.isfinite(plan.epsilon)
    memories = np.geomspace(1, max(10.0, 4.0 * plan.steps), 200)  # 1/(1−λ), the paper's scale
    if amplified:
        closed = accountant_for(LambdaCGD(0.5, normalized), plan.sampling).first_guess(plan.epsilon, plan.delta)
        memories = np.geomspace(1, 300, 60 if closed else 9)
    here = 1 / (1 - mechanism.resolved_lam) if isinstance(mechanism, LambdaCGD) else None
    if here is not None:
        memories = np.sort(np.append(memories, here))
    errors = np.array([_errors(plan, LambdaCGD(1 - 1 / memory, normalized), amplified) for memory in memories])
    if amplified and here is not None:
        errors *= plan.rmse / errors[int(np.searchsorted(memories, here)), 0]
    kind = "~" if amplified else ""
    for values, name in zip(errors.T, ("RMSE", "MaxSE"), strict=True):
        (line,) = axes.loglog(memories, values, label=f"{kind}{name} of λCGD{', amplified' if amplified else ''}")
        best = int(np.nanargmin(values))
        axes.plot(memories[best], values[best], "o", color=line.get_color())
    if here is not None:
        label = f"this plan, λ = {mechanism.resolved_lam:.4g}"  # type: ignore[attr-defined]
        axes.plot([here, here], [plan.rmse, plan.maxse], "k*", label=label)
    axes.set_xlabel("1 / (1 − λ)" + ("\n~: estimates, scaled to the plan's certified point" if amplified else ""))
    axes.set_ylabel("error, in clipping norms")
    axes.set_title(f"N = {plan.examples}, b = {plan.steps_per_epoch}, k = {plan.epochs}, ε = {plan.epsilon:g}")
    axes.legend()


def _errors(plan: Plan, mechanism: LambdaCGD, amplified: bool) -> tuple[float, float]:
    """RMSE and MaxSE at the plan's (ε, δ), with an estimate of σ under amplification; NaN where there is none."""
    mean, largest = error_norms(mechanism, plan.steps, plan.workload, restart_every=plan.restart_every)
    if not amplified:
        sigma = sensitivity(mechanism, plan.horizon, restart_every=plan.restart_every).value
        sigma *= plan.sigma / plan.sensitivity
        return mean * sigma, largest * sigma
    accountant = accountant_for(mechanism, plan.sampling)
    try:
        sigma = accountant.first_guess(plan.epsilon, plan.delta) or accountant.quick_sigma(plan.epsilon, plan.delta)
    except AccountingError:
        sigma = math.nan
    return mean * sigma, largest * sigma


def comparison_figure(plans: list[Plan], path: Path) -> None:
    """Draw the RMSE of each plan as a bar: blue where no noise is stored, grey where it is.

    Args:
        plans: what is compared.
        path: where the figure is written; its ending says of which kind it is.
    """
    ordered = sorted(plans, key=lambda plan: -plan.rmse)
    labels = [f"{plan.mechanism}, {plan.sampling.kind.removeprefix('balls-in-bins, ')}" for plan in ordered]
    colors = ["tab:blue" if plan.mechanism.regenerates(plan.block.steps) else "tab:gray" for plan in ordered]
    figure = Figure(figsize=(8, 0.45 * len(plans) + 1.5))
    axes = figure.subplots()
    axes.barh(labels, [plan.rmse for plan in ordered], color=colors)
    for row, plan in enumerate(ordered):
        axes.text(plan.rmse, row, f" {plan.rmse:.3g}", va="center")
    axes.set_xlabel("RMSE in clipping norms\nblue: no noise stored")
    axes.set_title(f"ε = {plans[0].epsilon:g}, δ = {plans[0].delta:g}, n = {plans[0].steps}")
    axes.margins(x=0.12)
    _save(figure, path)
