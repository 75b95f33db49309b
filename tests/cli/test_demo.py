"""``lambdacgd demo``, made small; its settings are those of the committed search."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from lambdacgd.cli import demo as module
from lambdacgd.cli import main
from lambdacgd.sampling import Cyclic

TUNING = Path(__file__).parents[2] / "results" / "demo_tuning.json"


def test_prints_both_accuracies(monkeypatch, capsys):
    monkeypatch.setattr(module, "EPOCHS", 1)
    monkeypatch.setattr(module, "BATCH_SIZE", 240)
    monkeypatch.setattr(module, "METHODS", tuple(replace(m, sampling=Cyclic()) for m in module.METHODS))
    assert main(["demo", "--seeds", "2"]) == 0
    output = capsys.readouterr().out
    for part in ("DP-SGD", "DP-λCGD, fixed bins", "DP-λCGD, fresh bins", "mean", "ε = 2", "%", "±"):
        assert part in output


def test_needs_nothing_but_the_core_packages():
    """As installed without extras, outside a checkout."""
    extras = ("sklearn", "matplotlib", "transformers", "opacus", "pyarrow", "PIL", "tensorboard", "reproduce")
    code = f"import sys; sys.modules |= dict.fromkeys({extras})\n"
    code += "from lambdacgd.cli import demo\n"
    code += "demo.EPOCHS, demo.BATCH_SIZE, demo.METHODS = 1, 240, demo.METHODS[:1]\ndemo.demo(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "%" in done.stdout


def test_refuses_no_seeds(capsys):
    assert main(["demo", "--seeds", "0"]) == 2
    assert "--seeds" in capsys.readouterr().err


def test_settings_are_the_best_of_the_search():
    found = json.loads(TUNING.read_text())
    assert (found["settings"]["epsilon"], found["settings"]["delta"]) == (module.EPSILON, module.DELTA)
    assert (found["settings"]["epochs"], found["settings"]["batch_size"]) == (module.EPOCHS, module.BATCH_SIZE)
    for method, name in zip(module.METHODS, ("dp-sgd", "lambda-cgd", "lambda-cgd-fresh"), strict=True):
        best = max((r for r in found["rows"] if r["method"] == name), key=lambda r: r["validation_accuracy"])
        assert (method.learning_rate, method.max_grad_norm) == (best["learning_rate"], best["max_grad_norm"])
