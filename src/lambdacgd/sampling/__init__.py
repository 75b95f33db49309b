"""Who takes part when: Balls-in-Bins, Poisson and cyclic sampling as pure functions of a secret key. No torch."""

from __future__ import annotations

from typing import Any

from lambdacgd.errors import InvalidInput
from lambdacgd.sampling.parquet import BinSortedParquet
from lambdacgd.sampling.samplings import BINS, DEFAULT_RUN, BallsInBins, Bins, Cyclic, Poisson, Sampling

SAMPLINGS: dict[str, type[Sampling]] = {cls.name: cls for cls in (BallsInBins, Poisson, Cyclic)}


def sampling_from_dict(data: dict[str, Any]) -> Sampling:
    """Make the bound sampling that ``to_dict`` described.

    Args:
        data: the name and the fields. Balls-in-Bins without ``bins`` are fixed ones, as they once all were.

    Raises:
        InvalidInput: the name or a field is not known, or a number cannot be used.
    """
    parameters = dict(data)
    name = parameters.pop("name", None)
    if name not in SAMPLINGS:
        raise InvalidInput("sampling", name, f"it must be one of {', '.join(SAMPLINGS)}")
    if name == BallsInBins.name:
        parameters.setdefault("bins", "fixed")
    return SAMPLINGS[name].from_fields(parameters)


__all__ = [
    "BINS",
    "DEFAULT_RUN",
    "SAMPLINGS",
    "BallsInBins",
    "BinSortedParquet",
    "Bins",
    "Cyclic",
    "Poisson",
    "Sampling",
    "sampling_from_dict",
]
