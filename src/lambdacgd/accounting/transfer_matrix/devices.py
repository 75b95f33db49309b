"""CUDA for the transfer product: where there is one, where it pays, and where it is right.

The rounding margin was measured on CPUs. Another device adds up in another order, and some emulate float64 with
narrower numbers. So a device is not trusted for what it is, but for what it has just computed.

Guarantee
---------
Of every transform computed on a device the first, the middle and the last value are computed on the CPU too, and have
to agree within half of the rounding margin. The CPU's own error is below the other half (docs/exact-accountant.md), so
at these values the margin that the certificate charges covers the device's. The other values come from the same tables
and matrices, in the same batches, from the same kernels; they are not compared one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import DeviceError

SPOTS = 3
"""values of a transform that are computed twice"""
FEWEST = 8 * SPOTS
"""values that make a transform worth a device: below, computing some of them twice takes back what it saves"""
LEAST_WORK = 5e9
"""real operations that make a transform worth a device: some 0.3 s of one CPU core"""

_refused: dict[str, str] = {}
"""devices that failed in this process, and how"""


def compute(
    on: Callable[[str, NDArray[Any]], NDArray[Any]], z: NDArray[Any], asked: str, *, work: float, unit: float
) -> NDArray[Any]:
    """``on(device, z)`` on the device that was asked for, or on the CPU if it is small or that device is wrong.

    ``unit`` is the rounding margin relative to the largest value, ``work`` the number of operations.
    """
    device = _resolve(asked)
    if device == "cpu" or len(z) < FEWEST or work < LEAST_WORK:
        return on("cpu", z)
    spots = np.linspace(0, len(z) - 1, SPOTS).astype(int)
    reference = on("cpu", z[spots])
    size = float(np.abs(reference).max())
    if not np.isfinite(size):  # an overflow is no fault of a device
        return on("cpu", z)
    try:
        values = on(device, z)
    except RuntimeError as error:  # out of memory, no kernel for this card, a card that fell off
        fault = f"it failed ({error})"
    else:
        strayed = float(np.abs(values[spots] - reference).max())
        if strayed <= 0.5 * unit * size:  # false for a NaN
            return values
        fault = f"it strayed from the CPU by {strayed / size:.2g}, where rounding is allowed {0.5 * unit:.2g}"
    _refused[device] = fault
    if asked == "auto":
        warnings.warn(f"accounting on the CPU: {device} is not used, because {fault}", RuntimeWarning, stacklevel=2)
        return on("cpu", z)
    raise _unusable(asked, fault)


def _resolve(asked: str) -> str:
    """The device to try: "auto" is CUDA where there is one that has not failed."""
    if asked == "cpu":
        return asked
    import torch

    present = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if present and "cuda" not in _refused else "cpu"
    if not present:
        raise _unusable(asked, "no CUDA device is here")
    if asked in _refused:
        raise _unusable(asked, _refused[asked])
    return asked


def _unusable(asked: str, fault: str) -> DeviceError:
    return DeviceError(
        f"the exact accountant was asked to compute on {asked!r}, but {fault}; set LAMBDACGD_ACCOUNTING_DEVICE to auto "
        "or cpu to go without"
    )
