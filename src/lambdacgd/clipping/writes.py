"""What the probe of one forward pass has not seen, told cheaply enough for every pass: other modes, later writes.

The probe sees whether examples stay apart, and compares what a forward pass writes into buffers with what it would
write for other examples. A layer may mix them in train mode only, and a buffer may be written for the first time later
on (after a warm-up, in evaluation).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lambdacgd.clipping.errors import ClippingError

MOST_MODES = 32
"""combinations of modes that are probed: a model that draws its own anew for every batch is not probed for ever"""


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

    def refuse_unseen(self) -> None:
        """After a forward pass without gradients, which no probe looks at. Counters tell nothing about examples."""
        held = {name: buffers.get(local) for name, buffers, local in self._places}
        for name in self.since():
            found = held[name]
            if found is not None and found.is_floating_point():
                raise _quiet(f"wrote the buffer '{name}', which those with gradients leave alone")

    def _versions(self) -> list[tuple[int, int]]:
        return [_version(buffers.get(name)) for _, buffers, name in self._places]


def _quiet(what: str) -> ClippingError:
    return ClippingError(
        f"a forward pass without gradients {what}: what it holds of examples would leave the model with its "
        "state_dict, without clipping or noise. Call the model in eval mode there, or detach first if the data is "
        "public."
    )


def _version(b: Tensor | None) -> tuple[int, int]:
    return (0, 0) if b is None or b.is_inference() else (id(b), b._version)
