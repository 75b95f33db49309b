"""Which runs trained a model, and whether anything else did: what `export` looks up. Nothing is hung on the model."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

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
    optimizer: weakref.ref[Optimizer] | None = None  # the run's own, while it is attached
    earlier: tuple[tuple[float, float], ...] = ()  # (ε, δ) of other runs that these weights went through; inf: no claim
    otherwise: bool = False  # an optimizer outside of the run has changed the weights since

    @property
    def claim(self) -> tuple[float, float]:
        """(ε, δ) of this run; ε = inf where nothing is claimed."""
        certified = self.plan.certificate.kind == "bound"
        return (self.plan.epsilon if certified else math.inf), self.plan.delta

    @property
    def history(self) -> tuple[tuple[float, float], ...]:
        """``earlier``, and training outside of any run as one that claims nothing: for whoever goes on from here."""
        return (*self.earlier, (math.inf, 0.0)) if self.otherwise else self.earlier


# The record holds no reference to its model, so that the entry goes when the model goes.
_RUNS: weakref.WeakKeyDictionary[nn.Module, Trained] = weakref.WeakKeyDictionary()


# Models that a run is attached to now: clipping one twice would count every example twice.
ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_OWNERS: Any = WeakIdKeyDictionary()  # a parameter's last run


def remember(model: nn.Module, trained: Trained) -> None:
    """``trained`` is the run of this model now. If another has taken steps on it in this process, both count."""
    before = _RUNS.get(model)
    if before is not None and before is not trained:
        trained.earlier = (*before.history, before.claim) if before.steps_taken else before.history
    _RUNS[model] = trained
    for p in model.parameters():
        _OWNERS[p] = trained
    _STRANGERS.clear()


# Optimizers that hold no parameter of any model here, so that their steps need not be looked at again.
_STRANGERS: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Ordinary training after a private run, with whatever optimizer: the run's claim is no longer the weights'."""
    if optimizer in _STRANGERS:
        return
    strange = True
    for group in optimizer.param_groups:
        for p in group["params"]:
            owner = _OWNERS.get(p)
            if owner is None:
                continue
            if owner.optimizer is not None and owner.optimizer() is optimizer:
                return
            strange = False
            owner.otherwise = owner.otherwise or p.grad is not None
    if strange:
        _STRANGERS.add(optimizer)


register_optimizer_step_post_hook(_after_any_step)


def trained_by(model: nn.Module) -> Trained:
    """How ``model`` was last trained in this process."""
    if model not in _RUNS:
        raise TrainingError(
            "this model was not trained by privatize in this process, so nothing can be said about its privacy. To "
            "export from a checkpoint, privatize the model again and load the checkpoint"
        )
    return _RUNS[model]
