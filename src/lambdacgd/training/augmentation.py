"""Several augmentations of an example, averaged before clipping.

The loader reads every example ``views`` times and puts the readings of one view side by side: view 1 of all examples,
then view 2, and so on. The model runs once a view, on the examples' own rows, so that clipping sees one example used
several times and treats its gradients as one (cross terms included); the outputs are put back together for the user's
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lambdacgd.clipping import Replaced, batch_size
from lambdacgd.training.errors import TrainingError


def examples_in(views: int) -> Callable[[tuple[Any, ...], dict[str, Any]], int]:
    """How many examples the model was given, when each has ``views`` rows."""

    def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        rows = batch_size(args, kwargs)
        if rows % views:
            raise TrainingError(
                f"the model was given {rows} rows, which is not a multiple of augmentations={views}. Run other data "
                "through it under torch.no_grad()"
            )
        return rows // views

    return count


def run_by_view(model: nn.Module, views: int) -> Callable[[], None]:
    """Make the model run once a view while gradients are on; returns what undoes it."""
    original, count = model.forward, examples_in(views)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        examples = count(args, kwargs)
        flat, tree = tree_flatten((args, kwargs))
        outputs = []
        for view in range(views):
            rows = slice(view * examples, (view + 1) * examples)
            own = [x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == views * examples else x for x in flat]
            view_args, view_kwargs = tree_unflatten(own, tree)
            outputs.append(original(*view_args, **view_kwargs))
        return _together(outputs, examples)

    replaced = Replaced(model, forward)
    model.forward = replaced
    return replaced.undo


def _together(outputs: list[Any], examples: int) -> Any:
    flats, trees = zip(*(tree_flatten(output) for output in outputs), strict=True)
    joined = []
    for parts in zip(*flats, strict=True):
        if isinstance(parts[0], Tensor):
            if parts[0].dim() == 0 or parts[0].shape[0] != examples:
                raise TrainingError(
                    f"with augmentations, every output of the model must have the examples first; one has shape "
                    f"{tuple(parts[0].shape)} for {examples} examples. Compute the loss outside the model"
                )
            joined.append(torch.cat(parts))
        else:
            joined.append(parts[0])
    return tree_unflatten(joined, trees[0])
