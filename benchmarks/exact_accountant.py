"""Time, memory and accuracy of the transfer-matrix accountant, beside Monte Carlo and the peers that are installed.

    python -m benchmarks.exact_accountant [--quick] [--out FILE.json] [--figure FILE.svg] [--peer-cap SECONDS]

Everything is measured in one run, uncached; how the peers are asked is told in ``peers.py``.
``--figure`` draws δ(ε) with sampled values and the budget of the bound.
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

from benchmarks import peers
from lambdacgd import cache
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.errors import AccountingError
from reproduce.framework import measured_on
from reproduce.reference import gram, sampled

DELTA = 1e-5
PAPER = [(lam, 390, 10, e) for lam in (0.9, 0.95, 0.975) for e in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)]
OTHERS = [(0.95, 10_000, 10, 4.0), (0.0, 390, 10, 8.0), (0.9, 390, 1, 1.0), (0.999, 390, 10, 4.0), (0.9, 390, 10, 16.0)]
QUICK = [(0.9, 390, 10, 8.0), (0.9, 390, 10, 2.0), (0.9, 390, 10, 1.0)]


def measure(lam: float, b: int, k: int, epsilon: float) -> dict[str, Any]:
    """One calibration; torch is already imported."""
    row: dict[str, Any] = {"lam": lam, "b": b, "k": k, "epsilon": epsilon, "delta": DELTA}
    started = time.perf_counter()
    try:
        bound = TransferMatrix(lam, b, k).sigma(epsilon, DELTA)
        sigma = bound.sigma
        row |= {"sigma": sigma, "slack_share_of_delta": sum(bound.budget.values()) / bound.delta}
        row |= {"delta_remove": bound.delta_remove, "delta_add": bound.delta_add, "budget": bound.budget}
    except AccountingError as error:
        row["refused"] = str(error)
    return row | {"seconds": time.perf_counter() - started}


def monte_carlo(lam: float, b: int, k: int, epsilon: float) -> dict[str, Any]:
    """Our own importance sampling on the same question: a point estimate of σ and its time."""
    from lambdacgd.mechanisms import Horizon, LambdaCGD
    from reproduce.sampled import Sampled

    started = time.perf_counter()
    found = Sampled(LambdaCGD(lam), Horizon(b, k)).sigma(epsilon, DELTA)
    return {"sigma": found.value, "seconds": time.perf_counter() - started}


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
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--quick", action="store_true", help="three calibrations, the small question to peers")
    parser.add_argument("--peer-cap", type=float, default=120.0, help="seconds for each answer of a peer")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": measured_on("fixed-bins accountant"), "rows": [], "monte_carlo": []}
    print("| λ | b | k | ε | σ | seconds | slack in δ |\n|---|---|---|---|---|---|---|")
    with cache.disabled():
        TransferMatrix(0.9, 20, 2).sigma(2.0, 1e-3)  # warm-up: imports and thread pools
        for case in QUICK if arguments.quick else PAPER + OTHERS:
            row = measure(*case)
            result["rows"].append(row)
            print(
                f"| {row['lam']:g} | {row['b']} | {row['k']} | {row['epsilon']:g} | {row.get('sigma', math.nan):.4f} "
                f"| {row['seconds']:.1f} | {100 * row.get('slack_share_of_delta', math.nan):.1f}% |",
                flush=True,
            )
        result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory {result['peak_memory_mb']:.0f} MB")
        for case in QUICK:
            row = {"case": case, **monte_carlo(*case)}
            result["monte_carlo"].append(row)
            print(f"Monte Carlo at λ = {case[0]:g}, ε = {case[3]:g}: σ ≈ {row['sigma']:.4f} in {row['seconds']:.1f} s")
        if arguments.figure:
            figure(arguments.figure)
    questions = peers.SMALL[:1] if arguments.quick else (peers.SMALL[0], peers.PAPER[0])  # the λCGD ones
    result["peers"] = peers.beside(questions, cap=arguments.peer_cap)
    print(f"peers: {result['peers']['versions']}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
