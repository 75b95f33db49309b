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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from lambdacgd.clipping import Replaced, batch_size
from lambdacgd.errors import TrainingError
from lambdacgd.sampling import BinSortedParquet, Cyclic, Sampling
from lambdacgd.torch_private import AnyConvolution, tree_flatten, tree_unflatten
from lambdacgd.training.loop import Chunk, Loop, Phase

Collate = Callable[[list[Any]], Any]


def cut(step: int, batch: np.ndarray, size: int | None, *, rank: int = 0, ranks: int = 1) -> Iterator[Chunk]:
    """A logical batch in parts of at most ``size`` examples; an empty one borrows example 0 at weight zero.

    With several ranks, rank r has every ``ranks``-th example from place r on: each example is on one rank. All ranks
    have as many parts as the one with the most examples, so that they go through them together.
    """
    own, most = batch[rank::ranks], max(1, -(-len(batch) // ranks))
    size = size or most
    for first in range(0, most, size):
        part = own[first : first + size].tolist()
        least = min(size, max(0, len(batch) // ranks - first))
        yield Chunk(step, rank + ranks * first, part or [0], first + size >= most, empty=not part, least=least)


class Examples(Dataset[Any]):
    """The user's dataset, read a chunk at a time with random numbers of the chunk's own (``views`` readings each)."""

    def __init__(self, dataset: Any, run: str, views: int) -> None:
        self._dataset, self._run, self._views = dataset, run, views

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, chunk: Chunk) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        items: list[Any] = []
        with random_numbers_of(f"{self._run}/{chunk.step}/{chunk.first}"):
            for _ in range(self._views):
                items += together(chunk.indices) if callable(together) else [self._dataset[i] for i in chunk.indices]
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
        rows = torch.tensor(chunk.indices * self._views, device=self._tensors[0].device)
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


@contextlib.contextmanager
def random_numbers_of(name: str, *, put_back: bool | None = None) -> Iterator[None]:
    """Python's, NumPy's and torch's generators set by a name, and put back afterwards (by default not in workers).

    CUDA's, too, where this process uses it: a ``collate_fn`` may augment there.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    put_back = get_worker_info() is None if put_back is None else put_back
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if put_back else None  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if cuda is not None:
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


class Loader:
    """Iterates the remaining steps of the run. ``private.epochs()`` groups them."""

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        *,
        max_physical_batch_size: int | None,
        views: int,
        options: dict[str, Any],
    ) -> None:
        """``options`` go to ``torch.utils.data.DataLoader``; every example is read ``views`` times."""
        self._loop, self._dataset, self._views, self._options = loop, dataset, views, options
        self._plan, self._size = loop.private_step.plan, max_physical_batch_size
        self._reading: Iterator[Any] | None = None  # None until this loop has read a batch
        self._given: deque[Chunk] = deque()  # what the workers were given and the loop not yet
        self._stands_at: tuple[int, bool] | None = None  # the step of the next chunk, and whether it has others before
        self._turn = 0
        self._verified = False  # whether a bin-sorted file has been checked against the run
        self._untouched: Epoch | None = None  # handed out by `epochs`, and nobody has asked for its batches
        loop.when_moved.append(self.restart)

    def __iter__(self) -> Iterator[Any]:
        if self._untouched is not None:
            self._untouched = None  # said once: a notebook's traceback may keep the loop over epochs alive
            raise TrainingError(
                "private.loader iterates the whole run, so it would all be one epoch here. Loop over the epoch: "
                "for epoch in private.epochs(): for batch in epoch: …"
            )
        return self.until(self._plan.steps)

    def __len__(self) -> int:
        return self.left_until(self._plan.steps)

    def epochs(self) -> Iterator[Epoch]:
        """The rest of the run, epoch by epoch."""
        cycle, plan = self._loop.cycle, self._plan
        self._loop.check_usable()
        try:
            while cycle.done < plan.steps:
                done = cycle.done
                number = done // plan.steps_per_epoch + 1
                epoch = self._untouched = Epoch(self, number, number * plan.steps_per_epoch)
                yield epoch
                if self._untouched is epoch and cycle.done == done:  # it would come again, for ever
                    raise TrainingError(
                        f"epoch {epoch.number} was passed over: its batches were not asked for. Epochs cannot be "
                        "skipped (private.load goes to where a run stopped): for batch in epoch: …"
                    )
        finally:
            self._untouched = None

    def until(self, last_step: int) -> Iterator[Any]:
        """The physical batches of the steps up to ``last_step``. A logical batch under way starts again."""
        self._untouched = None
        self._loop.check_usable()
        if self._loop.cycle.done >= self._plan.steps:
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
        warn_of_search(self._loop.model, plan.sampling)
        self._given = given = deque[Chunk]()

        def chunks() -> Iterator[Chunk]:
            for number, batch in enumerate(self.batches(step), start=step):
                for chunk in cut(number, batch, self._size, rank=world.rank, ranks=world.size):
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

    def batches(self, step: int) -> Iterator[np.ndarray]:
        """The plan's batches from ``step`` on; a file sorted by the run's bins knows them as runs of its rows."""
        data, run = self._dataset, self._loop.private_step.run
        if not isinstance(data, BinSortedParquet):
            return self._loop.private_step.batches(step)
        if data.sampling != self._plan.sampling:
            raise TrainingError(
                f"{data.path} was sorted for {data.sampling}, and the plan samples {self._plan.sampling}"
            )
        if not self._verified:
            data.verify(run.key, run=run.id)
            self._verified = True
        return data.batches(start_step=step)

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


def warn_of_search(model: nn.Module, sampling: Sampling) -> None:
    """Say it where cuDNN would look for its fastest algorithms at nearly every step, which takes far longer than it."""
    if not torch.backends.cudnn.benchmark or isinstance(sampling, Cyclic):
        return
    convolutions = (m for m in model.modules() if isinstance(m, AnyConvolution))
    if any(p.is_cuda for module in convolutions for p in module.parameters()):
        warnings.warn(
            "torch.backends.cudnn.benchmark is on: cuDNN searches its algorithms for every batch size it meets, and "
            "sampled batches have many (measured: steps eighteen times slower). Set it to False, or use "
            "private.captured_step, which has three sizes",
            stacklevel=4,  # the loop over the loader
        )


# --- several views of an example, averaged before clipping ----------------------------------------------------------
#
# The loader reads every example ``views`` times and puts the readings of one view side by side: view 1 of all examples,
# then view 2, and so on. The model runs once a view, on the examples' own rows, so that clipping sees one example used
# several times and treats its gradients as one (cross terms included); the outputs are put back together for the
# user's loss.


def examples_in(views: int) -> Callable[[tuple[Any, ...], dict[str, Any]], int]:
    """How many examples the model was given, when each has ``views`` rows."""

    def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        rows = batch_size(args, kwargs)
        if rows % views:
            raise TrainingError(
                f"the model was given {rows} rows, which is not a multiple of augmentations={views}. Run other data "
                "through it under torch.no_grad()"
            )
        return rows // views

    return count


def run_by_view(model: nn.Module, views: int) -> Callable[[], None]:
    """Make the model run once a view while gradients are on; returns what undoes it."""
    original, count = model.forward, examples_in(views)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        examples = count(args, kwargs)
        flat, tree = tree_flatten((args, kwargs))
        outputs = []
        for view in range(views):
            rows = slice(view * examples, (view + 1) * examples)
            own = [x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == views * examples else x for x in flat]
            view_args, view_kwargs = tree_unflatten(own, tree)
            outputs.append(original(*view_args, **view_kwargs))
        return _together(outputs, examples)

    replaced = Replaced(model, forward)
    model.forward = replaced
    return replaced.undo


def _together(outputs: list[Any], examples: int) -> Any:
    flats, trees = zip(*(tree_flatten(output) for output in outputs), strict=True)
    joined = []
    for parts in zip(*flats, strict=True):
        if isinstance(parts[0], Tensor):
            if parts[0].dim() == 0 or parts[0].shape[0] != examples:
                raise TrainingError(
                    f"with augmentations, every output of the model must have the examples first; one has shape "
                    f"{tuple(parts[0].shape)} for {examples} examples. Compute the loss outside the model"
                )
            joined.append(torch.cat(parts))
        else:
            joined.append(parts[0])
    return tree_unflatten(joined, trees[0])
