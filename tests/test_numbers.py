"""Numbers in README and docs are what ``results/`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce import numbers


def test_numbers_have_not_drifted() -> None:
    stale = sorted(str(path.relative_to(numbers.ROOT)) for path in numbers.changes())
    assert not stale, f"run python -m reproduce numbers: {', '.join(stale)} differ from results/"


def test_readme_and_docs_ask_for_numbers() -> None:
    for page in ("README.md", "docs/reproduced.md", "docs/noise.md", "docs/choosing-lambda.md"):
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
    assert numbers.runtime_summary() == "not measured yet"
    assert "Not run here yet: `python -m reproduce rmse-table`" in numbers.experiments()
    assert "Nothing computed yet" in numbers.readme_results()


def test_quick_results_are_not_shown_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    (tmp_path / "rmse-table").mkdir()
    (tmp_path / "rmse-table" / "rmse-table.json").write_text('{"quick": true, "rows": []}')
    assert "Not computed yet" in numbers.rmse_ratios()


def test_sentences_from_runtime_and_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)

    def write(name: str, rows: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(f'{{"quick": false, "rows": {rows}}}')

    base, ours = '{"over_dp_sgd": 1.0}', '{"over_dp_sgd": 1.0042}'
    peaks = '{"DP-SGD": 100.0, "regenerated, 2 bands": 100.25}'
    buffer = ", ".join(f'"CPU buffer, {p} bands": {{"over_dp_sgd": {1 + p / 10}}}' for p in (2, 4, 16))
    write(
        "runtime-imdb",
        f'[{{"model": "lstm", "variants": {{"DP-SGD": {base}, "regenerated, 2 bands": {ours}, {buffer}}}}}, '
        f'{{"what": "memory", "model": "lstm", "peaks_mib": {peaks}}}]',
    )
    write(
        "methods-cifar",
        '[{"method": "dp-sgd", "epsilon": 8.0, "test": 0.5, "standard_error": 0.01}, '
        '{"method": "lambda-cgd-fresh", "epsilon": 8.0, "test": 0.6, "standard_error": null}]',
    )
    said = numbers.readme_results()
    assert "1.0042 of DP-SGD's time an epoch over 1 models, at most 0.2 MiB more memory" in said
    assert "a noise buffer on the CPU takes 1.20 to 2.60" in said
    assert "ε = 8: 60.0% (fresh bins); DP-SGD 50.0 ± 1.0%" in said
