"""Which tensors have the batch first: learnt from batches of different sizes, never from one size alone.

A position table of 64 rows looks like a batch of 64 examples, and a [time, batch] tensor like a [batch, time] one,
whenever the numbers agree. So each place in a model where the question arises keeps what it saw: a first dimension that
once differed from the batch size is not the batch, however often it agrees later. To have two sizes from the start, the
first forward pass is preceded by one on the same batch without its last example (`probe`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lambdacgd.clipping.errors import ClippingError

if TYPE_CHECKING:
    from lambdacgd.clipping.clipper import Clipper


class Sizing:
    """What every place (a module, an operation on a parameter) has seen, by its number of use in a forward pass."""

    def __init__(self) -> None:
        self.batch = 0
        self._uses: dict[Hashable, int] = {}
        self._agreed: dict[
            tuple[Hashable, int], int
        ] = {}  # the first batch size that agreed; -1: two different ones did
        self._differed: set[tuple[Hashable, int]] = set()
        self._ever_differed: set[Hashable] = set()

    def start(self, batch: int) -> None:
        """A forward pass over ``batch`` examples begins."""
        self.batch = batch
        self._uses.clear()

    def batch_first(self, place: Hashable, x: Tensor) -> bool:
        """Whether the first dimension of ``x`` is the batch. For one example every answer gives the same gradient."""
        agrees = x.dim() > 0 and x.shape[0] == self.batch
        if self.batch == 1 or torch._C._current_graph_task_id() != -1:  # or a recomputation, which delivers nothing
            return agrees
        use = self._uses.get(place, 0)
        self._uses[place] = use + 1
        key = (place, use)
        if not agrees:
            if self._agreed.get(key) == -1:
                raise ClippingError(
                    f"{place}: the first dimension was the batch in earlier batches and now is {tuple(x.shape)[:1]} "
                    f"for {self.batch} examples. Keep the batch first in every batch."
                )
            self._differed.add(key)
            self._ever_differed.add(place)
            return False
        if key in self._differed:
            return False
        known = self._agreed.setdefault(key, self.batch)
        if known not in (-1, self.batch):
            self._agreed[key] = -1
        elif known == self.batch and place in self._ever_differed:
            raise ClippingError(
                f"{place}: cannot tell whether {tuple(x.shape)} has the batch ({self.batch} examples) first: other "
                "uses of it do not. Run a batch of another size first."
            )
        return True


def probe(clipper: Clipper, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> None:
    """One forward pass on all examples but the last, for its sizes alone; random numbers are put back.

    Of two examples the last is taken twice instead: a batch of one tells nothing.
    """
    other = batch - 1 if batch > 2 else batch + 1

    def resized(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == batch):
            return x
        return x[:other] if other < batch else torch.cat([x, x[-1:]])

    new_args, new_kwargs = tree_map(resized, args), tree_map(resized, kwargs)
    if clipper.count(new_args, new_kwargs) != other:
        return  # a container that cannot be cut: the sizes of later batches have to do
    device = clipper.anchor.device
    devices = [device] if device.type == "cuda" else []
    clipper.batch = other
    clipper.sizing.start(other)
    with torch.random.fork_rng(devices):
        try:
            clipper.check_output(clipper.model.forward(*new_args, **new_kwargs))
        except ClippingError:
            raise
        except Exception as error:
            raise ClippingError(
                f"the model failed on {other} examples instead of {batch} ({type(error).__name__}: {error}). It is run "
                "so once, to learn which dimensions are the batch. Start with a batch whose size no other dimension of "
                "the inputs has, or pass probe=False to attach and see to that yourself."
            ) from error
