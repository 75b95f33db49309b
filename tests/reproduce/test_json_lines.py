"""Files of JSON lines survive an interruption anywhere, in the middle of a letter too."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.framework import append, records, stored
from reproduce.runs import PlanBook, RunStore, TrainingRun

RUN = TrainingRun("digits", "mlp", "dp-sgd", 8.0, 16, 1, 0.5, 1.0)


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    assert list(records(path)) == []
    append(path, {"λ": 1})
    append(path, {"λ": [2, None]})
    assert list(records(path)) == [{"λ": 1}, {"λ": [2, None]}]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_line_cut_off_anywhere_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "some.jsonl"
    append(path, {"x": 1})
    append(path, {"λ": 2})  # a cut of seven bytes parts the two of the letter
    path.write_bytes(path.read_bytes()[:-cut])
    append(path, {"x": 3})
    whole = [{"x": 1}, {"λ": 2}, {"x": 3}] if cut == 1 else [{"x": 1}, {"x": 3}]  # cut 1 is the end of the line alone
    assert list(records(path)) == whole


def test_finished_cells_runs_and_plans_outlive_a_torn_letter(tmp_path: Path) -> None:
    torn = '{"λ'.encode()[:-1]
    cells = tmp_path / "cells.jsonl"
    append(cells, {"key": "a", "result": {}})
    cells.write_bytes(cells.read_bytes() + torn)
    assert list(stored(tmp_path)) == ["a"]

    runs = tmp_path / "runs.jsonl"
    RunStore(runs).add(RUN, {"accuracy": {"last": 0.5}})
    runs.write_bytes(runs.read_bytes() + torn)
    assert len(RunStore(runs)) == 1

    plans = tmp_path / "plans.jsonl"
    request = RUN.plan_request(1150)
    made = PlanBook(plans, make=True).get(request)
    plans.write_bytes(plans.read_bytes() + torn)
    PlanBook(plans, make=True).get(RUN.plan_request(1437))
    book = PlanBook(plans)
    assert len(book) == 2
    assert book.get(request) == made
