"""The fresh-bin table: certified cells, its page, and what is left out."""

from __future__ import annotations

import json

import pytest

from reproduce import fresh_bins_table as module
from reproduce.framework import RESULTS, Settings


def test_cells_cover_every_mechanism() -> None:
    cells = module.cells(Settings())
    assert {cell["row"] for cell in cells} == set(module.TITLES)
    assert len(cells) == 6 * len(module.TITLES) - 4  # λ = .975 below ε = 4
    assert len(module.cells(Settings(quick=True))) == 6


def test_a_cell_and_the_page() -> None:
    banded = "BandMF (cyclic Poisson, p chosen)"
    rows = [
        {"row": title, "epsilon": 8.0, "delta": 1e-5} | module.compute({"row": title, "epsilon": 8.0}, Settings())
        for title in ("DP-SGD", banded)
    ]
    assert [row["kind"] for row in rows] == ["bound", "bound"]
    assert [row["rmse"] for row in rows] == pytest.approx([21.49, 7.163], abs=0.05)
    written = json.loads((RESULTS / "fresh-bins-table" / "fresh-bins-table.json").read_text())["rows"]
    rows.append(next(row for row in written if (row["row"], row["epsilon"]) == ("BISR (p=4)", 8.0)))
    assert rows[2]["kind"] == "estimate"
    assert rows[2]["rmse"] == pytest.approx(9.2, rel=0.02)
    page = module.page(rows)
    assert "| DP-SGD | 21.4" in page
    assert f"| {banded} | 7.16 (64) |" in page
    assert "~9." in page
    assert module.plot(rows) is not None
