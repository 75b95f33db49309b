"""Results keep what the code answered when they were made, and pages say which of them are stale. Nothing is rerun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduce import EXPERIMENTS, framework, made_with, numbers


def test_every_result_of_an_experiment_says_what_made_it() -> None:
    for name in EXPERIMENTS:
        depends = framework.load(name).depends
        assert set(depends) <= set(made_with.PROBES)
        path = framework.RESULTS / name / f"{name}.json"
        if depends and path.exists():
            assert set(json.loads(path.read_text())["made_with"]) == set(depends), name


def test_a_change_beyond_what_searches_leave_open_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_with, "PROBES", {"new": lambda: [1.2345678, 2.0]})
    made_with.answer.cache_clear()
    try:
        assert made_with.made_with(["new"]) == {"new": [1.23457, 2.0]}
        assert made_with.changes({"new": [1.23457, 2.0]}) == []
        assert made_with.changes({"new": [1.23400, 2.0]}) == []
        assert made_with.changes({"new": [1.23300, 2.0]}) == ["new (it was 1.233, 2, now 1.23457, 2)"]
        assert made_with.changes({"new": [1.23457]}) == ["new (it was 1.23457, now 1.23457, 2)"]
    finally:
        made_with.answer.cache_clear()


def test_a_sampled_answer_is_the_same_twice() -> None:
    first = made_with.answer("Monte Carlo")
    made_with.answer.cache_clear()
    assert made_with.answer("Monte Carlo") == first


def test_stale_results_are_named_on_their_pages_with_the_reason_why_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (numbers.ROOT / "docs" / "reproduced.md").read_text()
    for name, verdict in made_with.verdicts().items():
        assert (f"`results/{name}`" in text) == (verdict != "current"), name
        assert any(name in names for names in made_with.KEPT.values()) == (verdict != "current"), name
    monkeypatch.setattr(numbers, "verdicts", lambda: {"rmse-table/rmse-table.json": "stale: mechanisms (1, now 2)"})
    assert "**Stale**: of what this was made with, today's code has another mechanisms (1, now 2)." in (
        numbers.experiments()
    )


def test_cells_made_by_different_code_count_as_the_older(tmp_path: Path) -> None:
    format_now = list(made_with.answer("format of the noise"))
    old, new = {"format of the noise": [0.0]}, {"format of the noise": format_now}
    assert framework.oldest([new, old, new]) == old
    assert framework.oldest([new, new]) == new
    assert framework.oldest([{}, new]) == new
    experiment = framework.Experiment(
        "rmse-table", "a test", lambda _: [{"x": 1}], lambda cell, _: {"y": 2}, ("x", "y"), lambda rows: "page",
        depends=("format of the noise",),
    )  # fmt: skip
    framework.reproduce(experiment, tmp_path)
    assert json.loads((tmp_path / "rmse-table.json").read_text())["made_with"] == new
    cells = tmp_path / "cells.jsonl"
    for kept, times in ((old, 2), (new, 2)):  # a stale cell is computed again, and counts from then on
        first = json.loads(cells.read_text().splitlines()[0]) | {"made_with": kept}
        cells.write_text(json.dumps(first) + "\n" + "".join(cells.read_text().splitlines(True)[1:]))
        framework.reproduce(experiment, tmp_path)
        assert len(cells.read_text().splitlines()) == times
