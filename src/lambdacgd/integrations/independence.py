"""Does an example's loss depend on the other examples of its batch? Then it has no gradient of its own to clip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.training import TrainingError
from lambdacgd.training.loader import random_numbers_of

Losses = Callable[[Any], Tensor]
Collate = Callable[[list[Any]], Any]


def check_losses(losses: object, rows: int) -> Tensor:
    """One loss per example, as a vector."""
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise TrainingError(
            f"compute_loss must return one loss per example, a tensor of shape ({rows},), and returned {found}. A loss "
            "that is already averaged may mix examples (a mean over all tokens of a batch does). Average over each "
            "example's own tokens and return the vector"
        )
    return losses


def check_independent(model: nn.Module, losses_of: Losses, items: Sequence[Any], collate: Collate) -> None:
    """Compare losses of a few examples in one batch with the same examples read alone.

    A difference beyond rounding means that the loss, the model or the padding mixes examples, and is refused. Two
    extra forward passes a call, without gradients, dropout off; random numbers are put back. Agreement is evidence,
    not proof.
    """
    if len(items) < 2:
        return
    with _quiet(model):
        batch = collate(list(items))
        together = check_losses(losses_of(batch), len(items)).float()
        lengths = [_size(collate([item])) for item in items]
        chosen = {0, lengths.index(min(lengths)), lengths.index(max(lengths))}
        random = not _same(batch, collate(list(items)))
        for row in sorted(chosen):
            single = _rows(batch, len(items), row) if random else collate([items[row]])
            alone = check_losses(losses_of(single), 1).float()
            tolerance = _rounding(model) * (1 + abs(float(alone)))
            if not abs(float(together[row]) - float(alone)) <= tolerance:
                raise TrainingError(
                    f"the loss of one example is {float(alone):.6g} alone and {float(together[row]):.6g} in a batch of "
                    f"{len(items)}: it depends on the other examples, so clipping one example would not bound what it "
                    "changes. Look for a mean over all tokens of the batch, contrastive terms, padding on the left "
                    "(pad on the right), padding without an attention mask, or BatchNorm"
                )


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, nobody's random numbers moved."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), random_numbers_of("independence"):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _rounding(model: nn.Module) -> float:
    parameter = next(model.parameters())
    low = parameter.dtype in (torch.float16, torch.bfloat16)
    if low or hasattr(model, "_original_forward"):  # accelerate's autocast
        return 3e-2
    return 2e-3 if parameter.is_cuda else 3e-5


def _size(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return max((_size(x) for x in batch.values()), default=0)
    return batch.numel() if isinstance(batch, Tensor) else 0


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Mapping):
        return all(_same(x[name], y[name]) for name in x)
    if isinstance(x, Tensor):
        return x.shape == y.shape and bool(torch.equal(x, y))
    return True


def _rows(batch: Any, rows: int, row: int) -> Any:
    """One row of a batch that was collated with random numbers, which another reading would not repeat."""
    if isinstance(batch, Mapping):
        return {name: _rows(x, rows, row) for name, x in batch.items()}
    if isinstance(batch, Tensor) and batch.dim() > 0 and batch.shape[0] == rows:
        return batch[row : row + 1]
    return batch
