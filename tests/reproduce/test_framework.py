"""Experiments are resumed, collected and written; files of JSON lines survive an interruption anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lambdacgd.errors import InvalidInput
from reproduce import EXPERIMENTS, framework
from reproduce.__main__ import main
from reproduce.framework import Cell, Experiment, Row, Settings, append, load, panels, records, reproduce, stored, table
from reproduce.runs import PlanBook, RunStore, TrainingRun


def plot(rows: list[Row]) -> Any:
    figure, (axes,) = panels(1)
    axes.plot([row["x"] for row in rows], [row["y"] for row in rows])
    return figure


def squares(asked: list[int], *, fail_at: int = -1, count: int = 4, revision: int = 1) -> Experiment:
    def compute(cell: Cell, settings: Settings) -> Row:
        asked.append(cell["x"])
        if cell["x"] == fail_at:
            raise KeyboardInterrupt
        return {"y": cell["x"] ** 2}

    return Experiment(
        name="squares",
        what="squares of numbers",
        cells=lambda settings: [{"x": x} for x in range(2 if settings.quick else count)],
        compute=compute,
        columns=("x", "y"),
        page=lambda rows: table(["x", "y"], [(row["x"], row["y"]) for row in rows]),
        plot=plot,
        revision=revision,
    )


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    asked: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        reproduce(squares(asked, fail_at=2), tmp_path)
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    rows = reproduce(squares(asked), tmp_path)
    assert asked == [0, 1, 2, 2, 3]
    assert [row["y"] for row in rows] == [0, 1, 4, 9]
    assert len(stored(tmp_path)) == 4  # the line after the torn one is whole


def test_everything_is_written(tmp_path: Path) -> None:
    reproduce(squares([]), tmp_path)
    assert (tmp_path / "squares.csv").read_text() == "x,y\n0,0\n1,1\n2,4\n3,9\n"
    written = json.loads((tmp_path / "squares.json").read_text())
    assert written["missing_cells"] == 0
    assert [row["y"] for row in written["rows"]] == [0, 1, 4, 9]
    assert written["machines"][0]["versions"]["numpy"]
    page = (tmp_path / "squares.md").read_text()
    assert "| 3 | 9 |" in page
    assert "(squares.svg)" in page
    assert (tmp_path / "squares.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "squares.svg").read_bytes()
    reproduce(squares([]), tmp_path, collect=True)
    assert (tmp_path / "squares.svg").read_bytes() == before


def test_another_configuration_revision_or_version_is_another_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    reproduce(squares(asked, count=1), tmp_path)
    reproduce(squares(asked, count=2), tmp_path)
    assert asked == [0, 1]
    reproduce(squares(asked, count=1, revision=2), tmp_path)
    assert asked == [0, 1, 0]
    monkeypatch.setattr(framework, "__version__", "99")
    reproduce(squares(asked, count=1), tmp_path)
    assert asked == [0, 1, 0, 0]


def test_errors_are_shown_and_tried_again(tmp_path: Path) -> None:
    answers: list[Row] = [{"error": "out of memory", "y": None}, {"y": 7}]
    experiment = Experiment(
        name="flaky", what="fails once", cells=lambda settings: [{"x": 1}],
        compute=lambda cell, settings: answers.pop(0), columns=("x", "y", "error"),
        page=lambda rows: str(rows[0].get("error")),
    )  # fmt: skip
    assert "error" in reproduce(experiment, tmp_path)[0]
    assert "out of memory" in (tmp_path / "flaky.md").read_text()
    assert reproduce(experiment, tmp_path)[0]["y"] == 7
    assert reproduce(experiment, tmp_path)[0]["y"] == 7
    assert not answers


def test_stopping_and_collecting_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no finished cell"):
        reproduce(squares([]), tmp_path, collect=True)
    reproduce(squares([]), tmp_path, settings=Settings(quick=True))
    assert len(reproduce(squares([]), tmp_path, stop_after=0.0)) == 2
    assert "2 of 4 cells are missing" in (tmp_path / "squares.md").read_text()


def test_cells_from_another_machine_count(tmp_path: Path) -> None:
    reproduce(squares([]), tmp_path / "there")
    here = tmp_path / "here"
    here.mkdir()
    (here / "cells-h200.jsonl").write_bytes((tmp_path / "there" / "cells.jsonl").read_bytes())
    asked: list[int] = []
    assert len(reproduce(squares(asked), here)) == 4
    assert not asked


def test_without_matplotlib_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reproduce(squares([]), tmp_path)
    assert not (tmp_path / "squares.png").exists()
    assert "squares.svg" not in (tmp_path / "squares.md").read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_named_experiment_is_well_formed(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").touch()
    weights = tmp_path if name == "fine-tuning" else None
    experiment = load(name)
    assert experiment.name == name
    assert experiment.what
    assert EXPERIMENTS[name][1]
    for settings in (Settings(quick=True, weights=weights), Settings(weights=weights)):
        cells = experiment.cells(settings)
        keys = {experiment.key(json.loads(json.dumps(cell))) for cell in cells}  # JSON alone, each only once
        assert len(keys) == len(cells) > 0
        assert all(experiment.title(cell) for cell in cells)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in EXPERIMENTS)
    assert main(["rmse-table", "--collect", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err


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
