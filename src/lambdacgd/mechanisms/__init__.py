"""What correlates the noise: the strategy C, its inverse, its sensitivity and its error. NumPy only."""

from __future__ import annotations

from typing import Any

from lambdacgd.mechanisms.base import (
    PREFIX_SUM,
    Auto,
    BandedInverse,
    BandedStrategy,
    BufferedToeplitz,
    Horizon,
    Mechanism,
    Objective,
    Workload,
    from_dict,
)
from lambdacgd.mechanisms.error import Sensitivity, error_norms, maxse, rmse, sensitivity
from lambdacgd.mechanisms.families import BISR, BSR, Diagonal, GammaBIFR, Identity, LambdaCGD
from lambdacgd.mechanisms.optimised import BLT, BandInvMF, BandMF

MECHANISMS: dict[str, type[Mechanism]] = {
    cls.name: cls for cls in (Identity, LambdaCGD, BISR, BandInvMF, GammaBIFR, BLT, BSR, BandMF, Diagonal)
}


def mechanism_from_dict(data: dict[str, Any]) -> Mechanism:
    """Make the mechanism that ``to_dict`` described.

    Args:
        data: the name and the parameters.

    Returns:
        The mechanism.

    Raises:
        InvalidInput: the name is not that of a mechanism of this package, or a parameter is not known.
        ValueError: the value of a parameter cannot be used.
    """
    made: Mechanism = from_dict("mechanism", MECHANISMS, data)
    return made


__all__ = [
    "BISR", "BLT", "BSR", "MECHANISMS", "PREFIX_SUM", "Auto", "BandInvMF", "BandMF", "BandedInverse", "BandedStrategy",
    "BufferedToeplitz", "Diagonal", "GammaBIFR", "Horizon", "Identity", "LambdaCGD", "Mechanism", "Objective",
    "Sensitivity", "Workload", "error_norms", "maxse", "mechanism_from_dict", "rmse", "sensitivity",
]  # fmt: skip
