"""The RMSE table: the paper's numbers are all there, cells are kept, and what is cheap to check agrees."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from reproduce import rmse_table
from reproduce.framework import Row, Settings, reproduce
from reproduce.paper import COLUMNS, ROWS, Column, known_slip

BY_TITLE = {row.title: row for row in ROWS}


def compute(title: str, column: Column, *, quick: bool = False) -> Row:
    """The cell of that row and column, as the experiment would compute it."""
    settings = Settings(quick=quick)
    known = {(cell["row"], cell["column"]): cell for cell in rmse_table.cells(Settings())}
    cell = known[title, column.title] | ({"relative_error": 0.05} if quick else {})
    return rmse_table.compute(cell, settings)


def test_the_table_is_whole() -> None:
    assert len(ROWS) == len(BY_TITLE) == 25
    assert [column.epsilon for column in COLUMNS] == [8, 8, 4, 2, 1, 0.5, 0.25]
    assert all(len(row.values) == 7 for row in ROWS)


def test_the_error_grows_as_epsilon_falls_but_for_the_slip() -> None:
    for row in ROWS:
        for at in range(1, 6):
            if row.values[at + 1] <= row.values[at]:
                assert known_slip(row, COLUMNS[at + 1]) or known_slip(row, COLUMNS[at])


@pytest.mark.parametrize("title", ["DP-λCGD (λ=0.975)", "BISR (p=2)", "BSR (p=64)", "BandMF (p=16)", "DP-SGD"])
def test_values_without_amplification(title: str) -> None:
    cell = compute(title, COLUMNS[0])
    assert cell["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert cell["method"] == "analytic"


def test_an_amplified_estimate() -> None:
    cell = compute("BISR (p=2)", Column(8.0, True), quick=True)
    assert cell["ratio"] == pytest.approx(1.0, abs=0.015)
    assert cell["method"] == "monte-carlo estimate"
    assert 0 < cell["relative_standard_error"] < 0.01


def test_the_page_marks_slips_and_refusals(tmp_path: Path) -> None:
    def invented(cell: Row, settings: Settings) -> Row:
        row, column = BY_TITLE[cell["row"]], Column(cell["epsilon"], cell["amplified"])
        found: Row = {"paper": 10.0, "known_slip": known_slip(row, column)}
        if row.title == "DP-SGD":
            return found | {"sigma": None, "rmse": None, "ratio": None, "method": "refused", "because": "a reason"}
        return found | {"sigma": 10.0, "rmse": 10.0, "ratio": 1.0, "method": "test"}

    experiment = replace(rmse_table.EXPERIMENT, compute=invented)
    reproduce(experiment, tmp_path, settings=Settings(quick=True))
    text = (tmp_path / "rmse-table.md").read_text()
    assert "† A slip in the paper's table" in text
    assert "— DP-SGD: a reason." in text
    assert "| DP-λCGD (λ=0.9) | 10.00 / 10.00 |" in text
    with (tmp_path / "rmse-table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    assert {row["rmse"] for row in rows if row["row"] == "DP-SGD"} == {""}
    assert (tmp_path / "rmse-table.png").stat().st_size > 10_000
