"""Time, memory and slack of the fresh-bins accountant, beside the simulation that checks it.

    python -m benchmarks.fresh_bins_accountant [--quick] [--out results/fresh-bins-accountant-cpu.json] [--busy]

One certified calibration a row, uncached, then the same σ by simulation in the same run (``--estimate``'s routine), and
last ε after every epoch and a curve from one composition. It refuses to start on a busy machine unless ``--busy`` says
that the times do not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from lambdacgd import cache
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import Horizon, LambdaCGD
from reproduce.framework import measured_on
from reproduce.simulated import estimate_sigma

DELTA = 1e-5
LIMIT = 30.0
"""seconds that a calibration of λ = 0.9 at b = 390, k = 10 may take on two cores"""
REQUIRED = [(0.9, 390, 10, epsilon) for epsilon in (8.0, 2.0, 0.5)]
OTHERS = [
    (0.0, 390, 10, 8.0), (0.8, 390, 10, 2.0), (0.95, 390, 10, 8.0), (0.975, 390, 10, 8.0), (0.9, 390, 100, 8.0),
    (0.9, 5_000, 10, 8.0), (0.9, 30, 10, 2.0),
]  # fmt: skip


def measure(lam: float, b: int, k: int, epsilon: float) -> dict[str, Any]:
    """One certified calibration; torch is already imported."""
    row: dict[str, Any] = {"lam": lam, "b": b, "k": k, "epsilon": epsilon, "delta": DELTA}
    before, started = time.process_time(), time.perf_counter()
    try:
        bound = FreshBins(lam, b, k).sigma(epsilon, DELTA)
        sigma = bound.sigma
        row |= {"sigma": sigma, "delta_remove": bound.delta_remove, "delta_add": bound.delta_add}
        row |= {"slack_share_of_delta": sum(bound.budget.values()) / bound.delta, "budget": bound.budget}
        row |= {"nodes": bound.details["nodes"], "transform": bound.details["transform"]}
    except AccountingError as error:
        row["refused"] = str(error)
    return row | {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - before}


def simulated(row: dict[str, Any]) -> dict[str, Any]:
    """The same question to the simulation, which claims nothing."""
    started = time.perf_counter()
    found = estimate_sigma(
        LambdaCGD(row["lam"]), Horizon(row["b"], row["k"]), epsilon=row["epsilon"], delta=DELTA, start=row.get("sigma")
    )
    return {
        "sigma": found.sigma,
        "standard_error": found.standard_error,
        "seconds": time.perf_counter() - started,
        "certified_over_simulated": row["sigma"] / found.sigma if "sigma" in row else None,
    }


def reuse(sigma: float) -> dict[str, Any]:
    """What one single-epoch curve is good for."""
    accountant = FreshBins(0.9, 390, 10)
    started = time.perf_counter()
    after = accountant.epsilons(sigma, DELTA)
    epochs = time.perf_counter() - started
    composed = accountant.composed(sigma, DELTA)
    curve = [accountant.bound(composed, sigma, 0.5 * i) for i in range(1, 33)]
    return {
        "epsilon_after_each_epoch": after,
        "epochs_seconds": epochs,
        "curve_points": len(curve),
        "curve_seconds": time.perf_counter() - started - epochs,
    }


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['lam']:g}", str(row["b"]), str(row["k"]), f"{row['epsilon']:g}"]
    if "refused" in row:
        return "| " + " | ".join([*cells, "refused", f"{row['seconds']:.1f}", "", "", "", ""]) + " |"
    beside = row["simulated"]
    cells += [f"{row['sigma']:.4f}", f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}"]
    cells += [f"{100 * row['slack_share_of_delta']:.1f}%", f"{beside['certified_over_simulated']:.4f}"]
    return "| " + " | ".join([*cells, f"{beside['seconds']:.1f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="λ = 0.9 at b = 390, k = 10 only")
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine too")
    arguments = parser.parse_args()
    if os.getloadavg()[0] > 0.5 and not arguments.busy:
        sys.exit(f"the load is {os.getloadavg()[0]:.1f}: these times would say nothing; wait, or pass --busy")
    result: dict[str, Any] = {"machine": measured_on("fresh-bins accountant"), "busy": arguments.busy}
    result |= {"limit_seconds": LIMIT, "rows": []}
    print("| λ | b | k | ε | σ | seconds | CPU seconds | slack in δ | σ over simulated | its seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with cache.disabled():
        FreshBins(0.5, 10, 2).sigma(2.0, 1e-3)  # warm-up: imports and thread pools
        for case in REQUIRED if arguments.quick else REQUIRED + OTHERS:
            row = measure(*case)
            row["simulated"] = simulated(row)
            result["rows"].append(row)
            print(line(row), flush=True)
        result["reuse"] = reuse(result["rows"][0]["sigma"])
    result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    slowest = max(row["seconds"] for row in result["rows"][: len(REQUIRED)])
    result["within_limit"] = slowest <= LIMIT
    print(f"λ = 0.9, b = 390, k = 10: at most {slowest:.1f} s (limit {LIMIT:g} s on two cores)")
    print(
        f"ε after each of 10 epochs in {result['reuse']['epochs_seconds']:.1f} s, a curve of "
        f"{result['reuse']['curve_points']} points in {result['reuse']['curve_seconds']:.1f} s; "
        f"peak memory {result['peak_memory_mb']:.0f} MB"
    )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
