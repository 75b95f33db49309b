from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise import Layout, NoiseField, RegeneratedNoise
from reproduce import bench_noise as benchmark
from reproduce.bench_noise import MODELS, shapes_of
from reproduce.stored import StoredNoise


def test_models_have_the_published_sizes() -> None:
    millions = {name: sum(map(math.prod, shapes_of(name).values())) / 1e6 for name in MODELS}
    assert millions["cnn"] == 0.30705
    for name, size in (
        ("wrn-40-4", 8.9),
        ("vit-b", 86),
        ("vit-l", 303),
        ("vit-h", 631),
        ("bert-base", 109.5),
        ("bert-large", 335),
    ):
        assert millions[name] == pytest.approx(size, rel=0.01)


def test_measures_everything_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "results" / "noise.json"
    result = benchmark.run(["cnn"], "cpu", bands=[2], seconds=0.005, out=path, show=False)
    assert json.loads(path.read_text()) == result
    rows = result["models"]["cnn"]["contenders"]
    assert {"copy", "opacus DP-SGD", "rewinding generator, 2 bands", "regenerated, 2 bands"} <= rows.keys()
    assert rows["regenerated, 2 bands"]["ms"] > 0
    assert rows["regenerated, 2 bands"]["over copy"] > 0
    assert result["versions"]["torch"]


def test_one_failure_does_not_lose_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(benchmark, "StoredNoise", broken)
    rows = benchmark.run(["cnn"], "cpu", bands=[2], seconds=0.005, show=False)["models"]["cnn"]["contenders"]
    assert rows["buffers on device, 2 bands"] == {"error": "RuntimeError: out of memory"}
    assert rows["regenerated, 2 bands"]["ms"] > 0


@pytest.mark.parametrize("where", ["device", "cpu"])
def test_stored_noise_is_the_regenerated(where: Literal["device", "cpu"]) -> None:
    """To float32's rounding: three bands, a step back in between. On CUDA, where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout, key, recurrence = Layout.of({"w": (1000,)}), SecretKey.for_tests(1), BandedInverse((1.0, -0.9, -0.05))
    terms: dict[str, Any] = {"sigma": 1.0, "clip": 1.0, "horizon": 100}
    field = NoiseField(key, layout, run_id="1")
    stored = StoredNoise(field, recurrence, buffers=where, **terms)
    regenerated = RegeneratedNoise(field, recurrence, **terms)
    for step in (1, 2, 3, 4, 2, 3, 9):
        sums = [{"w": torch.zeros(1000, device=device)} for _ in range(2)]
        stored.add_(sums[0], step)
        regenerated.add_(sums[1], step)
        torch.testing.assert_close(sums[0]["w"], sums[1]["w"], rtol=0, atol=1e-5)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no model"):
        benchmark.run(["gpt"], "cpu")
    with pytest.raises(ValueError, match="bands"):
        benchmark.run(["cnn"], "cpu", bands=[1])


def test_coefficients_are_those_of_lambda_cgd_for_two_bands() -> None:
    assert benchmark.coefficients(2) == (1.0, -0.9)
    assert len(benchmark.coefficients(16)) == 16
