"""A run that several processes share: one key, one id, one ledger, which rank 0 keeps."""

from __future__ import annotations

import torch

from lambdacgd.keys import SecretKey
from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import CheckpointError
from lambdacgd.training.run import Run


class SharedRun(Run):
    """As `Run`, on every rank of a world.

    Guarantee
    ---------
    Rank 0's key and run id are everybody's. Only rank 0 knows the key's file, so only it reads and writes the ledger;
    the others hold the key in memory.
    """

    def __init__(
        self, world: World, key: SecretKey | None, *, prepared: str | None = None, **facts: str | int | float
    ) -> None:
        self._world = world
        self._given = key is not None
        self.given_id = prepared  # the run that this rank was asked to be; None if it was asked nothing
        self._keeps_ledger = False
        super().__init__(key, prepared=prepared if world.first else None, **facts)

    @property
    def given_fingerprint(self) -> str | None:
        """The fingerprint of the key that this rank was given; None if it was given none."""
        return self.key.fingerprint() if self._given else None

    def share(self, device: torch.device) -> None:
        """Take rank 0's key. All ranks must call it, after they have agreed."""
        self._keeps_ledger = self._world.share(self.key.path is not None)
        secret = self._world.share_secret(bytes(self.key._secret), device)
        if not self._world.first:
            self.key = SecretKey.from_bytes(secret)

    def _new_id(self) -> str:
        return self._world.from_first("starting the run", super()._new_id)

    def check_ledger(self) -> None:
        if not self._keeps_ledger:
            self.refuse_memory_only()

    def release(self, step: int, *, digest: str, kind: str) -> None:
        """On rank 0: enter that weights are about to leave. Others leave it to rank 0."""
        if not self._world.first:
            return
        if self._id is None:
            raise CheckpointError("this run has not begun: take a batch on every rank before releasing weights")
        super().release(step, digest=digest, kind=kind)

    def resume(self, run_id: str, step: int, digest: str) -> None:
        """All ranks become the run of a checkpoint, if rank 0's ledger allows it. All must call it."""
        self._world.from_first("resuming", lambda: super(SharedRun, self).resume(run_id, step, digest))
        self._id = run_id
