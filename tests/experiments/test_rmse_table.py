"""The RMSE table: the paper's numbers are all there, cells are kept, and what is cheap to check agrees."""

import json
from pathlib import Path

import pytest

from lambdacgd.experiments import rmse_table
from lambdacgd.experiments.paper_rmse import COLUMNS, ROWS, Column, known_slip

BY_TITLE = {row.title: row for row in ROWS}


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
    cell = rmse_table.compute(BY_TITLE[title], COLUMNS[0])
    assert cell["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert cell["method"] == "analytic"


def test_an_amplified_estimate() -> None:
    cell = rmse_table.compute(BY_TITLE["BISR (p=2)"], Column(8.0, True), quick=True)
    assert cell["ratio"] == pytest.approx(1.0, abs=0.015)
    assert cell["method"] == "monte-carlo estimate"
    assert 0 < cell["relative_standard_error"] < 0.01


def test_finished_cells_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compute(row: object, column: Column, *, quick: bool) -> dict[str, object]:
        asked.append(f"{row.title} {column.title}")  # type: ignore[attr-defined]
        if len(asked) == 5 and not (tmp_path / "interrupted").exists():
            (tmp_path / "interrupted").touch()
            raise KeyboardInterrupt
        refused = row.title == "DP-SGD"  # type: ignore[attr-defined]
        value = None if refused else 10.0
        rest = {"method": "refused", "because": "a reason"} if refused else {"method": "test"}
        known = known_slip(row, column)  # type: ignore[arg-type]
        return {
            "row": row.title,  # type: ignore[attr-defined]
            "epsilon": column.epsilon,
            "amplified": column.amplified,
            "sigma": value,
            "rmse": value,
            "ratio": value,
            "paper": 10.0,
            "known_slip": known,
            "version": rmse_table.__version__,
        } | rest

    monkeypatch.setattr(rmse_table, "compute", compute)
    with pytest.raises(KeyboardInterrupt):
        rmse_table.run(tmp_path, quick=True)
    interrupted = asked.pop()
    done = set(asked)
    assert len(list((tmp_path / "cells-quick").glob("*.json"))) == 4
    (tmp_path / "cells-quick" / "BISR_p=4_ε=8_no_amplification.json").write_text('{"row": "BIS')  # cut off
    rmse_table.run(tmp_path, quick=True)
    again = asked[4:]
    assert interrupted in again
    assert done & set(again) == {"BISR (p=4) ε=8 (no amplification)"}
    text = (tmp_path / "rmse-table.md").read_text()
    assert "† A slip in the paper's table" in text
    assert "— DP-SGD: a reason." in text
    assert (tmp_path / "rmse-table.csv").read_text().count("\n") == 19
    assert (tmp_path / "rmse-table.png").stat().st_size > 10_000
    assert json.loads(next((tmp_path / "cells-quick").glob("DP-SGD*")).read_text())["rmse"] is None
