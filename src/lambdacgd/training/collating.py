"""Does a ``collate_fn`` keep examples apart? Mixup and cutmix in one put an example into another's row.

Then an example acts by two rows, clipped one by one, and zeroing it out moves a sum by 2ζ, not ζ.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdacgd.training.errors import TrainingError

_ITEMS = 4  #: of a batch that are collated for the comparison
_TRIALS = 4  #: random numbers that are tried: mixing is often random too


class _CannotSay(Exception):
    """These few examples cannot be collated again."""


class KeepsApart:
    """A ``collate_fn`` that is looked at once in each process, with the first batch of several examples.

    Of a few of its examples the last is exchanged for another, under the same random numbers: at most one row of the
    result may change, rows being read across all its tensors and in any order. Where padding changes shapes, nothing
    can be said. Agreement is evidence, not proof. Nothing more is read from the dataset, and nobody's random numbers
    move.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate, self._seen = collate, False

    def __call__(self, items: list[Any]) -> Any:
        if not self._seen and len(items) > 1:
            self._seen = True
            with contextlib.suppress(_CannotSay):
                self._look_at(items[:_ITEMS])
        return self._collate(items)

    def _look_at(self, items: list[Any]) -> None:
        for trial in range(_TRIALS):
            # If the last example decides how far all are padded, its turn comes elsewhere than last.
            pairs = self._exchanged(items, trial) or self._exchanged([items[-1], *items[:-1]], trial)
            if pairs is not None and (pairs[0] - pairs[1]).total() > 1:
                raise TrainingError(
                    f"collate_fn mixes examples: exchanging one of {len(items)} changes several rows of the batch. "
                    "Clipping bounds a row, so an example in two rows counts twice (mixup, cutmix, negatives from the "
                    "batch, its mean). Leave it out; several augmentations of one example are averaged before clipping "
                    "with augmentations=K. Random numbers whose count depends on an example belong into the dataset's "
                    "__getitem__"
                )

    def _exchanged(self, items: list[Any], trial: int) -> tuple[Counter[bytes], Counter[bytes]] | None:
        """Rows with the last item and with another in its place, if there is one that leaves all shapes as they are."""
        shapes, rows = self._rows(items, trial)
        for other in items[:-1]:
            same, changed = self._rows([*items[:-1], other], trial)
            if same == shapes:
                return rows, changed
        return None

    def _rows(self, items: list[Any], trial: int) -> tuple[list[str], Counter[bytes]]:
        """Paths and shapes of all tensors that have a row per example, and how often each row of all of them occurs."""
        try:
            with _random_numbers(trial):
                batch = self._collate(copy.deepcopy(items))  # some take labels out of the items
        except Exception as error:  # if it is broken, the batch itself will say so
            raise _CannotSay from error
        found = list(_tensors(batch, len(items), ""))
        rows = Counter(b"".join(parts) for parts in zip(*(rows for _, rows in found), strict=True))
        return [shape for shape, _ in found], rows


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


@contextlib.contextmanager
def _random_numbers(trial: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(trial)
    np.random.seed(trial)  # noqa: NPY002
    torch.default_generator.manual_seed(trial)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
