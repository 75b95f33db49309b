"""Mechanisms without an accountant of their own: certified σ over an estimate of it, b = 390, k = 10, δ = 1e-5.

    python -m benchmarks.dominated --out results/dominated-cpu.json [--epsilon 8 2 .5] [--bins fixed fresh]
    python -m benchmarks.dominated --before old.json --out results/dominated-cpu.json

``--before`` names what this script wrote with an earlier release, whose σ then stand beside these. Estimates with fixed
bins are importance sampling's (``reproduce.sampled``), with fresh bins those of ``reproduce.simulated``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lambdacgd as lc
from lambdacgd import cache
from lambdacgd.accounting import accountant_for
from reproduce.framework import measured_on
from reproduce.sampled import Sampled
from reproduce.simulated import estimate_sigma

MECHANISMS: dict[str, lc.Mechanism] = {
    **{f"BISR {p}": lc.BISR(p) for p in (64, 16, 4)},
    **{f"BLT {p}": lc.BLT(p) for p in (3, 2, 1)},
    **{f"BandMF {p}": lc.BandMF(p) for p in (64, 8)},
    **{f"BandInvMF {p}": lc.BandInvMF(p) for p in (16, 4, 2)},
    "BSR 8": lc.BSR(8),
    "BSR 64": lc.BSR(64),
    "GammaBIFR 3": lc.GammaBIFR(3, 0.7),
}
B, K, DELTA = 390, 10, 1e-5


def row(name: str, bins: Any, epsilon: float, before: dict[str, Any] | None) -> dict[str, Any]:
    sampling = lc.BallsInBins(bins, examples=50_000, steps_per_epoch=B, epochs=K)
    mechanism = MECHANISMS[name].resolve(sampling.block)
    began = time.process_time()
    found = accountant_for(mechanism, sampling).sigma(epsilon, DELTA)
    spent = time.process_time() - began
    made: dict[str, Any] = {"mechanism": name, "bins": bins, "epsilon": epsilon, "sigma": found.sigma, "cpu_s": spent}
    made["dominated_by"] = found.certificate.details.get("dominated_by")
    if before is not None:  # the same estimate serves both
        made |= {key: before[key] for key in ("estimate", "standard_error")} | {"before": before["sigma"]}
        made |= {"ratio_before": before["sigma"] / before["estimate"], "cpu_s_before": before["cpu_s"]}
    elif bins == "fixed":
        drawn = Sampled(mechanism, sampling.horizon).sigma(epsilon, DELTA)
        made |= {"estimate": drawn.value, "standard_error": drawn.standard_error}
    else:
        pool = estimate_sigma(
            mechanism, sampling.horizon, epsilon=epsilon, delta=DELTA, samples=98_304, start=found.sigma
        )
        made |= {"estimate": pool.sigma, "standard_error": pool.standard_error}
    made["ratio"] = made["sigma"] / made["estimate"]
    error = made["standard_error"] / made["estimate"]
    print(
        f"{name:12} {bins} ε={epsilon:g}: σ {made['sigma']:.4f}, over the estimate {made.get('ratio_before', 0):.4f} → "
        f"{made['ratio']:.4f} ± {error:.4f}, {spent:.1f} s",
        flush=True,
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0, 2.0, 0.5])
    parser.add_argument("--bins", nargs="+", default=["fixed", "fresh"])
    parser.add_argument("--only", nargs="+", default=list(MECHANISMS))
    asked = parser.parse_args()
    old = json.loads(asked.before.read_text(encoding="utf-8"))["rows"] if asked.before else []
    before = {(r["mechanism"], r["bins"], r["epsilon"]): r for r in old}
    rows = []
    with cache.disabled():
        for key in ((n, b, e) for b in asked.bins for e in asked.epsilon for n in asked.only):
            if not asked.before or key in before:
                rows.append(row(*key, before.get(key)))
            result = {"b": B, "k": K, "delta": DELTA, "rows": rows, "machine": measured_on("fixed-bins accountant")}
            asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
