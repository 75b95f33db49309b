"""Numbers in README and docs are what ``results/`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce import numbers


def test_numbers_have_not_drifted() -> None:
    stale = sorted(str(path.relative_to(numbers.ROOT)) for path in numbers.changes())
    assert not stale, f"run python -m reproduce numbers: {', '.join(stale)} differ from results/"


def test_readme_and_docs_ask_for_numbers() -> None:
    for page in (
        "README.md",
        "docs/index.md",
        "docs/reproduced.md",
        "docs/reproduced-tables.md",
        "docs/noise.md",
        "docs/choosing-lambda.md",
    ):
        assert numbers.PLACE.search((numbers.ROOT / page).read_text()), page


def test_a_changed_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "noise_over_opacus", lambda: "9.99")
    monkeypatch.setitem(numbers.NUMBERS, "noise-over-opacus", lambda: "9.99")
    assert numbers.ROOT / "README.md" in numbers.changes()


def test_numbers_edited_by_hand_are_put_right() -> None:
    right = f"take <!-- numbers: noise-over-opacus -->{numbers.noise_over_opacus()}<!-- end --> of it"
    assert numbers.written(right.replace("0.", "1.")) == right
    assert numbers.written(right) == right


@pytest.mark.parametrize("text", ["<!-- numbers: nonsense -->1<!-- end -->", "<!-- numbers: noise-table -->1"])
def test_unknown_names_and_missing_ends_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        numbers.written(text)


def test_what_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    assert "Not run here yet: `python -m reproduce rmse-table`" in numbers.experiments()
    with pytest.raises(SystemExit, match=r"results/pair-h200\.json is missing"):
        numbers.runtime_summary()


def test_quick_results_are_not_shown_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    (tmp_path / "rmse-table").mkdir()
    (tmp_path / "rmse-table" / "rmse-table.json").write_text('{"quick": true, "rows": []}')
    with pytest.raises(SystemExit, match="results/rmse-table is a quick version"):
        numbers.rmse_ratios()


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).mkdir()
    (folder / name / f"{name}.json").write_text(json.dumps({"quick": False, "rows": rows}))


def test_times_come_with_intervals_and_no_more_digits_than_they_bear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    sharp = {
        "model": "vit-b",
        "precision": "tf32",
        "batch": 64,
        "rounds": 25,
        "ratio": 1.0041,
        "low": 1.002,
        "high": 1.008,
    }
    wide = {"model": "cnn", "precision": "tf32", "batch": 128, "rounds": 12, "ratio": 1.0, "low": 0.93, "high": 1.08}
    cells = [sharp, wide, {"model": "vit-h", "error": "no memory"}]
    (tmp_path / "pair-h200.json").write_text(json.dumps({"cells": cells}))
    variants = {"DP-SGD": {"over_dp_sgd": 1.0}, "regenerated, 2 bands": {"over_dp_sgd": 1.0042}}
    variants |= {f"CPU buffer, {p} bands": {"over_dp_sgd": 1 + p / 10} for p in (2, 4, 16)}
    peaks = {"DP-SGD": 100.0, "regenerated, 2 bands": 100.25}
    memory = {"what": "memory", "model": "lstm", "peaks_mib": peaks}
    _write(tmp_path, "runtime-imdb", [{"model": "lstm", "variants": variants}, memory])
    _write(tmp_path, "runtime-cifar", [])
    said = numbers.runtime_summary()
    assert "of DP-SGD's time a step (95% intervals) 1.004 (1.002 to 1.008) for ViT-B in batches of 64" in said
    assert "it cannot be told: 1 of 1 intervals hold 1, and they reach from 0.93 to 1.08" in said
    said = numbers.buffer_summary()
    assert "1.20 to 2.60 of DP-SGD's time an epoch; regenerated noise takes at most 0.2 MiB more memory" in said


def test_the_claim_names_batch_sizes_epochs_seeds_and_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)

    def row(name: str, epochs: int, size: int, middle: float) -> dict[str, Any]:
        scores = [middle - 0.01, middle, middle + 0.01]
        return {"method": name, "epsilon": 8.0, "epochs": epochs, "batch_size": size, "scores": scores, "test": middle,
                "standard_error": 0.01 / 3**0.5}  # fmt: skip

    ours, theirs = "lambda-cgd-fresh-normalized", "dp-sgd"
    _write(
        tmp_path,
        "frontier",
        [row(ours, 10, 128, 0.7), row(ours, 40, 128, 0.75), row(theirs, 10, 512, 0.6), row(theirs, 40, 512, 0.7)],
    )
    said = numbers.frontier_claim()
    assert "reaches 70.0 ± 0.6% after 10 epochs with normalised λCGD and fresh bins (B = 128)" in said
    assert "DP-SGD (Poisson, B = 512) has 60.0 ± 0.6% after 10 and 70.0 ± 0.6% after 40" in said
    assert "of 3 seeds" in said
    assert "(difference +0.0 (−2.3 to +2.3) points)" in said
    said = numbers.frontier_table()
    assert "| 8 | 70.0 ± 0.6% after 10 (B = 128) | 70.0 ± 0.6% after 40 (B = 512) | +0.0 (−2.3 to +2.3) |" in said


def test_the_papers_own_tables_contradict_its_sentences() -> None:
    said = numbers.contradictions()
    assert "8.2% for BERT-tiny and 2.2% for the LSTM" in said
    assert "42.5% for BERT-tiny and 10.6% for BERT-base" in said
