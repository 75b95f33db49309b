"""Time, memory and accuracy of the Monte Carlo accountant, beside plain sampling and the peers that are installed.

    python -m benchmarks.monte_carlo [--out results/monte-carlo.json] [--quick] [--peer-cap SECONDS]

Everything is measured in one run, uncached; how the peers are asked is told in ``peers.py``. "plain" is what a
straightforward implementation does: samples of P in the Gram form, no importance sampling; its time is for the same
relative standard error of δ, from its measured speed and the variance that δ implies.
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
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.mechanisms import BISR, Horizon, LambdaCGD, Mechanism
from reproduce.framework import measured_on

DELTA = 1e-5


def measure(mechanism: Mechanism, horizon: Horizon, epsilon: float, *, certify: bool) -> dict[str, Any]:
    started = time.perf_counter()
    accountant = MonteCarlo(mechanism, horizon)
    estimate = accountant.estimate_sigma(epsilon, DELTA)
    row: dict[str, Any] = {
        "mechanism": mechanism.to_dict(),
        "b": horizon.steps_per_epoch,
        "k": horizon.epochs,
        "epsilon": epsilon,
        "sigma": estimate.sigma,
        "sigma_relative_error": estimate.standard_error / estimate.sigma,
        "delta_relative_error": estimate.delta.relative_error,
        "samples": estimate.delta.samples,
        "estimate_seconds": time.perf_counter() - started,
    }
    row["plain_seconds"] = plain_seconds(accountant, epsilon, estimate.sigma, estimate.delta.relative_error)
    if certify:
        started = time.perf_counter()
        found = accountant.certify(epsilon, DELTA)
        row |= {
            "certified_sigma": found.sigma,
            "certified_over_estimate": found.sigma / estimate.sigma,
            "certificate_seconds": time.perf_counter() - started,
            "certificate_samples": sum(test["samples"] for test in found.certificate.details["tests"]),
        }
    row["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def plain_seconds(accountant: MonteCarlo, epsilon: float, sigma: float, relative_error: float) -> float:
    """Time of plain samples of P for the same relative error: variance of the summand is at most about δ."""
    gram, count = accountant.gram, max(64, 4_000_000 // accountant.horizon.steps_per_epoch)
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    samples = gram.sample(rng, count) / sigma
    samples += gram.rows(rng.integers(samples.shape[1], size=count), 1) / sigma**2
    losses = np.log(np.exp(samples - 0.5 * gram.diagonal / sigma**2).mean(axis=1))
    np.maximum(-np.expm1(epsilon - losses), 0.0).mean()
    a_sample = (time.perf_counter() - started) / count
    # E[(1 − e^{ε−L})₊²] is about half of its mean: L passes ε by about one in these settings
    return 0.5 / DELTA / relative_error**2 * a_sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="ε = 8 only, no large b, small questions to peers")
    parser.add_argument("--peer-cap", type=float, default=120.0, help="seconds for each answer of a peer")
    arguments = parser.parse_args()
    paper, rows = Horizon(390, 10), []
    with cache.disabled():
        for epsilon in (8.0,) if arguments.quick else (8.0, 2.0, 0.5):
            for mechanism in (LambdaCGD(0.9), BISR(4)):
                rows.append(measure(mechanism, paper, epsilon, certify=True))
                show(rows[-1])
        if not arguments.quick:
            rows.append(measure(LambdaCGD(0.95), Horizon(10_000, 10), 4.0, certify=False))
            show(rows[-1])
    found = peers.beside(peers.SMALL if arguments.quick else (*peers.SMALL, *peers.PAPER), cap=arguments.peer_cap)
    print(f"peers: {found['versions']}")
    result = {"machine": measured_on("Monte Carlo"), "rows": rows, "peers": found}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def show(row: dict[str, Any]) -> None:
    name = " ".join(str(value) for value in row["mechanism"].values())
    print(
        f"{name:<32} b={row['b']:<6} ε={row['epsilon']:<4g} σ={row['sigma']:.4f} ± {row['sigma_relative_error']:.2%} "
        f"δ ± {row['delta_relative_error']:.1%} in {row['estimate_seconds']:.1f} s "
        f"(plain: {row['plain_seconds']:.0f} s, {row['plain_seconds'] / row['estimate_seconds']:.0f}×)",
        end="",
    )
    if "certified_sigma" in row and math.isfinite(row["certified_sigma"]):
        print(
            f"; certified {row['certified_sigma']:.4f} (× {row['certified_over_estimate']:.4f}) "
            f"in {row['certificate_seconds']:.1f} s, {row['certificate_samples']:,} samples",
            end="",
        )
    print(f"; peak {row['peak_memory_mb']:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
