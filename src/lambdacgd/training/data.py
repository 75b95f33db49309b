"""The user's data: what is looked at in place of trust, and the plan's batches of it, cut into physical batches.

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
import copy
import hashlib
import hmac
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lambdacgd.errors import CheckpointError, InvalidInput, TrainingError
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.training.loop import Chunk, Loop, Phase

Collate = Callable[[list[Any]], Any]


# --- the plan's batches ----------------------------------------------------------------------------------------------


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
        rows = torch.tensor([i for i in chunk.indices for _ in range(self._views)])
        places = {t.device: rows.to(t.device, non_blocking=True) for t in self._tensors}  # nobody waits for a GPU
        return [tensor.index_select(0, places[tensor.device]) for tensor in self._tensors]

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


# --- random numbers --------------------------------------------------------------------------------------------------


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


# --- is it a dataset that the plan is for? ---------------------------------------------------------------------------


def check_dataset(dataset: Any, plan: Plan) -> None:
    """Refuse what is no map-style dataset of the plan's length, or holds an example twice."""
    if isinstance(dataset, DataLoader):
        raise InvalidInput(
            "dataset",
            "This is a DataLoader. The plan decides which examples form a batch, so pass its dataset.",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput(
            "dataset",
            f"dataset must be map-style, with __len__ and __getitem__, because the plan decides which examples come "
            f"when; {type(dataset).__name__} is not.",
        )
    if len(dataset) != plan.examples:
        raise InvalidInput(
            "dataset",
            f"The dataset has {len(dataset)} examples, and the plan is for {plan.examples}. Make a plan for this "
            "dataset: lc.plan(dataset, …).",
        )
    check_no_repeats(dataset)


# --- does the dataset hold an example twice? -------------------------------------------------------------------------


def check_no_repeats(dataset: Any) -> None:
    """Refuse a dataset that names one example of another dataset more than once, as oversampling does.

    A plan protects one item; what is in two is protected half as well. `Subset`, `ConcatDataset` and what Hugging Face
    datasets select are looked into; what a dataset of one's own does inside is not seen.
    """
    if not isinstance(dataset, (Subset, ConcatDataset)) and _selected(dataset) is None:
        return
    owners, index = _sources(dataset)
    most = int(index.max(initial=0)) + 1
    examples, times = np.unique(np.unique(owners, return_inverse=True)[1] * most + index, return_counts=True)
    if (times > 1).any():
        first = int(np.argmax(times > 1))
        raise InvalidInput(
            "dataset",
            f"The {type(dataset).__name__} holds example {examples[first] % most} {times[first]} times "
            f"({int((times - 1).sum())} repetitions). "
            "Every item is clipped by itself, so an example in two items would move a sum twice as far as the "
            "plan accounts for. Give each example once; to make a class count for more, multiply its examples' losses.",
        )


def _sources(dataset: Any) -> np.ndarray:
    """For each item, in columns, a number for the dataset that it comes from, and its index there."""
    if isinstance(dataset, Subset):
        return _sources(dataset.dataset)[:, np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_sources(part) for part in dataset.datasets], axis=1)
    selected = _selected(dataset)
    index = np.arange(len(dataset)) if selected is None else selected
    return np.stack([np.full(len(index), id(dataset)), index])


def _selected(dataset: Any) -> np.ndarray | None:
    """The rows that a ``datasets.Dataset`` has selected of its table, if it has."""
    chosen = getattr(dataset, "_indices", None)
    if chosen is None or not hasattr(dataset, "select") or not hasattr(chosen, "column"):
        return None
    return np.asarray(chosen.column(0).to_numpy(), dtype=np.int64)


# --- does a collate_fn keep examples apart? --------------------------------------------------------------------------

_ITEMS = 4  #: of a batch that are collated for the comparison
_TRIALS = 4  #: random numbers that are tried: mixing is often random too


class KeepsApart:
    """A ``collate_fn`` that is looked at once in each process, with the first batch of several examples.

    Mixup and cutmix put an example into another's row: zeroing it out then moves a sum by 2ζ, not ζ. A few examples
    are collated, and again with the last one exchanged for another, under the same random numbers: at most one row of
    the result, read across all tensors, may change. Nor may equal rows go together with any one of the examples: it was
    drawn more than once. Where padding changes shapes, nothing is concluded. Agreement is evidence, not proof.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate, self._seen = collate, False

    def __call__(self, items: list[Any]) -> Any:
        if not self._seen and len(items) > 1:
            self._seen = True
            self._look_at(items[:_ITEMS])
        return self._collate(items)

    def _look_at(self, items: list[Any]) -> None:
        for trial in range(_TRIALS):
            # If the last example decides how far all are padded, its turn comes elsewhere than last.
            lost = self._lost(items, trial)
            if lost is None:
                lost = self._lost([items[-1], *items[:-1]], trial)
            of_each = (self._lost(items, trial, place) or Counter() for place in range(len(items)))
            repeated = any(max(rows.values(), default=0) > 1 for rows in of_each)
            if repeated or (lost is not None and lost.total() > 1):
                raise TrainingError(
                    f"collate_fn mixes examples: exchanging one of {len(items)} changes several rows of the batch. "
                    "Clipping bounds a row, so an example in two rows counts twice (mixup, cutmix, negatives from the "
                    "batch, its mean). Leave it out; several augmentations of one example are averaged before clipping "
                    "with augmentations=K. Random numbers whose count depends on an example belong into the dataset's "
                    "__getitem__"
                )

    def _lost(self, items: list[Any], trial: int, place: int = -1) -> Counter[bytes] | None:
        """Rows that are gone with another item in this one's place, if there is one that leaves all shapes alone."""
        place %= len(items)
        before, others = self._rows(items, trial), [*items[:place], *items[place + 1 :]]
        for other in others:
            after = self._rows([*others[:place], other, *others[place:]], trial)
            if before is not None and after is not None and before[0] == after[0]:
                return before[1] - after[1]
        return None

    def _rows(self, items: list[Any], trial: int) -> tuple[list[str], Counter[bytes]] | None:
        """Paths and shapes of all tensors that have a row per example, and how often each row of all of them occurs."""
        try:
            with random_numbers_of(f"trial {trial}"):
                batch = self._collate(copy.deepcopy(items))  # some take labels out of the items
        except Exception:  # if it is broken, the batch itself will say so
            return None
        tensors = list(_tensors(batch, len(items), ""))
        rows = Counter(b"".join(parts) for parts in zip(*(rows for _, rows in tensors), strict=True))
        return [shape for shape, _ in tensors], rows


def _tensors(value: Any, rows: int, path: str) -> Iterator[tuple[str, list[bytes]]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, rows, f"{path}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _tensors(item, rows, f"{path}[{place}]")
    elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        if value.dim() > 0 and value.shape[0] == rows:
            flat = value.detach().cpu().contiguous().reshape(rows, -1)
            yield f"{path} {tuple(value.shape)}", [row.view(torch.uint8).numpy().tobytes() for row in flat]
    elif isinstance(value, np.ndarray) and value.ndim > 0 and value.shape[0] == rows and not value.dtype.hasobject:
        yield f"{path} {value.shape}", [row.tobytes() for row in value]


def a_few(dataset: Any, count: int) -> list[Any]:
    """Examples from all over the dataset: where it is sorted, neighbours are too alike to tell anything."""
    with random_numbers_of("a few examples"):
        return [dataset[place] for place in _spread(len(dataset), count)]


def _spread(examples: int, count: int) -> list[int]:
    return sorted({k * (examples - 1) // max(1, count - 1) for k in range(count)})


# --- is it the data that a run began with, or that the other ranks have? --------------------------------------------
#
# Bins and batches are by index. A dataset that was shuffled or split anew, without a seed, has other examples at the
# same places: one of them may then take part twice in an epoch, or in another bin than accounted for. A few examples
# are compared in place of all.

_SAMPLES = 8


class Sample:
    """The sample of a run's dataset, sealed in checkpoints.

    Guarantee
    ---------
    A seal is a keyed hash of the run: whoever has no key learns nothing from it about an example, nor whether two runs
    read the same ones. Equal seals are evidence that the data is the same, not proof.
    """

    def __init__(self, dataset: Any, *, readable: bool) -> None:
        """``readable``: whether this process may read examples (not where workers do: they inherit open files)."""
        self._dataset, self._readable = dataset, readable

    def seal(self, key: SecretKey, run: str) -> str | None:
        """What a checkpoint keeps; None where reading tells nothing."""
        return None if self._digest is None else key.derive("sample", run, self._digest).hex()

    def check(self, saved: str | None, key: SecretKey, run: str) -> None:
        """Refuse to go on with a run whose examples were others."""
        own = None if saved is None else self.seal(key, run)
        if saved is not None and own is not None and not hmac.compare_digest(saved, own):
            raise CheckpointError(
                "this checkpoint does not belong here: some examples, read again, are not those of the run. The "
                "dataset is in another order or holds other data (shuffled or split anew, without a seed?), and "
                "batches are by index. Build the dataset as it was. If it is the same and only reading it differs "
                "(another library, random numbers of its own), say so with data_fingerprint=…"
            )

    @cached_property
    def _digest(self) -> str | None:
        """The digest of a few examples; None where they cannot be read, or reading is random in a way of its own."""
        if not self._readable:
            return None
        first, again = (sample_of(self._dataset) for _ in range(2))
        return first if first == again else None


def sample_of(dataset: Any) -> str | None:
    """A digest of a few examples, read with random numbers set; None where they are made of unknown things."""
    running = hashlib.sha256()
    for index in _spread(len(dataset), _SAMPLES):
        with random_numbers_of(f"sample {index}"):
            item = dataset[index]
        try:
            _feed(running, item)
        except Exception:  # whatever it is, it does not tell its bytes
            return None
    return running.hexdigest()


def _feed(running: Any, item: Any) -> None:
    if isinstance(item, torch.Tensor):
        item = item.detach().cpu().contiguous()
        running.update(f"{item.dtype} {tuple(item.shape)} ".encode())
        running.update(item.reshape(-1).view(torch.uint8).numpy().tobytes() if item.numel() else b"")
    elif isinstance(item, np.ndarray) and item.dtype != object:
        running.update(f"{item.dtype} {item.shape} ".encode() + item.tobytes())
    elif isinstance(item, dict):
        for key, value in item.items():
            running.update(f"{key!r}: ".encode())
            _feed(running, value)
    elif isinstance(item, (list, tuple)):
        running.update(f"{len(item)} ".encode())
        for value in item:
            _feed(running, value)
    elif item is None or isinstance(item, (bool, int, float, str, bytes, np.generic)):
        running.update(f"{type(item).__name__} {item!r} ".encode())
    elif hasattr(item, "mode") and hasattr(item, "size") and hasattr(item, "tobytes"):  # an image of Pillow
        running.update(f"{item.mode} {item.size} ".encode() + item.tobytes())
    else:
        raise TypeError("its bytes may differ from process to process")
