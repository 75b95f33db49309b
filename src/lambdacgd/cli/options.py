"""What several commands read the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from lambdacgd.validation import InvalidInput


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
