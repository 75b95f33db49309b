"""The disk cache: an answer to another question, a missing home or a full disk never changes a result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lambdacgd import cache


def ask(question: dict[str, Any], answer: Any) -> Any:
    return cache.cached("test", question, lambda: answer)


def test_only_the_same_question_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    assert ask({"x": 0.1}, "first") == "first"
    assert ask({"x": 0.1}, "again") == "first"
    assert ask({"x": 0.1 + 2**-55}, "next float") == "next float"
    with cache.disabled():
        assert ask({"x": 0.1}, "anew") == "anew"
    monkeypatch.setattr(cache, "_code", lambda: "another")
    assert ask({"x": 0.1}, "release") == "release"


def test_a_file_under_the_wrong_name_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    ask({"x": 1}, "one")
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    stored["asked"]["question"]["x"] = 2
    for content in (json.dumps(stored), "[]", "{", ""):
        path.write_text(content)
        assert ask({"x": 1}, "computed") == "computed"
        assert ask({"x": 1}, "kept") == "computed"


def test_a_damaged_answer_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A σ that lost a digit would be a noise multiplier that nobody certified."""
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    ask({"x": 1}, {"sigma": 2.5, "certificate": {"delta": 1e-5}})
    (path,) = tmp_path.iterdir()
    for damaged in ({"sigma": 0.5, "certificate": {"delta": 1e-5}}, None, {}):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"answer": damaged}))
        assert ask({"x": 1}, {"sigma": 2.5}) == {"sigma": 2.5}
        assert ask({"x": 1}, "kept") == {"sigma": 2.5}


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert ask({"x": 1}, "one") == "one"
    with pytest.raises(TypeError, match="JSON"):
        ask({"x": 1}, object())
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LAMBDACGD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.folder() is None
    assert ask({"x": 1}, "one") == "one"
