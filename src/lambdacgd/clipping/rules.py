"""What a layer's rule is made of: seeing inputs and output gradients without weight gradients being computed.

A *rule* is called in place of a module's forward, as ``rule(layer, *args, **kwargs)``. It runs the original with its
parameters hidden from autograd (``layer.hidden(...)``), so that the backward pass computes input gradients only, and
returns the output through a `tap`: when the output's gradient arrives, the rule's recorder turns it and the saved input
into records. Saved tensors go through ``save_for_backward``, so non-reentrant checkpointing recomputes them like any
other activation. A parameter used in any other way receives an ordinary gradient, which is an error (see `clipper`).

`register` adds a rule for a class of layers. It applies to that class and to those subclasses that keep the class's
``forward`` and what it calls (``_conv_forward``, say). One file under `layers` holds the rules of a family.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lambdacgd.clipping.backward import BackwardPass, Pass, Record
from lambdacgd.clipping.bounds import without_autocast
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import backward_task, own_parameters, quick_apply, version

Rule = Callable[..., Any]
Recorder = Callable[..., Iterable[Record]]

# --- which rule for which layer ---------------------------------------------------------------------------------------

RULES: dict[type[nn.Module], Rule] = {}
_NAMED: dict[str, Rule] = {}
_BESIDES = ("reset_parameters", "extra_repr")  #: methods of a layer that its forward does not call


def register(
    *kinds: type[nn.Module] | str, finds_batch: bool = False, pointwise: bool = False
) -> Callable[[Rule], Rule]:
    """Use the decorated rule for these classes of layers, or names of classes that need not be importable.

    `clipping.register`, which tries a rule before it keeps it, says what ``finds_batch`` and ``pointwise`` mean.
    """

    def keep(rule: Rule) -> Rule:
        rule.finds_batch, rule.pointwise = finds_batch, pointwise  # type: ignore[attr-defined]
        for kind in kinds:
            (_NAMED if isinstance(kind, str) else RULES)[kind] = rule  # type: ignore[index]
        return rule

    return keep


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for a module, or None: then its parameters are followed one by one (`batch_free`)."""
    kind = type(module)
    if nn.utils.parametrize.is_parametrized(module) or any(
        name not in own_parameters(module) and isinstance(getattr(module, name, None), Tensor)
        for name in ("weight", "bias")
    ):
        return None  # what is computed from parameters is no parameter
    for base in kind.__mro__:
        rule = RULES.get(base) or _NAMED.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule if _computes_as(base, module) else None
    return None


def _computes_as(base: type[nn.Module], module: nn.Module) -> bool:
    """Whether no subclass, nor the module itself, has a ``forward`` of its own, or a method that ``forward`` calls."""
    line = type(module).__mro__
    changed = set(vars(module)).union(*(vars(c) for c in line[: line.index(base)]))
    family = set().union(*(vars(c) for c in base.__mro__ if c not in (nn.Module, object)))
    return not any(n for n in changed & family if not n.startswith("__") and n not in _BESIDES)


# --- the forward pass -------------------------------------------------------------------------------------------------


MAJOR, MINOR = "major", "minor"
"""how rows are put together where every example has several: all of one example, then all of the next; or the first of
every example, then the second of every example (time before batch)"""

_FREE, _BATCH, _FOLDED, _SECOND = "free", "batch", "folded", "second"


class BatchSizes:
    """Which tensors have the batch first: learnt from batches of different sizes, never from one size alone.

    A position table of 64 rows looks like a batch of 64 examples whenever the numbers agree. So each place in a model
    where the question arises (a module, an operation on a parameter; told apart by how often it was asked in this
    forward pass) keeps what its first tensor looked like, and is what that and a tensor of a batch of another size both
    look like. The probe gives it two sizes to begin with (``learning``), by which it also finds first dimensions that
    are a multiple of the batch (examples folded with frames, windows or tokens) and batches in dimension 1.
    """

    def __init__(self) -> None:
        self.batch, self.learning = 0, False
        self._uses: Counter[Hashable] = Counter()
        self._first: dict[tuple[Hashable, int], tuple[int, list[tuple[str, int]]]] = {}  # (batch, what it looked like)
        self._known: dict[tuple[Hashable, int], str] = {}
        self._kinds: dict[Hashable, set[str]] = {}  # of all uses of a place

    def forget(self) -> None:
        """What was learnt was learnt from sizes that something else had, too."""
        for known in (self._uses, self._first, self._known, self._kinds):
            known.clear()

    def start(self, batch: int) -> None:
        """A forward pass over ``batch`` examples begins."""
        self.batch = batch
        self._uses.clear()

    def rows(self, place: Hashable, x: Tensor, *, second: bool = False) -> int:
        """How many rows of ``x`` an example has: 0 if the batch is not in its first dimension.

        Args:
            place: Where the question arises.
            x: A tensor.
            second: Whether the batch may be dimension 1; then the answer is −1.
        """
        if x.dim() == 0:
            return 0
        batch, first = self.batch, x.shape[0]
        if batch == 1 or backward_task() != -1:  # a recomputation delivers nothing; for one example any answer is right
            kinds = self._kinds.get(place, ())
            if second and _SECOND in kinds and x.dim() > 1 and x.shape[1] == batch:
                return -1
            return first // batch if first == batch or (_FOLDED in kinds and first % batch == 0) else 0
        key = (place, self._uses[place])
        self._uses[place] += 1
        known = self._known.get(key) or self._learn(key, x)
        if known == _FREE:
            return 0
        if known == _SECOND:
            return -1 if second else 0
        if first == batch or (known == _FOLDED and first % batch == 0):
            return first // batch
        raise ClippingError(f"{place}: the batch was first in earlier batches, now {first} is, for {batch} examples.")

    def _learn(self, key: tuple[Hashable, int], x: Tensor) -> str:
        """What this place is, if batches of two sizes have come by it; else what it looks like."""
        looks = self._looks(x)
        size, then = self._first.setdefault(key, (self.batch, looks))
        both = [kind for kind in looks if kind in then]
        if size != self.batch or (not both and not self.learning):
            known = self._known[key] = both[0][0] if both else _FREE
            self._kinds.setdefault(key[0], set()).add(known)
            return known
        if not self.learning and _FREE in self._kinds.get(key[0], ()):
            raise ClippingError(f"{key[0]}: cannot tell whether {tuple(x.shape)} has the batch first. Run other sizes.")
        return looks[0][0] if looks else _FREE

    def _looks(self, x: Tensor) -> list[tuple[str, int]]:
        """What a tensor may be, with a number that does not change with the size of the batch."""
        batch, first = self.batch, x.shape[0]
        looks = [(_BATCH, 1)] if first == batch else []
        if self.learning and first and first != batch and first % batch == 0:
            looks.append((_FOLDED, first // batch))
        if self.learning and x.dim() > 1 and x.shape[1] == batch:
            looks.append((_SECOND, first))
        return looks


class ForwardPass:
    """The model's forward pass under way: what the rules of all layers ask about it.

    Attributes:
        batch: The number of examples.
        now: What backward passes are to know of it.
        running: Whether the model's own forward runs now.
        sharded: Whether parameters are gathered only while their layer runs (FSDP2).
        watch: What a pass of the probe shows; None in all others.
    """

    def __init__(self) -> None:
        self.batch, self.now = 0, Pass()
        self.watch: Any = None
        self.running = self.sharded = False
        self.sizes = BatchSizes()
        self.cast_weights: dict[Layer, tuple[Tensor, Tensor | None]] = {}
        self._last_cast: tuple[Tensor, int, Tensor] | None = None

    def begin(self) -> None:
        self.now, self.running = Pass(self.now.number + 1), True

    def look_at(self, batch: int) -> None:
        """Layers now see ``batch`` examples."""
        self.batch = batch
        self.sizes.start(batch)

    def leave(self) -> None:
        """Also where the forward pass raised: what layers do afterwards is outside it."""
        self.cast_weights, self._last_cast = {}, None
        if backward_task() == -1:
            self.running = False

    def cast_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in autocast's type; query, key and value layers, which share their input, share the copy too."""
        last = self._last_cast
        if last is not None and last[0] is x and last[1] == version(x) and last[2].dtype == dtype:
            return last[2]
        copy = x.to(dtype)
        if copy is not x:
            self._last_cast = (x, version(x), copy)
        return copy


def mark(value: Any) -> tuple[int, int]:
    """What changes when another tensor takes the place of this one, or somebody writes into it."""
    return (id(value), version(value)) if isinstance(value, Tensor) and not value.is_inference() else (0, 0)


@contextlib.contextmanager
def exchanged(places: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Other tensors in the places of parameters; these come back at the end."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for slots, name, value in places:
            kept.append((slots, name, slots[name]))
            slots[name] = value
        yield
    finally:
        for slots, name, value in reversed(kept):
            slots[name] = value


class Slot(NamedTuple):
    """A parameter, its name in the model, and where it lies: in which dictionary, under which name."""

    within: dict[str, Any]
    local: str
    name: str
    value: Tensor


@dataclass(eq=False)
class Layer:
    """A module that owns trainable parameters.

    Attributes:
        path: Its name in the model.
        names: Its own names of its parameters, and the model's.
        original: Its own forward.
        batched: Whether the input it runs on now has the batch in a dimension that its rule knows.
        layout: How rows are put together where an example has several; None: nobody has seen it.
        elsewhere: The model's names of those that other modules read, too.
    """

    module: nn.Module
    path: str
    names: dict[str, str]
    original: Callable[..., Any]
    forward_pass: ForwardPass
    backward_pass: BackwardPass
    slots: list[Slot] = field(default_factory=list)
    batched: bool = False
    layout: str | None = None
    elsewhere: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"module '{self.path}'" if self.path else "the model itself"

    def is_batched(self, x: Tensor) -> bool:
        """Whether ``x``, an input of this module, has the batch first (examples may have several rows)."""
        batched = self.forward_pass.sizes.rows(self, x) > 0
        if batched:
            self.compare(x)
        return batched

    def compare(self, x: Tensor, *, free: bool = False) -> None:
        """In a pass of the probe: compare the rows of ``x``, which records are made of. The output need not show what
        they hold: a parameter may be zero still. ``free``: ``x`` has no batch, so it must hold nothing of examples.
        """
        if self.forward_pass.watch is not None:
            self.forward_pass.watch.add(self.path, "input", x.unsqueeze(0) if free else x, free=free)

    def hidden(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward with this module's own parameters hidden from autograd."""
        with self.hiding():
            return self.original(*args, **kwargs)

    def hiding(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts, autograd does not see this module's own parameters."""
        own: dict[str, Any] = own_parameters(self.module)
        return exchanged((own, name, own[name].detach()) for name in self.names if name in own)

    def refuse(self, why: str) -> ClippingError:
        return ClippingError(f"{self} ({type(self.module).__name__}): {why}")


# --- taps -------------------------------------------------------------------------------------------------------------


class Call:
    """One use of a layer in one forward pass; delivers records once, when the output's gradient arrives."""

    __slots__ = ("batch", "delivered", "forward", "layer", "number", "recorder", "watch", "within_backward")

    def __init__(self, layer: Layer, recorder: Recorder) -> None:
        self.layer, self.recorder = layer, recorder
        self.batch, self.forward = layer.forward_pass.batch, layer.forward_pass.now
        self.within_backward = backward_task() != -1
        self.delivered = False
        self.watch = layer.forward_pass.watch  # what the probe's passes leave behind is never added to a sum
        self.number = 0 if self.watch is None else self.watch.number(layer.path, "call")

    def deliver(self, gradient: Tensor, *saved: Tensor) -> None:
        if self.watch is not None:
            self.watch.add(self.layer.path, self.watch.kind, gradient, self.number)
            return
        if torch.is_grad_enabled():
            raise self.layer.refuse("backward(create_graph=True) is not supported: clipped sums have no derivative.")
        if not self.layer.backward_pass.gathers():
            return
        if self.delivered:
            raise self.layer.refuse("a second backward pass went through a forward pass. Add losses up, call it once.")
        if self.within_backward:
            raise self.layer.refuse(
                "its forward ran inside a backward pass: reentrant gradient checkpointing splits an example's gradient "
                "into parts that would be clipped one by one. Use torch.utils.checkpoint(..., use_reentrant=False)."
            )
        self.delivered = True
        without_autocast(self._deliver, gradient, *saved)

    def _deliver(self, gradient: Tensor, *saved: Tensor) -> None:
        backward_pass, refuse = self.layer.backward_pass, self.layer.refuse
        examples = self.batch // backward_pass.views
        if backward_pass.looking is not None:
            backward_pass.low |= gradient.dtype in (torch.bfloat16, torch.float16)
        backward_pass.begin(examples, self.forward, refuse)
        for record in self.recorder(gradient, *saved):
            backward_pass.receive(record if record.examples == examples else self._by_example(record, examples), refuse)

    def _by_example(self, record: Record, examples: int) -> Record:
        """A record with one row per example, of one with several: frames or steps of it, then its views."""
        if record.examples != self.batch:
            if record.examples % self.batch or self.layer.layout is None:
                raise self.layer.refuse(
                    f"its input has {record.examples} rows for {self.batch} examples, and which rows are whose could "
                    "not be seen from the first batches. Keep the batch as the first dimension of its input."
                )
            record = record.folded(self.batch, minor=self.layer.layout == MINOR)
        return record if self.batch == examples else record.folded(examples, minor=False)


class Tap(torch.autograd.Function):
    """The identity on a layer's output; its backward delivers. ``mark_dirty`` avoids a view, so in-place ReLUs work."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, call: Call, *saved: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*saved)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        ctx.call.deliver(gradient, *saved)
        return (gradient, None, None, *([None] * len(saved)))


class FusedTap(torch.autograd.Function):
    """A layer's operation and its tap as one node instead of two, for models that are bound by the host.

    ``forward(x, weight)`` gives the output and what to keep: x, weight, and what else ``backward(gradient, x, weight,
    *kept)`` needs for the gradient of x. The recorder is given x and what else was kept.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, forward: Any, backward: Any, call: Call) -> Tensor:
        y, x, weight, *kept = forward(x, weight)
        ctx.operation, ctx.call = backward, call
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved_tensors
        below = None if weight is None else ctx.operation(gradient, x, weight, *kept)
        ctx.call.deliver(gradient, x, *kept)
        return None, below, None, None, None, None


def tap(layer: Layer, output: Tensor, recorder: Recorder, *saved: Tensor) -> Tensor:
    """Deliver ``recorder(gradient of output, *saved)`` when the backward pass reaches ``output``."""
    if not isinstance(output, Tensor):
        raise layer.refuse(f"its forward returned {type(output).__name__}; a tensor is needed to follow its gradient.")
    if any(output is s for s in saved):
        output = output.clone()
    saved = tuple(s.detach() for s in saved)
    return apply_tap(output, layer.backward_pass.anchor, Call(layer, recorder), *saved)


def fused_tap(x: Tensor, weight: Tensor, forward: Any, backward: Any, call: Call) -> Tensor:
    """A layer's operation as one node; see `FusedTap`. ``weight`` is detached."""
    return _apply_fused(call.layer.backward_pass.anchor, x, weight, forward, backward, call)


def computed(m: nn.Module) -> bool:
    """Whether a layer's weight or bias is no parameter of its own but made from others (pruning, weight drop): autograd
    has to see it then.
    """
    return "weight" not in own_parameters(m) or "bias" not in own_parameters(m)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast runs products in on ``x``'s device; None without autocast."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


apply_tap, _apply_fused = quick_apply(Tap), quick_apply(FusedTap)
