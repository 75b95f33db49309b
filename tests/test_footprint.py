"""Estimates of memory and time: near the measurements they come from, and never apart from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import lambdacgd as lc
from lambdacgd import footprint, footprint_data
from lambdacgd.cli import main
from lambdacgd.cli.size import size, time
from lambdacgd.footprint import Machine
from lambdacgd.validation import InvalidInput

ROOT = Path(footprint.__file__).resolve().parents[2]
PLAN = ["plan", "--examples", "1000", "--batch-size", "10", "--epochs", "2", "--epsilon", "8", "--delta", "1e-4"]
PLAN += ["--lambda", "0.9", "--sampling", "cyclic"]


def script():
    path = ROOT / "benchmarks" / "footprint.py"
    if not path.exists():
        pytest.skip("the results are not part of an installed package")
    spec = importlib.util.spec_from_file_location("footprint_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_numbers_are_those_of_the_results():
    """Made anew from results/: after new measurements run ``python benchmarks/footprint.py``."""
    assert Path(footprint_data.__file__).read_text() == script().text()


def test_estimates_are_near_the_measurements():
    models = json.loads((ROOT / script().NOISE).read_text())["models"]
    seen = 0
    for model in models.values():
        for name, cell in model["contenders"].items():
            regenerated = name.startswith("regenerated")
            if model["parameters"] < 80e6 or not (regenerated or name.startswith("buffers on device")):
                continue
            bands = 1 if "DP-SGD" in name else int(name.split(", ")[1].split()[0])
            given = {"regenerated": regenerated, "tensors": model["tensors"]}
            estimate = footprint.noise_ms(model["parameters"], bands, **given)
            worst = footprint_data.MEASURED["regenerated" if regenerated else "buffered"]["worst_relative_error"]
            assert estimate == pytest.approx(cell["ms"], rel=worst * 1.01)
            memory = footprint.noise_bytes(model["parameters"], bands, **given)
            assert memory == pytest.approx(cell["extra_mib"] * 2**20, rel=0.1)
            seen += 1
    assert seen > 20


def test_time_grows_with_size_and_bands_and_shrinks_with_shards():
    one, eight = (Machine(parameters=7 * 10**9, devices=n, tokens=128) for n in (1, 8))
    for regenerated in (True, False):
        small = footprint.footprint(eight, bands=2, regenerated=regenerated, batch_size=64)
        large = footprint.footprint(eight, bands=16, regenerated=regenerated, batch_size=64)
        alone = footprint.footprint(one, bands=2, regenerated=regenerated, batch_size=64)
        assert small.sharded_ms < large.sharded_ms
        assert small.sharded_ms < small.replicated_ms == alone.sharded_ms == alone.replicated_ms
        assert small.step_ms < alone.step_ms
    stored = footprint.footprint(eight, bands=4, regenerated=False, batch_size=64)
    assert stored.replicated_bytes == pytest.approx(8 * stored.sharded_bytes)
    assert stored.replicated_bytes > 4 * 4 * 7e9
    assert small.replicated_bytes > 1e9


def test_a_plans_own_mechanism_and_adapters():
    plan = lc.plan(1000, 10, epochs=2, epsilon=8.0, delta=1e-4, mechanism=lc.BSR(3), sampling=lc.Cyclic())
    found = footprint.report(plan, Machine(parameters=10**9, trainable=10**6))
    assert found["kind"] == "estimate"
    assert not found["noise"]["this plan"]["regenerated"]
    assert found["noise"]["λCGD"]["regenerated"]
    assert found["noise"]["λCGD"]["step_ms"] is None
    assert found["noise"]["this plan"]["sharded_bytes"] < 4 * 10**6 * 20
    assert found["weights_sums_adam_bytes"]["replicated"] == 16 * 10**6 + 4 * (10**9 - 10**6)


def test_the_command_prints_an_estimate(capsys):
    assert main([*PLAN, "--parameters", "7e9", "--devices", "8", "--tokens", "512"]) == 0
    out = capsys.readouterr().out
    for word in ("7e+09 parameters", "8 devices", "FSDP2", "estimates", "regenerated", "stored", "extrapolated"):
        assert word in out
    assert main([*PLAN, "--parameters", "3e8", "--trainable", "1e6", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["size"]["kind"] == "estimate"
    assert not data["size"]["extrapolated"]
    assert main([*PLAN, "--json"]) == 0
    assert "size" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--parameters", "many"], ["--parameters", "-1"], ["--parameters", "1.5"], ["--tokens", "5"],
        ["--parameters", "7e9", "--trainable", "8e9"], ["--parameters", "7e9", "--devices", "0"],
        ["--parameters", "7e9", "--precision", "fp8"],
    ],
)  # fmt: skip
def test_bad_sizes_are_one_line(wrong, capsys):
    assert main([*PLAN, *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_units():
    assert (size(28e9), size(3e6), size(12.0)) == ("26.1 GiB", "2.86 MiB", "<1 MiB")
    assert (time(0.75), time(1234.0)) == ("0.75 ms", "1.23 s")
    with pytest.raises(InvalidInput):
        Machine(parameters=0)
