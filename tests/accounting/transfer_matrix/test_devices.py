"""What justifies a device: its transforms keep within the rounding margin, and its answers are the CPU's.

Every test runs on the CPU too. Passing on CUDA (``-m gpu``) is the evidence for computing there: the margin was
measured on CPUs, and a GPU adds its sums up in another order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lambdacgd.accounting.fresh_bins import FreshBins
from lambdacgd.accounting.transfer_matrix import TransferMatrix
from lambdacgd.accounting.transfer_matrix.chain import plain_chain
from lambdacgd.accounting.transfer_matrix.extended import AVAILABLE, extended_transform
from lambdacgd.accounting.transfer_matrix.measure import FINE, Scale, measure
from lambdacgd.accounting.transfer_matrix.put import rounding_unit

torch = pytest.importorskip("torch")
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICES = ["cpu", CUDA]
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
    law = measure(plain_chain(lam, b, k, sigma), Scale(strike, 1e-5, 4.0), FINE, direction=direction, device=device)
    rounding: Any = "up" if direction == "remove" else "down"
    z = (1j * np.array([0.0, 1.0, 6.0, 30.0, 120.0]) - 2.0) / strike
    found = law.transform(z, rounding)
    exact = extended_transform(law.product, z, rounding)
    total = abs(complex(exact[0]))
    for value, truth in zip(found, exact, strict=True):
        assert abs(complex(np.clongdouble(value) - truth)) <= 0.5 * rounding_unit(b) * total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_agree_to_what_rounding_allows(case: Any) -> None:
    lam, b, k, sigma, epsilon = case
    here, there = (TransferMatrix(lam, b, k, device=device).delta(sigma, epsilon) for device in ("cpu", "cuda"))
    allowed = here.budget.get("rounding", 0.0) + 1e-9 * here.delta
    assert abs(there.delta_remove - here.delta_remove) <= allowed
    assert abs(there.delta_add - here.delta_add) <= allowed + 1e-6 * here.delta_add


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calibrations_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for device in ("cpu", "cuda"):
        monkeypatch.setenv("LAMBDACGD_ACCOUNTING_DEVICE", device)
        fixed = TransferMatrix(0.9, 390, 10).sigma(2.0, 1e-5)[0]
        found.append((fixed, FreshBins(0.9, 390, 10).sigma(8.0, 1e-5)[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
