"""Ten epochs of the sweeps' CNN on CUDA as a user would run them: a captured step, cold and warm, and the plain loop.

    python benchmarks/captured.py --out results/captured-h200.json

Images are random; time does not depend on them. "cold" is all that the first run in a process takes, from
``lc.privatize`` to the last of 3 900 steps, kernels compiled and graphs captured; "warm" is the second run's. The plain
loop (``private.loader``) is timed over one epoch after a few steps and counted ten times. With ``--cudnn-benchmark``
the plain loop is far slower: its batches are of many sizes, and cuDNN searches its algorithms for each.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc
from reproduce.machine import machine
from reproduce.problems import problem

EXAMPLES, BATCH, EPOCHS = 50_000, 128, 10


def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def private(plan: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    model = problem("cifar10").models["cnn"]().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    key = lc.SecretKey.generate()
    return lc.privatize(model, optimizer, TensorDataset(x, y), plan, max_grad_norm=0.3, key=key)


def captured(plan: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    began = time.perf_counter()
    run = private(plan, x, y)
    step = run.captured_step(loss, (x, y))
    step.run(1)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    step.run(plan.steps - 1)
    torch.cuda.synchronize()
    end = time.perf_counter()
    finite = all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    return {"steps": run.steps_taken, "seconds": end - began, "until_first_step": ready - began, "finite": finite}


def plain(plan: Any, x: torch.Tensor, y: torch.Tensor, *, warm_up: int = 20) -> dict[str, Any]:
    run = private(plan, x, y)
    batches, epoch, began = iter(run.loader), plan.steps // EPOCHS, 0.0
    for i in range(warm_up + epoch):
        if i == warm_up:
            torch.cuda.synchronize()
            began = time.perf_counter()
        inputs, targets = next(batches)
        loss(run.model, inputs, targets).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / epoch
    return {"steps_timed": epoch, "seconds_of_all_steps": each * plan.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN search for every shape it meets")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("captured steps are CUDA graphs: this benchmark needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    plan = lc.plan(EXAMPLES, BATCH, epochs=EPOCHS, epsilon=8.0, delta=1e-5, lam=0.95)
    x = torch.randn(EXAMPLES, 3, 32, 32, device="cuda")
    y = torch.randint(0, 10, (EXAMPLES,), device="cuda")
    found = {"cold": captured(plan, x, y), "warm": captured(plan, x, y), "plain": plain(plan, x, y)}
    found |= {"mechanism": str(plan.mechanism), "batch": BATCH, "precision": "tf32"}
    found |= {"cudnn_benchmark": options.cudnn_benchmark, "machine": machine()}
    found["date"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
