"""σ, CPU seconds and memory of the transfer-matrix accountant, uncached, on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.exact_accountant [--out FILE.json] [--figure FILE.svg]

``--figure`` draws δ(ε) with sampled values and the budget of the bound instead.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from lambdacgd import cache
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.errors import AccountingError
from reproduce.framework import measured_on
from reproduce.reference import gram, sampled

DELTA = 1e-5
PAPER = [(lam, 390, 10, e) for lam in (0.9, 0.95, 0.975) for e in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)]
OTHERS = [(0.95, 10_000, 10, 4.0), (0.0, 390, 10, 8.0), (0.9, 390, 1, 1.0), (0.999, 390, 10, 4.0), (0.9, 390, 10, 16.0)]


def measure(lam: float, b: int, k: int, epsilon: float) -> dict[str, Any]:
    """One calibration."""
    row: dict[str, Any] = {"lam": lam, "b": b, "k": k, "epsilon": epsilon, "delta": DELTA}
    started = time.process_time()
    try:
        bound = TransferMatrix(lam, b, k).sigma(epsilon, DELTA)
        sigma = bound.sigma
        row |= {"sigma": sigma, "slack_share_of_delta": sum(bound.budget.values()) / bound.delta}
        row |= {"delta_remove": bound.delta_remove, "delta_add": bound.delta_add, "budget": bound.budget}
    except AccountingError as error:
        row["refused"] = str(error)
    return row | {"cpu_seconds": time.process_time() - started}


def figure(path: Path) -> None:
    """δ(ε) of both directions with 95% intervals of plain sampling, and the shares of the budget."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    lam, b, k, sigma = 0.9, 390, 10, 5.5
    epsilons = np.linspace(0.1, 2.4, 24)
    curve = [TransferMatrix(lam, b, k).delta(sigma, epsilon) for epsilon in epsilons]
    plt.rcParams["svg.hashsalt"] = "exact-accountant"
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=[3, 2])
    for name, colour in (("remove", "C0"), ("add", "C1")):
        left.semilogy(epsilons, [getattr(x, f"delta_{name}") for x in curve], colour, label=f"{name}: bound")
    matrix = gram(lam, b, k)
    for epsilon in (0.1, 0.4, 0.7, 1.0, 1.3):
        for (value, error), colour in zip(
            sampled(matrix, sigma, epsilon, samples=60_000, seed=1), ("C0", "C1"), strict=True
        ):
            if value > 4 * error:
                left.errorbar(epsilon, value, 1.96 * error, fmt="o", ms=3, color=colour)
    left.set(xlabel="ε", ylabel="δ", ylim=(1e-7, 1), title=f"λ = {lam}, b = {b}, k = {k}, σ = {sigma} (dots: sampled)")
    left.legend()
    last = min(curve, key=lambda x: abs(math.log(x.delta_remove / DELTA)))
    items = sorted(last.budget.items(), key=lambda item: item[1])
    right.barh([name for name, _ in items], [100 * max(v, 1e-14) / last.delta for _, v in items], color="C0")
    right.set(xscale="log", xlim=(1e-6, 10), xlabel="% of δ", title=f"what may be slack at ε = {last.epsilon:.1f}")
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/exact-accountant-cpu.json"))
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    with cache.disabled():
        if arguments.figure:
            figure(arguments.figure)
            return
        result: dict[str, Any] = {"machine": measured_on("fixed-bins accountant"), "rows": []}
        for case in PAPER + OTHERS:
            result["rows"].append(measure(*case))
            print(result["rows"][-1], flush=True)
        result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
