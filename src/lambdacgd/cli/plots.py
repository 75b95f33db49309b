"""The figure of ``lambdacgd compare``. Only this module needs matplotlib; it draws to files, without a display."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from lambdacgd.errors import InvalidInput
from lambdacgd.planning import Plan


def check_ending(path: Path) -> None:
    """Refuse a kind of file that cannot be drawn."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InvalidInput("plot", str(path), f"its ending must be one of {', '.join(sorted(known))}")


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
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
