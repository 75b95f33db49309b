"""λCGD's step over DP-SGD's, to a fraction of a percent: one model, one batch, two noises that take turns.

Whole steps differ by far less than a machine's moods. So both noises act on the same model, in turns A B B A, which
cancels whatever drifts; each round gives one ratio, and the median of many comes with an interval that assumes nothing
about their distribution.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lambdacgd.validation import integer
from reproduce import bench_step as benchmark
from reproduce.bench_models import CASES

PAIR = ("dp-sgd", "lambda-cgd")


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and two order statistics around it that hold the true one in 95 of 100 cases (n ≥ 6)."""
    ordered = sorted(values)
    n = len(ordered)
    below, chance = 0, 2.0**-n  # P(Binomial(n, 1/2) ≤ 0)
    total = chance
    while total <= 0.025 and below < n:
        below += 1
        chance *= (n - below + 1) / below
        total += chance
    low = max(0, below - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def ratios(turn: Callable[[str], float], rounds: int) -> tuple[list[float], list[float]]:
    """Per round, in turns A B B A: B's time over A's, and A's time. ``turn`` runs one of ``PAIR`` and times it."""
    a, b = PAIR
    found, base = [], []
    for _ in range(rounds):
        first, second, third, fourth = (turn(kind) for kind in (a, b, b, a))
        found.append((second + third) / (first + fourth))
        base.append((first + fourth) / 2)
    return found, base


def compare(
    model: str, precision: str, device: torch.device, *, batch: int, warm_up: int, rounds: int
) -> dict[str, Any]:
    """One cell: the ratio of the two steps with its interval."""
    torch.manual_seed(1)
    step = benchmark.OurStep(CASES[model], device, precision, batch, *PAIR)

    def turn(kind: str) -> float:
        step.kind = kind
        return benchmark.turn(step, device)

    ratios(turn, warm_up)
    found, base = ratios(turn, rounds)
    ratio, low, high = median_interval(found)
    return {
        "model": model, "precision": precision, "batch": batch, "ratio": ratio, "low": low, "high": high,
        "dp_sgd_ms": statistics.median(base), "rounds": rounds,
    }  # fmt: skip


def run(
    models: Sequence[str],
    *,
    precisions: Sequence[str],
    device: str,
    warm_up: int = 2,
    rounds: int = 40,
    batch: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Compare for every model and precision; one that fails is recorded as an error and the rest goes on."""
    benchmark.check_names(model=(models, tuple(CASES)), precision=(precisions, benchmark.PRECISIONS))
    integer("rounds", rounds, minimum=6)
    place = torch.device(device)
    result: dict[str, Any] = {"machine": benchmark.machine(place), "cells": []}
    for precision in precisions:
        for model in models:
            size = batch or CASES[model].batch
            try:
                with benchmark.set_precision(precision):
                    cell = compare(model, precision, place, batch=size, warm_up=warm_up, rounds=rounds)
                text = f"{cell['ratio']:.4f} ({cell['low']:.4f} to {cell['high']:.4f}) of {cell['dp_sgd_ms']:.2f} ms"
            except Exception as error:
                cell = {"model": model, "precision": precision, "batch": size, "error": f"{error}"[:500]}
                text = cell["error"][:120]
            benchmark.free(place)
            result["cells"].append(cell)
            print(f"{precision:5} {model:18} λCGD over DP-SGD {text}", flush=True)
            benchmark.write(result, out)
    return result
