"""How near the audit's lower bounds come to the claim: ε = 1, 2, 4, fixed and fresh bins, a million canaries each.

``python -m benchmarks.audit`` writes ``results/audit-cpu.json``, an audit at a time, in some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import lambdacgd as lc
from reproduce.framework import measured_on

EXAMPLES, RUNS = 500_000, 2
SETTINGS = [
    (bins, epsilon, steps, epochs, delta)
    for bins in ("fixed", "fresh")
    for epsilon in (1.0, 2.0, 4.0)
    for steps, epochs, delta in ((4, 3, 1e-2), (4, 3, 1e-3))
]


def measure(bins: Any, epsilon: float, steps: int, epochs: int, delta: float) -> dict[str, Any]:
    plan = lc.plan(
        EXAMPLES,
        EXAMPLES // steps,
        epochs=epochs,
        epsilon=epsilon,
        delta=delta,
        mechanism=lc.LambdaCGD(0.9),
        sampling=lc.BallsInBins(bins),
    )
    report = lc.audit(plan, runs=RUNS, max_grad_norm=0.7)
    assert report.bound is not None
    settings = {
        "bins": bins,
        "epsilon": epsilon,
        "steps_per_epoch": steps,
        "epochs": epochs,
        "delta": delta,
        "lam": 0.9,
    }
    return settings | {
        "sigma": plan.sigma,
        "lower_bound": report.bound.epsilon,
        "confidence": report.bound.confidence,
        "share_of_the_claim": report.bound.epsilon / epsilon,
        "share_of_an_ideal_run": report.ideal / epsilon,
        "passed": report.passed,
        "smallest_p_value": min(check.p_value for check in report.checks),
        "seconds": report.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/audit-cpu.json"))
    out = parser.parse_args().out
    warnings.simplefilter("ignore")  # δ above 1/N: on purpose, so that a million canaries reach it
    result: dict[str, Any] = {
        "machine": measured_on("fixed-bins accountant", "fresh-bins accountant", "format of the noise"),
        "examples": EXAMPLES,
        "runs": RUNS,
        "rows": [],
    }
    for settings in SETTINGS:
        row = measure(*settings)
        result["rows"].append(row)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
