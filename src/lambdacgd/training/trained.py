"""Which run trained a model: what `export` looks up, without hanging anything on the model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from lambdacgd.planning import Plan
from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import TrainingError
from lambdacgd.training.run import Run


@dataclass
class Trained:
    """What can be said about a model's weights: public facts, and the run whose ledger must know of their release."""

    plan: Plan
    run: Run
    max_grad_norm: float
    clipping_mode: str
    augmentations: int
    steps_taken: int = 0
    world: World = field(default_factory=lambda: World(None))  # the processes that hold the weights


# The record holds no reference to its model, so that the entry goes when the model goes.
_RUNS: weakref.WeakKeyDictionary[nn.Module, Trained] = weakref.WeakKeyDictionary()


# Models that a run is attached to now: clipping one twice would count every example twice.
ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember(model: nn.Module, trained: Trained) -> None:
    _RUNS[model] = trained


def trained_by(model: nn.Module) -> Trained:
    """How ``model`` was last trained in this process."""
    if model not in _RUNS:
        raise TrainingError(
            "this model was not trained by privatize in this process, so nothing can be said about its privacy. To "
            "export from a checkpoint, privatize the model again and load the checkpoint"
        )
    return _RUNS[model]
