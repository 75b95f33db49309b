"""The two figures of the docs' first page: noise that cancels itself, and accuracy over ε.

    python benchmarks/docs_figures.py            # writes docs/figures/cancelling-noise.svg and accuracy.svg

The first is drawn from the planner's own numbers (DP-SGD and λCGD at the same ε and δ), with NumPy's normal variates;
the second from ``results/methods-cifar/methods-cifar.csv``.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import lambdacgd as lc

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
BLUE, GREY, ORANGE = "#3f51b5", "#9e9e9e", "#e67e22"


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


def accuracy() -> None:
    """Test accuracy on CIFAR-10 over ε, with standard errors."""
    shown = {
        "lambda-cgd-fresh-normalized": ("λCGD, normalised, fresh bins", BLUE, "o-"),
        "lambda-cgd": ("λCGD as in the paper, fixed bins", ORANGE, "s--"),
        "dp-sgd": ("DP-SGD, Poisson sampling", GREY, "^-"),
    }
    rows = list(csv.DictReader((ROOT / "results/methods-cifar/methods-cifar.csv").open()))
    figure = Figure(figsize=(7, 3.8))
    axes = figure.subplots()
    for method, (label, color, style) in shown.items():
        points = sorted((float(r["epsilon"]), r) for r in rows if r["method"] == method)
        axes.errorbar(
            [epsilon for epsilon, _ in points],
            [100 * float(r["test"]) for _, r in points],
            [100 * float(r["standard_error"] or 0) for _, r in points],
            fmt=style, color=color, label=label, capsize=3, ms=5,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
    axes.set_xlabel("ε: less private to the right (δ = 10⁻⁵)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("CIFAR-10, a CNN of 0.3 million parameters trained from scratch", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(FIGURES / "accuracy.svg", metadata={"Date": None})


if __name__ == "__main__":
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "lambdacgd"
    cancelling_noise()
    accuracy()
