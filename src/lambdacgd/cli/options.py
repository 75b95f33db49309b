"""What several commands read the same way: flags, and the mechanisms and samplings that they name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from lambdacgd.errors import InvalidInput


def flag(name: str, *, help: str, **how: Any) -> Any:
    """An option without a value: help must not say <bool> behind it, as if one were to follow."""
    return typer.Option(name, help=help, metavar="", **how)


def place_for(parameter: str, path: Path | None) -> Path | None:
    """Where a file is to be written, refused before the work rather than after it."""
    if path is not None and path.is_dir():
        raise InvalidInput(parameter, str(path), "it is a folder; name a file")
    if path is not None and not path.parent.is_dir():
        raise InvalidInput(parameter, str(path), f"there is no folder {path.parent}; make it first")
    return path


def number_or_auto(parameter: str, text: str | None) -> float | str | None:
    """The value of --lambda or --gamma: a number, ``auto``, or nothing."""
    if text is None or text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(parameter, text, "it must be a number in [0, 1) or auto") from None


def plan_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """Turn names into objects: what a command line or a file says about a plan into arguments of ``lc.plan``.

    Args:
        request: ``mechanism`` and ``sampling`` by name, the parameters of both (``lam``, ``bands``, ``bins``, …; those
            that are None count as not given), and any other arguments of ``lc.plan``, which are passed on.

    Returns:
        Keyword arguments for ``lc.plan``.

    Raises:
        InvalidInput: a name is not known, or a parameter does not apply to what is named.
    """
    from lambdacgd.mechanisms import MECHANISMS, LambdaCGD
    from lambdacgd.sampling import SAMPLINGS, BallsInBins

    known = {field.name for cls in MECHANISMS.values() for field in fields(cls) if "help" in field.metadata}
    given = {name: value for name, value in request.items() if value is not None}
    parameters = {name: given.pop(name) for name in known & set(given)}
    bins = given.pop("bins", None)
    mechanism, sampling = given.pop("mechanism", LambdaCGD.name), given.pop("sampling", BallsInBins.name)
    if mechanism not in MECHANISMS:
        raise InvalidInput("mechanism", mechanism, f"it must be one of {', '.join(MECHANISMS)}")
    if sampling not in SAMPLINGS:
        raise InvalidInput("sampling", sampling, f"it must be one of {', '.join(SAMPLINGS)}")
    takes = [field.name for field in fields(MECHANISMS[mechanism]) if "help" in field.metadata]
    for name, value in parameters.items():
        if name not in takes:
            described = ", ".join(takes) or "no parameters"
            raise InvalidInput(name, value, f"it does not apply to {mechanism}, which takes {described}")
    given["mechanism"] = MECHANISMS[mechanism](**parameters)
    if sampling != BallsInBins.name:
        if bins is not None:
            raise InvalidInput("bins", bins, f"it applies to balls-in-bins, not to {sampling}; leave it out")
        given["sampling"] = SAMPLINGS[sampling]()
    elif bins is not None:
        given["sampling"] = BallsInBins(bins)
    return given
