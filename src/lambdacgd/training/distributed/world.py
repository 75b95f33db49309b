"""The processes that train one model together, and how they agree: all of them go on, or none.

Everything here is small (errors, digests, the key). Sums travel in `reduction`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from lambdacgd.errors import InvalidInput, TrainingError, shown
from lambdacgd.keys import SubKey

Result = TypeVar("Result")


class World:
    """All processes of a job, or one process alone: then it is in no ``job``, and nothing is ever sent."""

    def __init__(self, *, job: bool = False) -> None:
        self.job = job
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if job else (0, 1)

    @classmethod
    def here(cls) -> World:
        """The world of this process: the job's, if ``torch.distributed`` is initialised."""
        job = dist.is_available() and dist.is_initialized()
        if not job and int(os.environ.get("WORLD_SIZE") or "1") > 1:
            alone = f"This is one of {os.environ['WORLD_SIZE']} processes, which do not know each other"
            how = "Call torch.distributed.init_process_group() before privatize, so that they train one model"
            raise InvalidInput("process_group", f"{alone}. {how}; or unset WORLD_SIZE.")
        return cls(job=job)

    @property
    def many(self) -> bool:
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this process keeps the key's file and the ledger."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. All must call it."""
        if not self.many:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. All must call it."""
        if not self.many:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that every rank runs by itself: if it fails on one, it fails on all, and nobody is left waiting.

        Blocks must not be nested, nor hold anything else that speaks to other ranks.
        """
        try:
            yield
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}")
            raise
        failed = {rank: said for rank, said in enumerate(self.gather(None)) if said is not None}
        for rank, said in failed.items():
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise TrainingError(f"{what} failed on rank {rank}{others}, so no rank goes on. There: {said}")

    def from_first(self, what: str, act: Callable[[], Result]) -> Result:
        """What ``act`` returns on rank 0, on every rank; if it fails there, an error on every rank."""
        with self.together(what):
            result = act() if self.first else None
        shared: Result = self.share(result)
        return shared

    def agree(self, what: str, facts: dict[str, Any], advice: dict[str, str]) -> None:
        """An error on every rank, naming what differs and where, unless all ranks have the same facts."""
        gathered = self.gather(facts)
        lines = []
        for name in dict.fromkeys(name for other in gathered for name in other):  # a rank may have facts of its own
            values = [other.get(name) for other in gathered]
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            if odd:
                both = f"{shown(values[0], 24)} on rank 0, {shown(values[odd[0]], 24)} on rank {odd[0]}"
                lines.append(f"- {name}: {both}. {advice.get(name, 'It must be the same on every rank')}")
        if lines:
            raise TrainingError(f"{what}: the ranks differ, so no rank goes on.\n" + "\n".join(lines))

    def share_secret(self, secret: bytes, device: torch.device) -> bytes:
        """Rank 0's 32 bytes, on every rank, by way of memory that is overwritten afterwards."""
        if not self.many:
            return secret
        box = torch.zeros(32, dtype=torch.uint8, device=device)
        try:
            if self.first:
                box.copy_(torch.frombuffer(bytearray(secret), dtype=torch.uint8))
            dist.broadcast(box, src=0)
            return SubKey(box.tolist())
        finally:
            box.zero_()  # also if sending failed: the error's traceback holds this tensor
