"""Does a dataset hold an example twice? A plan protects one item; what is in two is protected half as well.

Oversampling a rare class repeats its examples: `Subset` with an index twice, `ConcatDataset` of one dataset with
itself, ``select`` of Hugging Face datasets. What a dataset of one's own does inside is not seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lambdacgd.validation import InvalidInput

Places = tuple[np.ndarray, np.ndarray]  # for each item, which dataset it is of, and its index there


def check_no_repeats(dataset: Any) -> None:
    """Refuse a dataset that names one example of another dataset more than once."""
    owners: dict[int, int] = {}
    places = _places(dataset, owners)
    if places is None:
        return
    order = np.lexsort(places)
    whose, index = places[0][order], places[1][order]
    again = np.flatnonzero((whose[1:] == whose[:-1]) & (index[1:] == index[:-1]))
    if len(again):
        first = again[0]
        times = int(((places[0] == whose[first]) & (places[1] == index[first])).sum())
        raise InvalidInput(
            "dataset",
            f"a {type(dataset).__name__} that holds example {index[first]} {times} times ({len(again)} repetitions)",
            "every item is clipped by itself, so an example in two items would move a sum twice as far as the plan "
            "accounts for. Give each example once; to make a class count for more, multiply its examples' losses",
        )


def _places(dataset: Any, owners: dict[int, int]) -> Places | None:
    """Where the items of a dataset come from; None if they are its own."""
    if isinstance(dataset, Subset):
        inner, chosen = _of(dataset.dataset, owners), np.asarray(dataset.indices, dtype=np.int64)
        return inner[0][chosen], inner[1][chosen]
    if isinstance(dataset, ConcatDataset):
        parts = [_of(part, owners) for part in dataset.datasets]
        return np.concatenate([whose for whose, _ in parts]), np.concatenate([index for _, index in parts])
    selected = _selected(dataset)
    return None if selected is None else (np.zeros(len(selected), dtype=np.int64), selected)


def _of(dataset: Any, owners: dict[int, int]) -> Places:
    found = _places(dataset, owners)
    size, owner = len(dataset), owners.setdefault(id(dataset), len(owners) + 1)
    if found is None:
        return np.full(size, owner), np.arange(size)
    if isinstance(dataset, (Subset, ConcatDataset)):
        return found
    return np.full(size, owner), found[1]


def _selected(dataset: Any) -> np.ndarray | None:
    """The rows that a ``datasets.Dataset`` has selected of its table, if it has."""
    chosen = getattr(dataset, "_indices", None)
    if chosen is None or not hasattr(dataset, "select") or not hasattr(chosen, "column"):
        return None
    return np.asarray(chosen.column(0).to_numpy(), dtype=np.int64)
