"""What is asked of the noise field, checked before any number is written.

Three questions, in this order: where does every trainable tensor sit in the field (``Layout``: by name and logical
index, never by device, shard or order); which memory gets which part of it (``Job``); and which combination of the
field's steps is added at a step of the run (``Combination``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lambdacgd.errors import integer, number

#: Names that wrappers (DDP, torch.compile, FSDP, activation checkpointing) insert into parameter names.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

FORMAT = "2.1"  #: of the noise: which number a key gives to which element, and what is released of sum and noise
FINENESS = 10  #: sum plus noise is released in multiples of Δ, at least 2⁻¹⁰ of the noise's standard deviation
GROUP_BLOCKS = 32  #: ChaCha20 blocks whose words are interleaved, one for each lane of a GPU's warp
PAIRS = 6  #: of normals from one block: 80 bits are a pair's own, and the last word is shared by all six
GROUP_ELEMENTS = 2 * PAIRS * GROUP_BLOCKS  #: elements of one group
RARE = 1 << 17  #: a radius whose own word is within 2¹⁷ of 2³¹, so u near 0 or 1, takes more bits, from a block …
MORE = 1 << 31  #: … of its own: its index has this bit of state word 13 set, and the pair's number in the three below


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
        if not shapes:
            raise LayoutError("there is no tensor to add noise to; are all parameters frozen?")
        given: dict[str, str] = {}  # names, by what is left of them without wrapper names
        for name in shapes:
            short = clean_name(name)
            if not short:
                raise LayoutError(f"the name {name!r} holds nothing but wrapper names; give the tensor one of its own")
            if short in given:
                raise LayoutError(f"{name!r} and {given[short]!r} are both called {short!r}: rename one of the modules")
            given[short] = name
        entries, block = [], 0
        for short, name in sorted(given.items()):
            entry = Entry(short, tuple(int(size) for size in shapes[name]), block)
            if min(entry.shape, default=0) < 0:
                raise LayoutError(f"{name!r} has shape {entry.shape}; sizes must not be negative")
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


# --- Which memory gets which part of the field ------------------------------------------------------------------------

Tensors = Mapping[str, torch.Tensor]  #: by name
Offsets = Mapping[str, int] | None  #: of shards, by name: the row-major index of the first element in the whole tensor


@dataclass(frozen=True, eq=False)
class Job:
    """Noise for one tensor, which holds elements ``offset`` … of the layout's ``entry``."""

    entry: Entry
    tensor: torch.Tensor
    offset: int


def match(layout: Layout, sums: Tensors, *, offsets: Offsets = None) -> list[Job]:
    """The jobs for these tensors, in the layout's order; an error, before anything is written, if they do not fit."""
    tensors = {clean_name(name): tensor for name, tensor in sums.items()}
    if len(tensors) != len(sums):
        raise LayoutError("two of the sums have the same name once wrapper names are taken out")
    starts = {} if offsets is None else {clean_name(name): offset for name, offset in offsets.items()}
    expected = layout.by_name
    if missing := expected.keys() - tensors.keys():
        raise LayoutError(f"sums lack {min(missing)!r} ({len(missing)} missing): every tensor of the layout must come")
    for given, what in ((tensors, "sums"), (starts, "offsets")):
        if unknown := given.keys() - expected.keys():
            raise LayoutError(f"{what} hold {min(unknown)!r}, which is not in the layout ({len(unknown)} unknown)")
    for entry in layout.entries:
        _check(entry, tensors[entry.name], starts.get(entry.name))
    return [Job(entry, tensors[entry.name], starts.get(entry.name, 0)) for entry in layout.entries]


def _check(entry: Entry, tensor: torch.Tensor, offset: int | None) -> None:
    name = entry.name
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"sum of {name!r} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if hasattr(tensor, "to_local"):
        raise TypeError(f"sum of {name!r} is a DTensor; pass its to_local() and its place in offsets={{{name!r}: …}}")
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"sum of {name!r} has dtype {tensor.dtype}; allowed are torch.float32 and torch.float64")
    if tensor.layout != torch.strided:
        raise TypeError(f"sum of {name!r} is sparse ({tensor.layout}); noise is dense: call to_dense() first")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise LayoutError(f"sum of {name!r} is an expanded view whose elements share memory; call contiguous() first")
    if offset is None:
        if tuple(tensor.shape) != entry.shape:
            shapes = f"{tuple(tensor.shape)}, the layout {entry.shape}"
            raise LayoutError(f"sum of {name!r} has shape {shapes}; for a shard give its first index in offsets")
    elif isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= entry.elements - tensor.numel():
        shard = f"a shard of {tensor.numel()} elements at offset {offset!r}"
        raise LayoutError(f"{shard} does not fit into {name!r}, which has {entry.elements}")


# --- What is added at a step ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combination:
    """What is added at step t: ζσ·d_t·Σ_{j<p} a_j z[t−j]. z before the run or before a restart counts as zero.

    Public numbers only. ``coefficients`` are a_0 … a_{p−1}; ``scale`` is ζσ; ``column_scales`` are d_1 … d_period.
    With ``restart_every`` = b the noise starts anew at steps 1, b+1, 2b+1, …: the correlation never crosses such a
    boundary, and column scales are indexed from it. ``fineness`` says on which lattice sum plus noise is released.
    """

    coefficients: tuple[float, ...]
    scale: float
    horizon: int
    column_scales: tuple[float, ...] | None = None
    restart_every: int | None = None
    fineness: int = FINENESS

    def __post_init__(self) -> None:
        for name, least, most in (("horizon", 1, 1 << 62), ("restart_every", 1, 1 << 62), ("fineness", 0, 40)):
            value = getattr(self, name)
            if value is not None or name != "restart_every":  # NumPy's integers are no kernel arguments
                object.__setattr__(self, name, integer(name, value, minimum=least, maximum=most))
        if (scales := self.column_scales) is not None:
            if len(scales) < (needed := min(self.period, self.horizon)):
                raise ValueError(f"there are {len(scales)} column scales for {needed} steps; give one a step")
            if not all(math.isfinite(d) and d > 0 for d in scales):
                raise ValueError("column scales must be positive and finite")
        for size in (self.scale,) if scales is None else (self.scale * min(scales), self.scale * max(scales)):
            if self.scale and not 2.0**-100 < size < 2.0**100:  # below, a step's noise and lattice could vanish
                raise ValueError(f"a step's noise is {size!r}; it must lie between 2^-100 and 2^100")

    @property
    def period(self) -> int:
        return self.restart_every or self.horizon

    def since(self, step: int) -> int:
        """Steps since the last restart, this one included: t for a run without restarts."""
        return (step - 1) % self.period + 1

    def bands(self, step: int) -> list[tuple[int, float]]:
        """The (field step, coefficient) pairs of a step."""
        return [(step - j, a) for j, a in enumerate(self.coefficients[: self.since(step)])]

    def scale_at(self, step: int) -> float:
        return self.scale * (1.0 if self.column_scales is None else self.column_scales[self.since(step) - 1])

    def lattice_at(self, step: int) -> float:
        """M = 1.5·2⁵²Δ: (v + M) − M is v rounded to a multiple of Δ, the least power of two > 2^−fineness·scale.

        Where |v| ≥ 2⁵¹Δ, the float64 sum is coarser than Δ, but the function stays monotone. Without noise M is 0.
        """
        scale = self.scale_at(step)
        return 0.0 if scale == 0 else math.ldexp(1.5, math.frexp(scale)[1] + 52 - self.fineness)


def combined_scale(sigma: float, clip: float) -> float:
    """ζσ, rounded up, so that no product of σ, ζ and a column scale falls below what it should be."""
    sigma = number("sigma", sigma, above=0, include=(0,))
    clip = number("clip", clip, above=0, include=() if sigma else (math.inf,))
    return sigma * clip * (1 + 2.0**-50) if sigma else 0.0
