"""Everything this package raises or warns with, and the checks of arguments that raise it. No torch, no NumPy."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal
from numbers import Integral, Real
from typing import Any


class InvalidInput(ValueError):
    """An argument cannot be used.

    ``parameter`` is its name, so that the command line can name the flag instead.

    Args:
        parameter: the name of the argument.
        given: what was given for it; or, if ``allowed`` is left out, a whole sentence about what is wrong.
        allowed: what may be given instead, or why this cannot be. The message is "<parameter> is <given>; <allowed>"
            where it begins with "it", as in "it must be below 1", and else "<parameter> is <given>: <allowed>".
    """

    def __init__(self, parameter: str, given: Any, allowed: str | None = None) -> None:
        self.parameter = parameter
        if allowed is None:
            self.complaint = f": {given}"
        else:
            self.complaint = f" is {shown(given)}{';' if allowed.startswith('it ') else ':'} {allowed}"
        # Two strings, so that the error survives the way out of a worker process: exceptions are pickled by their args.
        super().__init__(parameter, str(given) if allowed is None else parameter + self.complaint)

    @classmethod
    def of_type(cls, parameter: str, given: Any, wanted: str) -> InvalidInput:
        """The error for a value of a wrong type: "<parameter> must be <wanted>, and a <type> was given"."""
        name = "nothing" if given is None else type(given).__name__
        article = "" if given is None else "an " if name[0] in "aeioAEIO" else "a "
        return cls(parameter, f"{parameter} must be {wanted}, and {article}{name} was given.")

    def __str__(self) -> str:
        return str(self.args[1])


class AccountingError(ValueError):
    """No accountant here can answer the request; the message says why and what can be asked instead."""


class KeyFileError(ValueError):
    """A key file that cannot be trusted or used; the message says what to do and holds nothing secret."""


class LedgerError(RuntimeError):
    """The ledger refuses: going back, an unknown run, two processes on one run, or a damaged file."""


class ClippingError(ValueError):
    """The model, the loss or the call cannot be clipped per example exactly; the message says what to do."""


class TrainingError(RuntimeError):
    """The loop did something that private training cannot allow. Nothing was released; the message says what to do."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written, or must not be resumed from; the message says what differs."""


class NotPrivateWarning(UserWarning):
    """The run claims nothing: ε = inf (no noise, no clipping), or a key for tests."""


class NonFiniteSum(ArithmeticError):
    """A sum held a NaN or an infinity. Its noisy result must not reach the weights: drop it, do not step."""


def shown(value: Any, length: int = 200) -> str:
    """``repr(value)``, cut off where it is long: for errors that name what was given or what a file holds."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def counted(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def rounded_up(value: float | str, digits: int = 4) -> str:
    """So many digits, never less than the value: a bound must not be rounded down."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    above = Context(prec=digits, rounding=ROUND_CEILING).plus(Decimal(repr(float(value))))
    return f"{float(above):.{digits}g}"


def at_least(value: float) -> str:
    """A number of a claim, as people write it where six digits are enough; never less than it is."""
    return rounded_up(value, 6)


def brief(text: object, length: int = 200) -> str:
    """``str(text)`` on one line, cut off where it is long, and such that every terminal shows it.

    For errors that repeat what a file holds, or what another library says about it.
    """
    line = " ".join(str(text).split())
    line = line if len(line) <= length else line[: length - 1] + "…"
    return line.encode("utf-8", "backslashreplace").decode()  # JSON can hold half a character


def integer(parameter: str, value: Any, *, minimum: int = 1, maximum: int | None = None, why: str = "") -> int:
    """``value`` as an ``int``, if it is an integer (a ``bool`` is none) within the limits; ``why`` follows them.

    Raises:
        InvalidInput: It is not.
    """
    ok = isinstance(value, Integral) and not isinstance(value, bool)
    if not ok or int(value) < minimum or (maximum is not None and int(value) > maximum):
        limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InvalidInput(parameter, value, f"it must be an integer {limits}{why}")
    return int(value)


def number(
    parameter: str, value: Any, *, above: float = -math.inf, below: float = math.inf, include: tuple[float, ...] = ()
) -> float:
    """``value`` as a ``float``, if it is a real number (a ``bool`` is none) strictly between the limits, or included.

    Raises:
        InvalidInput: It is not.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            converted = float(value)
        except OverflowError:  # an integer or fraction beyond all floats
            converted = math.nan
        if above < converted < below or converted in include:
            return converted
    limits = [f"{'at least' if above in include else 'above'} {above:g}"] if above > -math.inf else []
    if below < math.inf or math.inf not in include:
        limits.append(f"below {below:g}" if below < math.inf else "finite")
    others = "".join(f" or exactly {extra:g}" for extra in include if extra not in (above, below))
    raise InvalidInput(parameter, value, f"it must be a number {' and '.join(limits)}{others}")
