"""The run ledger: a private, append-only record of when weights left the process. docs/keys.md says what it is for.

One z serves one released sum, so a run resumes only from its newest release (checkpoint or export), unless the later
ones are declared destroyed. The file holds one JSON object a line, each with a checksum over itself and the line before
it, and each synced to disk before the call returns: a line cut off by a crash was never acknowledged, and is ignored.
Any other damage is an error. Record a release *before* the file that holds it gets its final name: a crash in between
then leaves a run that refuses to go back, never one that goes back unnoticed.

What the file itself cannot show is that its last lines were cut off, or that it is an older copy, as when a folder is
copied and both are resumed. So the machine remembers the last record of each run that was written here, outside of the
folder: one small file a run in ``~/.local/state/lambdacgd`` (``XDG_STATE_HOME``; ``LAMBDACGD_STATE`` names another
folder, or ``off``). A ledger that lacks this record is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lambdacgd.errors import LedgerError, integer
from lambdacgd.files import read_bytes, replace_file, sync_folder, users_folder, write_all

_PART = 1 << 20  # bytes that are read at a time, and more than the longest line has


@dataclass(frozen=True)
class Release:
    """Weights that left the process after ``step`` steps, named by a public ``digest`` of what was written."""

    step: int
    digest: str
    kind: str


class Ledger:
    """The ledger in the file ``path`` (created, 0600, with the first record).

    Guarantee
    ---------
    A record that a call returned from is on disk. A run that released weights resumes only from the newest of them: a
    changed, missing or swapped line is an error. That the last lines were cut off, or that the whole file is an older
    copy, is noticed on the machine that wrote what is missing, by the user who wrote it, as long as that user's state
    folder can be written and is kept. On another machine nothing tells such a file from a whole one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def new_run(self, **public: str | int | float) -> str:
        """Enter a new run.

        Args:
            **public: Facts about the run that may be known, such as the plan's digest.

        Returns:
            The run's id, 32 hexadecimal digits.

        Raises:
            LedgerError: The file is damaged or cannot be written.
        """
        run_id = secrets.token_hex(16)
        self._append({"event": "run", "run": run_id, "facts": public})
        return run_id

    def runs(self) -> list[str]:
        """All run ids, oldest first."""
        return list(self._read().releases)

    def record(self, run_id: str, step: int, *, digest: str, kind: str = "checkpoint") -> None:
        """Enter that weights are about to leave the process. They may leave once this call has returned.

        Args:
            run_id: A run of this ledger.
            step: How many steps the weights went through.
            digest: A public name of what is written; ``check_resume`` compares it.
            kind: What leaves, such as "checkpoint" or "export".

        Raises:
            LedgerError: The run is unknown, or released a later step before; the file is damaged, or cannot be written.
            ValueError: ``step`` is not an integer of at least 0.
        """
        step = integer("step", step, minimum=0)

        def check(contents: _Contents) -> None:
            contents.check_remembered(run_id)
            newest = contents.newest_of(run_id)
            if newest is not None and step < newest.step:
                raise LedgerError(f"run {run_id} released step {newest.step}, now {step}: this process went back. Stop")

        record = {"event": "release", "run": run_id, "step": step, "digest": str(digest), "kind": str(kind)}
        self._append(record, check)

    def declare_destroyed(self, run_id: str, after_step: int) -> None:
        """Enter the operator's word that every release of this run after ``after_step`` is destroyed, with all copies.

        This is what makes going back safe. The ledger cannot check it.

        Args:
            run_id: A run of this ledger.
            after_step: The last step whose release still exists.

        Raises:
            LedgerError: The run is unknown; the file is damaged, or cannot be written.
            ValueError: ``after_step`` is not an integer of at least 0.
        """
        record = {"event": "destroyed", "run": run_id, "after": integer("after_step", after_step, minimum=0)}
        self._append(record, lambda contents: contents.releases_of(run_id))

    def newest(self, run_id: str) -> Release | None:
        """The newest release that was not declared destroyed; None if there is none."""
        return self._read().newest_of(run_id)

    def check_resume(self, run_id: str, step: int, digest: str | None = None) -> None:
        """Refuse to resume this run from ``step`` unless that is its newest release (or, with none, step 0).

        Args:
            run_id: A run of this ledger.
            step: How many steps the weights to resume from went through.
            digest: The public name of the file to resume from, if it shall be compared.

        Raises:
            LedgerError: The run is unknown, ``step`` is not its newest release, or the digest is another; the file is
                damaged.
            ValueError: ``step`` is not an integer of at least 0.
        """
        contents = self._read()
        releases = contents.releases_of(run_id)
        step = integer("step", step, minimum=0)
        contents.check_remembered(run_id)
        if not releases:
            if step != 0:
                raise LedgerError(f"run {run_id} released nothing that still exists: it starts at step 0, not {step}")
            return
        newest = max(release.step for release in releases)
        if step < newest:
            raise LedgerError(
                f"run {run_id} released weights after step {newest}; resuming from step {step} would use the same "
                f"noise for other sums. Resume from step {newest}; or, if every release after step {step} is destroyed "
                f"with all its copies, call key.ledger().declare_destroyed({run_id!r}, {step}); or start a new run"
            )
        if step > newest:
            raise LedgerError(f"run {run_id} never released step {step} (newest: {newest}): this is not its ledger")
        if digest is not None and digest not in {release.digest for release in releases if release.step == step}:
            raise LedgerError(
                f"step {step} of run {run_id} was released with another digest: the file was changed or is not the "
                f"run's own. Restore the original; or declare it destroyed and resume from an older one"
            )

    @contextlib.contextmanager
    def lock(self, run_id: str) -> Iterator[None]:
        """Hold this run for one process of this machine; a second one is refused at once.

        The lock ends with the process, however it ends. On a network file system it is as good as that system's
        ``flock``; across machines without one nothing is detected.
        """
        path = self.path.with_name(f"{self.path.name}.{run_id}.lock")
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _lock_file(descriptor, wait=False)
            except OSError:
                os.close(descriptor)
                raise LedgerError(
                    f"run {run_id} is in use by another process, or earlier in this one, with the same noise: "
                    f"wait for it, let go of the earlier one (private.detach(), del noiser), or start a new run"
                ) from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    break
            os.close(descriptor)  # the holder before us removed the file between our open and our lock
        holder = os.getpid()
        try:
            yield
        finally:
            if os.getpid() == holder:  # a forked child ends with a copy of this frame, and its parent holds on
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def _read(self) -> _Contents:
        contents = _Contents(self.path)
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb", buffering=0) as file:
            contents.read(file)
        return contents

    def _append(self, record: dict[str, Any], check: Callable[[_Contents], object] | None = None) -> None:
        """Add a record, unless ``check`` refuses what is there: both under one lock, so nothing comes between.

        A file that does not exist is not made by a refusal.
        """
        if check is not None and not self.path.exists():
            check(_Contents(self.path))
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritten(error) from error
        with open(descriptor, "r+b", buffering=0) as file:
            _lock_file(descriptor, wait=True)
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600:
                os.fchmod(descriptor, 0o600)
            contents = _Contents(self.path)
            contents.read(file)
            if check is not None:
                check(contents)
            record = record | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            record["check"] = _checksum(contents.check, record)
            self._write(file, contents.length, json.dumps(record, sort_keys=True).encode() + b"\n")
            if (memory := _memory_of(record["run"])) is not None:
                with contextlib.suppress(OSError):  # a home that cannot be written: then nothing is remembered
                    memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    replace_file(memory, record["check"].encode())

    def _write(self, file: Any, length: int, line: bytes) -> None:
        """Put the line behind the whole lines: a torn one was never acknowledged, and must not run on into this one."""
        try:
            file.truncate(length)
            file.seek(length)
            write_all(file, line)
            os.fsync(file.fileno())
            if not length:
                sync_folder(self.path.absolute().parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(length)
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"{self.path} cannot be written ({error.strerror or error}), so no weights may leave this process: mend "
            f"that and save again"
        )


class _Contents:
    """What the whole lines of a ledger's file say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.releases: dict[str, list[Release]] = {}  # by run, oldest first, without what was declared destroyed
        self._checks: dict[str, set[int]] = {}  # by run: the checksums of all its records
        self.lines = 0
        self.length = 0  # in bytes
        self.check = ""  # the last line's

    def releases_of(self, run_id: str) -> list[Release]:
        if run_id not in self.releases:
            raise LedgerError(f"run {run_id} is not in {self.path}: a ledger moves with its key")
        return self.releases[run_id]

    def newest_of(self, run_id: str) -> Release | None:
        """The last entry of the furthest step, whatever came last."""
        return max(reversed(self.releases_of(run_id)), key=lambda release: release.step, default=None)

    def check_remembered(self, run_id: str) -> None:
        """Refuse a ledger without the last record of this run that this machine wrote."""
        remembered = _remembered(run_id)
        if remembered is not None and remembered not in self._checks.get(run_id, ()):
            raise LedgerError(
                f"{self.path} lacks the newest record of run {run_id} on this machine: lines were cut off, or "
                f"this is an older copy, and the run went on in another. Use the newest ledger and checkpoint; or, if "
                f"all releases since are destroyed, with copies, call ledger.declare_destroyed({run_id!r}, step)"
            )

    def read(self, file: Any) -> None:
        """Read an unbuffered file to its end."""
        torn = b""
        while part := file.read(_PART):
            *lines, torn = (torn + part).split(b"\n")
            for line in lines:
                self._add(line)
            if len(torn) > _PART:  # no record is as long: the file does not decide how much memory is taken
                raise self._damaged()
        if _is_more_than_an_object(torn):  # a crash cuts a line off; it does not put something else behind it
            raise self._damaged()

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            valid = record["check"] == _checksum(self.check, record) and self._apply(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            valid = False
        if not valid:
            raise self._damaged()
        self._checks.setdefault(str(record["run"]), set()).add(int(record["check"], 16))
        self.lines += 1
        self.length += len(line) + 1
        self.check = record["check"]

    def _apply(self, record: dict[str, Any]) -> bool:
        event, run_id = record["event"], str(record["run"])
        if event == "run":
            self.releases.setdefault(run_id, [])
        elif event == "release":
            release = Release(integer("step", record["step"], minimum=0), str(record["digest"]), str(record["kind"]))
            self.releases[run_id].append(release)
        elif event == "destroyed":
            after = integer("after", record["after"], minimum=0)
            self.releases[run_id] = [release for release in self.releases[run_id] if release.step <= after]
        else:
            return False
        return True

    def _damaged(self) -> LedgerError:
        return LedgerError(
            f"line {self.lines + 1} of {self.path} is damaged, so it is unknown which weights were released. Restore "
            f"the file from a backup, or destroy every checkpoint of its runs and train anew with a new key"
        )


def _checksum(before: str, record: dict[str, Any]) -> str:
    body = json.dumps({k: v for k, v in record.items() if k != "check"}, sort_keys=True)
    return hashlib.blake2b((before + body).encode(), digest_size=8).hexdigest()


def _memory_of(run_id: str) -> Path | None:
    """Where this machine remembers the last record of a run; None if it shall not, or the user has no home."""
    folder = users_folder("LAMBDACGD_STATE", "XDG_STATE_HOME", ".local/state")
    return folder / f"run-{run_id}" if folder is not None and run_id.isalnum() else None


def _remembered(run_id: str) -> int | None:
    path = _memory_of(run_id)
    try:
        return None if path is None else int(read_bytes(path, most=64), 16)
    except (OSError, ValueError):  # never written, or cut off by a crash
        return None


def _is_more_than_an_object(text: bytes) -> bool:
    """Whether a whole JSON object stands there with something behind it, as when a bit of the newline flipped."""
    try:
        decoded = text.decode("utf-8", "replace")
        return json.JSONDecoder().raw_decode(decoded)[1] < len(decoded)
    except (ValueError, RecursionError):
        return False


def _lock_file(descriptor: int, *, wait: bool) -> None:
    try:
        import fcntl  # here, so that planning works on systems without it
    except ImportError:
        raise LedgerError("this system has no file locks (fcntl), which a ledger needs: use Linux or macOS") from None
    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
