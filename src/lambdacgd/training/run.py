"""Who a run is: its key, its id, and the ledger that remembers what left the process; alone or on several ranks."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import warnings
from collections.abc import Iterator

import torch

from lambdacgd.errors import CheckpointError, InvalidInput, LedgerError, NotPrivateWarning, TrainingError
from lambdacgd.keys import SecretKey, SubKey
from lambdacgd.ledger import Ledger, Release
from lambdacgd.training.distributed.world import World

# Data-loading workers of a killed process inherit its lock and notice their parent's death within seconds.
_ORPHANS_S = 15.0


class Run:
    """A run id under a key, made when it is first needed. With a key file, the id is in the ledger and held by a lock.

    Guarantee
    ---------
    Every run has its own 128-bit id, so its own noise and batches. With a key file, one process at a time holds a run.
    Of several ranks, rank 0's key and id are everybody's. Only rank 0 knows the key's file, so only it reads and writes
    the ledger; the others hold the key in memory.
    """

    def __init__(self, key: SecretKey | None, *, world: World | None = None, plan: str = "") -> None:
        """``plan`` is the plan's digest, which a new run is entered with."""
        if key is not None and not isinstance(key, SecretKey):
            raise InvalidInput.of_type("key", key, "a SecretKey (SecretKey.generate() or SecretKey.load(path))")
        self.key = SecretKey.generate() if key is None else key
        if self.key.is_for_tests:
            claims_nothing = "NOT PRIVATE: everybody can compute a key of SecretKey.for_tests: this run claims nothing"
            warnings.warn(claims_nothing, NotPrivateWarning, stacklevel=3)
        self.world = World() if world is None else world
        #: The fingerprint of the key that this rank was given, if it was given one.
        self.given = None if key is None else key.fingerprint()
        self._plan = plan
        self._has_ledger = self.key.path is not None
        self._id: str | None = None
        self._process = os.getpid()
        self._ledger: Ledger | None = None  # on rank 0, once the run has begun
        self._held = contextlib.ExitStack()
        self._holds = False  # whether this process has the run's lock
        self._last: Release | None = None  # the run's newest release, as far as this process knows

    def share(self, device: torch.device) -> None:
        """Take rank 0's key. All ranks must call it, after they have agreed."""
        self._has_ledger = self.world.share(self._has_ledger)
        for_tests = self.world.share(self.key.is_for_tests)
        secret = self.world.share_secret(SubKey(self.key._secret), device)
        if not self.world.first:
            self.key = SecretKey.from_bytes(secret)
            self.key._for_tests = for_tests

    @property
    def id(self) -> str:
        """The run's id. Asking for it starts the run, so the first time all ranks must ask."""
        if os.getpid() != self._process:
            raise TrainingError("this run was forked, and its noise must not serve twice: begin it where you train")
        if self._id is None:
            self._id = self.world.from_first("starting the run", self._start)
        return self._id

    def _start(self) -> str:
        if self.key.is_for_tests:
            return self.key.derive("run of tests").hex()[:32]
        if self.key.path is None:
            return secrets.token_hex(16)
        ledger = self.key.ledger()
        run_id = ledger.new_run(plan=self._plan)
        self._hold(ledger, run_id, self._held, 0)
        self._ledger, self._holds = ledger, True
        return run_id

    @property
    def started(self) -> bool:
        """Whether the run has its id."""
        return self._id is not None

    def check_ledger(self) -> None:
        """Refuse to save what nobody could resume."""
        if not self._has_ledger:
            raise CheckpointError(
                "this run's key lives in memory only: nothing could resume it. Make a key file before training: "
                'key = SecretKey.generate(); key.save("run.key"); then give key=key'
            )

    def release(self, step: int, *, digest: str, kind: str) -> None:
        """Enter that weights are about to leave the process. Rank 0 does it; without a key file nobody keeps it.

        Raises:
            LedgerError: This run was detached, and another process has it now or went on with it.
        """
        if not self.world.first:
            return
        if self.world.many and self._id is None:
            raise CheckpointError("this run has not begun: take a batch on every rank before releasing weights")
        _ = self.id
        if self._ledger is not None:
            with self.holding(self.id, patience=0):
                self._check_alone(self._ledger)
                self._ledger.record(self.id, step, digest=digest, kind=kind)
                self._last = Release(step, digest, kind)  # the ledger refuses what is not the newest

    def resume(self, run_id: str, step: int, digest: str) -> None:
        """Become the run of a checkpoint, if rank 0's ledger allows it. All ranks must call it.

        Raises:
            CheckpointError: It does not, or this is another run already.
        """
        self.world.from_first("resuming", lambda: self._resume(run_id, step, digest))
        self._id = run_id

    def _resume(self, run_id: str, step: int, digest: str) -> None:
        self.check_ledger()
        if self._id not in (None, run_id):
            raise CheckpointError("this run has already begun; load a checkpoint before taking the first batch")
        ledger = self.key.ledger()
        try:
            ledger.check_resume(run_id, step, digest)
            if not self._holds:
                with contextlib.ExitStack() as held:
                    self._hold(ledger, run_id, held)
                    ledger.check_resume(run_id, step, digest)  # whoever held it may have released more meanwhile
                    self._held = held.pop_all()
            self._ledger, self._holds, self._last = ledger, True, ledger.newest(run_id)
        except LedgerError as error:
            raise CheckpointError(str(error)) from error

    @contextlib.contextmanager
    def holding(self, run_id: str, patience: float | None = None) -> Iterator[None]:
        """No other process has the run ``run_id`` in this block: what a dead one left behind can be settled.

        Raises:
            LedgerError: Another process has it, and did not let go of it within ``patience`` seconds (if not given,
                as long as its orphans may live); or it is this run, which was detached, and another process has gone
                on with it since.
        """
        own = run_id == self._id
        if own and self._holds:
            yield
            return
        with contextlib.ExitStack() as held:
            ledger = self.key.ledger()
            self._hold(ledger, run_id, held, patience)
            if not own:
                yield
                return
            self._check_alone(ledger, detached=True)
            self._holds = True
            try:
                yield
            finally:
                self._holds = False

    def _check_alone(self, ledger: Ledger, *, detached: bool = False) -> None:
        """Whether anybody else has released weights of this run. Locks fail, too: where a file system has none, or
        somebody removed the file. A later release than ours may have been declared destroyed only while we held it.
        """
        newest, last = ledger.newest(self.id), self._last
        older = newest is None or (last is not None and newest.step < last.step)
        if newest != last and (detached or not older):
            raise LedgerError(
                f"another process went on with run {self.id}, so the noise of these weights has served other sums: "
                "load the run's newest checkpoint. Unless this run was detached, its lock failed (a network file "
                "system, a cleaner of files)"
            )

    def _hold(self, ledger: Ledger, run_id: str, held: contextlib.ExitStack, patience: float | None = None) -> None:
        deadline = time.monotonic() + (_ORPHANS_S if patience is None else patience)
        while True:
            try:
                held.enter_context(ledger.lock(run_id))
                return
            except LedgerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def close(self) -> None:
        """Let go of the lock."""
        self._holds = False
        self._held.close()
