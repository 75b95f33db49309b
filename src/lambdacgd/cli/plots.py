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

from lambdacgd.mechanisms import LambdaCGD, error_norms, maxse, rmse
from lambdacgd.planning import Plan
from lambdacgd.validation import InvalidInput


@contextmanager
def _figure(path: Path, **how: Any) -> Iterator[Any]:
    known = plt.gcf().canvas.get_supported_filetypes()
    plt.close()
    if path.suffix.lstrip(".") not in known:
        raise InvalidInput("plot", str(path), f"its ending must be one of {', '.join(sorted(known))}")
    figure, axes = plt.subplots(**how)
    try:
        yield axes
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)


def plan_figure(plan: Plan, path: Path) -> None:
    """RMSE and MaxSE of λCGD over λ without amplification, and the plan's own point."""
    horizon = plan.horizon
    memories = np.geomspace(1, max(10.0, 4.0 * horizon.steps), 200)  # 1/(1−λ), the paper's scale
    curves = {"RMSE": rmse, "MaxSE": maxse}
    scale = plan.sigma / plan.sensitivity
    with _figure(path, figsize=(6, 4)) as axes:
        for name, error in curves.items():
            values = [error(LambdaCGD(1 - 1 / memory), horizon) * scale for memory in memories]
            (line,) = axes.loglog(memories, values, label=f"{name}, all λ at this plan's σ / sens")
            best = int(np.argmin(values))
            axes.plot(memories[best], values[best], "o", color=line.get_color())
        if isinstance(plan.mechanism, LambdaCGD):
            mean, largest = error_norms(plan.mechanism, plan.steps)
            here = 1 / (1 - plan.mechanism.lam)
            axes.plot(
                [here, here],
                [mean * plan.sigma, largest * plan.sigma],
                "k*",
                label=f"this plan, λ = {plan.mechanism.lam:.4g}",
            )
        axes.set_xlabel("1 / (1 − λ)")
        axes.set_ylabel("error, in clipping norms")
        axes.set_title(f"N = {plan.examples}, b = {plan.steps_per_epoch}, k = {plan.epochs}, ε = {plan.epsilon:g}")
        axes.legend()


def comparison_figure(plans: list[Plan], path: Path) -> None:
    """RMSE of each mechanism as bars: blue where no noise is stored, grey where it is."""
    from lambdacgd.cli.planner import describe

    ordered = sorted(plans, key=lambda plan: -plan.rmse)
    labels = [f"{describe(plan.mechanism)} ({plan.sampling.name})" for plan in ordered]
    colors = ["tab:blue" if plan.mechanism.regenerates(plan.steps) else "tab:gray" for plan in ordered]
    with _figure(path, figsize=(8, 0.45 * len(plans) + 1.5)) as axes:
        axes.barh(labels, [plan.rmse for plan in ordered], color=colors)
        for row, plan in enumerate(ordered):
            axes.text(plan.rmse, row, f" {plan.rmse:.3g}", va="center")
        axes.set_xlabel("RMSE, in clipping norms (blue: no noise stored, grey: needs buffers)")
        axes.set_title(f"ε = {plans[0].epsilon:g}, δ = {plans[0].delta:g}, n = {plans[0].steps}")
        axes.margins(x=0.12)
