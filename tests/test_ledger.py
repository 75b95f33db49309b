"""The run ledger: one z serves one released sum."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd.ledger import Ledger, LedgerError, Release
from tests.faults import fault


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "run.ledger")


def test_a_run_and_its_releases(ledger: Ledger) -> None:
    run, other = ledger.new_run(plan="p1"), ledger.new_run()
    assert run != other
    assert ledger.runs() == [run, other]
    assert ledger.newest(run) is None
    ledger.record(run, 10, digest="aa")
    ledger.record(other, 3, digest="cc", kind="export")
    ledger.record(run, 20, digest="bb")
    assert ledger.newest(run) == Release(20, "bb", "checkpoint")
    assert ledger.newest(other) == Release(3, "cc", "export")
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    assert ledger.path.name == "run.ledger"
    again = Ledger(ledger.path)
    again.check_resume(run, 20, "bb")
    again.check_resume(run, 20)


def test_going_back_is_refused_unless_the_later_ones_are_destroyed(ledger: Ledger) -> None:
    run = ledger.new_run()
    for step in (10, 20, 30):
        ledger.record(run, step, digest=f"d{step}")
    with pytest.raises(LedgerError, match="declare_destroyed"):
        ledger.check_resume(run, 10, "d10")
    with pytest.raises(LedgerError, match="went back"):
        ledger.record(run, 15, digest="x")
    ledger.declare_destroyed(run, 10)
    ledger.check_resume(run, 10, "d10")
    with pytest.raises(LedgerError, match="never released step 20"):
        ledger.check_resume(run, 20, "d20")
    ledger.record(run, 15, digest="d15")
    ledger.check_resume(run, 15, "d15")


def test_what_was_never_released_can_only_start_anew(ledger: Ledger) -> None:
    run = ledger.new_run()
    ledger.check_resume(run, 0)
    with pytest.raises(LedgerError, match="step 0"):
        ledger.check_resume(run, 5)
    ledger.record(run, 5, digest="a")
    with pytest.raises(LedgerError):
        ledger.check_resume(run, 0)
    ledger.declare_destroyed(run, 0)
    ledger.check_resume(run, 0)


def test_a_changed_file_is_refused(ledger: Ledger) -> None:
    run = ledger.new_run()
    ledger.record(run, 5, digest="a")
    ledger.record(run, 5, digest="export", kind="export")
    ledger.check_resume(run, 5, "a")
    ledger.check_resume(run, 5, "export")
    with pytest.raises(LedgerError, match="another digest"):
        ledger.check_resume(run, 5, "b")
    with pytest.raises(LedgerError, match="never released step 6"):
        ledger.check_resume(run, 6, "a")


def test_unknown_runs_and_bad_steps(ledger: Ledger) -> None:
    run = ledger.new_run()
    for call in (
        lambda: ledger.newest("nobody"),
        lambda: ledger.record("nobody", 1, digest="a"),
        lambda: ledger.check_resume("nobody", 1),
        lambda: ledger.declare_destroyed("nobody", 1),
    ):
        with pytest.raises(LedgerError, match="not in"):
            call()
    for step in (-1, 1.5, True):
        with pytest.raises(ValueError, match="step"):
            ledger.record(run, step, digest="a")  # type: ignore[arg-type]


@fault(
    "Killed processes",
    "The machine goes down while the ledger is written, which cuts off its last line.",
    shows="Nothing: the line was never acknowledged, so nothing left the process on its account.",
    loses="Nothing.",
)
def test_a_line_cut_off_by_a_crash_is_forgiven_at_every_byte(ledger: Ledger) -> None:
    run = ledger.new_run()
    ledger.record(run, 10, digest="a")
    whole = ledger.path.read_bytes()
    ledger.record(run, 20, digest="b")
    longer = ledger.path.read_bytes()
    for cut in range(len(whole), len(longer)):
        ledger.path.write_bytes(longer[:cut])
        assert ledger.newest(run) == Release(10, "a", "checkpoint")
    ledger.record(run, 12, digest="c")  # takes the torn line's place
    assert ledger.newest(run) == Release(12, "c", "checkpoint")
    assert len(ledger.path.read_bytes().splitlines()) == 3


def flip(content: bytes) -> bytes:
    return content.replace(b'"step": 10', b'"step": 90')


def drop_line(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(lines[:1] + lines[2:])


def garbage(content: bytes) -> bytes:
    return content + b"not json\n"


def blank(content: bytes) -> bytes:
    return b"\n" + content


def bad_text(content: bytes) -> bytes:
    return content.replace(b"release", b"rel\xffase")


def deep(content: bytes) -> bytes:
    return content + b"[" * 100_000 + b"\n"


def long_number(content: bytes) -> bytes:
    return content + b"9" * 10_000 + b"\n"


@fault(
    "Damaged files",
    "Bits of the ledger flip, a line is lost, or it holds other bytes.",
    says="is damaged, so it is unknown which weights were released",
    loses="The run, unless there is a backup of the ledger.",
)
@pytest.mark.parametrize("damage", [flip, drop_line, garbage, blank, bad_text, deep, long_number])
def test_any_other_damage_is_an_error(ledger: Ledger, damage: object, sentence: str) -> None:
    run = ledger.new_run()
    ledger.record(run, 10, digest="a")
    ledger.record(run, 20, digest="b")
    ledger.path.write_bytes(damage(ledger.path.read_bytes()))  # type: ignore[operator]
    for call in (lambda: ledger.newest(run), lambda: ledger.new_run(), lambda: ledger.check_resume(run, 20)):
        with pytest.raises(LedgerError, match=sentence):
            call()


@pytest.mark.parametrize("lines", [1, 3])
def test_a_flipped_newline_at_the_end_does_not_make_the_last_line_forgotten(ledger: Ledger, lines: int) -> None:
    """It looked like a line cut off by a crash, so the newest release was forgotten, and the run could go back."""
    run = ledger.new_run()
    for step in range(1, lines):
        ledger.record(run, step, digest="a")
    content = ledger.path.read_bytes()
    for bit in range(8):
        ledger.path.write_bytes(content[:-1] + bytes((content[-1] ^ 1 << bit,)))
        with pytest.raises(LedgerError, match="damaged"):
            ledger.newest(run)
    ledger.path.write_bytes(content)
    assert ledger.runs() == [run]


@given(st.binary(max_size=80), st.integers(0, 400), st.booleans())
def test_whatever_stands_in_the_file_the_answer_is_an_error_or_the_truth(junk: bytes, at: int, replace: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "run.ledger")
        run = ledger.new_run()
        ledger.record(run, 5, digest="a")
        content = ledger.path.read_bytes()
        ledger.path.write_bytes(content[:at] + junk + content[at + len(junk) * replace :])
        try:
            newest = Ledger(ledger.path).newest(run)
        except LedgerError:
            return
        assert newest == Release(5, "a", "checkpoint") or (newest is None and at + len(junk) >= len(content) - 1)


def test_another_file_in_its_place_is_read_anew(ledger: Ledger) -> None:
    run = ledger.new_run()
    before = ledger.path.read_bytes()
    ledger.record(run, 5, digest="a")
    assert ledger.newest(run) == Release(5, "a", "checkpoint")
    other = ledger.path.with_name("other")
    other.write_bytes(before)
    os.replace(other, ledger.path)
    assert ledger.newest(run) is None
    ledger.record(run, 3, digest="b")
    ledger.path.write_bytes(before)  # the same file, cut off and written anew
    assert ledger.newest(run) is None
    ledger.path.unlink()
    assert ledger.runs() == []


@fault(
    "Full disks",
    "The disk is full while the ledger is written.",
    says="cannot be written (No space left on device), so no weights may leave this process",
    loses="Nothing: the checkpoint or export is not made, and saving again works.",
)
def test_a_full_disk_is_a_sentence_and_leaves_the_ledger_as_it_was(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, sentence: str
) -> None:
    run = ledger.new_run()
    ledger.record(run, 5, digest="a")
    before = ledger.path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LedgerError, match=sentence):
            ledger.record(run, 6, digest="b")
    assert ledger.path.read_bytes() == before
    ledger.record(run, 6, digest="b")
    assert ledger.newest(run) == Release(6, "b", "checkpoint")
    with pytest.raises(LedgerError, match="cannot be written"):
        Ledger(ledger.path.parent / "no" / "folder.ledger").new_run()


def test_a_system_without_file_locks_imports_the_ledger_and_refuses_to_write_one(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import lambdacgd.keys\n"
        "from lambdacgd.ledger import Ledger, LedgerError\n"
        "try:\n    Ledger(sys.argv[1]).new_run()\n"
        "except LedgerError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run.ledger")]
    assert "file locks" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this machine remembers runs; tests do without unless they ask for it."""
    monkeypatch.setenv("LAMBDACGD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@fault(
    "Two jobs at once, and going back",
    "A run's folder is copied with its key, and both are resumed on one machine.",
    says="this is an older copy, and the run went on in another",
    loses="Nothing of the one that went on first. On another machine this is not noticed.",
)
def test_a_copy_of_a_run_is_not_resumed_behind_the_other(tmp_path: Path, memory: Path, sentence: str) -> None:
    (tmp_path / "a").mkdir()
    first = Ledger(tmp_path / "a" / "run.ledger")
    run, other = first.new_run(), first.new_run()
    first.record(run, 10, digest="a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = Ledger(tmp_path / "b" / "run.ledger")
    copy.check_resume(run, 10, "a")  # either of the two may go on
    first.record(run, 20, digest="b")
    with pytest.raises(LedgerError, match=sentence):
        copy.check_resume(run, 10, "a")
    with pytest.raises(LedgerError, match="lacks the newest record"):
        copy.record(run, 15, digest="c")
    copy.check_resume(other, 0)  # nothing happened to that one
    copy.declare_destroyed(run, 10)  # the operator's word about what the first released
    copy.check_resume(run, 10, "a")
    copy.record(run, 15, digest="c")
    with pytest.raises(LedgerError, match="lacks the newest record"):
        first.check_resume(run, 20, "b")
    assert {stat.S_IMODE(path.stat().st_mode) for path in memory.iterdir()} == {0o600}
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700


@fault(
    "Damaged files",
    "Whole lines are cut off the end of the ledger, on the machine that wrote them.",
    says="lacks the newest record of run",
    loses="Nothing, if the newest ledger is put back.",
)
def test_a_ledger_cut_off_at_the_end_of_a_line_is_refused(ledger: Ledger, memory: Path, sentence: str) -> None:
    """Together with an old checkpoint it looked like a run that never went further."""
    run = ledger.new_run()
    ledger.record(run, 10, digest="a")
    before = ledger.path.read_bytes()
    ledger.record(run, 20, digest="b")
    ledger.path.write_bytes(before)
    with pytest.raises(LedgerError, match=sentence):
        ledger.check_resume(run, 10, "a")


def test_a_ledger_that_went_on_elsewhere_or_before_its_memory_was_written_is_fine(
    ledger: Ledger, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ledger.new_run()
    ledger.record(run, 10, digest="a")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("LAMBDACGD_STATE", "off")  # another machine; or a crash before the memory was written
        ledger.record(run, 20, digest="b")
    ledger.check_resume(run, 20, "b")
    ledger.record(run, 30, digest="c")
    for content in ("", "not a number"):  # a crash cut it off
        (memory / f"run-{run}").write_text(content)
        ledger.check_resume(run, 30, "c")


def test_a_home_that_cannot_be_written_remembers_nothing(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAMBDACGD_STATE", str(tmp_path / "file" / "state"))
    run = ledger.new_run()
    ledger.record(run, 10, digest="a")
    ledger.check_resume(run, 10, "a")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LAMBDACGD_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    ledger.record(run, 20, digest="b")
    ledger.check_resume(run, 20, "b")


def test_lines_are_json_and_hold_nothing_secret(ledger: Ledger) -> None:
    run = ledger.new_run(layout="abc")
    ledger.record(run, 1, digest="a")
    records = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert records[0]["facts"] == {"layout": "abc"}
    assert {"event", "run", "step", "digest", "kind", "time", "check"} == set(records[1])


def hold(path: str, run: str, ready: object, done: object) -> None:
    with Ledger(path).lock(run):
        ready.set()  # type: ignore[attr-defined]
        done.wait(30)  # type: ignore[attr-defined]


@fault(
    "Two jobs at once, and going back",
    "A second process takes a run that another one is training.",
    says="is in use by another process",
    loses="Nothing: the first goes on. When it ends, however it ends, the run is free.",
)
def test_two_processes_cannot_hold_one_run(ledger: Ledger, sentence: str) -> None:
    run, other = ledger.new_run(), ledger.new_run()
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(ledger.path), run, ready, done))
    process.start()
    assert ready.wait(30)
    with pytest.raises(LedgerError, match=sentence), ledger.lock(run):
        pass
    with ledger.lock(other):
        pass
    process.kill()  # however the holder ends, the lock ends with it
    process.join(30)
    with ledger.lock(run), pytest.raises(LedgerError, match="in use"), ledger.lock(run):
        pass
    assert sorted(os.listdir(ledger.path.parent)) == ["run.ledger"]


def test_a_forked_child_that_ends_does_not_take_the_lock_with_it(ledger: Ledger) -> None:
    run = ledger.new_run()
    holding = contextlib.ExitStack()
    holding.enter_context(ledger.lock(run))
    child = os.fork()
    if child == 0:
        try:
            holding.close()  # as the interpreter's own end would
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(LedgerError, match="in use"), ledger.lock(run):
        pass
    holding.close()


def test_nothing_comes_between_the_check_and_the_record(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ledger.new_run()
    real = fcntl.flock

    def another_process_first(*arguments: object) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        ledger.record(run, 10, digest="later")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", another_process_first)
    with pytest.raises(LedgerError, match="went back"):
        ledger.record(run, 5, digest="earlier")
    assert ledger.newest(run) == Release(10, "later", "checkpoint")


def test_the_newest_release_is_the_furthest_step_whatever_came_last(ledger: Ledger) -> None:
    run = ledger.new_run()
    for step in (10, 5):  # as an older version may have written them
        ledger._append({"event": "release", "run": run, "step": step, "digest": f"d{step}", "kind": "checkpoint"})
    assert ledger.newest(run) == Release(10, "d10", "checkpoint")
    with pytest.raises(LedgerError, match="released weights after step 10"):
        ledger.check_resume(run, 5)


def append_many(path: str, run: str, kind: str) -> None:
    for _ in range(25):
        Ledger(path).record(run, 7, digest="a", kind=kind)


def test_many_processes_may_append_at_once(ledger: Ledger) -> None:
    run = ledger.new_run()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=append_many, args=(str(ledger.path), run, f"k{j}")) for j in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(ledger.path.read_text().splitlines()) == 51
    assert ledger.newest(run) is not None
