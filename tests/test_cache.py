"""The disk cache: an answer to another question, a missing home or a full disk never changes a result."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from lambdacgd import cache
from tests.faults import fault


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
    (path,) = tmp_path.glob("*.json")
    ask({"x": 2}, "two")
    (two,) = set(tmp_path.glob("*.json")) - {path}
    for content in (two.read_bytes(), b"[]", b"{", b"", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        assert ask({"x": 1}, "computed") == "computed"
        assert ask({"x": 1}, "kept") == "computed"


@fault(
    "Damaged files",
    "A cached answer of an accountant is damaged.",
    shows="Nothing: it is computed again.",
    loses="Time.",
)
def test_a_damaged_answer_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A σ that lost a digit would be a noise multiplier that nobody certified."""
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    ask({"x": 1}, {"sigma": 2.5, "certificate": {"delta": 1e-5}})
    (path,) = tmp_path.glob("*.json")
    for damaged in ({"sigma": 0.5, "certificate": {"delta": 1e-5}}, None, {}):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"answer": damaged}))
        assert ask({"x": 1}, {"sigma": 2.5}) == {"sigma": 2.5}
        assert ask({"x": 1}, "kept") == {"sigma": 2.5}


@fault(
    "Files that were changed or planted",
    "A cached σ is replaced by σ/10, with every hash in the file put right.",
    shows="Nothing: the file is not signed with the folder's secret, so σ is computed again.",
    loses="Time.",
)
def test_an_edited_answer_is_not_believed_even_with_its_hash_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that was edited to σ/10 gave a plan that training accepted."""
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    ask({"x": 1}, {"sigma": 2.5})
    (path,) = tmp_path.glob("*.json")
    stored = json.loads(path.read_text())
    answer, text = {"sigma": 0.25}, json.dumps(stored["asked"], sort_keys=True)
    for key in (b"", bytes(32), b"another user's secret, 32 bytes."):
        signature = cache._signature(key, text, answer)
        digest = hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()  # as it was signed before
        path.write_text(json.dumps(stored | {"answer": answer, "signature": signature, "digest": digest}))
        assert ask({"x": 1}, {"sigma": 2.5}) == {"sigma": 2.5}


def test_the_secret_of_a_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    assert ask({"x": 1}, "first") == "first"
    secret = tmp_path / ".secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    secret.chmod(0o644)
    assert ask({"x": 1}, "anew") == "anew"  # anyone may have signed what lies here
    secret.chmod(0o600)
    assert ask({"x": 1}, "again") == "first"
    secret.write_bytes(b"cut off")
    assert ask({"x": 1}, "anew") == "anew"
    assert ask({"x": 1}, "kept") == "kept"
    assert ask({"x": 1}, "again") == "kept"
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert ask({"x": 1}, "another user") == "another user"


def test_all_code_before_training_counts_as_code_of_the_answer(tmp_path: Path) -> None:
    root = Path(cache.__file__).parent
    files = {file.relative_to(root).as_posix() for file in cache.code_of_answers(root)}
    parts = {file.split("/")[0] for file in files}
    assert {"accounting", "mechanisms", "sampling.py", "planning.py"} <= parts
    assert all((root / part).exists() for part in parts)
    assert not parts & {"training", "clipping", "noise", "integrations", "cli"}
    (tmp_path / "accounting").mkdir()
    for name in ("new.py", "accounting/newer.py"):  # a file that somebody adds counts without being named anywhere
        (tmp_path / name).write_text("")
        assert tmp_path / name in cache.code_of_answers(tmp_path)


@fault(
    "Full disks",
    "The disk is full while an accountant's answer is cached.",
    shows="Nothing: the answer is not kept.",
    loses="Time, when the same question is asked again.",
)
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert ask({"x": 1}, "one") == "one"
    with pytest.raises(TypeError, match="JSON"):
        ask({"x": 1}, object())
    assert [path.name for path in tmp_path.iterdir()] == [".secret"]


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LAMBDACGD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.folder() is None
    assert ask({"x": 1}, "one") == "one"
