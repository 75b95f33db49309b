"""Where the host's time goes in a loop over sampled batches, private and not, on CUDA: milliseconds of each phase.

    python -m benchmarks.loop_phases [--out results/loop-phases-h200.json]

Turns of three steps, plain and private by turns, behind the 22nd step, so that none is probed (the 34th is the next).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd.clipping.convert import convert
from reproduce.bench_models import CASES
from reproduce.bench_step import loss_of, set_precision, write
from reproduce.framework import free, measured_on

MODELS = (("cnn", "tf32"), ("wrn-16-4", "tf32"), ("bert-base", "bf16"), ("vit-b", "bf16"))
PHASES = ("next batch", "forward", "backward", "optimizer.step", "zero_grad")
WARM_UP, TURNS, TURN = 22, 3, 3
Step = Callable[[list[list[float]]], None]


def loop(name: str, precision: str, device: torch.device, *, private: bool) -> Step:
    """A step that appends the seconds of its phases to what it is given."""
    case = CASES[name]
    torch.manual_seed(1)
    with device:
        model = convert(case.build()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    (x, y), key = case.data(device, 8 * case.batch), lc.SecretKey.for_tests(1)
    mechanism, sampling = lc.LambdaCGD(0.5), lc.BallsInBins("fixed")
    plan = lc.plan(
        8 * case.batch, case.batch, epochs=50, epsilon=8.0, delta=1e-3, mechanism=mechanism, sampling=sampling
    )
    if private:
        data = TensorDataset(x, y)
        batches: Iterator[Any] = iter(lc.privatize(model, optimizer, data, plan, max_grad_norm=1.0, key=key).loader)
    else:
        drawn = (torch.as_tensor(rows, device=device) for rows in plan.sampling.batches(key, run="1"))
        batches = ((x[rows], y[rows]) for rows in drawn)

    def step(times: list[list[float]]) -> None:
        moments = [time.perf_counter()]
        inputs, targets = next(batches)
        moments.append(time.perf_counter())
        loss = loss_of(model, inputs, targets, precision)
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        moments.append(time.perf_counter())
        times.append([after - before for before, after in pairwise(moments)])

    return step


def measure(name: str, precision: str, device: torch.device) -> dict[str, Any]:
    """Both loops of a model: wall milliseconds a step, and the medians of their phases."""
    steps = {mode: loop(name, precision, device, private=mode == "private") for mode in ("plain", "private")}
    for step in steps.values():
        for _ in range(WARM_UP):
            step([])
    phases: dict[str, list[list[float]]] = {mode: [] for mode in steps}
    walls: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(TURNS):
        for mode, step in steps.items():
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(TURN):
                step(phases[mode])
            torch.cuda.synchronize(device)
            walls[mode].append(1e3 * (time.perf_counter() - began) / TURN)
    return {"model": name, "precision": precision} | {
        mode: {
            "wall_ms": statistics.median(walls[mode]),
            "phases_ms": [1e3 * statistics.median(column) for column in zip(*phases[mode], strict=True)],
        }
        for mode in steps
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    device, result = torch.device("cuda"), {"machine": measured_on(), "phases": PHASES, "cells": []}
    warnings.simplefilter("ignore")  # the key is for tests, and nobody looks at the loss
    for name, precision in MODELS:
        with set_precision(precision):
            cell = measure(name, precision, device)
        free(device)
        result["cells"].append(cell)
        print(f"{name:10} {precision}  x{cell['private']['wall_ms'] / cell['plain']['wall_ms']:.2f}", cell, flush=True)
        write(result, out)


if __name__ == "__main__":
    main()
