"""What correlated noise does to Adam's second moment: measured on digits, with AdamW and plain SGD.

For every λ one run at the same (ε, δ); the noise-free mean gradient ḡ is taken from the clipped sums before the noise
(which only a benchmark may do) and the noise x from the difference. Averages are over coordinates and over the steps
of the last epoch. ``python -m benchmarks.adam_second_moment`` writes ``results/adam_second_moment.json`` in about a
minute on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd import digits
from lambdacgd.training import privatize
from reproduce.framework import measured_on

EPSILON, DELTA, EPOCHS, BATCH_SIZE, CLIP = 4.0, 1e-4, 5, 16, 1.0
SEEDS = (1, 2, 3)


def measure(lam: float, optimizer_name: str, seed: int) -> dict[str, float]:
    train, _ = digits.load()
    plan = lc.plan(
        train,
        BATCH_SIZE,
        epochs=EPOCHS,
        epsilon=EPSILON,
        delta=DELTA,
        mechanism=lc.LambdaCGD(lam),
        sampling=lc.BallsInBins("fixed"),
    )
    torch.manual_seed(seed)
    model = digits.model()
    optimizer: torch.optim.Optimizer
    if optimizer_name == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.0)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    private = privatize(model, optimizer, train, plan, max_grad_norm=CLIP)
    totals: dict[str, float] = {"gradient": 0.0, "noise": 0.0, "cross": 0.0, "noisy": 0.0}
    steps = 0
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        sums = [private.clipper.sums[name].flatten() for name in private.clipper.parameters]
        clean = torch.cat(sums) / plan.batch_size
        optimizer.step()
        noisy = torch.cat([p.grad.flatten() for p in private.clipper.parameters.values() if p.grad is not None])
        optimizer.zero_grad()
        if private.steps_taken > plan.steps - plan.steps_per_epoch and plan.steps_per_epoch:
            noise = noisy - clean
            totals["gradient"] += float(clean.square().mean())
            totals["noise"] += float(noise.square().mean())
            totals["cross"] += float(2 * (clean * noise).mean())
            totals["noisy"] += float(noisy.square().mean())
            steps += 1
    means = {name: value / steps for name, value in totals.items()}
    means["predicted_noise"] = (plan.sigma * CLIP / plan.batch_size) ** 2 * (1 + lam**2)
    means["sigma"] = plan.sigma
    if optimizer_name == "adamw":
        correction = 1 - 0.999**plan.steps
        squares = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in private.clipper.parameters.values()])
        means["second_moment"] = float(squares.mean()) / correction
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/adam_second_moment.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in ("adamw", "sgd"):
        for lam in (0.0, 0.5, 0.9):
            found = [measure(lam, name, seed) for seed in SEEDS]
            row: dict[str, Any] = {"optimizer": name, "lambda": lam}
            row |= {key: sum(f[key] for f in found) / len(found) for key in found[0]}
            row["cross_over_gradient"] = row["cross"] / row["gradient"]
            rows.append(row)
            print(
                {key: value if isinstance(value, str) else float(f"{value:.4g}") for key, value in row.items()},
                flush=True,
            )
    settings = {"epsilon": EPSILON, "delta": DELTA, "epochs": EPOCHS, "batch_size": BATCH_SIZE, "max_grad_norm": CLIP}
    machine = measured_on("fixed-bins accountant", "format of the noise")
    report = {"settings": settings | {"seeds": SEEDS}, "rows": rows, "machine": machine}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
