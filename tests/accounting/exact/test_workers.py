"""Transforms on several cores: the same numbers, bounded memory, and torch's threads as they were."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lambdacgd.accounting.exact import product
from lambdacgd.accounting.exact.evaluation import FINE, LossLaw, Scale, loss_law
from lambdacgd.accounting.exact.lattice import plain_chain
from lambdacgd.accounting.exact.product import _in_parallel, _worker_count

Z = 1j * np.linspace(0.0, 30.0, 61) - 1.0


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def law() -> LossLaw:
    return loss_law(plain_chain(0.8, 30, 1, 1.5), Scale(2.0, 1e-3, 5.0), FINE, direction="remove", device="cpu")


def test_the_number_of_workers_makes_no_difference() -> None:
    one = law()
    torch.set_num_threads(1)
    alone = one.transform(Z, "up")
    torch.set_num_threads(3)
    together = one.transform(Z, "up")
    assert torch.get_num_threads() == 3
    np.testing.assert_allclose(together, alone, rtol=1e-14)


def test_parts_cover_all_and_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    made = law().product
    assert isinstance(made, product.TransferProduct)
    each = 5 * 16 * max(made.lattice.states, made.lattice.closing_states) * made.lattice.states + 64 * len(made.grid)
    for room in (1, 2, 3, 1000):
        monkeypatch.setattr(product, "MEMORY", room * each)
        parts, at_once = made._batches(61, 16, "cpu")
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(61))
        assert at_once * max(part.stop - part.start for part in parts) <= room
        assert 1 <= at_once <= 4
    assert at_once == 4


def test_an_error_reaches_the_caller_and_threads_are_restored() -> None:
    torch.set_num_threads(2)

    def fail(part: int) -> None:
        assert torch.get_num_threads() == 1
        assert _worker_count() == 2
        if part == 3:
            raise ValueError("part 3")

    with pytest.raises(ValueError, match="part 3"):
        _in_parallel(fail, range(5), at_once=2)
    assert torch.get_num_threads() == 2
