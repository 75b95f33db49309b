"""The search behind the demo's settings: the same grid of learning rates and clipping norms for every method.

All have the same (ε, δ), epochs and expected batch size, and λ = 0.8; that setting was chosen by hand among about
eight (docs/training.md says which and what they gave). The grid itself searches learning rates and clipping norms.
Every point trains on four fifths of the 1 437 training digits (a new fifth for validation with every seed) under a plan
for that many examples; this script does not look at the test digits. ``python -m benchmarks.tune_demo`` writes
``results/demo_tuning.json`` in about three minutes a method on one core; ``--method`` searches for some and keeps what
the file says of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import lambdacgd as lc
from lambdacgd import digits
from lambdacgd.training import privatize
from reproduce.framework import measured_on

DELTA, EPOCHS, BATCH_SIZE, LAMBDA = 1e-4, 2, 8, 0.8
METHODS = {
    "dp-sgd": (lc.Identity(), lc.Poisson()),
    "lambda-cgd": (lc.LambdaCGD(LAMBDA), lc.BallsInBins("fixed")),
    "lambda-cgd-fresh": (lc.LambdaCGD(LAMBDA), lc.BallsInBins("fresh")),
}
CLIPS = (0.5, 1.0, 2.0, 4.0, 8.0)
REACHES = (0.0625, 0.125, 0.25, 0.5)  # learning rate times clipping norm: how far one example can move the sum


def accuracy(every: TensorDataset, plan: lc.Plan, rate: float, clip: float, seed: int) -> float:
    """Validation accuracy of one run."""
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    train, held_out = Subset(every, order[: plan.examples].tolist()), order[plan.examples :]
    torch.manual_seed(seed)
    model = digits.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    private = privatize(model, optimizer, train, plan, max_grad_norm=clip)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        images, labels = (tensor[held_out] for tensor in every.tensors)
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--method", action="append", choices=sorted(METHODS))
    parser.add_argument("--out", type=Path, default=Path("results/demo_tuning.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    every, _ = digits.load()
    examples = digits.TRAIN * 4 // 5
    chosen = options.method or list(METHODS)
    rows = []
    if set(chosen) != set(METHODS):
        rows = [row for row in json.loads(options.out.read_text())["rows"] if row["method"] not in chosen]
    for name in chosen:
        mechanism, sampling = METHODS[name]
        plan = lc.plan(
            examples,
            BATCH_SIZE,
            epochs=EPOCHS,
            epsilon=options.epsilon,
            delta=DELTA,
            mechanism=mechanism,
            sampling=sampling,
        )
        for clip in CLIPS:
            for reach in REACHES:
                rate = reach / clip
                began = time.monotonic()
                found = [accuracy(every, plan, rate, clip, 1000 + seed) for seed in range(options.seeds)]
                row = {"method": name, "learning_rate": rate, "max_grad_norm": clip, "sigma": plan.sigma}
                row |= {"validation_accuracy": statistics.mean(found), "each": found}
                rows.append(row)
                print(
                    f"{name:12} ζ={clip} lr={rate:6} σ={plan.sigma:6.3f} {100 * statistics.mean(found):5.2f}% "
                    f"{time.monotonic() - began:.0f}s",
                    flush=True,
                )
    best = {
        name: max((r for r in rows if r["method"] == name), key=lambda r: float(str(r["validation_accuracy"])))
        for name in METHODS
    }
    settings = {
        "epsilon": options.epsilon,
        "delta": DELTA,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
        "lambda": LAMBDA,
        "seeds": options.seeds,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "what": "validation search for the digits demo",
        "settings": settings | {"train_examples": examples, "validation_examples": digits.TRAIN - examples},
        "best": best,
        "rows": rows,
        "machine": measured_on("fresh-bins accountant", "format of the noise"),
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
