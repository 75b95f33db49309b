"""Certified σ beside independent estimates, at 38 settings.

    OMP_NUM_THREADS=1 nice -n 10 python -m benchmarks.accounting_truth

writes results/accounting-truth.json, a row at a time, in half an hour; docs/planning-measured.md shows it. An
interrupted run goes on, and rows that other code made are computed again.
The estimates share no code with the certificates: quadrature in all dimensions (b ≤ 4), the Gaussian mechanism's closed
form (b = 1), importance sampling straight from the Gram matrix (fixed bins), and losses of whole epochs drawn straight
from C and convolved (fresh bins).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

import lambdacgd as lc
from lambdacgd import cache
from lambdacgd.accounting.accountants import accountant_for
from lambdacgd.accounting.certificate import OneWay
from lambdacgd.accounting.gaussian import gaussian_sigma
from reproduce.framework import measured_on
from reproduce.reference import gram, quadrature
from reproduce.sampled import Sampled
from reproduce.simulated import Pool, Simulation

RESULTS = Path(__file__).parent.parent / "results" / "accounting-truth.json"
POOLS, MANY, LARGEST_GRAM = 4, 20, 1000
# bins, λ, normalised, b, k, ε, δ
SETTINGS: list[tuple[Any, float, bool, int, int, float, float]] = [
    ("fixed", 0.6, False, 1, 7, 1.3, 1e-6), ("fixed", 0.8, False, 2, 4, 0.4, 1e-5),
    ("fixed", 0.95, False, 2, 20, 3.0, 1e-7), ("fixed", 0.5, True, 3, 3, 9.0, 1e-8),
    ("fixed", 0.99, True, 3, 8, 1.0, 1e-4), ("fixed", 0.7, False, 4, 2, 0.05, 1e-3),
    ("fixed", 0.3, False, 7, 30, 2.5, 1e-6), ("fixed", 0.85, True, 13, 6, 5.0, 1e-5),
    ("fixed", 0.97, False, 29, 3, 1.2, 1e-6), ("fixed", 0.98, True, 29, 2, 2.0, 1e-5),
    ("fixed", 0.9, False, 57, 1, 6.0, 1e-9), ("fixed", 0.0, False, 150, 12, 0.7, 1e-6),
    ("fixed", 0.999, False, 211, 2, 4.0, 1e-4), ("fixed", 0.92, True, 333, 40, 10.0, 1e-7),
    ("fixed", 0.75, False, 733, 5, 0.3, 1e-8), ("fixed", 0.95, True, 1500, 3, 15.0, 1e-6),
    ("fixed", 0.9, False, 3001, 7, 1.5, 1e-7), ("fixed", 0.5, True, 40, 300, 20.0, 1e-6),
    ("fresh", 0.6, False, 1, 12, 2.2, 1e-6), ("fresh", 0.9, False, 2, 6, 1.0, 1e-5),
    ("fresh", 0.7, True, 3, 25, 4.0, 1e-7), ("fresh", 0.99, True, 5, 3, 0.5, 1e-3),
    ("fresh", 0.4, False, 9, 80, 1.5, 1e-5), ("fresh", 0.85, False, 16, 4, 7.0, 1e-8),
    ("fresh", 0.98, True, 29, 10, 2.0, 1e-6), ("fresh", 0.95, False, 64, 2, 12.0, 1e-5),
    ("fresh", 0.0, False, 120, 30, 0.2, 1e-6), ("fresh", 0.97, True, 250, 5, 20.0, 1e-6),
    ("fresh", 0.999, False, 211, 3, 3.0, 1e-5), ("fresh", 0.93, True, 390, 20, 3.0, 1e-5),
    ("fresh", 0.8, False, 500, 8, 0.05, 1e-4), ("fresh", 0.96, True, 900, 4, 1.0, 1e-9),
    ("fresh", 0.9, False, 2000, 15, 5.0, 1e-7), ("fresh", 0.985, True, 5000, 3, 10.0, 1e-6),
    ("fresh", 0.97, True, 20_000, 6, 2.0, 1e-8), ("fresh", 0.99, True, 100_000, 2, 2.0, 1e-4),
    ("fresh", 0.5, False, 20, 300, 0.1, 1e-5), ("fresh", 0.6, True, 25, 10_000, 1.0, 1e-6),
]  # fmt: skip


def truth(
    bins: str, mechanism: lc.LambdaCGD, b: int, k: int, epsilon: float, delta: float, certified: float
) -> tuple[float, float, str]:
    """σ, its standard error, and how it was found; ``certified`` only says near which σ epochs are drawn."""
    horizon = lc.Horizon(b, k)
    if b == 1:
        # Bins of one step: fixed ones add up k columns of one example, fresh ones compose k Gaussian mechanisms.
        matrix = gram(mechanism.resolved_lam, 1, k, normalized=mechanism.normalized is True)
        norm = math.sqrt(float(matrix[0, 0])) if bins == "fixed" else math.sqrt(k)
        return norm * gaussian_sigma(epsilon, delta), 0.0, "closed form"
    if bins == "fixed" and b <= 4:
        matrix = gram(mechanism.resolved_lam, b, k, normalized=mechanism.normalized is True)
        top = math.log(math.sqrt(float(matrix.max())) * gaussian_sigma(epsilon, delta))
        low, high = top - 3.0, top
        for _ in range(30):
            middle, step = 0.5 * (low + high), 0.1 if b < 4 else 0.25
            passes = max(quadrature(matrix, math.exp(middle), epsilon, step=step)) <= delta
            low, high = (low, middle) if passes else (middle, high)
        return math.exp(high), 0.0, "quadrature"
    if bins == "fixed":
        most = max(4096, min(400_000, 60_000_000 // b))
        drawn = Sampled(mechanism, horizon).sigma(epsilon, delta, relative_error=0.01, most=most)
        return drawn.value, drawn.standard_error, "importance sampling"
    return (*simulated(mechanism, b, k, epsilon, delta, certified), "simulation")


def simulated(
    mechanism: lc.LambdaCGD, b: int, k: int, epsilon: float, delta: float, sigma: float
) -> tuple[float, float]:
    """σ with fresh bins, and its standard error: δ at and near ``sigma`` from a few large pools of epochs.

    Composing a pool k times is convex in its error, so small pools lean upwards: these are as large as time allows, and
    from 20 epochs on they are calibrated.
    """
    simulation, size, step = Simulation(mechanism, b), max(2048, min(1_000_000, 40_000_000 // b)), 1.01
    drawn: dict[OneWay, list[tuple[float, float]]] = {"remove": [], "add": []}
    for seed in range(POOLS):
        pools = [simulation.pool(sigma * factor, samples=size, seed=seed) for factor in (1.0, step)]
        if k >= MANY and b <= LARGEST_GRAM:
            matrix = gram(mechanism.resolved_lam, b, 1, normalized=mechanism.normalized is True)
            pools = [
                calibrated(pool, float(np.exp(matrix / (sigma * factor) ** 2).mean()))
                for pool, factor in zip(pools, (1.0, step), strict=True)
            ]
        for way, values in drawn.items():
            here, there = (pool.delta(way, k, epsilon, cells=1500) for pool in pools)
            values.append((here, there))
    means = {way: np.mean(values, axis=0) for way, values in drawn.items()}
    larger: OneWay = "remove" if means["remove"][0] >= means["add"][0] else "add"
    here, there = means[larger]
    slope = math.log(here / there) / math.log(step)
    error = float(np.std([value for value, _ in drawn[larger]], ddof=1)) / math.sqrt(POOLS) / here
    return sigma * (here / delta) ** (1 / slope), sigma * error / slope


def calibrated(pool: Pool, second: float) -> Pool:
    """The pool with weights under which E_P 1 = 1, E_P e^{−L} = 1 and E_P e^L = E_Q W², as they are exactly.

    Over many epochs nearly all of a pool's error is that of its mean loss, which these say.
    """
    weights: dict[OneWay, np.ndarray] = {}
    for way, losses in pool.losses.items():
        known = np.exp(losses if way == "remove" else -2 * losses)
        functions = np.stack([np.ones_like(losses), np.exp(-losses), known])
        weighted = functions * pool.weights[way]
        change = np.linalg.solve(weighted @ functions.T, np.array([1.0, 1.0, second]) - weighted.sum(axis=1))
        weights[way] = pool.weights[way] * (1 + change @ functions)
        if weights[way].min() < 0:
            return pool
    return Pool(pool.losses, weights)


def row(setting: dict[str, Any]) -> dict[str, Any]:
    bins, lam, normalized, b, k, epsilon, delta = setting.values()
    sampling = lc.BallsInBins(examples=10 * b, steps_per_epoch=b, epochs=k, bins=bins)
    mechanism = lc.LambdaCGD(lam, normalized)
    with cache.disabled():
        began = time.process_time()
        certified = accountant_for(mechanism, sampling).sigma(epsilon, delta)
        seconds = time.process_time() - began
        began = time.process_time()
        sigma, error, method = truth(bins, mechanism, b, k, epsilon, delta, certified.sigma)
    return setting | {
        "sigma": certified.sigma, "method": certified.certificate.method, "cpu_seconds": round(seconds, 2),
        "slack_share": certified.certificate.details.get("slack_share"),
        "estimate": sigma, "estimate_error": error, "estimate_by": method,
        "estimate_cpu_seconds": round(time.process_time() - began, 2), "ratio": certified.sigma / sigma,
    }  # fmt: skip


def main() -> None:
    machine = measured_on("fixed-bins accountant", "fresh-bins accountant")
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machine": {}}
    stored = before if before["machine"].get("made_with") == machine["made_with"] else {"machine": machine, "rows": []}
    names = ("bins", "lambda", "normalized", "b", "k", "epsilon", "delta")
    for values in SETTINGS:
        setting = dict(zip(names, values, strict=True))
        if not any(setting.items() <= made.items() for made in stored["rows"]):
            stored["rows"].append(row(setting))
            print(stored["rows"][-1], flush=True)
            RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
