"""The step benchmark: modes side by side, failures recorded, bad names refused."""

from __future__ import annotations

import json

import pytest
import torch

from reproduce import bench_step as benchmark

MODES = ["non-private", "dp-sgd", "lambda-cgd"]


def test_modes_take_turns(monkeypatch):
    order = []

    def stand_in(mode, *_):
        return lambda: order.append(mode)

    monkeypatch.setattr(benchmark, "make_step", stand_in)
    benchmark.run(["cnn"], precisions=["fp32"], modes=["dp-sgd", "lambda-cgd"], device="cpu", warm_up=1, repeats=6)
    assert order == ["dp-sgd", "lambda-cgd"] + 2 * (3 * ["dp-sgd"] + 3 * ["lambda-cgd"])


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
