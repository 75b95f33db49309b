"""An example that is in a dataset twice is found, where torch's own wrappers or a selection put it there."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Subset

from lambdacgd.errors import InvalidInput
from lambdacgd.training.data import check_no_repeats
from tests.training import oracle
from tests.training.saved import start

DATA, OTHER = oracle.data(), oracle.data()


class Selected:
    """As ``datasets.Dataset`` after ``select``: a table, and the rows that were chosen."""

    def __init__(self, rows):
        pyarrow = pytest.importorskip("pyarrow")
        self._indices = None if rows is None else pyarrow.table({"indices": pyarrow.array(rows, pyarrow.uint64())})
        self.rows = rows or range(9)

    def select(self, rows):
        return Selected(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Subset(DATA, [0, 3, 5, 3, 3]), r"example 3 3 times \(2 repetitions\)"),
        (lambda: Subset(DATA, np.array([0, 3, 3])), "example 3 2 times"),
        (lambda: Subset(DATA, [0, len(DATA) - 1, -1]), f"example {len(DATA) - 1} 2 times"),
        (lambda: ConcatDataset([DATA, DATA]), "example 0 2 times"),
        (lambda: ConcatDataset([Subset(DATA, [1, 2]), OTHER, Subset(DATA, [2])]), "example 2 2 times"),
        (lambda: Subset(ConcatDataset([OTHER, DATA]), [len(OTHER) + 4, 1, len(OTHER) + 4]), "example 4 2 times"),
        (lambda: Subset(Subset(DATA, [7, 8, 9]), [0, 0]), "example 7 2 times"),
        (lambda: Selected([4, 4, 1]), "example 4 2 times"),
        (lambda: Subset(Selected([4, 5, 1]), [1, 1]), "example 5 2 times"),
    ],
)
def test_repetitions_are_refused(make, says):
    with pytest.raises(InvalidInput, match=says):
        check_no_repeats(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: DATA,
        lambda: [1, 1, 1],  # equal, but three
        lambda: Subset(DATA, range(9, 2, -1)),
        lambda: ConcatDataset([DATA, OTHER]),
        lambda: ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [3])]),
        lambda: Subset(ConcatDataset([DATA, OTHER]), [1, len(DATA) + 1]),
        lambda: Selected(None),
        lambda: Selected([3, 1, 2]),
        lambda: ConcatDataset([Selected([3, 1]), Selected([3, 1])]),  # of two tables, as far as anybody can tell
        lambda: Subset(DATA, []),
    ],
)
def test_everything_once_is_fine(make):
    check_no_repeats(make())


def test_at_the_door(tmp_path):
    with pytest.raises(InvalidInput, match="Give each example once"):
        start(tmp_path, dataset=Subset(DATA, [0] * len(DATA)))
