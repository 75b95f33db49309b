"""Figures of the docs that are drawn from plans: noise that cancels itself, and mechanisms side by side.

    python -m benchmarks.docs_figures            # writes cancelling-noise.svg and compare.png into docs/figures

The noise is drawn from the planner's own numbers (DP-SGD and λCGD at the same ε and δ), with NumPy's normal variates.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import lambdacgd as lc

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
BLUE, GREY = "#3f51b5", "#9e9e9e"


def cancelling_noise(seed: int = 4) -> None:
    """The noise of single steps, and of the sum of all steps so far with its 95% band, for DP-SGD and λCGD."""
    request = {"examples": 2000, "batch_size": 10, "epochs": 1, "epsilon": 2.0, "delta": 1e-5}
    independent = lc.plan(**request, mechanism=lc.Identity(), sampling=lc.Poisson())
    correlated = lc.plan(**request, mechanism=lc.LambdaCGD(0.8))
    z = np.random.default_rng(seed).standard_normal(independent.steps)
    last = np.concatenate([[0.0], z[:-1]])
    t = np.arange(1, len(z) + 1)
    noises = {
        "DP-λCGD: each step takes back 80% of the last noise": (
            correlated.sigma * (z - 0.8 * last),
            correlated.sigma * np.sqrt(1 + (t - 1) * 0.2**2),
            BLUE,
        ),
        "DP-SGD: independent noise": (independent.sigma * z, independent.sigma * np.sqrt(t), GREY),
    }
    figure = Figure(figsize=(9, 3.4))
    left, right = figure.subplots(ncols=2)
    for name, (noise, deviation, color) in noises.items():
        left.plot(t[:60], noise[:60], color=color, lw=1.4)
        right.fill_between(t, -2 * deviation, 2 * deviation, color=color, alpha=0.18, lw=0)
        right.plot(t, np.cumsum(noise), color=color, lw=1.4, label=name)
    left.set_title("One step: the noise of λCGD is larger …", fontsize=10)
    right.set_title("… all steps so far: what adds up is smaller", fontsize=10)
    for axes in (left, right):
        axes.axhline(0, color="black", lw=0.5)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("noise, in clipping norms")
    figure.legend(*right.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(FIGURES / "cancelling-noise.svg", metadata={"Date": None})
    print(f"DP-SGD σ = {independent.sigma:.3f}, λCGD σ = {correlated.sigma:.3f}; ", end="")
    print(f"RMSE {independent.rmse:.2f} and {correlated.rmse:.2f}")


def comparison() -> None:
    """The RMSE of each mechanism as a bar: blue where no noise is stored, grey where it is. Takes minutes."""
    plans = sorted(lc.compare(50_000, 128, epochs=10, epsilon=2.0, delta=1e-5), key=lambda plan: -plan.rmse)
    labels = [f"{plan.mechanism}, {plan.sampling.kind.removeprefix('balls-in-bins, ')}" for plan in plans]
    colors = ["tab:blue" if plan.mechanism.regenerates(plan.block.steps) else "tab:gray" for plan in plans]
    figure = Figure(figsize=(8, 0.45 * len(plans) + 1.5))
    axes = figure.subplots()
    axes.barh(labels, [plan.rmse for plan in plans], color=colors)
    for row, plan in enumerate(plans):
        axes.text(plan.rmse, row, f" {plan.rmse:.3g}", va="center")
    axes.set_xlabel("RMSE in clipping norms\nblue: no noise stored")
    axes.set_title(f"ε = {plans[0].epsilon:g}, δ = {plans[0].delta:g}, n = {plans[0].steps}")
    axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(FIGURES / "compare.png", dpi=150)


if __name__ == "__main__":
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "lambdacgd"
    cancelling_noise()
    comparison()
