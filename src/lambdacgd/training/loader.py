"""The loader: the plan's batches, in order, cut into physical batches, from the step the run stands at.

Guarantee
---------
The examples of step t are exactly those that the plan's sampling gives for (key, run, t): never shuffled, truncated,
padded or rebalanced. Several processes split them by their place in the batch: none is left out, none is on two. Where
nobody takes part, one example of weight exactly zero is handed out, so that the step is pure noise. What random
augmentation does depends on the run, the step and the place in the logical batch only, not on workers or resuming.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lambdacgd.sampling import BinSortedParquet, Cyclic, Sampling
from lambdacgd.training.collating import KeepsApart
from lambdacgd.training.cycle import Phase
from lambdacgd.training.errors import TrainingError

if TYPE_CHECKING:
    from lambdacgd.training.private import Private


class Chunk(NamedTuple):
    """A physical batch: part of the logical batch of ``step``, from its ``first`` example on."""

    step: int
    first: int
    indices: list[int]
    last: bool
    empty: bool
    least: int = 0  # examples that every rank has at least in this physical batch


class Chunks:
    """What the data loader reads its batches from; remembers, in order, what it gave."""

    def __init__(
        self, batches: Iterator[np.ndarray], start: int, size: int | None, *, rank: int = 0, ranks: int = 1
    ) -> None:
        self._batches, self._start, self._size = batches, start, size
        self._rank, self._ranks = rank, ranks
        self.given: deque[Chunk] = deque()

    def __iter__(self) -> Iterator[Chunk]:
        for step, found in enumerate(self._batches, start=self._start):
            for chunk in cut(step, found, self._size, rank=self._rank, ranks=self._ranks):
                self.given.append(chunk)
                yield chunk


def cut(step: int, found: np.ndarray, size: int | None, *, rank: int = 0, ranks: int = 1) -> Iterator[Chunk]:
    """A logical batch in parts of at most ``size`` examples; an empty one borrows example 0 at weight zero.

    With several ranks, rank r has every ``ranks``-th example from place r on: each example is on one rank. All ranks
    have as many parts as the one with the most examples, so that they go through them together.
    """
    own, most = found[rank::ranks], max(1, -(-len(found) // ranks))
    size = size or most
    for first in range(0, most, size):
        part = own[first : first + size].tolist()
        least = min(size, max(0, len(found) // ranks - first))
        yield Chunk(step, rank + ranks * first, part or [0], first + size >= most, empty=not part, least=least)


class Examples(Dataset[Any]):
    """The user's dataset, read a chunk at a time with random numbers of the chunk's own (``views`` readings each)."""

    def __init__(self, dataset: Any, run: str, views: int) -> None:
        self._dataset, self._run, self._views = dataset, run, views

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, chunk: Chunk) -> list[Any]:
        with random_numbers_of(f"{self._run}/{chunk.step}/{chunk.first}"):
            return [item for _ in range(self._views) for item in self._read(chunk.indices)]

    def _read(self, indices: list[int]) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        return list(together(indices)) if callable(together) else [self._dataset[i] for i in indices]


@contextlib.contextmanager
def random_numbers_of(name: str) -> Iterator[None]:
    """Python's, NumPy's and torch's generators set by a name; outside worker processes put back afterwards."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    alone = get_worker_info() is None
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if alone else None  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])


class Loader:
    """Iterates the remaining steps of the run. ``private.epochs()`` groups them."""

    def __init__(
        self,
        private: Private,
        *,
        max_physical_batch_size: int | None,
        views: int,
        options: dict[str, Any],
    ) -> None:
        self._private, self._size, self._views, self._options = private, max_physical_batch_size, views, dict(options)
        if options.get("collate_fn") is not None:
            self._options["collate_fn"] = KeepsApart(options["collate_fn"])
        self._reading: Reading | None = None
        self._turn = 0
        self._verified = False  # whether a bin-sorted file has been checked against the run
        self.untouched: Epoch | None = None  # handed out by `private.epochs()`, and nobody has asked for its batches

    def __iter__(self) -> Iterator[Any]:
        if self.untouched is not None:
            self.untouched = None  # said once: a notebook's traceback may keep the loop over epochs alive
            raise TrainingError(
                "private.loader iterates the whole run, so it would all be one epoch here. Loop over the epoch: "
                "for epoch in private.epochs(): for batch in epoch: …"
            )
        return self.until(self._private.plan.steps)

    def __len__(self) -> int:
        if self._size is not None:
            raise TypeError(
                "how many physical batches are left depends on the bins; the plan's steps are private.plan.steps"
            )
        return self._private.plan.steps - self._private.steps_taken

    def until(self, last_step: int) -> Iterator[Any]:
        """The physical batches of the steps up to ``last_step``. A logical batch under way starts again."""
        private = self._private
        private.check_usable()
        if private.steps_taken >= private.plan.steps:
            raise TrainingError(
                f"all {private.plan.steps} steps of the plan are done; the horizon is fixed. The loader iterates the "
                "whole run: loop over private.epochs() to have it epoch by epoch"
            )
        private.drop_batch()
        private.begin()
        self._turn += 1
        return self._iterate(last_step, self._turn)

    def _iterate(self, last_step: int, turn: int) -> Iterator[Any]:
        cycle = self._private.cycle
        while True:
            if turn != self._turn:
                raise TrainingError("another iteration of the loader has begun; there is one position in a run")
            self._private.check_usable()
            cycle.before_batch()
            if cycle.phase is Phase.IDLE and cycle.done >= last_step:
                return
            data, chunk = self._ready().next()
            self._private.hand_out(chunk)
            yield data

    def _ready(self) -> Reading:
        """The reading under way if it stands where the run stands, else (a failed step, a resumed run) a new one."""
        if self._reading is None or not self._reading.stands_at(self._private.cycle.current, self._private.cycle.phase):
            self._private.drop_batch()
            self._reading = self._start(self._private.cycle.current)
        return self._reading

    def _start(self, step: int) -> Reading:
        private = self._private
        private.check_dataset()
        warn_of_search(private.model, private.plan.sampling)
        batches = self.batches(step)
        world = private.world
        chunks = Chunks(iter(batches), step, self._size, rank=world.rank, ranks=world.size)
        # A generator of its own: starting to read must not move the generator that dropout uses.
        generator = torch.Generator().manual_seed(step)
        loader = DataLoader(
            Examples(private.dataset, private.run.id, self._views),
            batch_sampler=chunks,  # type: ignore[arg-type]  # chunks, which Examples understands
            generator=generator,
            **self._options,
        )
        return Reading(iter(loader), chunks, step)

    def batches(self, step: int) -> Iterator[np.ndarray]:
        """The plan's batches from ``step`` on; a file sorted by the run's bins knows them as runs of its rows."""
        plan, run, data = self._private.plan, self._private.run, self._private.dataset
        if not isinstance(data, BinSortedParquet):
            return plan.sampling.batches(run.key, run=run.id, start_step=step)
        if data.sampling != plan.sampling:
            raise TrainingError(f"{data.path} was sorted for {data.sampling}, and the plan samples {plan.sampling}")
        if not self._verified:
            data.verify(run.key, run=run.id)
            self._verified = True
        return data.batches(start_step=step)

    def restart(self) -> None:
        """Forget the position; the next iteration starts at the run's current step."""
        self._reading = None
        self._turn += 1


class Epoch:
    """What is left of one epoch. ``number`` counts from 1."""

    def __init__(self, private: Private, number: int) -> None:
        self._private, self.number = private, number

    def __iter__(self) -> Iterator[Any]:
        self._private.loader.untouched = None
        return self._private.loader.until(self.number * self._private.plan.steps_per_epoch)

    def __len__(self) -> int:
        """Logical steps left in the epoch; physical batches are more where logical ones are split."""
        if self._private.max_physical_batch_size is not None:
            raise TypeError(
                "how many physical batches an epoch has depends on the bins; it has plan.steps_per_epoch steps"
            )
        return max(0, self.number * self._private.plan.steps_per_epoch - self._private.steps_taken)


class Reading:
    """One pass of the data loader, which may run ahead of us in its workers."""

    def __init__(self, data: Iterator[Any], chunks: Chunks, start: int) -> None:
        self._data, self._chunks = data, chunks
        self._next_step, self._within = start, False

    def stands_at(self, step: int, phase: Phase) -> bool:
        return self._next_step == step and self._within == (phase is Phase.GATHERING)

    def next(self) -> tuple[Any, Chunk]:
        self._next_step = -1  # until the read has succeeded: after a failure nobody goes on from here
        data = next(self._data)
        chunk = self._chunks.given.popleft()
        self._next_step, self._within = (chunk.step + 1, False) if chunk.last else (chunk.step, True)
        return data, chunk


def warn_of_search(model: torch.nn.Module, sampling: Sampling) -> None:
    """Say it where cuDNN would look for its fastest algorithms at nearly every step, which takes far longer than it."""
    if not torch.backends.cudnn.benchmark or isinstance(sampling, Cyclic):
        return
    convolutions = (m for m in model.modules() if isinstance(m, torch.nn.modules.conv._ConvNd))
    if any(p.is_cuda for module in convolutions for p in module.parameters()):
        warnings.warn(
            "torch.backends.cudnn.benchmark is on: cuDNN searches its algorithms for every batch size it meets, and "
            "sampled batches have many (measured: steps eighteen times slower). Set it to False, or use "
            "private.captured_step, which has three sizes",
            stacklevel=5,  # the loop over the loader
        )


Collate = Callable[[list[Any]], Any]
