"""The fresh-bin table: one certified and one simulated cell, its page, and what is left out."""

from __future__ import annotations

import pytest

from reproduce import fresh_bins_table as module
from reproduce.framework import Settings


def test_cells_cover_every_mechanism() -> None:
    cells = module.cells(Settings())
    assert {cell["row"] for cell in cells} == set(module.TITLES)
    assert len(cells) == 6 * len(module.TITLES) - 4  # λ = .975 below ε = 4
    assert len(module.cells(Settings(quick=True))) == 6


def test_a_cell_and_the_page() -> None:
    rows = [
        {"row": title, "epsilon": 8.0, "delta": 1e-5} | module.compute({"row": title, "epsilon": 8.0}, Settings())
        for title in ("DP-SGD", "BISR (p=4)")
    ]
    assert rows[0]["kind"] == "bound"
    assert rows[0]["rmse"] == pytest.approx(21.49, abs=0.05)
    assert rows[1]["kind"] == "estimate"
    assert rows[1]["rmse"] == pytest.approx(9.2, rel=0.02)
    page = module.page(rows)
    assert "| DP-SGD | 21.4" in page
    assert "~9." in page
    assert module.plot(rows) is not None
