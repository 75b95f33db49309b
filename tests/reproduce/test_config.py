"""Settings of a run from a TOML file, and the tasks' defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lambdacgd.errors import InvalidInput
from reproduce import session as config
from reproduce.problems import TASKS

RESULTS = Path(__file__).parents[2] / "results"


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "c.toml").write_text('data = "Köln"\n', encoding="utf-8-sig")
    assert config.read_config(tmp_path / "c.toml") == {"data": "Köln"}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_refused(tmp_path, encoding):
    (tmp_path / "c.toml").write_text('data = "Köln"\n', encoding=encoding)
    with pytest.raises(InvalidInput, match=r"c\.toml.*UTF-8"):
        config.read_config(tmp_path / "c.toml")


def test_written_settings_are_read_again(tmp_path):
    resolved = config.resolve("digits", None, {"epsilon": 2.0, "data": "Köln/ζ"})
    config.write_config(resolved, tmp_path / "c.toml")
    assert config.resolve(None, tmp_path / "c.toml", {}) == resolved


def test_the_defaults_of_digits_are_those_that_did_best():
    best = json.loads((RESULTS / "demo_tuning.json").read_text())["best"]["lambda-cgd-fresh"]
    task = TASKS["digits"]
    assert (task.learning_rate, task.max_grad_norm) == (best["learning_rate"], best["max_grad_norm"])
