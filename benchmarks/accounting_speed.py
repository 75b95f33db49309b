"""CPU seconds and σ of uncached plans at the settings of docs/planning.md, on one thread of one core.

    OMP_NUM_THREADS=1 python benchmarks/accounting_speed.py [NAME …]

writes results/accounting-speed.json. What stands there as ``before`` was measured before accounting left torch: on the
same machine where it says "here", and by another person's machine where it says "elsewhere".
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lambdacgd as lc
from lambdacgd import cache

RESULTS = Path(__file__).parent.parent / "results" / "accounting-speed.json"
CIFAR = {"examples": 50_000, "batch_size": 128, "epochs": 10, "delta": 1e-5}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"plain, ε = {e:g}": CIFAR | {"epsilon": e, "mechanism": lc.LambdaCGD("auto")} for e in (8.0, 2.0, 0.5)},
    **{f"default, ε = {e:g}": CIFAR | {"epsilon": e} for e in (8.0, 2.0, 0.5)},
    "plain, b = 976": {
        "examples": 1_000_000, "batch_size": 1024, "epochs": 3, "epsilon": 8.0, "delta": 1e-7,
        "mechanism": lc.LambdaCGD("auto"),
    },
    "plain, b = 6250": {
        "examples": 400_000, "batch_size": 64, "epochs": 3, "epsilon": 1.0, "delta": 1e-7,
        "mechanism": lc.LambdaCGD("auto"),
    },
    "default, b = 976": {"examples": 1_000_000, "batch_size": 1024, "epochs": 3, "epsilon": 8.0, "delta": 1e-7},
    "default, b = 6250": {"examples": 400_000, "batch_size": 64, "epochs": 3, "epsilon": 1.0, "delta": 1e-7},
    "default, b = 10 000": {"examples": 1_280_000, "batch_size": 128, "epochs": 10, "epsilon": 8.0, "delta": 1e-5},
    "default, b = 100 000": {"examples": 12_800_000, "batch_size": 128, "epochs": 3, "epsilon": 8.0, "delta": 1e-7},
}  # fmt: skip


def main() -> None:
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or SETTINGS:
        began, told = time.process_time(), []
        with cache.disabled():
            plan = lc.plan(
                **SETTINGS[name], progress=lambda _, began=began, told=told: told.append(time.process_time() - began)
            )
        seconds = time.process_time() - began
        row = {
            "lambda": plan.mechanism.to_dict()["lam"], "normalized": plan.mechanism.to_dict()["normalized"],
            "sigma": plan.sigma, "rmse": plan.rmse, "cpu_seconds": round(seconds, 2),
            "cpu_seconds_to_the_estimate": round(told[0], 2) if told else None,
            "slack_share": plan.certificate.details["slack_share"],
            "dominating_chain_sigma_loss": plan.certificate.details["dominating_chain_sigma_loss"],
        }  # fmt: skip
        stored[name] = {"before": stored.get(name, {}).get("before"), "after": row}
        print(name, row, flush=True)
        RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
