"""The run ledger: a private, append-only record of when weights left the process.

One z serves one released sum. If a run went back behind weights that already left the process and trained on from
there with other data, the same noise would cover two different sums, and their difference would be noiseless. So the
ledger, a file beside the key, knows every run id and every released step (checkpoint or export), and a run resumes
only from the newest of these unless the later ones are declared destroyed.

The file holds one JSON object a line, each with a checksum over itself and the line before it. Every record is synced
to disk before the call returns; a line cut off by a crash was therefore never acknowledged, and is ignored. Any other
damage is an error. Record a release *before* the file that holds it gets its final name: a crash in between then
leaves a run that refuses to go back, never one that goes back unnoticed.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from lambdacgd.errors import LedgerError


@dataclass(frozen=True)
class Release:
    """Weights that left the process after ``step`` steps, named by a public ``digest`` of what was written."""

    step: int
    digest: str
    kind: str


class Ledger:
    """The ledger in the file ``path`` (created, 0600, with the first record)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def beside(cls, key_file: str | os.PathLike[str]) -> Ledger:
        """The ledger of a key file: ``run.key`` -> ``run.ledger``."""
        return cls(Path(key_file).with_suffix(".ledger"))

    def new_run(self, **public: str | int | float) -> str:
        """Enter a new run, with any public facts about it, and return its id (32 hexadecimal digits)."""
        run_id = secrets.token_hex(16)
        self._append({"event": "run", "run": run_id, "facts": public})
        return run_id

    def runs(self) -> list[str]:
        """All run ids, oldest first."""
        return [record["run"] for record in self._records() if record["event"] == "run"]

    def record(self, run_id: str, step: int, *, digest: str, kind: str = "checkpoint") -> None:
        """Enter that the weights after ``step`` steps are about to leave the process."""
        _check_step(step)

        def check(records: list[dict[str, Any]]) -> None:
            newest = _newest(self._releases(run_id, records))
            if newest is not None and step < newest.step:
                raise LedgerError(
                    f"run {run_id} released step {newest.step} and now wants to release step {step}: this process went "
                    f"back. Stop it; one noise vector must not cover two sums"
                )

        record = {"event": "release", "run": run_id, "step": int(step), "digest": str(digest), "kind": str(kind)}
        self._append(record, check)

    def declare_destroyed(self, run_id: str, after_step: int) -> None:
        """Enter the operator's word that every release of this run after ``after_step`` is destroyed, with all copies.

        This is what makes going back safe. The ledger cannot check it.
        """
        _check_step(after_step)
        record = {"event": "destroyed", "run": run_id, "after": int(after_step)}
        self._append(record, lambda records: self._releases(run_id, records))

    def newest(self, run_id: str) -> Release | None:
        """The newest release that was not declared destroyed; None if there is none."""
        return _newest(self._releases(run_id, self._records()))

    def check_resume(self, run_id: str, step: int, digest: str | None = None) -> None:
        """Refuse to resume this run from ``step`` unless that is its newest release (or, with none, step 0)."""
        releases = self._releases(run_id, self._records())
        _check_step(step)
        if not releases:
            if step != 0:
                raise LedgerError(
                    f"run {run_id} released nothing that still exists, so it can only start at step 0, not {step}"
                )
            return
        newest = max(release.step for release in releases)
        if step < newest:
            raise LedgerError(
                f"run {run_id} released weights after step {newest}; resuming from step {step} would use the same "
                f"noise for other sums. Resume from step {newest}; or, if every release after step {step} is destroyed "
                f"with all its copies, say so with ledger.declare_destroyed({run_id!r}, {step}); or start a new run"
            )
        if step > newest:
            raise LedgerError(
                f"run {run_id} never released step {step} (newest: {newest}); this ledger is not the run's own"
            )
        known = {release.digest for release in releases if release.step == step}
        if digest is not None and digest not in known:
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
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise LedgerError(
                    f"run {run_id} is in use by another process, or by an earlier privatize() in this one; two would "
                    f"use the same noise for different sums. Wait for it, call detach() on the earlier one, or start "
                    f"a new run"
                ) from None
            if _same_file(descriptor, path):
                break
            os.close(descriptor)  # the holder before us removed the file between our open and our lock
        holder = os.getpid()
        try:
            yield
        finally:
            if os.getpid() == holder:  # a forked child ends with a copy of this frame, and its parent holds on
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def _releases(self, run_id: str, records: list[dict[str, Any]]) -> list[Release]:
        known, releases = False, []
        for record in records:
            if record["run"] != run_id:
                continue
            if record["event"] == "run":
                known = True
            elif record["event"] == "release":
                releases.append(Release(record["step"], record["digest"], record["kind"]))
            elif record["event"] == "destroyed":
                releases = [release for release in releases if release.step <= record["after"]]
        if not known:
            raise LedgerError(
                f"run {run_id} is not in {self.path}; a run starts with new_run(), and its ledger moves with its key"
            )
        return releases

    def _records(self) -> list[dict[str, Any]]:
        try:
            return _parse(self.path.read_bytes(), self.path)[0]
        except FileNotFoundError:
            return []

    def _append(
        self, record: dict[str, Any], check_records: Callable[[list[dict[str, Any]]], object] | None = None
    ) -> None:
        """Add a record, unless ``check_records`` refuses what is there: both under one lock, so nothing comes between.

        A file that does not exist is not made by a refusal.
        """
        if check_records is not None and not self.path.exists():
            check_records([])
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(descriptor, "r+b") as file:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600:
                os.fchmod(descriptor, 0o600)
            records, check, whole = _parse(file.read(), self.path)
            if check_records is not None:
                check_records(records)
            file.truncate(whole)  # a torn last line was never acknowledged; the next record must not run on from it
            file.seek(whole)
            record = record | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            record["check"] = _checksum(check, record)
            file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        if not whole:
            folder = os.open(self.path.absolute().parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def _checksum(before: str, record: dict[str, Any]) -> str:
    body = json.dumps({k: v for k, v in record.items() if k != "check"}, sort_keys=True)
    return hashlib.blake2b((before + body).encode(), digest_size=8).hexdigest()


def _parse(content: bytes, path: Path) -> tuple[list[dict[str, Any]], str, int]:
    """The records, the last checksum, and the length of the whole lines."""
    whole = content.rfind(b"\n") + 1
    records: list[dict[str, Any]] = []
    check = ""
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            record = json.loads(line)
            valid = record["check"] == _checksum(check, record) and record["event"] in ("run", "release", "destroyed")
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            raise LedgerError(
                f"line {number} of {path} is damaged, so it is unknown which weights were released. Restore the file "
                f"from a backup, or destroy every checkpoint of its runs and train anew with a new key"
            )
        records.append(record)
        check = record["check"]
    return records, check, whole


def _newest(releases: list[Release]) -> Release | None:
    """The last entry of the furthest step, in whatever order they were entered."""
    return max(reversed(releases), key=lambda release: release.step, default=None)


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}; it must be an integer of at least 0")


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
