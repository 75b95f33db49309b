"""Which tensors have the batch first: learnt from batches of different sizes, never from one size alone.

A position table of 64 rows looks like a batch of 64 examples, and a [time, batch] tensor like a [batch, time] one,
whenever the numbers agree. So each place in a model where the question arises keeps what it saw: a first dimension that
once differed from the batch size is not the batch, however often it agrees later. To have two sizes from the start, the
first forward pass is preceded by one on the same batch without its last example (`probe`). Whether row i of every such
tensor is example i is looked at there, too: the gradient of some rows of the output must lie in the same rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

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


class Buffers:
    """What the model's buffers held before the probe and after it; the probe's changes are taken back.

    A buffer that then comes out differently with one more example holds statistics of examples, which would leave the
    model with its state_dict, neither clipped nor noised. Counters and power iterations come out the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._objects = dict(model.named_buffers())
        self._before = {name: b.detach().clone() for name, b in self._objects.items()}
        self._after: dict[str, Tensor] = {}

    @torch.no_grad()
    def take_back(self) -> None:
        for name, b in list(self._model.named_buffers()):
            if name not in self._objects:
                continue
            self._after[name] = self._before[name] if _same(b, self._before[name]) else b.detach().clone()
            if b is self._objects[name] and self._after[name] is self._before[name]:
                continue
            owner, _, local = name.rpartition(".")
            if b.shape == self._before[name].shape and b is self._objects[name]:
                b.copy_(self._before[name])
            else:
                self._model.get_submodule(owner)._buffers[local] = self._before[name].clone()

    @torch.no_grad()
    def check(self) -> None:
        """After the forward pass over all examples."""
        kept = self._model.state_dict().keys()
        for name, now in self._model.named_buffers():
            after = self._after.get(name)
            if after is None or _same(now, after):
                continue
            if (now.shape, now.dtype) == (after.shape, after.dtype):
                if now.is_floating_point() and not _far(now, after, self._before[name]):
                    continue
            elif name not in kept:  # a cache as long as the batch
                continue
            raise ClippingError(
                f"the forward pass writes what depends on the examples into the buffer '{name}': statistics of "
                "examples would leave the model without clipping or noise. Freeze them (eval mode), or use a layer "
                "without running statistics: lambdacgd.clipping.convert(model)."
            )


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)


def _far(now: Tensor, after: Tensor, before: Tensor) -> bool:
    """Whether two updates of one buffer differ by more than rounding."""
    change = (after - before).abs().max() if after.shape == before.shape else after.abs().max()
    rounding = 8 * torch.finfo(now.dtype).eps * after.abs().max()
    return bool((now - after).abs().max() > 1e-5 * change + rounding)


def probe(clipper: Clipper, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Buffers | None:
    """One forward pass on all examples but the last, for its sizes, and then one on all, to see that examples stay in
    their rows; random numbers and buffers are put back.

    Of two examples the last is taken twice instead: a batch of one tells nothing.
    """
    other = batch - 1 if batch > 2 else batch + 1
    found = _resized(clipper, args, kwargs, batch, other)
    device = clipper.anchor.device
    devices = [device] if device.type == "cuda" else []
    buffers = Buffers(clipper.model)
    # Checkpointing around the model keeps tensors by hooks of its own, which the probe's are not for. Detached: outputs
    # that their own nodes keep would never be freed.
    with torch.random.fork_rng(devices), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        try:
            if found is not None:
                _run(clipper, *found, other)
        except (ClippingError, torch.OutOfMemoryError):  # a batch too large says nothing about dimensions
            raise
        except Exception as error:
            raise ClippingError(
                f"the model's forward pass failed ({type(error).__name__}: {error}). It was run on {other} examples of "
                f"a batch of {batch}, once, to learn which dimensions are the batch. If it fails on all {batch} too, "
                "mend that; if not, start with a batch whose size no other dimension of the inputs has, or pass "
                "probe=False to clipping.attach and see to that yourself."
            ) from error
        finally:
            buffers.take_back()
        if not clipper.sharded:  # its gradients are gathered by hooks that expect a whole backward pass
            again = Buffers(clipper.model)
            try:
                _check_rows(clipper, _run(clipper, args, kwargs, batch), batch)
            finally:
                again.take_back()
    return None if found is None else buffers


def _resized(
    clipper: Clipper, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, other: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments for ``other`` examples, cut where the batch is first or, by ``batch_of``, second; None where they
    cannot be cut: then the sizes of later batches have to do.
    """
    views = clipper.views
    for dim in (0, 1):

        def resized(x: Any, dim: int = dim) -> Any:
            if not (isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == views * batch):
                return x
            parts = x.split(batch, dim)  # one after another, where examples have several views
            last = [p.narrow(dim, 0, other) if other < batch else p.narrow(dim, batch - 1, 1) for p in parts]
            return torch.cat(
                last if other < batch else [t for pair in zip(parts, last, strict=True) for t in pair], dim
            )

        new = tree_map(resized, args), tree_map(resized, kwargs)
        if clipper.count(*new) == other:
            return new
    return None


def _run(clipper: Clipper, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> list[Tensor]:
    """One forward pass; its outputs that have the batch first."""
    clipper.batch = batch
    clipper.sizing.start(batch)
    output = clipper.model.forward(*args, **kwargs)
    clipper.check_output(output)
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    return [x for k, x in enumerate(found) if clipper.sizing.batch_first(f"output {k} of the model", x)]


def _check_rows(clipper: Clipper, outputs: list[Tensor], batch: int) -> None:
    """Examples stay apart and in their places: the outputs' first half has no gradient in other rows of any layer."""
    clipper.expected_rows = batch // 2
    parts = [x[: clipper.expected_rows].flatten() for x in outputs if x.requires_grad and x.numel()]
    weights = [torch.linspace(0.5, 1.5, p.numel(), device=p.device).to(p.dtype) for p in parts]
    try:
        if parts:
            torch.autograd.grad(parts, clipper.anchor, weights, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # what fails here fails in the user's own backward pass, and is better explained there
        pass
    finally:
        clipper.expected_rows = 0
