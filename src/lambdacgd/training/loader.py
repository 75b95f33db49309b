"""The loader: the plan's batches, in order, cut into physical batches, from the step the run stands at.

Guarantee
---------
The examples of step t are exactly those that the plan's sampling gives for (key, run, t): never shuffled, truncated or
rebalanced. Several processes split them by their place in the batch: none is left out, none is on two. Where nobody
takes part, one example of weight exactly zero is handed out, so that the step is pure noise; what fills a batch up
(``pad_batches``) has weight exactly zero, too. What random augmentation does depends on the run, the step and the place
in the logical batch only, not on workers, padding or resuming.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lambdacgd.errors import TrainingError
from lambdacgd.training.loop import Chunk, Loop, Phase

Collate = Callable[[list[Any]], Any]


def cut(
    step: int, batch: np.ndarray, size: int | None, *, rank: int = 0, ranks: int = 1, multiple: int = 1
) -> Iterator[Chunk]:
    """A logical batch in parts of at most ``size`` examples; an empty one borrows example 0 at weight zero.

    A part is filled up at weight zero to a multiple of ``multiple``, though not beyond ``size``, by its first example.
    With several ranks, rank r has every ``ranks``-th example from place r on: each example is on one rank. All ranks
    have as many parts as the one with the most examples, so that they go through them together.
    """
    own, most = batch[rank::ranks], max(1, -(-len(batch) // ranks))
    step_size = size or most
    for first in range(0, most, step_size):
        part = own[first : first + step_size].tolist()
        least = min(step_size, max(0, len(batch) // ranks - first))
        width = max(1, -(-len(part) // multiple)) * multiple
        padding = (width if size is None else min(width, size)) - len(part)
        indices = part + (part[:1] or [0]) * padding
        yield Chunk(step, rank + ranks * first, indices, first + step_size >= most, padding, least)


class Examples(Dataset[Any]):
    """The user's dataset, read a chunk at a time with random numbers of the chunk's own (``views`` readings each).

    The readings of an example are neighbours. What fills a chunk up is read last: nobody's random numbers move.
    """

    def __init__(self, dataset: Any, run: str, views: int) -> None:
        self._dataset, self._run, self._views = dataset, run, views

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, chunk: Chunk) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        own = len(chunk.indices) - chunk.padding
        items: list[Any] = []
        with random_numbers_of(f"{self._run}/{chunk.step}/{chunk.first}"):
            for some in (chunk.indices[:own], chunk.indices[own:]):
                readings = [
                    together(some) if callable(together) else [self._dataset[i] for i in some]
                    for _ in range(self._views if some else 0)
                ]
                items += [item for of_example in zip(*readings, strict=True) for item in of_example]
        return items


class Rows(Dataset[Any]):
    """A ``TensorDataset``, a chunk by one indexing of each tensor: the batch that collating its items would give.

    Nothing about it is random. Item by item, a batch on a GPU costs as many launches as it has numbers.
    """

    def __init__(self, dataset: TensorDataset, views: int) -> None:
        self._tensors, self._views = dataset.tensors, views

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitems__(self, chunk: Chunk) -> list[Tensor]:
        rows = torch.tensor([i for i in chunk.indices for _ in range(self._views)], device=self._tensors[0].device)
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors]

    @staticmethod
    def collate(batch: list[Tensor]) -> list[Tensor]:
        return batch

    @staticmethod
    def can_read(dataset: Any) -> bool:
        """Whether the batch is the same to the bit, strides included: plain tensors, row after row."""
        return type(dataset) is TensorDataset and all(
            type(t) is Tensor and t.layout == torch.strided and t.is_contiguous() and not t.requires_grad
            for t in dataset.tensors
        )


def generators() -> dict[str, Any]:
    """The random numbers of dropout and augmentation. They protect nobody: noise and bins come from the key alone."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    name, words, *rest = legacy
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(words.astype(np.int64)), *rest],
    }


def set_generators(state: dict[str, Any]) -> None:
    """Go on with the random numbers of `generators`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002


@contextlib.contextmanager
def random_numbers_of(name: str) -> Iterator[None]:
    """Python's, NumPy's and torch's generators set by a name, and put back afterwards.

    CUDA's, too, where this process uses it: a ``collate_fn`` may augment there.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    before = generators()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        set_generators(before)


class Loader:
    """Iterates the remaining steps of the run. ``private.epochs()`` groups them."""

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        *,
        max_physical_batch_size: int | None,
        pad_batches: int,
        views: int,
        **options: Any,
    ) -> None:
        """``options`` go to ``torch.utils.data.DataLoader``; every example is read ``views`` times."""
        self._loop, self._dataset, self._views, self._options = loop, dataset, views, options
        self._multiple = pad_batches
        self._plan, self._size = loop.private_step.plan, max_physical_batch_size
        self._reading: Iterator[Any] | None = None  # None until this loop has read a batch
        self._given: deque[Chunk] = deque()  # what the workers were given and the loop not yet
        self._stands_at: tuple[int, bool] | None = None  # the step of the next chunk, and whether it has others before
        self._turn = 0
        loop.when_moved.append(self.restart)

    def __iter__(self) -> Iterator[Any]:
        return self.until(self._plan.steps)

    def __len__(self) -> int:
        return self.left_until(self._plan.steps)

    def epochs(self) -> Iterator[Epoch]:
        """The rest of the run, epoch by epoch."""
        cycle, plan = self._loop.cycle, self._plan
        self._loop.check_usable()
        while cycle.done < plan.steps:
            done = cycle.done
            number = done // plan.steps_per_epoch + 1
            yield Epoch(self, number, number * plan.steps_per_epoch)
            if cycle.done == done:  # it would come again, for ever
                raise TrainingError(
                    f"epoch {number} was passed over: no step was taken in it. Epochs cannot be skipped (private.load "
                    "goes to where a run stopped): for batch in epoch: …"
                )

    def until(self, last_step: int) -> Iterator[Any]:
        """The physical batches of the steps up to ``last_step``. A logical batch under way starts again."""
        self._loop.check_usable()
        # A run that was finished when it was loaded has no more batches: the same script goes on behind its loop.
        if self._loop.cycle.done >= self._plan.steps and self._reading is not None:
            raise TrainingError(
                f"all {self._plan.steps} steps of the plan are done; the horizon is fixed. The loader iterates the "
                "whole run: loop over private.epochs() to have it epoch by epoch"
            )
        self._loop.begin()
        self._turn += 1
        return self._iterate(last_step, self._turn)

    def _iterate(self, last_step: int, turn: int) -> Iterator[Any]:
        loop, cycle = self._loop, self._loop.cycle
        while True:
            if turn != self._turn:
                raise TrainingError("another iteration of the loader has begun; there is one position in a run")
            loop.before_batch()
            within = cycle.phase is Phase.GATHERING
            if not within and cycle.done >= last_step:
                if self._reading is not None and cycle.done >= self._plan.steps:
                    self._reading = iter(())  # ends workers. Left to the garbage collector, torch waits 5 s for each
                return
            if self._reading is None or self._stands_at != (cycle.current, within):  # a failed step, a resumed run
                loop.drop_batch()
                self._reading = self._start(cycle.current)
            self._stands_at = None  # until the read has succeeded: after a failure nobody goes on from here
            data = next(self._reading)
            chunk = self._given.popleft()
            self._stands_at = (chunk.step + 1, False) if chunk.last else (chunk.step, True)
            loop.hand_out(chunk)
            yield data

    def _start(self, step: int) -> Iterator[Any]:
        """Begin to read at a step, ahead of the loop if there are workers."""
        plan, world, dataset = self._plan, self._loop.world, self._dataset
        if len(dataset) != plan.examples:
            raise TrainingError(
                f"the dataset now has {len(dataset)} examples and the plan {plan.examples}; it must not change mid-run"
            )
        self._given = given = deque[Chunk]()

        def chunks() -> Iterator[Chunk]:
            for number, batch in enumerate(self._loop.private_step.batches(step), start=step):
                parts = cut(number, batch, self._size, rank=world.rank, ranks=world.size, multiple=self._multiple)
                for chunk in parts:
                    given.append(chunk)
                    yield chunk

        options, run = self._options, self._loop.private_step.run.id
        examples: Dataset[Any] = Examples(dataset, run, self._views)
        if options["collate_fn"] is None and Rows.can_read(dataset):
            options, examples = {**options, "collate_fn": Rows.collate}, Rows(dataset, self._views)
        loader = DataLoader(
            examples,
            batch_sampler=chunks(),  # type: ignore[arg-type]  # chunks, which the examples understand
            # A generator of its own: starting to read must not move the generator that dropout uses.
            generator=torch.Generator().manual_seed(step),
            **options,
        )
        return iter(loader)

    def restart(self) -> None:
        """Forget the position; the next iteration starts at the run's current step."""
        self._reading = self._stands_at = None
        self._turn += 1

    def left_until(self, last_step: int) -> int:
        """Logical steps left; physical batches are more where logical ones are split."""
        if self._size is not None:
            raise TypeError(
                "how many physical batches are left depends on the bins. The plan has private.plan.steps steps, "
                "plan.steps_per_epoch of them in an epoch"
            )
        return max(0, last_step - self._loop.cycle.done)


class Epoch:
    """What is left of one epoch. ``number`` counts from 1."""

    def __init__(self, loader: Loader, number: int, last_step: int) -> None:
        self.number = number
        self._loader, self._last_step = loader, last_step

    def __iter__(self) -> Iterator[Any]:
        return self._loader.until(self._last_step)

    def __len__(self) -> int:
        """Logical steps left in the epoch."""
        return self._loader.left_until(self._last_step)
