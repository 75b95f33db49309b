"""A run's state as named tensors, whole or sharded, and plain facts: what a checkpoint folder is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lambdacgd.training.distributed.shards import is_sharded
from lambdacgd.training.errors import CheckpointError
from lambdacgd.version import __version__

if TYPE_CHECKING:
    from lambdacgd.training.private import Private

Tensors = dict[str, Tensor]


def of(private: Private, *, frozen: bool) -> tuple[Tensors, dict[str, Any]]:
    """The tensors in use, and facts about the rest. ``frozen=False`` leaves frozen parameters out."""
    weights, plain = _model(private, frozen=frozen)
    moments, kept = _optimizer(private)
    averages = {
        f"average.{i}.{name}": value
        for i, average in enumerate(private.averages)
        for name, value in average.state_dict()["average"].items()
    }
    facts = {
        "version": __version__,
        "frozen": frozen,
        "plain": plain,
        "optimizer": kept,
        "groups": groups_by_name(private),
        "averages": [{"decay": a.decay, "updates": a.state_dict()["updates"]} for a in private.averages],
    }
    return weights | moments | averages, facts


def places(private: Private, facts: dict[str, Any]) -> Tensors:
    """The tensors to read a checkpoint into: the run's own where it has them. Everything is checked first."""
    names = [group["names"] for group in groups_by_name(private)]
    if [group["names"] for group in facts["groups"]] != names:
        raise CheckpointError(
            "the optimizer's parameter groups are not those of the checkpoint: make the same groups, in the same order"
        )
    if len(facts["averages"]) != len(private.averages):
        raise CheckpointError(
            f"the checkpoint has {len(facts['averages'])} running averages of the weights and this run "
            f"{len(private.averages)}; make the same ones with private.ema(…) before loading"
        )
    found, _ = _model(private, frozen=facts["frozen"])
    for name, values in facts["optimizer"].items():
        p = private.clipper.parameters[name]
        for key, value in values.items():
            if "dtype" in value:
                found[f"optimizer.{name}.{key}"] = torch.zeros_like(p, dtype=getattr(torch, value["dtype"]))
    for i, average in enumerate(private.averages):
        found |= {f"average.{i}.{name}": value for name, value in average.state_dict()["average"].items()}
    return {name: value.detach() for name, value in found.items()}


def apply(private: Private, tensors: Tensors, facts: dict[str, Any]) -> None:
    """Go on from what was read into `places`; weights and averages are in their places already."""
    names = [name for group in facts["groups"] for name in group["names"]]
    index = {name: k for k, name in enumerate(names)}
    state = {
        index[name]: {
            key: tensors[f"optimizer.{name}.{key}"] if "dtype" in value else value["value"]
            for key, value in values.items()
        }
        for name, values in facts["optimizer"].items()
    }
    groups = [
        {key: value for key, value in group.items() if key != "names"} | {"params": [index[n] for n in group["names"]]}
        for group in facts["groups"]
    ]
    private.optimizer.load_state_dict({"state": state, "param_groups": groups})
    if facts["plain"]:
        private.model.load_state_dict(facts["plain"], strict=False)
    for i, (average, saved) in enumerate(zip(private.averages, facts["averages"], strict=True)):
        read = {name: tensors[f"average.{i}.{name}"] for name in average.state_dict()["average"]}
        average.load_state_dict(saved | {"average": read})


def _model(private: Private, *, frozen: bool) -> tuple[Tensors, dict[str, Any]]:
    held = dict(private.model.named_parameters(remove_duplicate=False))
    state = {
        name: value
        for name, value in private.model.state_dict().items()
        if frozen or name not in held or held[name].requires_grad
    }
    tensors = {f"model.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def _names(private: Private) -> dict[int, str]:
    return {id(p): name for name, p in private.clipper.parameters.items()}


def groups_by_name(private: Private) -> list[dict[str, Any]]:
    """Parameter groups with names in place of parameters (frozen parameters have no state)."""
    names = _names(private)
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": [names.get(id(p), f"frozen {k}") for k, p in enumerate(group["params"])]}
        for group in private.optimizer.param_groups
    ]


def _optimizer(private: Private) -> tuple[Tensors, dict[str, Any]]:
    """Moments shaped like their parameter, as tensors; counters and the like, as facts."""
    tensors: Tensors = {}
    kept: dict[str, Any] = {}
    for name, p in private.clipper.parameters.items():
        kept[name] = {}
        for key, value in private.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape == p.shape and is_sharded(value) == is_sharded(p):
                tensors[f"optimizer.{name}.{key}"] = value
                kept[name][key] = {"dtype": str(value.dtype).removeprefix("torch.")}
            elif isinstance(value, Tensor) and is_sharded(p) and (is_sharded(value) or value.numel() > 1):
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of {name!r} in shape {tuple(value.shape)}, which other numbers of "
                    "processes could not take over: use an optimizer whose state has the parameters' shapes"
                )
            else:
                kept[name][key] = {"value": value}
    return tensors, kept
