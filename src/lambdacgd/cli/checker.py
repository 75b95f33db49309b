"""``lambdacgd check``: whether a model of the user's can be trained privately."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from lambdacgd.errors import InvalidInput

EXAMPLE = "it must be module:function, such as models:make for the function make in models.py"
RETURNS = "it must return a model, a batch and a loss: return model, (x, y), lambda model, batch: …"


def check(factory: str, loss_reduction: str) -> None:
    """Check the model, the batch and the loss that ``factory`` (module:function) returns, and print what was compared.

    Raises:
        InvalidInput: ``factory`` names nothing, or does not return what it should.
        ClippingError: the model or the loss cannot be trained privately; the message says what to do.
    """
    if loss_reduction not in ("mean", "sum"):
        raise InvalidInput("loss_reduction", loss_reduction, "it must be mean or sum")
    made = imported("factory", factory)()
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[2]):
        raise InvalidInput("factory", factory, RETURNS)
    from torch import nn

    from lambdacgd.clipping import check_model

    model, batch, loss = made
    if not isinstance(model, nn.Module):
        raise InvalidInput("factory", factory, RETURNS)
    report = check_model(model, batch, loss=loss, loss_reduction="mean" if loss_reduction == "mean" else "sum")
    print(f"{type(model).__name__} can be trained privately: clipped sums are those of one example at a time. {report}")


def imported(parameter: str, factory: str) -> Any:
    """The function that module:function names, also where the module lies in the current folder."""
    module, _, name = factory.partition(":")
    if not module or not name:
        raise InvalidInput(parameter, factory, EXAMPLE)
    try:
        with _importing_from_here():
            function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # something that the user's module needs
        raise InvalidInput(parameter, factory, f"there is no module {module} here; {EXAMPLE}") from None
    if not callable(function):
        raise InvalidInput(parameter, factory, f"{module} has no function {name}")
    return function


@contextlib.contextmanager
def _importing_from_here() -> Iterator[None]:
    """A console script does not look for modules in the current folder, as ``python -m`` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
