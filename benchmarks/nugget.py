"""Chains with a nugget: certified σ before and after, beside independent simulation; and what tries to break it.

    python -m benchmarks.nugget --out results/nugget-cpu.json            # the table, about twenty minutes
    python -m benchmarks.nugget --quadrature 300                         # small mechanisms beside quadrature
    python -m benchmarks.nugget --check results/nugget-cpu.json --out results/nugget-check-cpu.json

"Before" is a chain without a nugget that lies above the Gram matrix in every entry. The estimate comes from
``reproduce.simulated``, which draws every epoch in all b coordinates straight from C.
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
from lambdacgd.accounting.certificate import OneWay
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.dominating import _Goal, _Inner, dominating, exact_columns
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.accounting.exact.accountant import Precision, Scale, evaluate, loss_law
from lambdacgd.accounting.exact.lattice import Columns
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.mechanisms import mechanism_from_dict
from reproduce.framework import measured_on
from reproduce.reference import dense_strategy, quadrature
from reproduce.sampled import Sampled
from reproduce.simulated import Pool, Simulation, estimate_sigma

KINDS = ("buffer", "normalised buffer", "bands", "inverse bands", "normalised inverse bands")
WAYS: tuple[OneWay, OneWay] = ("remove", "add")
OWN = lc.BandInvMF(3, coefficients=(1.0, -0.55, -0.25))
OTHERS: list[tuple[int, int, float, lc.Mechanism]] = [
    *((390, 10, epsilon, m) for epsilon in (8.0, 2.0, 0.5) for m in (lc.BISR(4), lc.BandInvMF(4), lc.BSR(8), OWN)),
    *((390, 10, epsilon, m) for epsilon in (8.0, 2.0) for m in (lc.BandMF(16), lc.BLT(2))),
    (100, 20, 8.0, lc.BSR(8)),
    (100, 20, 8.0, lc.BLT(2)),
    (1000, 5, 1.0, lc.BISR(4)),
]


def without_nugget(mechanism: lc.Mechanism, b: int, k: int, epsilon: float, delta: float) -> FreshBins:
    """The chain of the smallest E W² that lies above G in every entry."""
    inner = _Inner(mechanism, lc.Horizon(b, 1))
    goal = _Goal(inner, gaussian_sigma(epsilon, delta) ** -2 / k)
    choices = []
    for lam in 1.0 - np.geomspace(1.0, 0.003, 60)[1:]:
        with np.errstate(all="ignore"):
            needed = np.where(inner.by_distance > 0, inner.by_distance / lam ** np.arange(float(b)), 0.0)
        if math.isfinite(alpha := float(needed.max())):
            choices.append((goal.excess(float(lam), Columns(alpha)), float(lam), alpha))
    _, lam, alpha = min(choices)
    return FreshBins(lam, b, k, columns=Columns(alpha))


def table(delta: float = 1e-5) -> list[dict[str, Any]]:
    rows = []
    for b, k, epsilon, asked in OTHERS:
        mechanism, horizon = asked.resolve(lc.Horizon(b, 1)), lc.Horizon(b, k)
        old = without_nugget(mechanism, b, k, epsilon, delta).sigma(epsilon, delta).sigma
        began = time.process_time()
        found = dominating(mechanism, horizon, epsilon=epsilon, delta=delta)
        fitted = time.process_time() - began
        new = FreshBins(found.lam, b, k, columns=found.columns).sigma(epsilon, delta).sigma
        spent = time.process_time() - began
        rows.append(row(mechanism, "fresh", b, k, epsilon, delta, old, new, spent, fit_cpu_s=fitted))
    return rows


def buffers(delta: float = 1e-5) -> list[dict[str, Any]]:
    """BLT with one buffer and normalised bands, chosen and certified; "before" is nothing."""
    rows, blt = [], lc.BLT(1, amplified=True)
    for epsilon in (8.0, 4.0, 2.0, 1.0, 0.5):
        for mechanism in (blt, replace(blt, normalized=True), lc.BandInvMF(4, normalized=True, amplified=True)):
            began = time.process_time()
            plan = lc.plan(
                50_000, 128, epochs=10, epsilon=epsilon, delta=delta, sampling=lc.BallsInBins("fresh"),
                mechanism=mechanism,
            )  # fmt: skip
            spent = time.process_time() - began
            made = row(plan.mechanism, "fresh", 390, 10, epsilon, delta, math.nan, plan.sigma, spent)
            rows.append(made | {"rmse": plan.rmse, **plan.mechanism.to_dict()})
    return rows


def fixed(delta: float = 1e-6) -> list[dict[str, Any]]:
    """BLT with one buffer and fixed bins, beside sampling."""
    mechanism, b, k, epsilon = lc.BLT(1, (0.9,), (0.3,)), 200, 6, 3.0
    sampling = lc.BallsInBins(examples=b, steps_per_epoch=b, epochs=k, bins="fixed")
    began = time.process_time()
    new = accountant_for(mechanism, sampling).sigma(epsilon, delta).sigma
    spent = time.process_time() - began
    drawn = Sampled(mechanism, sampling.horizon).sigma(epsilon, delta)
    return [
        {"mechanism": str(mechanism), "bins": "fixed", "b": b, "k": k, "epsilon": epsilon, "delta": delta,
         "after": new, "estimate": drawn.value, "standard_error": drawn.standard_error,
         "ratio": new / drawn.value, "cpu_s": spent}
    ]  # fmt: skip


def row(
    mechanism: lc.Mechanism, bins: str, b: int, k: int, epsilon: float, delta: float, old: float, new: float,
    spent: float, **more: float,
) -> dict[str, Any]:  # fmt: skip
    drawn = estimate_sigma(mechanism, lc.Horizon(b, k), epsilon=epsilon, delta=delta, samples=196_608, start=new)
    made = {
        "mechanism": str(mechanism), "bins": bins, "b": b, "k": k, "epsilon": epsilon, "delta": delta, "before": old,
        "after": new, "estimate": drawn.sigma, "standard_error": drawn.standard_error, "ratio": new / drawn.sigma,
        "ratio_before": old / drawn.sigma, "cpu_s": spent, **more,
    }  # fmt: skip
    print(
        f"{mechanism!s:34} b={b} k={k} ε={epsilon:g}: {old:.4f} → {new:.4f}, estimate {drawn.sigma:.4f} ± "
        f"{drawn.standard_error:.4f}, ratio {old / drawn.sigma:.3f} → {new / drawn.sigma:.4f}, {spent:.1f} s",
        flush=True,
    )
    return made


def without_bias(before: dict[str, Any], pools: int = 16, size: int = 40_000) -> list[dict[str, Any]]:
    """δ at certified σ where the estimate of σ, which leans upwards at small ε, lies above it.

    A pool composed k times is convex in its error, of order 1/size: two pools joined, twice, less the mean of both
    (jackknife) has none of that order. It is a cross-check and claims nothing.
    """
    rows = []
    for made in [*before["buffers"], *before["others"]]:
        if made["ratio"] >= 0.999 or made["b"] != 390:
            continue
        own = ("name", "buffers", "decays", "weights", "bands", "coefficients", "normalized")
        given = {key: made[key] for key in own if key in made}
        named = {str(m.resolve(lc.Horizon(390, 1))): m.resolve(lc.Horizon(390, 1)) for _, _, _, m in OTHERS}
        mechanism = mechanism_from_dict(given) if given else named[made["mechanism"]]
        simulation, epsilon, sigma = Simulation(mechanism, 390), made["epsilon"], made["after"]
        values: dict[OneWay, list[float]] = {way: [] for way in WAYS}
        for pair in range(pools // 2):
            two = [simulation.pool(sigma, samples=size, seed=7000 + 2 * pair + i) for i in range(2)]
            joined = Pool(
                {way: np.concatenate([p.losses[way] for p in two]) for way in WAYS},
                {way: np.concatenate([p.weights[way] for p in two]) / 2 for way in WAYS},
            )
            for way in WAYS:
                alone = float(np.mean([p.delta(way, 10, epsilon) for p in two]))
                values[way].append(2 * joined.delta(way, 10, epsilon) - alone)
        # The larger of two means, not the mean of the larger: that would lean upwards where both are close.
        drawn = max(values.values(), key=lambda some: float(np.mean(some)))
        error = float(np.std(drawn, ddof=1) / math.sqrt(len(drawn)))
        rows.append(
            {"mechanism": made["mechanism"], "epsilon": epsilon, "sigma": sigma, "claimed": made["delta"],
             "delta": float(np.mean(drawn)), "standard_error": error}
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quadrature", type=int, default=0)
    parser.add_argument("--check", type=Path)
    asked = parser.parse_args()
    with cache.disabled():
        if asked.check:
            result: dict[str, Any] = {"check": without_bias(json.loads(asked.check.read_text(encoding="utf-8")))}
        elif asked.quadrature:
            result = {"quadrature": against_quadrature(asked.quadrature)}
        else:
            result = {"buffers": buffers(), "fixed": fixed(), "others": table()}
    result["machine"] = measured_on("fixed-bins accountant", "fresh-bins accountant")
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
