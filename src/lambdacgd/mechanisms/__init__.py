"""What correlates the noise: the strategy C, its inverse, its sensitivity and its error. NumPy only."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lambdacgd.errors import InvalidInput
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
        InvalidInput: the name is not that of a mechanism of this package.
        ValueError: a parameter is not known, or its value cannot be used.
    """
    given = dict(data)
    name = given.pop("name", None)
    if name not in MECHANISMS:
        allowed = f"it must be one of {', '.join(MECHANISMS)}; files hold none of your own: plan anew with lc.plan"
        raise InvalidInput("mechanism", name, allowed)
    known = {f.name for f in fields(MECHANISMS[name])}
    if unknown := set(given) - known:
        raise ValueError(f"mechanism {name} has no parameter {', '.join(sorted(unknown))}; it takes {sorted(known)}")
    return MECHANISMS[name](**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


__all__ = [
    "BISR", "BLT", "BSR", "MECHANISMS", "PREFIX_SUM", "Auto", "BandInvMF", "BandMF", "BandedInverse", "BandedStrategy",
    "BufferedToeplitz", "Diagonal", "GammaBIFR", "Horizon", "Identity", "LambdaCGD", "Mechanism", "Objective",
    "Sensitivity", "Workload", "error_norms", "maxse", "mechanism_from_dict", "rmse", "sensitivity",
]  # fmt: skip
