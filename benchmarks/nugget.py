"""Chains with a nugget: certified σ and RMSE beside independent simulation; and what tries to break them.

    OMP_NUM_THREADS=1 python -m benchmarks.nugget --out results/nugget-cpu.json   # ten CPU minutes
    python -m benchmarks.nugget --quadrature 300                                  # small mechanisms beside quadrature

The estimate comes from ``reproduce.simulated``, which draws every epoch in all b coordinates straight from C. Longer
memories are in ``benchmarks.dominated``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import lambdacgd as lc
from lambdacgd import cache
from lambdacgd.accounting import accountant_for
from lambdacgd.accounting.dominating import dominating, exact_columns
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.accounting.exact.accountant import Precision, Scale, evaluate, loss_law
from reproduce.framework import measured_on
from reproduce.reference import dense_strategy, quadrature
from reproduce.simulated import estimate_sigma

DELTA = 1e-5
KINDS = ("buffer", "normalised buffer", "bands", "inverse bands", "normalised inverse bands")
OWN = lc.BandInvMF(3, coefficients=(1.0, -0.55, -0.25))
CASES: list[tuple[int, int, float, lc.Mechanism]] = [
    *((390, 10, epsilon, m) for epsilon in (8.0, 2.0) for m in (lc.BISR(4), lc.BandInvMF(4), lc.BSR(8), OWN)),
    (1000, 5, 1.0, lc.BISR(4)),
]
BLT = lc.BLT(1, amplified=True)
PLANNED = {
    "one buffer": BLT, "one buffer, normalised": replace(BLT, normalized=True),
    "four bands, normalised": lc.BandInvMF(4, normalized=True, amplified=True),
    "λCGD, normalised (the default)": lc.LambdaCGD("auto", normalized=True),
}  # fmt: skip


def beside_simulation(b: int, k: int, epsilon: float, asked: lc.Mechanism) -> dict[str, Any]:
    """Certified σ with fresh bins, and what simulation says."""
    sampling = lc.BallsInBins("fresh", examples=10 * b, steps_per_epoch=b, epochs=k)
    mechanism = asked.resolve(sampling.block)
    began = time.process_time()
    sigma = accountant_for(mechanism, sampling).sigma(epsilon, DELTA).sigma
    spent = time.process_time() - began
    drawn = estimate_sigma(mechanism, sampling.horizon, epsilon=epsilon, delta=DELTA, samples=196_608, start=sigma)
    return {
        "mechanism": str(mechanism), "b": b, "k": k, "epsilon": epsilon, "sigma": sigma, "estimate": drawn.sigma,
        "standard_error": drawn.standard_error, "ratio": sigma / drawn.sigma, "cpu_s": spent,
    }  # fmt: skip


def planned(name: str, epsilon: float) -> dict[str, Any]:
    """What `lc.plan` makes of a mechanism with fresh bins."""
    began = time.process_time()
    plan = lc.plan(50_000, 128, epochs=10, epsilon=epsilon, delta=DELTA, mechanism=PLANNED[name])
    spent = time.process_time() - began
    return {"mechanism": name, "epsilon": epsilon, "sigma": plan.sigma, "rmse": plan.rmse, "cpu_s": spent}


TIGHT = Precision(smoothing=0.02, lattice=1e-6, scales=1e-6, negligible=1e-6, wrap=1e-6, rounding=8e-3)


def against_quadrature(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random small mechanisms, one epoch or (one buffer) several: certified over true δ with little slack left."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        b = int(rng.choice([2, 3, 4], p=[0.4, 0.45, 0.15]))
        kind = str(rng.choice(KINDS))
        k = int(rng.integers(1, 5)) if "buffer" in kind else 1
        if "buffer" in kind:
            decay = 1 - float(np.exp(rng.uniform(math.log(0.02), math.log(0.9))))
            weight = decay * float(rng.uniform(0.02, 1))
            mechanism: lc.Mechanism = lc.BLT(1, (decay,), (weight,), normalized=kind != "buffer")
            found = exact_columns(mechanism, b * k)
            assert found is not None
        else:
            tail = rng.uniform(0, 1.2, b - 1) if kind == "bands" else -rng.dirichlet(np.ones(b))[: b - 1]
            if kind == "bands":
                mechanism = lc.BandMF(b, coefficients=(1.0, *tail))
            else:
                mechanism = lc.BandInvMF(b, coefficients=(1.0, *tail), normalized=kind != "inverse bands")
            found = dominating(mechanism, lc.Horizon(b, 1), epsilon=float(rng.uniform(0.3, 8)), delta=1e-4)
        if found.columns.shared:  # tests/accounting/test_dominating.py has these
            continue
        sums = dense_strategy(mechanism, lc.Horizon(b, k)).reshape(b * k, k, b).sum(axis=1)
        gram = np.asarray(sums.T @ sums)
        sigma = math.sqrt(gram.max()) * float(rng.uniform(0.5, 1.5))
        epsilon = float(rng.uniform(0.1, 4.0))
        steps = {2: (0.01, 0.014), 3: (0.03, 0.04), 4: (0.09, 0.11)}[b]
        truths = [quadrature(gram, sigma, epsilon, step=step) for step in steps]
        chain = TransferMatrix(found.lam, b, k, columns=found.columns).chain(sigma)
        for way, sign, at in (("remove", 1, 0), ("add", -1, 1)):
            true, doubt = truths[0][at], abs(truths[0][at] - truths[1][at])
            if true < 1e-7 or doubt > 1e-3 * true:
                continue
            slope = max(2.0 * math.log(1 / true) / (1 + epsilon), 1.0)
            for _ in range(3):
                scale = Scale(math.exp(sign * epsilon), true, slope)
                law = loss_law(chain, scale, TIGHT, direction=way)  # type: ignore[arg-type]
                value = evaluate(law, scale, TIGHT)
                slope = max(value.slope, 1.0)
            rows.append(
                {"kind": kind, "b": b, "k": k, "way": way, "sigma": sigma, "epsilon": epsilon, "true": true,
                 "doubt": doubt, "certified": value.delta, "ratio": value.delta / true}
            )  # fmt: skip
            if value.delta < true - 2 * doubt - 1e-7 * true:
                print("BELOW", rows[-1], mechanism.to_dict(), flush=True)
    for kind in KINDS:
        some = [r["ratio"] for r in rows if r["kind"] == kind]
        print(f"{kind}: {len(some)} cases, certified over true {min(some):.6f} to {max(some):.4f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quadrature", type=int, default=0)
    asked = parser.parse_args()
    with cache.disabled():
        if asked.quadrature:
            against_quadrature(asked.quadrature)
            return
        made = measured_on("fresh-bins accountant", "choice of λ, fresh bins", "dominating chains")
        result: dict[str, Any] = {"delta": DELTA, "planned": [], "simulated": [], "machine": made}
        todo = [(planned, "planned", (name, e)) for e in (8.0, 4.0, 2.0, 1.0, 0.5) for name in PLANNED]
        for measure, part, case in [*todo, *((beside_simulation, "simulated", case) for case in CASES)]:
            result[part].append(measure(*case))
            print(result[part][-1], flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
