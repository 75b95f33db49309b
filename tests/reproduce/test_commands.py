"""The command line of a checkout: bad input is one line, benchmarks write JSON, cells are collected anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reproduce.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["nonsense"], "nonsense"),
        (["bench", "noise", "--model", "nonsense"], "nonsense"),
        (["bench", "step", "--mode", "nonsense"], "nonsense"),
        (["bench", "step", "--batch", "0"], "--batch"),
        (["bench", "step", "--repeats", "0"], "--repeats"),
        (["bench", "step", "--device", "nonsense"], "--device"),
        (["bench", "pair", "--rounds", "-1"], "--rounds"),
        (["bench", "noise", "--seconds", "nan"], "--seconds"),
        (["bench", "noise", "--device", "nonsense"], "--device"),
        (["bench", "noise", "--out", "/proc/nowhere/noise.json"], "--out"),
        (["rmse-table", "--stop-after", "-1"], "--stop-after"),
        (["rmse-table", "--device", "nonsense"], "--device"),
        (["rmse-table", "--weights", "bert"], "--weights"),
        (["fine-tuning", "--weights", "nowhere"], "--weights"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, flag, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("reproduce: ")
    assert flag in captured.err


def test_half_a_command_is_answered_with_help_alone(capsys):
    assert main(["bench"]) == 2
    captured = capsys.readouterr()
    assert "noise" in captured.out + captured.err
    assert "reproduce: \n" not in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows a machine without CUDA")
def test_cells_of_a_gpu_are_collected_anywhere(capsys, tmp_path):
    arguments = ["runtime-cifar", "--device", "cuda", "--out", str(tmp_path)]
    assert main(arguments) != 0
    assert "no CUDA device" in capsys.readouterr().err
    cells = Path(__file__).parents[2] / "results" / "runtime-cifar" / "cells.jsonl"
    (tmp_path / "runtime-cifar").mkdir()
    (tmp_path / "runtime-cifar" / "cells.jsonl").write_text(cells.read_text())
    assert main([*arguments, "--collect"]) == 0
    assert "CNN (0.3M)" in (tmp_path / "runtime-cifar" / "runtime-cifar.md").read_text()


def test_bench_writes_json_with_the_machine_named(capsys, tmp_path):
    out = tmp_path / "noise.json"
    arguments = ["--model", "cnn", "--device", "cpu", "--bands", "2", "--seconds", "0.01"]
    assert main(["bench", "noise", *arguments, "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert measured["device"]
    assert measured["models"]["cnn"]["parameters"] > 100_000
    step = tmp_path / "step.json"
    arguments = [
        "--model",
        "cnn",
        "--mode",
        "non-private",
        "--mode",
        "lambda-cgd",
        "--precision",
        "fp32",
        "--device",
        "cpu",
    ]
    arguments += ["--batch", "4", "--warm-up", "1", "--repeats", "1"]
    assert main(["bench", "step", *arguments, "--out", str(step)]) == 0
    cells = json.loads(step.read_text())["cells"]
    assert [cell["mode"] for cell in cells] == ["non-private", "lambda-cgd"]
    assert not any("error" in cell for cell in cells)
