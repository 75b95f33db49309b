"""The user's data, looked at in place of trust; and random numbers that depend on a name alone."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import hmac
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from lambdacgd.errors import CheckpointError, InvalidInput, TrainingError
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan

Collate = Callable[[list[Any]], Any]

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
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidInput("dataset", f"{type(dataset).__name__} is not map-style. Of a DataLoader pass its dataset.")
    if len(dataset) != plan.examples:
        has = f"The dataset has {len(dataset)} examples, and the plan is for {plan.examples}"
        raise InvalidInput("dataset", f"{has}: plan anew with lc.plan(dataset, …).")
    check_no_repeats(dataset)


def check_no_repeats(dataset: Any) -> None:
    """Refuse a dataset that names one example of another dataset more than once, as oversampling does.

    A plan protects one item; what is in two is protected half as well. `Subset`, `ConcatDataset` and what Hugging Face
    datasets select or put together are looked into; what a dataset of one's own does inside is not seen.
    """
    if not isinstance(dataset, (Subset, ConcatDataset)) and _rows(dataset) is None:
        return
    owners, index = _sources(dataset)
    most = int(index.max(initial=0)) + 1
    examples, times = np.unique(np.unique(owners, return_inverse=True)[1] * most + index, return_counts=True)
    if (times > 1).any():
        first = int(np.argmax(times > 1))
        twice = f"The {type(dataset).__name__} holds example {examples[first] % most} {times[first]} times "
        twice += f"({int((times - 1).sum())} repetitions), so it would move a sum as often"
        raise InvalidInput("dataset", f"{twice}. Give each example once, and weigh its loss instead.")


def _sources(dataset: Any) -> np.ndarray:
    """For each item, in columns, a number for the dataset that it comes from, and its index there."""
    if isinstance(dataset, Subset):
        return _sources(dataset.dataset)[:, np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_sources(part) for part in dataset.datasets], axis=1)
    rows = _rows(dataset)
    return np.stack([np.full(len(dataset), id(dataset)), np.arange(len(dataset))]) if rows is None else rows


def _rows(dataset: Any) -> np.ndarray | None:
    """Where the rows of a ``datasets.Dataset`` lie in memory: to put them together, or to select them from one table in
    two ways, copies none. None for other datasets, and where the first column is empty.
    """
    data: Any = getattr(dataset, "data", None)
    chosen = getattr(dataset, "_indices", None)
    if not hasattr(dataset, "select") or not hasattr(data, "column") or not getattr(data, "num_columns", 0):
        return None
    parts = []
    for chunk in data.column(0).chunks:
        buffers = tuple(buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size)
        if len(chunk) and not buffers:
            return None  # a column of nulls
        if len(chunk):
            parts.append(np.stack([np.full(len(chunk), hash(buffers)), chunk.offset + np.arange(len(chunk))]))
    table = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0), dtype=np.int64)
    return table if chosen is None else table[:, chosen.column(0).to_numpy().astype(np.int64)]


# --- does a collate_fn keep examples apart? --------------------------------------------------------------------------

_ITEMS = 4  #: of a batch that are collated for the comparison
_TRIALS = 4  #: random numbers that are tried: mixing is often random too
_APART = 64  #: batches from one that is looked at to the next, at most


class KeepsApart:
    """A ``collate_fn`` that is looked at in each process: at batches 1, 2, 3, 5, 8, …, at most 64 apart.

    Mixup and cutmix put an example into another's row: zeroing it out then moves a sum by 2ζ, not ζ. A few examples
    are collated, and again with the last one exchanged for another, under the same random numbers: at most one row of
    the result, read across all tensors, may change. Nor may equal rows go together with any one of the examples: it was
    drawn more than once. Where places mean something (what fills a batch up is last and weighs nothing, neighbours are
    views of one example), no row may turn up in another's place. Where padding changes shapes, nothing is concluded.
    Agreement is evidence, not proof.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], *, in_order: bool = False) -> None:
        """``in_order``: whether places mean something."""
        self._collate, self._in_order = collate, in_order
        self._batches, self._last, self._next = 0, 1, 1  # those so far; those that are looked at, last and next

    def __call__(self, items: list[Any]) -> Any:
        self._batches += len(items) > 1
        if self._batches >= self._next:
            self._last, self._next = self._next, self._next + min(self._last, _APART)
            self._look_at(items[:: max(1, len(items) // _ITEMS)][:_ITEMS])
        return self._collate(items)

    def _look_at(self, items: list[Any]) -> None:
        for trial in range(_TRIALS):
            # If the last example decides how far all are padded, its turn comes elsewhere than last.
            lost = self._lost(items, trial) or self._lost([items[-1], *items[:-1]], trial)
            of_each = (self._lost(items, trial, place) for place in range(len(items)))
            if lost.total() > 1 or any(max(rows.values(), default=0) > 1 for rows in of_each):
                raise TrainingError(
                    f"collate_fn mixes examples: exchanging one of {len(items)} changes several rows of the batch. "
                    "Leave mixup and the like out; several augmentations of one example are augmentations=K, and "
                    "random numbers whose count depends on it belong into __getitem__"
                )

    def _lost(self, items: list[Any], trial: int, place: int = -1) -> Counter[bytes]:
        """Rows that are gone with another item in this one's place, if there is one that leaves all shapes alone."""
        place %= len(items)
        before, others = self._rows(items, trial), [*items[:place], *items[place + 1 :]]
        for other in others:
            after = self._rows([*others[:place], other, *others[place:]], trial)
            if before is not None and after is not None and before[0] == after[0]:
                pairs = enumerate(zip(before[1], after[1], strict=True))
                if self._in_order and any(x != y and y in before[1] for k, (x, y) in pairs if k != place):
                    raise TrainingError(
                        "collate_fn changes the order of examples, by their length, say. With pad_batches or "
                        "augmentations an example would count more than once: leave that out, or keep the order "
                        "(pack_padded_sequence has enforce_sorted=False)"
                    )
                return Counter(before[1]) - Counter(after[1])
        return Counter()

    def _rows(self, items: list[Any], trial: int) -> tuple[list[str], list[bytes]] | None:
        """Paths and shapes of all tensors that have a row per example, and the rows of all of them together."""
        try:
            with random_numbers_of(f"trial {trial}"):
                batch = self._collate(copy.deepcopy(items))  # some take labels out of the items
        except Exception:  # if it is broken, the batch itself will say so
            return None
        tensors = list(_tensors(batch, len(items), ""))
        rows = [b"".join(parts) for parts in zip(*(rows for _, rows in tensors), strict=True)]
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
# Batches are by index. In a dataset that was shuffled or split anew, without a seed, an example may take part twice in
# an epoch, or in another bin than accounted for. A few examples are compared in place of all.

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
                "this checkpoint does not belong here: some examples, read again, are not those of the run. Build the "
                "dataset as it was: it holds other data, or in another order. If only reading differs, vouch for the "
                "data with data_fingerprint=…"
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
