"""Where every trainable tensor sits in the noise field: by name and logical index, never by device, shard or order."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Names that wrappers (DDP, torch.compile, FSDP, activation checkpointing) insert into parameter names.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

GROUP_BLOCKS = 32  #: ChaCha20 blocks whose words are interleaved, one for each lane of a GPU's warp
GROUP_ELEMENTS = 16 * GROUP_BLOCKS  #: elements of one group: one 32-bit word an element


class LayoutError(ValueError):
    """Tensors that do not fit the noise field's layout; the message names the first that differs."""


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    >>> clean_name("module._orig_mod.encoder.module.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True)
class Entry:
    """One tensor: its shape and the first of the ChaCha20 blocks that are its own."""

    name: str
    shape: tuple[int, ...]
    first_block: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def groups(self) -> int:
        return -(-self.elements // GROUP_ELEMENTS)


@dataclass(frozen=True)
class Layout:
    """The trainable tensors of a model, sorted by name, each starting on a ChaCha20 block of its own.

    Public. Build it with ``Layout.of({"weight": (10, 3), …})`` or ``Layout.of_parameters(model.named_parameters())``.
    Elements are counted row-major in the *logical* tensor, so memory format, sharding and parameter groups change
    nothing.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """The layout of tensors given as name -> shape."""
        cleaned: dict[str, tuple[int, ...]] = {}
        origin: dict[str, str] = {}
        for name, shape in shapes.items():
            short = clean_name(name)
            if not short:
                raise LayoutError(
                    f"the name {name!r} holds nothing but wrapper names; give the tensor a name of its own"
                )
            if short in cleaned:
                raise LayoutError(
                    f"{name!r} and {origin[short]!r} are both called {short!r} once wrapper names "
                    f"({', '.join(sorted(WRAPPERS))}) are taken out; rename one of the modules"
                )
            size = tuple(int(s) for s in shape)
            if any(s < 0 for s in size):
                raise LayoutError(f"{name!r} has shape {size}; sizes must not be negative")
            cleaned[short], origin[short] = size, name
        if not cleaned:
            raise LayoutError("there is no tensor to add noise to; are all parameters frozen?")
        entries, block = [], 0
        for name in sorted(cleaned):
            entry = Entry(name, cleaned[name], block)
            entries.append(entry)
            block += GROUP_BLOCKS * entry.groups
        return cls(tuple(entries))

    @classmethod
    def of_parameters(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Layout:
        """The layout of a model's trainable parameters, as ``model.named_parameters()`` gives them."""
        return cls.of({name: tuple(p.shape) for name, p in named if p.requires_grad})

    @cached_property
    def digest(self) -> str:
        """A public name for the layout (SHA-256 over names and shapes); it belongs in every checkpoint."""
        text = json.dumps(["lambdacgd-layout-1", [[e.name, list(e.shape)] for e in self.entries]], ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @property
    def elements(self) -> int:
        """How many numbers get noise: the model's trainable dimension d."""
        return sum(entry.elements for entry in self.entries)
