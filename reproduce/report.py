"""The report of a finished run: what may be shown to anyone. No training loss, no norms, no batch sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lambdacgd.planning import Plan
from lambdacgd.training.card import to_markdown
from reproduce.config import Config

REPORT, FIGURE = "report.md", "report.png"


def noise_spectrum(plan: Plan, points: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """(frequency in cycles a step, power relative to independent noise of the same σ): |Σ_j a_j e^{−2πijf}|²."""
    column = plan.mechanism.noising(plan.block.steps)
    frequency = np.linspace(0.0, 0.5, points)
    response = np.exp(-2j * np.pi * np.outer(frequency, np.arange(len(column)))) @ column
    return frequency, np.abs(response) ** 2


def write_report(folder: Path, config: Config, plan: Plan, *, test_accuracy: float, card: dict[str, object]) -> Path:
    """``report.md`` and ``report.png`` in the run's folder."""
    _figure(folder / FIGURE, plan, test_accuracy)
    described = ", ".join(f"{k} = {v}" for k, v in plan.mechanism.to_dict().items() if k != "name" and v is not None)
    text = f"""# {config.task}: {plan.mechanism.name}

Test accuracy **{100 * test_accuracy:.2f}%** after {plan.steps} steps ({plan.epochs} epochs of {plan.steps_per_epoch},
expected batch size {plan.batch_size}).

| | |
|---|---|
| mechanism | {plan.mechanism.name}{": " + described if described else ""} |
| noise multiplier σ | {plan.sigma:.6g} |
| clipping norm | {config.clip:g} |
| learning rate | {config.lr:g} ({config.optimizer}) |
| RMSE of prefix sums | {plan.rmse:.6g} |

![Theoretical noise spectrum]({FIGURE})

The figure shows the theoretical power of the noise over frequency, relative to independent noise of the same σ: slow
drifts of the weights are where training is hurt, and where correlated noise is small.

{to_markdown(card).replace("# Privacy card", "## Privacy card")}"""
    path = folder / REPORT
    path.write_text(text, encoding="utf-8")
    return path


def _figure(path: Path, plan: Plan, test_accuracy: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    frequency, power = noise_spectrum(plan)
    axes.plot(frequency, np.maximum(power, 1e-8), label=f"{plan.mechanism.name}, σ = {plan.sigma:.3g}")
    axes.axhline(1.0, linestyle="--", color="gray", label="independent noise of the same σ")
    axes.set(
        yscale="log",
        xlabel="frequency (cycles a step)",
        ylabel="noise power, relative",
        title=f"(ε = {plan.epsilon:g}, δ = {plan.delta:g}), test accuracy {100 * test_accuracy:.1f}%",
    )
    axes.legend()
    figure.savefig(path, dpi=150)
