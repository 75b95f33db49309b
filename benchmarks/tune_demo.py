"""The search behind the demo's settings: the same grid of learning rates and batch sizes for DP-SGD and DP-λCGD.

Every setting trains on four fifths of the 1 437 training digits (a new fifth for validation with every seed) under a
plan for that many examples at the demo's (ε, δ); the test digits are never looked at. ``python benchmarks/tune_demo.py
--out results/demo_tuning.json`` takes about fifteen minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import privatize
from lambdacgd.training.data import digits
from lambdacgd.training.tasks import digits_model

DELTA, EPOCHS, CLIP = 1e-4, 10, 1.0
METHODS = {
    "dp-sgd": (lc.Identity(), "poisson"),
    "lambda-cgd 0.8": (lc.LambdaCGD(0.8), "balls-in-bins"),
    "lambda-cgd 0.9": (lc.LambdaCGD(0.9), "balls-in-bins"),
}
BATCH_SIZES = (16, 32, 64)
RATES = (0.25, 0.5, 1.0, 2.0)


def accuracy(plan: lc.Plan, rate: float, seed: int) -> float:
    """Validation accuracy of one run."""
    every = digits.load().train
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))
    train, held_out = every.part(order[: plan.examples]), every.part(order[plan.examples :])
    torch.manual_seed(seed)
    model = digits_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    private = privatize(model, optimizer, train, plan, max_grad_norm=CLIP)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float((model(held_out.inputs).argmax(1) == held_out.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("results/demo_tuning.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    examples = digits.TRAIN * 4 // 5
    rows = []
    for batch_size in BATCH_SIZES:
        for name, (mechanism, sampling) in METHODS.items():
            plan = lc.plan(
                examples,
                batch_size,
                epochs=EPOCHS,
                epsilon=options.epsilon,
                delta=DELTA,
                mechanism=mechanism,
                sampling=sampling,
            )
            for rate in RATES:
                began = time.monotonic()
                found = [accuracy(plan, rate, 1000 + seed) for seed in range(options.seeds)]
                row = {"method": name, "batch_size": batch_size, "learning_rate": rate, "sigma": plan.sigma}
                row |= {"validation_accuracy": statistics.mean(found), "each": found}
                rows.append(row)
                print(
                    f"{name:16} B={batch_size:3} lr={rate:5} σ={plan.sigma:6.3f} {100 * statistics.mean(found):5.1f}% "
                    f"{time.monotonic() - began:.0f}s",
                    flush=True,
                )
    best = {
        kind: max(
            (r for r in rows if str(r["method"]).startswith(kind)), key=lambda r: float(str(r["validation_accuracy"]))
        )
        for kind in ("dp-sgd", "lambda-cgd")
    }
    settings = {
        "epsilon": options.epsilon,
        "delta": DELTA,
        "epochs": EPOCHS,
        "max_grad_norm": CLIP,
        "seeds": options.seeds,
    }
    machine = {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "what": "validation search for the digits demo",
        "settings": settings | {"train_examples": examples, "validation_examples": digits.TRAIN - examples},
        "best": best,
        "rows": rows,
        "machine": machine,
        "version": lc.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
