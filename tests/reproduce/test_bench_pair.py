"""λCGD's step over DP-SGD's: turns that cancel a drift, an interval that covers, both noises on one model."""

from __future__ import annotations

import json
import random

import pytest
import torch

from lambdacgd.errors import InvalidInput
from reproduce import bench_step as benchmark
from reproduce.bench_models import CASES


def test_turns_cancel_a_drift() -> None:
    """A machine that slows steadily while λCGD costs 1% more: every round says 1.01."""
    clock = iter(range(1000))
    asked = []

    def turn(kind: str) -> float:
        asked.append(kind)
        return (100.0 + next(clock)) if kind == "dp-sgd" else 1.01 * (100.0 + next(clock))

    found, base = benchmark.ratios(turn, 5)
    assert found == pytest.approx([1.01] * 5)
    assert asked[:4] == ["dp-sgd", "lambda-cgd", "lambda-cgd", "dp-sgd"]
    assert base == pytest.approx([101.5 + 4 * i for i in range(5)])


def test_the_interval_covers() -> None:
    """Of a skewed distribution's median, in at least 95% of cases; of 2 000 at least 93% (false alarm: below 1e-4)."""
    draw = random.Random(20261115)
    covered = 0
    for _ in range(2000):
        values = [draw.expovariate(1.0) for _ in range(20)]
        middle, low, high = benchmark.median_interval(values)
        assert low <= middle <= high
        covered += low <= 0.6931471805599453 <= high
    assert covered >= 1860
    assert benchmark.median_interval(range(1, 21))[1:] == (6, 15)  # as tables of the sign test say


def test_both_noises_act_on_one_model() -> None:
    step = benchmark.OurStep(CASES["cnn"], torch.device("cpu"), "fp32", 2, *benchmark.PAIR)
    made: dict[str, int] = {}
    for kind, noise in dict(step._noises).items():
        step._noises[kind] = lambda sums, t, kind=kind, noise=noise: (made.__setitem__(kind, t), noise(sums, t))[0]
    for kind in benchmark.PAIR:
        step.kind = kind
        step()
    assert made == {"dp-sgd": 1, "lambda-cgd": 2}


def test_results_are_written_and_failures_recorded(monkeypatch, tmp_path) -> None:
    out = tmp_path / "new" / "pair.json"
    settings = {"precisions": ["fp32"], "device": "cpu", "warm_up": 1, "rounds": 6, "batch": 1}
    real = benchmark.compare_pair

    def failing(model, *rest, **options):
        if model == "lstm":
            raise RuntimeError("no memory")
        return real(model, *rest, **options)

    monkeypatch.setattr(benchmark, "compare_pair", failing)
    benchmark.run_pair(["lstm", "cnn"], out=out, **settings)
    lost, cell = json.loads(out.read_text())["cells"]
    assert lost["error"] == "no memory"
    assert 0 < cell["low"] <= cell["ratio"] <= cell["high"]
    assert cell["dp_sgd_ms"] > 0
    with pytest.raises(InvalidInput, match="rounds"):
        benchmark.run_pair(["cnn"], **settings | {"rounds": 5})
    with pytest.raises(ValueError, match="unknown model"):
        benchmark.run_pair(["nothing"], **settings)
