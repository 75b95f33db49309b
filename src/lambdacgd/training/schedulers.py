"""Learning-rate schedulers rest while a logical batch is being gathered, so that they count logical steps.

A scheduler is recognised by its ``optimizer`` and its class is exchanged for a subclass whose ``step`` asks first:
nothing is added to the instance, so its ``state_dict`` stays what it was.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_GATES: weakref.WeakKeyDictionary[Optimizer, Callable[[], bool]] = weakref.WeakKeyDictionary()


_KINDS: dict[type[LRScheduler], type[LRScheduler]] = {}


def _resting(kind: Any) -> Any:
    """The subclass of a scheduler's class that rests."""

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        is_open = _GATES.get(self.optimizer)
        if is_open is None or is_open():
            kind.step(self, *args, **kwargs)

    if kind not in _KINDS:
        _KINDS[kind] = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__, "_rests": True})
    return _KINDS[kind]


def attach(scheduler: LRScheduler) -> None:
    """Let one scheduler rest between physical batches. Doing it again changes nothing."""
    if not hasattr(type(scheduler), "_rests"):
        scheduler.__class__ = _resting(type(scheduler))


def watch(optimizer: Optimizer, is_open: Callable[[], bool]) -> None:
    """Attach every scheduler that exists for this optimizer."""
    _GATES[optimizer] = is_open
    for found in _of(optimizer):
        attach(found)


def release(optimizer: Optimizer) -> None:
    """Give the optimizer's schedulers their own classes back."""
    _GATES.pop(optimizer, None)
    for found in _of(optimizer):
        if hasattr(type(found), "_rests"):
            found.__class__ = type(found).__mro__[1]


def _of(optimizer: Optimizer) -> list[LRScheduler]:
    """An optimizer does not know its schedulers; the garbage collector does."""
    every = [o for o in gc.get_objects() if issubclass(type(o), LRScheduler)]
    return [o for o in every if getattr(o, "optimizer", None) is optimizer]
