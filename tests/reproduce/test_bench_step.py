"""The step benchmarks: modes side by side, failures recorded, bad names refused; turns that cancel a drift."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from lambdacgd.clipping import attach
from lambdacgd.errors import InvalidInput
from reproduce import bench_models
from reproduce import bench_step as benchmark
from reproduce.bench_models import CASES

MODES = ["non-private", "dp-sgd", "lambda-cgd"]


def test_modes_take_turns(monkeypatch):
    order = []

    def stand_in(mode, *_):
        return lambda: order.append(mode)

    monkeypatch.setattr(benchmark, "make_step", stand_in)
    benchmark.run(["cnn"], precisions=["fp32"], modes=["dp-sgd", "lambda-cgd"], device="cpu", warm_up=1, repeats=6)
    assert order == ["dp-sgd", "lambda-cgd"] + 2 * (3 * ["dp-sgd"] + 3 * ["lambda-cgd"])


def test_loops_are_timed_behind_a_step_that_is_probed(monkeypatch):
    """As a clipper probes them, whoever asks."""
    model, passes, probed = nn.Linear(3, 2), 0, []
    clipper = attach(model)
    look = clipper._probe.look
    monkeypatch.setattr(clipper._probe, "look", lambda *given: (probed.append(passes), look(*given))[1])
    for passes in range(1, 60):  # noqa: B007  (`look` reads it)
        model(torch.randn(4, 3)).sum(1).mean().backward()
    assert probed == [t for t in range(1, 60) if benchmark.probed_from(t) == t]

    counts: dict[str, int] = {}

    def counting(mode, *_):
        return lambda: counts.__setitem__(mode, counts.get(mode, 0) + 1)

    monkeypatch.setattr(benchmark, "make_step", counting)
    modes = ["plain-loop", "loop"]
    result = benchmark.run(["cnn"], precisions=["fp32"], modes=modes, device="cpu", warm_up=20, repeats=6)
    assert counts == {"plain-loop": 21 + 6, "loop": 21 + 6}
    assert all(cell["probed_ms"] >= 0 for cell in result["cells"])


@pytest.mark.parametrize("build", ["gpt2", "llama"])
def test_loops_of_language_models(monkeypatch, build):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    builds = {
        "gpt2": lambda: bench_models.gpt2(16, 2, 2, vocabulary=30),
        "llama": lambda: bench_models.llama_with_lora(16, 2, 2, vocabulary=30, hidden=24),
    }
    monkeypatch.setitem(CASES, "gpt2", bench_models.Case(builds[build], 8, tokens=6, vocabulary=30))
    modes = list(benchmark.LOOPS)
    result = benchmark.run(["gpt2"], precisions=["bf16"], modes=modes, device="cpu", warm_up=1, repeats=3)
    assert [cell.get("error") for cell in result["cells"]] == [None] * len(modes)
    assert all(cell["least_ms"] > 0 for cell in result["cells"])


def test_a_failing_mode_is_recorded_and_the_rest_goes_on(monkeypatch, tmp_path):
    real = benchmark.make_step

    def failing(mode, *rest):
        if mode == "dp-sgd":
            raise RuntimeError("no memory")
        return real(mode, *rest)

    monkeypatch.setattr(benchmark, "make_step", failing)
    out = tmp_path / "new" / "step.json"
    benchmark.run(["cnn"], precisions=["fp32"], modes=MODES, device="cpu", warm_up=1, repeats=1, batch=2, out=out)
    cells = {cell["mode"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert list(cells) == MODES
    assert "no memory" in cells["dp-sgd"]["error"]
    for mode in ("non-private", "lambda-cgd"):
        assert cells[mode]["median_ms"] >= cells[mode]["least_ms"] > 0


def test_precision_settings_are_put_back():
    before = torch.get_float32_matmul_precision()
    benchmark.run(["cnn"], precisions=["tf32"], modes=["non-private"], device="cpu", warm_up=0, repeats=1, batch=1)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("wrong", ["models", "modes", "precisions"])
def test_unknown_names_are_refused(wrong):
    given = {"models": ["cnn"], "modes": ["dp-sgd"], "precisions": ["fp32"]} | {wrong: ["nothing"]}
    models = given.pop("models")
    with pytest.raises(ValueError, match="unknown"):
        benchmark.run(models, device="cpu", **given)


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
