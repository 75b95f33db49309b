"""A running average of the weights. It only post-processes released steps, so it costs no privacy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd import torch_private
from lambdacgd.errors import TrainingError, number
from lambdacgd.training.distributed.models import reshard


class EMA:
    """w̄ ← βw̄ + (1−β)w after every logical step, with β_t = min(β, (1+t)/(10+t)) so that the start is forgotten.

    Kept in float32 or wider. ``with ema.applied():`` puts the average into the model, for evaluation or export; the
    model's own weights come back at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        *,
        exchanged: Callable[[], contextlib.AbstractContextManager[Callable[[], None]]],
        before_update: Callable[[], None],
    ) -> None:
        """An average that begins with the model's weights.

        ``exchanged`` gives a context for the block of ``applied()``, which yields a function to call once the average
        is in the model: so the run knows that its weights were not changed for good. ``before_update`` is called before
        weights are taken in.
        """
        self._exchanged, self._before_update = exchanged, before_update
        self.decay = number("decay", decay, above=0, below=1, include=(0,))
        self._model = model
        reshard(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._updates = 0
        self._average = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._parameters.items()
        }
        self.in_use = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights. ``private.ema`` calls this after every logical step."""
        if self.in_use:
            raise TrainingError("the model holds its average now (ema.applied()); leave that block before training on")
        self._before_update()
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        averages = [self._average[name] for name in self._parameters]
        new = [p.detach().to(average.dtype) for average, p in zip(averages, self._parameters.values(), strict=True)]
        if all(type(tensor) is Tensor for tensor in new):
            torch_private.foreach_lerp_(averages, new, 1 - decay)  # one launch: small models are bound by launches
            return
        for average, tensor in zip(averages, new, strict=True):  # sharded tensors know fewer operations
            average.lerp_(tensor, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the average in place of its weights."""
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        with self._exchanged() as in_place:
            self._copy(self._average)
            in_place()
            self.in_use = True
            try:
                yield self._model
            finally:
                self.in_use = False
                self._copy(own)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor]) -> None:
        for name, p in self._parameters.items():
            p.copy_(source[name])
        reshard(self._model)

    def state_dict(self) -> dict[str, Any]:
        """Decay, number of updates and the averages by parameter name; checkpoints hold it."""
        return {"decay": self.decay, "updates": self._updates, "average": dict(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved average of the same decay."""
        if state["decay"] != self.decay:
            raise TrainingError(f"the saved average has decay {state['decay']} and this one {self.decay}")
        self._updates = state["updates"]
        for name, value in state["average"].items():
            self._average[name].copy_(value)
