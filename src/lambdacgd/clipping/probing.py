"""When a forward pass is probed: the first, and whenever one does what no probe has seen, told cheaply for every pass.

The probe (`sizing`) sees whether examples stay apart, and compares what a forward pass writes into buffers with what it
would write for other examples. A layer may mix them in train mode only, and a buffer may be written for the first time
later on (after a warm-up, in evaluation), or earlier, in evaluation before the first batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lambdacgd.clipping.errors import ClippingError
from lambdacgd.clipping.sizing import Buffers, probe

if TYPE_CHECKING:
    from lambdacgd.clipping.clipper import Clipper

MOST_MODES = 32
"""combinations of modes that are probed: a model that draws its own anew for every batch is not probed for ever"""


class Probing:
    """``begin`` and ``end`` of every forward pass with gradients, ``begin_quietly`` and ``end_quietly`` of others."""

    def __init__(self, model: nn.Module) -> None:
        self._modes, self._writes = Modes(model), Writes(model)
        self._due, self._now = True, False  # whether a probe is, and whether the pass under way was probed
        self._buffers: Buffers | None = None  # until the end of the pass that was probed

    def begin(self, clipper: Clipper, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> None:
        if self._buffers is not None:  # the forward pass after the probe failed
            self._buffers, self._due = None, True
        if not self._due:
            self._writes.refuse_unseen()  # also for whoever caught the error of the pass that wrote
        self._due |= self._modes.new()
        self._now = self._due and batch > 1 and clipper.may_probe
        if self._now:
            self._buffers = probe(clipper, args, kwargs, batch)
            self._modes.probed()
            self._due = False
        self._writes.begin()

    def end(self) -> None:
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
        self._writes.begin_quietly()

    def end_quietly(self) -> None:
        self._writes.end_quietly()
        if not self._due:
            self._writes.refuse_unseen()


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
            (f"{path}.{name}" if path else name, module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._norms = [(path, m) for path, m in model.named_modules() if isinstance(m, _NormBase)]
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
    return (0, 0) if b is None or b.is_inference() else (id(b), b._version)
