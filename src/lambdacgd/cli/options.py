"""What several commands read the same way."""

from __future__ import annotations

from lambdacgd.validation import InvalidInput


def number_or_auto(parameter: str, text: str | None) -> float | str | None:
    """The value of --lambda or --gamma: a number, ``auto``, or nothing."""
    if text is None or text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(parameter, text, "it must be a number in [0, 1) or auto") from None
