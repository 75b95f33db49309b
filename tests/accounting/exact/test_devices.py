"""What justifies a device: its transforms keep within the rounding margin, and one that does not is refused. And what
justifies several cores: the same numbers, bounded memory, and torch's threads as they were.

A stand-in plays the device on machines without one, good or bad on purpose. The tests marked ``gpu`` ask a real one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lambdacgd.accounting import accountant_for
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.exact import TransferMatrix, product
from lambdacgd.accounting.exact.evaluation import FINE, LossLaw, Scale, loss_law
from lambdacgd.accounting.exact.lattice import plain_chain
from lambdacgd.accounting.exact.product import (
    AVAILABLE,
    TransferProduct,
    _in_parallel,
    _worker_count,
    extended_transform,
    rounding_unit,
)
from lambdacgd.errors import DeviceError
from lambdacgd.mechanisms import LambdaCGD
from lambdacgd.sampling import BallsInBins

NEEDS_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
# λ, b, k, σ, ε: small and large b, flat and steep, one epoch and many, ε ≥ 8 included
CASES = [
    (0.5, 3, 3, 1.2, 8.0),
    (0.9, 30, 5, 3.0, 4.0),
    (0.9, 390, 1, 1.45, 3.0),
    (0.9, 390, 10, 2.93, 8.0),
    (0.9, 390, 10, 7.49, 1.0),
    (0.95, 390, 10, 8.8, 2.0),
    (0.9, 2000, 10, 2.6, 8.0),
]


@pytest.mark.skipif(not AVAILABLE, reason="needs extended precision as the yardstick")
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_transforms_keep_within_half_their_rounding_margin(device: str, case: Any, direction: Any) -> None:
    lam, b, k, sigma, epsilon = case
    strike = math.exp(epsilon if direction == "remove" else -min(epsilon, 1.0))
    law = loss_law(plain_chain(lam, b, k, sigma), Scale(strike, 1e-5, 4.0), FINE, direction=direction, device=device)
    rounding: Any = "up" if direction == "remove" else "down"
    z = (1j * np.linspace(0.0, 120.0, 41) - 2.0) / strike
    spots = [0, 1, 3, 10, 40]
    assert isinstance(law.product, TransferProduct)
    found = law.product.on(device, z, rounding)[spots]
    exact = extended_transform(law.product, z[spots], rounding)
    total = abs(complex(exact[0]))
    for value, truth in zip(found, exact, strict=True):
        assert abs(complex(np.clongdouble(value) - truth)) <= 0.5 * rounding_unit(b) * total


# The stand-in: "cuda" is what the CPU computes, with a fault. One problem, small enough to be quick.

Fault = Callable[[Any], Any]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], list[str]]:
    """Puts a device with this fault in; returns the devices that were asked, as they were asked."""
    monkeypatch.delenv("LAMBDACGD_ACCOUNTING_DEVICE", raising=False)
    monkeypatch.setattr(product, "_refused", {})
    monkeypatch.setattr(product, "LEAST_WORK", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked: list[str] = []
    honest = TransferProduct.on

    def put_in(fault: Fault) -> list[str]:
        def on(self: TransferProduct, device: str, z: Any, rounding: Any) -> Any:
            asked.append(device)
            values = honest(self, "cpu", z, rounding)
            return values if device == "cpu" else fault(values)

        monkeypatch.setattr(TransferProduct, "on", on)
        return asked

    return put_in


def a_bound(device: str = "auto") -> Any:
    return TransferMatrix(0.5, 9, 3, device=device).delta(2.5, 1.5)


def test_a_good_device_is_used_and_checked(stand_in: Any) -> None:
    expected = a_bound("cpu")
    asked = stand_in(lambda values: values * (1 + 4e-16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = a_bound()
    assert "cuda" in asked
    assert found.delta == pytest.approx(expected.delta, rel=1e-6)
    before = asked.index("cuda") - 1
    assert asked[before] == "cpu"  # the values it is compared with


def single(values: Any) -> Any:
    """A device whose float64 is a float32: what emulation may come to."""
    return values.astype(np.complex64).astype(np.complex128)


def slightly(values: Any) -> Any:
    """Just more than half of the margin, of 9 bins."""
    return values + 0.51 * rounding_unit(9) * abs(values[0])


def last_one(values: Any) -> Any:
    return np.concatenate([values[:-1], values[-1:] + 1e-6])


def lost(values: Any) -> Any:
    return values * np.nan


def broken(values: Any) -> Any:
    raise RuntimeError("CUDA error: out of memory")


FAULTS = [single, slightly, last_one, lost, broken]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_device_is_refused_once_and_the_cpu_answers(stand_in: Any, fault: Fault) -> None:
    expected = a_bound("cpu")
    asked = stand_in(fault)
    with pytest.warns(RuntimeWarning, match="accounting on the CPU: cuda is not used") as warned:
        found = [a_bound(), a_bound()]
    assert len(warned) == asked.count("cuda") == 1
    assert found == [expected, expected]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_device_that_was_asked_for_is_an_error(stand_in: Any, fault: Fault) -> None:
    asked = stand_in(fault)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"on 'cuda', but it (strayed|failed).* to auto or cpu"):
            a_bound("cuda")
    assert asked.count("cuda") == 1


def test_small_transforms_stay_on_the_cpu(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "LEAST_WORK", 1e12)
    asked = stand_in(broken)
    a_bound()
    assert "cuda" not in asked


def test_an_overflow_is_not_the_fault_of_a_device(stand_in: Any) -> None:
    asked = stand_in(single)
    with np.errstate(all="ignore"):
        values = product._on_device(lambda device, z: np.exp(z), np.full(30, 1e4), "auto", work=1.0, unit=1e-14)
    assert np.isinf(values).all()
    assert not asked
    assert not product._refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_an_error_not_a_fallback() -> None:
    with pytest.raises(DeviceError, match="no CUDA device is here"):
        a_bound("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_nor_is_another_accountant_asked_instead(bins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", "cuda")
    sampling = BallsInBins(examples=9, steps_per_epoch=9, epochs=3, bins=bins)
    with pytest.raises(DeviceError):
        accountant_for(LambdaCGD(0.5), sampling).sigma(1.0, 1e-3)


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets everything go to CUDA; returns the devices that were asked."""
    monkeypatch.setattr(product, "LEAST_WORK", 0.0)
    monkeypatch.setattr(product, "FEWEST", 1)
    monkeypatch.setattr(product, "_refused", {})
    asked: list[str] = []
    honest = TransferProduct.on

    def on(self: TransferProduct, device: str, z: Any, rounding: Any) -> Any:
        asked.append(device)
        return honest(self, device, z, rounding)

    monkeypatch.setattr(TransferProduct, "on", on)
    return asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_agree_to_what_rounding_allows(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_cuda(monkeypatch)
    lam, b, k, sigma, epsilon = case
    here, there = (TransferMatrix(lam, b, k, device=device).delta(sigma, epsilon) for device in ("cpu", "cuda"))
    assert "cuda" in asked
    allowed = here.budget.get("rounding", 0.0) + 1e-9 * here.delta
    assert abs(there.delta_remove - here.delta_remove) <= allowed
    assert abs(there.delta_add - here.delta_add) <= allowed + 1e-6 * here.delta_add


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_by_default_cuda_is_used_passes_its_checks_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = on_cuda(monkeypatch)
    found = []
    for device in ("cpu", "auto"):
        monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a refusal would be one
            fixed = TransferMatrix(0.9, 390, 10).sigma(2.0, 1e-5).sigma
            found.append((fixed, FreshBins(0.9, 390, 10).sigma(8.0, 1e-5).sigma))
    assert "cuda" in asked
    assert found[0] == pytest.approx(found[1], rel=1e-6)


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
