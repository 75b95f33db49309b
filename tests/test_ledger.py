"""The run ledger: one z serves one released sum."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from lambdacgd.ledger import Ledger, LedgerError, Release


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.beside(tmp_path / "run.key")


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


@pytest.mark.parametrize("damage", [flip, drop_line, garbage, blank])
def test_any_other_damage_is_an_error(ledger: Ledger, damage: object) -> None:
    run = ledger.new_run()
    ledger.record(run, 10, digest="a")
    ledger.record(run, 20, digest="b")
    ledger.path.write_bytes(damage(ledger.path.read_bytes()))  # type: ignore[operator]
    for call in (lambda: ledger.newest(run), lambda: ledger.new_run(), lambda: ledger.check_resume(run, 20)):
        with pytest.raises(LedgerError, match="damaged"):
            call()


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


def test_two_processes_cannot_hold_one_run(ledger: Ledger) -> None:
    run, other = ledger.new_run(), ledger.new_run()
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(ledger.path), run, ready, done))
    process.start()
    assert ready.wait(30)
    with pytest.raises(LedgerError, match="in use"), ledger.lock(run):
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
