"""How a `Private` run is saved and gone on with: its checkpoints, its state, and the position it stands at after.

The methods only. What a checkpoint holds and how it is written safely is in `checkpoint` (one process, a file) and in
`distributed.folder` (several processes, a folder).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdacgd.training import checkpoint
from lambdacgd.training.cycle import Cycle, Phase
from lambdacgd.training.distributed.sharded import ShardedTotals
from lambdacgd.training.distributed.shards import local
from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import TrainingError
from lambdacgd.training.gradients import Gradients
from lambdacgd.training.loader import Loader
from lambdacgd.training.run import Run
from lambdacgd.training.stage import NoiseStage
from lambdacgd.training.trained import Trained

if TYPE_CHECKING:
    from lambdacgd.training.private import Private

_LOADED_BY_HAND = (
    "optimizer.load_state_dict() was called on the optimizer of a private run, with the state of another moment. A run "
    "is resumed by private.load(path) or private.resume(path), which go on with its noise and batches and ask its "
    "ledger. State loaded by hand (or by accelerator.load_state) would be a new run behind the old one's weights, "
    "which costs its own (ε, δ). If that is meant, load before privatize"
)
_HALF_LOADED = (
    "loading a checkpoint failed half-way, so the weights may be of two moments, and this run is already the "
    "checkpoint's. Call detach(), build the model and the optimizer anew, privatize, and load again"
)


class Resuming:
    """The part of `Private` that saves a run and goes on with it. Its attributes are those that `Private` makes."""

    world: World
    run: Run
    cycle: Cycle
    loader: Loader
    trained: Trained
    gradients: Gradients
    shards: ShardedTotals | None
    _stage: NoiseStage | None
    _broken: str | None
    _loading: bool

    def save(self, path: str | os.PathLike[str], *, extra: dict[str, Any] | None = None, frozen: bool = True) -> None:
        """Write a checkpoint, whole or not at all, and enter it in the ledger.

        ``extra`` is anything of yours made of tensors, numbers, strings, lists and dicts (a scheduler's
        ``state_dict()``). ``frozen=False`` leaves frozen parameters out, for small checkpoints of adapters: the model
        that loads it brings them. Where ``torch.distributed`` is initialised, ``path`` becomes a folder that any number
        of processes can go on from, and every rank must call this.
        """
        checkpoint.save(self._whole, path, extra, frozen=frozen)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint, which must be the run's newest release. Returns what was given as ``extra``."""
        return checkpoint.load(self._whole, path)

    def resume(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """``load`` if there is a checkpoint at ``path``, else None: for jobs that may be started again at any time."""
        found = self.world.from_first("looking for a checkpoint", lambda: checkpoint.exists(self._whole, path))
        return self.load(path) if found else None

    # --- the position of a resumed run -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def going_on_from(self, step: int) -> Iterator[None]:
        """Restore weights and the rest in this block, once the run is that of the checkpoint.

        The position comes first: if the block fails and somebody goes on all the same, no step that was released is
        done again under its noise. And nobody goes on.
        """
        with self.loading():
            self.stand_at(step)
            self._broken = _HALF_LOADED
            yield
        self._broken = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """The optimizer's state may be loaded in this block, and the run go back: the ledger has been asked."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loading its own state again is nobody's harm: accelerate does so to move it to a device."""
        own = optimizer.state_dict()["state"]
        if not self._loading and state.get("state") and not _same(state["state"], own):
            raise TrainingError(_LOADED_BY_HAND)

    def stand_at(self, step: int) -> None:
        """Set the position of a resumed run. Only loading leads back: noise that was added serves no other sum."""
        forwards = step >= self.cycle.done and self.cycle.phase is Phase.IDLE
        if not forwards and not self._loading:
            raise TrainingError(
                f"the run stands after step {self.cycle.done}, and other sums would get the noise of steps it has "
                "taken or begun; only a checkpoint leads back: private.load(path)"
            )
        self.cycle.done = self.trained.steps_taken = step
        self.cycle.phase = Phase.IDLE
        self._whole.drop_batch()
        self.loader.restart()
        self.gradients.clear()
        self._stage = None

    @property
    def _whole(self) -> Private:
        """This run as what it is: `checkpoint` reads and writes all of it."""
        return cast("Private", self)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(local(a).to(local(b).device), local(b)))
    return type(a) is type(b) and bool(a == b)
