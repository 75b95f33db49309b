"""Which runs trained a model, and whether anything else did: what `export` looks up. Nothing is hung on the model.

Runs are known by the parameters they trained, not only by the module they were given: a wrapper, a part or a copy of a
model went through what its weights went through.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from lambdacgd.planning import Plan
from lambdacgd.training.distributed.shards import local
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

    @cached_property
    def claim(self) -> tuple[float, float]:
        """(ε, δ) of this run; ε = inf where nothing is claimed. One object, so that a run is known again and counted
        once.
        """
        certified = self.plan.certificate.kind == "bound"
        return (self.plan.epsilon if certified else math.inf), self.plan.delta

    @property
    def history(self) -> tuple[tuple[float, float], ...]:
        """``earlier``, and training outside of any run as one that claims nothing: for whoever goes on from here."""
        return (*self.earlier, _NO_CLAIM) if self.otherwise else self.earlier

    @property
    def whole(self) -> tuple[tuple[float, float], ...]:
        """``history`` and this run, if it has taken a step."""
        return (*self.history, self.claim) if self.steps_taken else self.history


_NO_CLAIM = (math.inf, 0.0)


# The record holds no reference to its model, so that the entry goes when the model goes.
_RUNS: weakref.WeakKeyDictionary[nn.Module, Trained] = weakref.WeakKeyDictionary()


# Models that a run is attached to now: clipping one twice would count every example twice.
ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


_OWNERS: Any = WeakIdKeyDictionary()  # a parameter's last run
# Parameters that a run trains (it has others, frozen), with how they began: None where they came from other runs.
_BEGAN: Any = WeakIdKeyDictionary()


def remember(model: nn.Module, trained: Trained) -> None:
    """``trained`` is the run of this model now. What others did to its weights in this process counts as well."""
    trained.earlier = _joined(trained.earlier, _others(model, trained))
    _RUNS[model] = trained
    for p in model.parameters():
        _OWNERS[p] = trained
        if p.requires_grad and p not in _BEGAN:
            _BEGAN[p] = None if trained.earlier or not _holds(p) else _first(p)
    _STRANGERS.clear()


def _others(model: nn.Module, trained: Trained) -> list[Trained]:
    """Other runs that the model's weights went through: its own last one, those of its parameters, of copied ones."""
    parameters = list(model.parameters())
    found = [_RUNS.get(model), *(_OWNERS.get(p) for p in parameters)]
    unknown = [p for p in parameters if _OWNERS.get(p) is None]
    found += _copied(unknown, trained)
    others = {id(one): one for one in found if one is not None and one is not trained}
    return list(others.values())


def _copied(parameters: list[nn.Parameter], trained: Trained) -> list[Trained]:
    """Runs that trained what these parameters hold: a deep copy, or a state_dict loaded into another model.

    Every step puts noise on every trained weight, so equal values are no coincidence, unless they are those that the
    run began with (a learning rate of zero). Seen as long as the original is there and has not moved on.
    """
    if not parameters:
        return []
    originals: dict[Any, list[tuple[nn.Parameter, Trained]]] = {}
    for original, owner in list(_OWNERS.items()):
        if owner is not trained and owner.whole and original in _BEGAN and _holds(original):
            values = _first(original)
            if values != _BEGAN[original]:
                originals.setdefault(values, []).append((original, owner))
    return [
        owner
        for p in (parameters if originals else ())
        if _holds(p)
        for original, owner in originals.get(_first(p), ())
        if torch.equal(local(p.detach()), local(original.detach()).to(local(p).device))
    ]


def _holds(p: Tensor) -> bool:
    """Whether there are numbers here to compare: not in an empty shard, nor on the meta device."""
    return local(p).numel() > 0 and not p.is_meta


def _first(p: Tensor) -> tuple[Any, ...]:
    """The shape and a few numbers, to look copies up by without comparing everything with everything."""
    held = local(p.detach())
    return (held.dtype, *held.shape, *held.reshape(-1)[:8].tolist())


def _joined(earlier: tuple[tuple[float, float], ...], others: Iterable[Trained]) -> tuple[tuple[float, float], ...]:
    """All claims, every run's once."""
    found = {id(claim): claim for claim in earlier}
    for other in others:
        found |= {id(claim): claim for claim in other.whole}
    return tuple(found.values())


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
    """How ``model`` was last trained in this process, with what other runs did since to weights that they share."""
    if model not in _RUNS:
        raise TrainingError(
            "this model was not trained by privatize in this process, so nothing can be said about its privacy. To "
            "export from a checkpoint, privatize the model again and load the checkpoint"
        )
    trained = _RUNS[model]
    owners = {id(owner): owner for p in model.parameters() if (owner := _OWNERS.get(p)) is not None}
    owners.pop(id(trained), None)
    joined = _joined(trained.earlier, owners.values())
    return replace(trained, earlier=tuple(claim for claim in joined if claim is not trained.claim))
