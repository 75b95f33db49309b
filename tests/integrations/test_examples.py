"""The examples run as they are, with small models and made-up data."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


def run(monkeypatch, name, *args):
    monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_a_first_run_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    for _ in range(2):
        run(monkeypatch, "first_run.py", "--out", tmp_path / "out", "--epochs", 1)
    first, second = re.findall(r"test accuracy (.*)%", capsys.readouterr().out)
    assert first == second
    assert (tmp_path / "out" / "release" / "privacy-card.json").exists()
    assert (tmp_path / "out.private" / "run.key").exists()
    assert not list((tmp_path / "out").rglob("*.key"))


def test_lora_of_a_language_model(monkeypatch, tmp_path, capsys):
    pytest.importorskip("peft")
    run(monkeypatch, "lora_7b.py", "--tiny", "--out", tmp_path / "out", "--epochs", 1)
    assert "adapters and their privacy card" in capsys.readouterr().out
    card = json.loads((tmp_path / "out" / "release" / "privacy-card.json").read_text())
    assert card["claim"].startswith("(8,")
    assert (tmp_path / "out" / "release" / "adapter_model.safetensors").exists()
    assert not list((tmp_path / "out").rglob("*.key"))


def test_the_trainer(monkeypatch, tmp_path, capsys):
    run(monkeypatch, "huggingface_trainer.py", "--out", tmp_path / "out", "--epochs", 1)
    assert "ε = 8" in capsys.readouterr().out
    assert (tmp_path / "out" / "release" / "PRIVACY.md").exists()


def test_lightning(monkeypatch, tmp_path, capsys):
    pytest.importorskip("lightning")
    run(monkeypatch, "lightning_digits.py", "--out", tmp_path / "out", "--epochs", 2)
    out = capsys.readouterr().out
    assert float(out.split("accuracy ")[1].split(",")[0]) > 0.3
    assert (tmp_path / "out" / "release" / "model.safetensors").exists()
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt").exists()
    assert not list((tmp_path / "out").rglob("*.key"))
    assert "checked on a few examples" in (tmp_path / "out" / "release" / "PRIVACY.md").read_text()
