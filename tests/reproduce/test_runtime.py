"""The runtime tables: the arithmetic of an epoch, turns between variants, and what happens when something fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reproduce import runtime
from reproduce.bench_models import Case
from reproduce.framework import Row, Settings
from reproduce.paper import CIFAR, DP_SGD, IMDB, VARIANTS
from reproduce.runtime import Times, Variant, measure_model, summary, variants
from reproduce.stored import StoredNoise

SIZES = {"batch": 8, "physical": 4, "steps_per_epoch": 10, "bands": [2, 4, 16], "device": "cpu"}


class Flat(nn.Module):
    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 4 * 4, 2)
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("a fake one")
        return self.head(x.flatten(1))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    cases = {"cnn": Case(Flat, 4, image=4), "greedy": Case(lambda: Flat(5), 4, image=4)}
    monkeypatch.setattr(runtime, "MODELS", cases)
    return cases


def measured(name: str, **more: Any) -> Row:
    return measure_model(name, **(SIZES | {"rounds": 2, "steps": 2, "seconds": 60.0} | more))


def test_every_variant_is_measured(tiny: dict[str, Case]) -> None:
    found = measured("cnn")
    assert list(found["variants"]) == [*VARIANTS, "Opacus"]
    assert found["parameters"] == 98
    for name in VARIANTS:
        row = found["variants"][name]
        assert row["rounds"] == 2
        assert row["steps"] == 4
        assert row["act_ms"] > 0
        b_m = 10 * (row["pooled_first_ms"] + row["pooled_later_ms"] + row["act_ms"]) / 1e3
        assert row["epoch_s"] == pytest.approx(b_m)
        assert row["over_dp_sgd"] == pytest.approx(row["epoch_s"] / found["variants"][DP_SGD]["epoch_s"])
    assert found["variants"]["Opacus"]["epoch_s"] > 0
    assert found["variants"]["CPU buffer, 4 bands"]["host_buffer_mib"] == pytest.approx(3 * 4 * 98 / 2**20)


def test_bands_are_all_in_use_and_kept_from_round_to_round(
    tiny: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Variant] = []
    monkeypatch.setattr(runtime, "variants", lambda *a: seen.extend(made := variants(*a)) or made)
    stages: dict[str, set[int]] = {}
    once = runtime._round

    def spied(variant: Variant, *rest: Any) -> None:
        once(variant, *rest)
        stages.setdefault(variant.title, set()).add(id(variant.buffered))

    monkeypatch.setattr(runtime, "_round", spied)
    measured("cnn")
    trial = seen.pop()
    assert trial.done == 20 + 2  # what a step takes, found out before the rounds
    for variant in seen:
        assert variant.done == (0 if variant.on_cpu else 20) + 2 * 3  # two rounds of one step off the clock and two on
        if variant.on_cpu:
            assert isinstance(variant.buffered, StoredNoise)
            assert variant.buffered._next == variant.done + 1  # went on, was not rebuilt
            assert len(stages[variant.title]) == 1


def test_out_of_memory_halves_the_physical_batch(tiny: dict[str, Case]) -> None:
    found = measured("greedy", batch=16, physical=8)
    assert found["physical_used"] == 4
    assert found["variants"]["Opacus"]["physical_used"] == 4
    row = found["variants"][DP_SGD]
    assert row["epoch_s"] == pytest.approx(
        10 * (row["pooled_first_ms"] + 3 * row["pooled_later_ms"] + row["act_ms"]) / 1e3
    )


def test_a_failing_variant_does_not_lose_the_rest(tiny: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*a: Any, **k: Any) -> None:
        raise RuntimeError("cannot pin that much memory")

    monkeypatch.setattr(StoredNoise, "add_", fail)
    found = measured("cnn")["variants"]
    assert "cannot pin" in found["CPU buffer, 2 bands"]["error"]
    assert found["regenerated, 16 bands"]["over_dp_sgd"] > 0


def test_a_failing_model_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> nn.Module:
        raise ImportError("no transformers here")

    monkeypatch.setattr(runtime, "MODELS", {"cnn": Case(broken, 4, image=4)})
    cell = runtime.cells(CIFAR, Settings(quick=True, device="cpu"))[0]
    row = cell | runtime.compute(CIFAR, cell, Settings(quick=True, device="cpu"))
    assert "no transformers here" in row["error"]
    assert "no transformers here" in runtime.page(CIFAR, [row])
    assert runtime.flat(CIFAR, [row])[0]["error"]


def test_slow_steps_are_timed_less_often(tiny: dict[str, Case]) -> None:
    found = measured("cnn", rounds=5, seconds=1e-9)["variants"][DP_SGD]
    assert found["rounds"] == 2
    assert found["steps"] == 2


def test_the_epoch_is_put_together_from_medians() -> None:
    made = variants([2], 4)[:2]
    made[0].times = Times([[1.0, 3.0], [1.0]], [[2.0], [2.0]], [[0.5], [0.7]])
    made[1].times = Times([[1.0], [9.0]], [[2.0], [2.0]], [[0.8], [0.8]])
    found = summary(made, m=3, b=10, parameters=5)
    assert found[DP_SGD]["epoch_s"] == pytest.approx(10 * (1 + 2 * 2 + 0.6))
    assert found["regenerated, 2 bands"]["epoch_s"] == pytest.approx(10 * (1 + 2 * 2 + 0.8))
    assert found["regenerated, 2 bands"]["own_epoch_s"] == pytest.approx(10 * (5 + 2 * 2 + 0.8))


def test_memory_is_measured_apart_from_times() -> None:
    on_gpu = runtime.cells(CIFAR, Settings(device="cuda"))
    assert [cell["model"] for cell in on_gpu if "what" in cell] == [model.case for model in CIFAR.models]
    assert not [cell for cell in runtime.cells(CIFAR, Settings(device="cpu")) if "what" in cell]
    times = {"table": "cifar", "batch": 512, "model": "cnn"}
    titles = (*VARIANTS, "Opacus")
    times["variants"] = {name: {"epoch_s": 2.0, "over_dp_sgd": 1.0, "host_buffer_mib": 0.0} for name in titles}
    memory = {"what": "memory", "model": "cnn", "peaks_mib": {DP_SGD: 258.0, "regenerated, 2 bands": 258.25}}
    text = runtime.page(CIFAR, [times, memory])
    assert "| 258 MiB | 258 MiB |" in text
    assert "+0.2 MiB" in text
    peaks = {line["variant"]: line.get("peak_mib") for line in runtime.flat(CIFAR, [times, memory])}
    assert peaks[DP_SGD] == 258.0
    assert peaks["Opacus"] is None
    assert "timed yet" in runtime.page(CIFAR, [memory])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lambda_cgd_needs_no_memory_of_its_own() -> None:
    peaks = runtime.measure_memory("bert-tiny", physical=8, device="cuda")["peaks_mib"]
    assert abs(peaks["regenerated, 2 bands"] - peaks[DP_SGD]) < 1


def test_the_paper_tables_are_whole() -> None:
    for paper in (CIFAR, IMDB):
        assert all(len(model.values) == len(VARIANTS) == 7 for model in paper.models)
    assert CIFAR.steps_per_epoch == 97
    worst = max((model.value(VARIANTS[1]) or 0) / (model.value(DP_SGD) or 1) for model in CIFAR.models)
    assert 1.007 < worst < 1.01  # the paper: less than 1% on CIFAR-10
    assert IMDB.models[3].value("CPU buffer, 16 bands") == 1236.5  # +147%, as its text says
    assert 1236.5 / (IMDB.models[3].value(DP_SGD) or 1) == pytest.approx(2.47, abs=0.01)
