"""How many files a reader opens to follow an operation: no more than `benchmarks/walk.py` allows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[1] / "benchmarks" / "walk.py"


def test_no_operation_visits_more_files_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds a file to a walk sees it here, and folds it or raises the number in the benchmark by hand."""
    spec = importlib.util.spec_from_file_location("walk", WALK)
    assert spec is not None
    assert spec.loader is not None
    walk = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "walk", walk)  # dataclasses look their module up
    monkeypatch.setenv("LAMBDACGD_CACHE", "")  # set back at the end: the benchmark sets its own
    spec.loader.exec_module(walk)
    walks = walk.measure()
    assert walks.keys() == walk.MOST_FILES.keys()
    for name, measured in walks.items():
        visited = sorted(set(measured.files))
        assert len(visited) <= walk.MOST_FILES[name], f"{name} visits {visited}"
