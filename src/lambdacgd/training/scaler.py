"""``GradScaler`` and a private run: refused with a sentence, instead of an assertion in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lambdacgd.training.errors import TrainingError

_ASKED = "_step_supports_amp_scaling"  # what GradScaler asks an optimizer that takes care of scales by itself
_GIVEN = ("grad_scale", "found_inf")  # what it then leaves on the optimizer before it calls step()


def announce(optimizer: Any) -> Callable[[], None]:
    """Have ``scaler.step(optimizer)`` come to ``optimizer.step()``, whose hook refuses it; returns the undoing.

    Before the step there are no gradients to look at, and GradScaler would fail on that without saying why.
    """
    had = vars(optimizer).get(_ASKED)
    setattr(optimizer, _ASKED, True)

    def undo() -> None:
        if had is None:
            vars(optimizer).pop(_ASKED, None)
        else:
            setattr(optimizer, _ASKED, had)

    return undo


def refuse_scaler(optimizer: Optimizer, drop_batch: Callable[[], None]) -> None:
    """An error if GradScaler is calling. The losses of this batch were scaled, so its sums are not what was meant."""
    if not any(name in vars(optimizer) for name in _GIVEN):
        return
    for name in _GIVEN:
        vars(optimizer).pop(name, None)
    drop_batch()
    raise TrainingError(
        "GradScaler does not fit: it looks at gradients before they are noised, and its scale would change what is "
        "clipped. Use torch.autocast with bfloat16, which needs no scaler, or GradScaler(enabled=False), and call "
        "loss.backward() and optimizer.step(). The batch was dropped; the loader yields it again"
    )
