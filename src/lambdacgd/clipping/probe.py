"""The probe: does row i of every layer's input belong to example i alone, and does nothing of examples stay behind?

The first forward pass is preceded by two others on the same batch. One leaves the last example out, so that the places
which ask for the batch dimension (`rules.BatchSizes`) see two sizes. One takes all examples and differentiates the
first rows of the output: their gradient must lie in the same rows of every layer. Whether a buffer that the forward
pass writes comes out differently with one more example is compared as well: it would hold statistics of examples, which
leave the model with its state_dict, neither clipped nor noised.

The probe is repeated whenever a forward pass does what no probe has seen, which is told cheaply for every pass: a layer
may mix examples in train mode only (`Modes`), and a buffer may be written for the first time later on, after a warm-up,
in evaluation, or earlier, in evaluation before the first batch (`Writes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping.batch_free import check_output
from lambdacgd.clipping.rules import ForwardPass
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import (
    AnyNormWithStatistics,
    non_persistent_buffers,
    own_buffers,
    tree_leaves,
    tree_map,
    version,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
MOST_MODES = 32
"""combinations of modes that are probed: a model that draws its own anew for every batch is not probed for ever"""


class Probe:
    """``begin`` and ``end`` of every forward pass with gradients, ``begin_quietly`` and ``end_quietly`` of others.

    Attributes:
        enabled: Whether anything is looked at.
        allowed: Whether this batch may be probed: where ranks compute together (FSDP2), all must probe at the same one.
        views: Rows of every example in the model's arguments, one view of all examples after another.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_pass: ForwardPass,
        anchor: Tensor,
        count: Callable[[tuple[Any, ...], dict[str, Any]], int],
        *,
        enabled: bool,
    ) -> None:
        self.enabled, self.allowed, self.views = enabled, True, 1
        self._model, self._forward_pass, self._anchor, self._count = model, forward_pass, anchor, count
        self._modes, self._writes = Modes(model), Writes(model)
        self._due, self._now = True, False  # whether a probe is, and whether the pass under way was probed
        self._buffers: Buffers | None = None  # until the end of the pass that was probed

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> None:
        """Before a forward pass with gradients: probe if it is due.

        Raises:
            ClippingError: The model mixes examples, or an earlier pass wrote what must not leave the model.
        """
        if not self.enabled:
            return
        if self._buffers is not None:  # the forward pass after the probe failed
            self._buffers, self._due = None, True
        if not self._due:
            self._writes.refuse_unseen()  # also for whoever caught the error of the pass that wrote
        self._due |= self._modes.new()
        self._now = self._due and batch > 1 and self.allowed
        if self._now:
            self._buffers = self._look((args, kwargs), batch)
            self._modes.probed()
            self._due = False
        self._writes.begin()

    def end(self) -> None:
        """After a forward pass with gradients.

        Raises:
            ClippingError: The pass wrote what depends on the examples into a buffer.
        """
        if not self.enabled:
            return
        if not self._now:
            self._due |= bool(self._writes.since())  # compared in the next forward pass
            return
        buffers, self._buffers = self._buffers, None
        self._due = True  # where it is refused, it stays refused
        if buffers is not None:
            buffers.check()
        self._writes.compared()
        self._due = False

    def begin_quietly(self) -> None:
        """Before a forward pass without gradients."""
        if self.enabled:
            self._writes.begin_quietly()

    def end_quietly(self) -> None:
        """After a forward pass without gradients."""
        if self.enabled:
            self._writes.end_quietly()
            if not self._due:
                self._writes.refuse_unseen()

    def _look(self, arguments: Arguments, batch: int) -> Buffers | None:
        """One forward pass on all examples but the last, for its sizes, and then one on all, to see that examples stay
        in their rows; random numbers and buffers are put back.

        Of two examples the last is taken twice instead: a batch of one tells nothing.
        """
        other = batch - 1 if batch > 2 else batch + 1
        resized = self._resized(arguments, batch, other)
        devices = [self._anchor.device] if self._anchor.is_cuda else []
        buffers = Buffers(self._model)
        # Checkpointing around the model keeps tensors by hooks of its own, which the probe's are not for. Detached:
        # outputs that their own nodes keep would never be freed.
        with torch.random.fork_rng(devices), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
            try:
                if resized is not None:
                    self._forward(resized, other)
            except (ClippingError, torch.OutOfMemoryError):  # a batch too large says nothing about dimensions
                raise
            except Exception as error:  # whatever the user's forward raises
                raise ClippingError(
                    f"the model's forward pass failed ({type(error).__name__}: {error}). It was run on {other} "
                    f"examples of a batch of {batch}, once, to learn which dimensions are the batch. If it fails on "
                    f"all {batch} too, mend that; if not, start with a batch whose size no other dimension of the "
                    "inputs has, or pass probe=False to clipping.attach and see to that yourself."
                ) from error
            finally:
                buffers.take_back()
            if not self._forward_pass.sharded:  # its gradients are gathered by hooks that expect a whole backward pass
                again = Buffers(self._model)
                try:
                    self._check_rows(self._forward(arguments, batch), batch)
                finally:
                    again.take_back()
        return None if resized is None else buffers

    def _resized(self, arguments: Arguments, batch: int, other: int) -> Arguments | None:
        """The arguments for ``other`` examples, cut where the batch is first or, by ``batch_of``, second; None where
        they cannot be cut: then the sizes of later batches have to do.
        """
        for dim in (0, 1):

            def resize(x: Any, dim: int = dim) -> Any:
                if not (isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == self.views * batch):
                    return x
                parts = x.split(batch, dim)  # one after another, where examples have several views
                if other < batch:
                    return torch.cat([p.narrow(dim, 0, other) for p in parts], dim)
                return torch.cat([t for p in parts for t in (p, p.narrow(dim, batch - 1, 1))], dim)

            args, kwargs = tree_map(resize, arguments[0]), tree_map(resize, arguments[1])
            if self._count(args, kwargs) == other:
                return args, kwargs
        return None

    def _forward(self, arguments: Arguments, batch: int) -> list[Tensor]:
        """One forward pass; its outputs that have the batch first."""
        self._forward_pass.look_at(batch)
        output = self._model.forward(*arguments[0], **arguments[1])
        check_output(output, batch)
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        sizes = self._forward_pass.sizes
        return [x for k, x in enumerate(tensors) if sizes.batch_first(f"output {k} of the model", x)]

    def _check_rows(self, outputs: list[Tensor], batch: int) -> None:
        """Examples stay apart and in their places: the outputs' first half has no gradient in other rows of any layer
        (`rules.Call` looks).
        """
        rows = batch // 2
        parts = [x[:rows].flatten() for x in outputs if x.requires_grad and x.numel()]
        weights = [torch.linspace(0.5, 1.5, p.numel(), device=p.device).to(p.dtype) for p in parts]
        self._forward_pass.expected_rows = rows
        try:
            if parts:
                torch.autograd.grad(parts, self._anchor, weights, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # what fails here fails in the user's own backward pass, and is better explained there
            pass
        finally:
            self._forward_pass.expected_rows = 0


class Modes:
    """Which modules were in train mode and which in eval mode when the model was probed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._last, self._seen = b"", set[bytes]()

    def new(self) -> bool:
        """Whether the model is in a mode that was not probed."""
        self._last = bytes(m.training for m in self._modules)
        return self._last not in self._seen and len(self._seen) < MOST_MODES

    def probed(self) -> None:
        """The probe has seen the mode that ``new`` was asked about last."""
        self._seen.add(self._last)


class Writes:
    """``begin()`` before a forward pass; ``since()`` says what it has written that no probe has seen written."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}" if path else name, own_buffers(module), name)
            for path, module in model.named_modules()
            for name in own_buffers(module)
            if name not in non_persistent_buffers(module)
        ]
        self._norms = [(path, m) for path, m in model.named_modules() if isinstance(m, AnyNormWithStatistics)]
        self._before: list[tuple[int, int]] = []
        self._compared: set[str] = set()
        self._quietly: set[str] = set()  # by passes without gradients, so that no probe compares it

    def begin(self) -> None:
        self._before = self._versions()

    def begin_quietly(self) -> None:
        """Before a forward pass without gradients. PyTorch's kernels write running statistics without counting it."""
        for path, norm in self._norms:
            if norm.training and norm.running_mean is not None:
                raise _quiet(f"would write the statistics of '{path}' ({type(norm).__name__})")
        self.begin()

    def since(self) -> list[str]:
        now = self._versions()
        places = zip(self._places, self._before, now, strict=False)
        return [name for (name, _, _), before, after in places if before != after and name not in self._compared]

    def compared(self) -> None:
        """A probe has seen this forward pass: what it writes does not depend on the examples."""
        self._compared.update(self.since())
        self.refuse_unseen()

    def end_quietly(self) -> None:
        """After a forward pass without gradients. Counters tell nothing about examples."""
        held = {name: buffers.get(local) for name, buffers, local in self._places}
        self._quietly.update(n for n in self.since() if (b := held[n]) is not None and b.is_floating_point())

    def refuse_unseen(self) -> None:
        """Once a probe has seen what passes with gradients write: others may write no more."""
        for name in sorted(self._quietly - self._compared):
            raise _quiet(f"wrote the buffer '{name}', which those with gradients leave alone")

    def _versions(self) -> list[tuple[int, int]]:
        return [_version(buffers.get(name)) for _, buffers, name in self._places]


def _quiet(what: str) -> ClippingError:
    return ClippingError(
        f"a forward pass without gradients {what}: what it holds of examples would leave the model with its "
        "state_dict, without clipping or noise. Call the model in eval mode there, or, if the data is public, before "
        "it is private (detach first)."
    )


def _version(b: Tensor | None) -> tuple[int, int]:
    return (0, 0) if b is None or b.is_inference() else (id(b), version(b))


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
                own_buffers(self._model.get_submodule(owner))[local] = self._before[name].clone()

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
