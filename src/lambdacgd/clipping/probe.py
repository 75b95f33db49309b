"""The probe: does every example go through the model alone, and does nothing of it stay behind?

A forward pass that is probed is preceded by others over a few examples of its batch: all of them, and all but one. Then
*values* are compared. An example's rows in the output of every layer, in the gradient that comes back to it, and in the
model's outputs must be the same whether another example is there or not; what the forward pass writes (buffers, plain
attributes of modules) must be, too, since it would leave the model without clipping or noise. The same passes show
which dimensions hold the examples (`rules.BatchSizes`), how rows are put together where one example has several
(`Layer.layout`), and which parameters are read outside their own module (`Layer.elsewhere`).

Random numbers are the same in all passes, and the same for all examples (`SameNoise`): dropout is no difference.
Rounding is one: products of other sizes are added up in another order. `tolerance_of` says what passes for it.

Something may begin later: a warm-up, mixup every other batch, another mode of a module. So a probe is due at forward
passes 1, 2, 4, 8, …, in modes that were not probed (`Modes`), and after a buffer was written that no probe has seen
written (`Writes`). All other passes are only asked whether they wrote anything.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping.backward import BackwardPass
from lambdacgd.clipping.batch_free import check_output, plain, standing_in
from lambdacgd.clipping.rules import MAJOR, MINOR, ForwardPass, Layer
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import (
    AnyNormWithStatistics,
    DispatchMode,
    non_persistent_buffers,
    own_buffers,
    tree_map,
    version,
    versions,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[nn.Module, Any], Tensor]  #: loss(model, batch), for a batch of any number of examples
MOST_MODES = 32
"""combinations of modes that are probed: a model that draws its own anew for every batch is not probed for ever"""
_SIZES = (5, 6, 7, 8, 4, 3)  #: examples to probe with; as long as no other dimension of the model has that size
_SETS = 3  #: numbers of examples that are tried until one tells the batch from other dimensions
_TURNS = 3  #: random numbers that are tried until every layer has been seen
_STEPS, _EACH = 512, 32  #: of a row, how many steps and how many numbers of each are compared, with their norm
_WALKED = 1 << 12  #: operations behind a tensor that are looked at for parameters


class Probe:
    """``begin`` and ``end`` of every forward pass with gradients, ``begin_quietly`` and ``end_quietly`` of others.

    Attributes:
        enabled: Whether anything is looked at.
        allowed: Whether this batch may be probed: where ranks compute together (FSDP2), all must probe at the same one.
        views: Rows of every example in the model's arguments, one view of all examples after another.
        layers: The layers that are clipped.
        read_elsewhere: Those whose parameters other modules read, too.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_pass: ForwardPass,
        anchor: Tensor,
        count: Callable[[tuple[Any, ...], dict[str, Any]], int],
        *,
        enabled: bool,
        mean: bool,
    ) -> None:
        """``mean``: whether a loss that the model returns is the mean over examples."""
        self.enabled, self.allowed, self.views = enabled, True, 1
        self.layers: list[Layer] = []
        self.read_elsewhere: list[Layer] = []
        self._model, self._forward_pass, self._anchor, self._count = model, forward_pass, anchor, count
        self._mean = mean
        self._modes, self._writes = Modes(model), Writes(model)
        self._due, self._now = True, False  # whether a probe is, and whether the pass under way was probed
        self._passes, self._next = 0, 1  # forward passes so far, and the one that is probed next
        self._looked = False  # whether any probe has come to its end
        self._turn = 0  # which random numbers it is looked at with
        self._shapes: dict[int, list[torch.Size]] = {}  # of the model's outputs, by the number of examples
        self._suspects: dict[bytes, dict[int, str]] = {}  # by mode: outputs that no gradient may come from, and why

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> None:
        """Before a forward pass with gradients: probe if it is due.

        Raises:
            ClippingError: The model mixes examples, or a forward pass writes what must not leave the model.
        """
        if not self.enabled:
            return
        self._passes += 1
        if not self._due:
            self._writes.refuse_unseen()  # also for whoever caught the error of the pass that wrote
        again = self._passes >= self._next and not self._forward_pass.sharded  # of shards no values are compared
        self._due |= self._modes.new() or again
        capturing = self._anchor.is_cuda and torch.cuda.is_current_stream_capturing()
        self._now = self._due and batch > 1 and self.allowed and not capturing
        if self._now:
            while self._next <= self._passes:
                self._next *= 2
            try:
                self._look((args, kwargs), batch)
            except _Failed as failed:
                if not self._looked:  # it has worked before: if this batch is at fault, the pass itself will say so
                    raise failed.explained() from failed.error
            self._modes.probed()
            self._due = False
        self._writes.begin(self._forward_pass.sharded)

    def end(self, output: Any) -> None:
        """After a forward pass with gradients.

        Raises:
            ClippingError: The pass wrote a parameter, or what it wrote was refused before.
        """
        if not self.enabled:
            return
        self._writes.refuse_parameters()
        suspects = self._suspects.get(self._modes.last)
        for place, x in enumerate(tensors_in(output)) if suspects else ():
            if suspects and place in suspects and x.requires_grad:
                x.register_hook(_refuse_gradient(suspects[place]))
        if not self._now:
            self._due |= bool(self._writes.since())  # compared in the next forward pass
            return
        self._due = True  # where it is refused, it stays refused
        self._writes.compared()
        self._due = False

    def begin_quietly(self) -> None:
        """Before a forward pass without gradients."""
        if self.enabled:
            self._writes.begin_quietly(self._forward_pass.sharded)

    def end_quietly(self) -> None:
        """After a forward pass without gradients."""
        if self.enabled:
            self._writes.refuse_parameters()
            self._writes.end_quietly()
            if not self._due:
                self._writes.refuse_unseen()

    # --- the passes ---------------------------------------------------------------------------------------------------

    def _look(self, arguments: Arguments, batch: int) -> None:
        """Run a few examples together, and without each of them; compare, and leave everything as it was."""
        sets = self._chosen(arguments, batch)
        if take_examples(arguments, batch, sets[0][0], self.views, self._count) is None:
            return  # arguments that cannot be cut: the sizes of later batches have to do
        noise, state = SameNoise(), State(self._model)
        devices = [self._anchor.device] if self._anchor.is_cuda else []
        self._forward_pass.sizes.learning, self._shapes = True, {}
        try:
            # Checkpointing around the model keeps tensors by hooks of its own, which the probe's are not for. Detached:
            # outputs that their own nodes keep would never be freed.
            with same_numbers(devices) as again, torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):

                def run(rows: Sequence[int], stage: str, *, apart: bool = False) -> Seen:
                    again(self._turn)
                    try:
                        with noise.passing(stage):
                            return self._run(arguments, batch, rows, apart=apart)
                    finally:
                        state.take_back()

                self._turn = 0
                if self._forward_pass.sharded:  # a pass gathers parameters: as many on every rank, for sizes
                    self._learn(run, sets[0][0], rounds=1)
                    self._looked = True
                    return
                every = self._learn_sizes(run, sets)
                for self._turn in range(_TURNS):
                    sure = True
                    for chosen in every:
                        whole, written = run(chosen, "keep"), state.last
                        for j in range(len(chosen)):
                            rest = [c for i, c in enumerate(chosen) if i != j]
                            fewer = run(rest, "repeat")
                            state.compare(written, state.last, whole.tolerance)
                            if noise.repeats and self._compare(whole, fewer, j):  # some outputs mix: which?
                                self._compare(run(chosen, "keep", apart=True), run(rest, "repeat", apart=True), j)
                        sure &= self._settle(whole)
                    if sure:
                        break
                self._looked = True
                self.read_elsewhere = [layer for layer in self.layers if layer.elsewhere]
        finally:
            self._forward_pass.sizes.learning, self._forward_pass.watch = False, None

    def _learn_sizes(self, run: Callable[..., Seen], sets: list[list[list[int]]]) -> list[list[int]]:
        """Learn from the first sets of examples whose sizes do not stand in the way."""
        for attempt, every in enumerate(sets):
            try:
                self._learn(run, every[0], rounds=1 if self._looked else 2)
                return every
            except ClippingError:
                if self._looked or attempt == len(sets) - 1:
                    raise
                self._forward_pass.sizes.forget()
                self._shapes = {}
        raise AssertionError

    def _learn(self, run: Callable[..., Seen], chosen: Sequence[int], *, rounds: int) -> None:
        """Passes of two sizes, until all places know whether the batch is their first dimension.

        A table with as many rows as there are examples looks like a batch until a pass of another size has come by it.
        """
        failed: ClippingError | None = None
        while rounds > 0:
            failed, rounds = None, rounds - 1
            for rows in (chosen, chosen[1:]):
                try:
                    strays = run(rows, "shapes").strays
                except ClippingError as error:
                    failed, strays = error, self._forward_pass.watch.strays
                for layer in self.layers if strays else ():
                    new = {local for local, name in layer.names.items() if name in strays} - layer.elsewhere
                    layer.elsewhere |= new
                    rounds = max(rounds, 2) if new else rounds  # what they take part in is a place, too
        if failed is not None:
            raise failed

    def _run(self, arguments: Arguments, batch: int, rows: Sequence[int], *, apart: bool) -> Seen:
        """One forward pass over some examples, and backward passes from its outputs, together or each apart."""
        taken = take_examples(arguments, batch, rows, self.views, self._count)
        assert taken is not None
        forward_pass, count = self._forward_pass, len(rows)
        own = {name: p for layer in self.layers for name, p in layer.parameters.items()}
        seen = forward_pass.watch = Seen(count, {id(p): name for name, p in own.items()})
        forward_pass.look_at(count)
        try:
            with standing_in(self.layers):
                output = self._model.forward(*taken[0], **taken[1])
        except (ClippingError, torch.OutOfMemoryError):  # a batch too large says nothing about dimensions
            raise
        except Exception as error:  # whatever the user's forward raises
            raise _Failed(error, count, batch) from error
        check_output(output, count)
        outputs = list(tensors_in(output))
        self._shapes[count] = [x.shape for x in outputs]
        for place, x in enumerate(outputs):
            seen.outputs.append(sample(x if x.dim() else x.reshape(1)))
            seen.seconds.append(sample(x.flatten(0, 1)) if x.dim() > 1 and x.shape[1] == count else None)
            seen.tolerance = max(seen.tolerance, tolerance_of(x))
            if x.requires_grad and x.numel() == 1:
                seen.losses.add(place)
        if not forward_pass.sharded:  # whose gradients are gathered by hooks of a whole backward pass
            self._backward(seen, outputs, [1.0 + 0.1 * row for row in rows], own, apart=apart)
        return seen

    def _backward(
        self, seen: Seen, outputs: list[Tensor], weights: list[float], own: dict[str, Tensor], *, apart: bool
    ) -> None:
        """Gradients of outputs that have examples in them, and of losses that the model returns, each for itself."""
        other = next((shapes for count, shapes in self._shapes.items() if count != seen.count), [])
        together: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for place, x in enumerate(outputs):
            if not x.requires_grad or not x.numel():
                continue
            if place in seen.losses:
                vector: Tensor | None = torch.full_like(x, float(seen.count) if self._mean else 1.0)
            else:
                vector = _cotangent(x, other[place] if place < len(other) else x.shape, seen.count, weights)
            if vector is not None:
                kind = f"gradient of {place}" if apart or place in seen.losses else "gradient"
                together.setdefault(kind, []).append((x, vector))
        for seen.kind, pairs in together.items():
            roots, vectors = zip(*pairs, strict=True)
            try:
                found = torch.autograd.grad(
                    roots, [self._anchor, *own.values()], vectors, retain_graph=True, allow_unused=True
                )
            except (ClippingError, torch.OutOfMemoryError):
                raise
            except RuntimeError:  # what fails here fails in the user's own backward pass, and is better explained there
                continue
            seen.strays |= {name for name, g in zip(own, found[1:], strict=True) if g is not None}

    # --- what they show -----------------------------------------------------------------------------------------------

    def _compare(self, whole: Seen, fewer: Seen, left_out: int) -> bool:
        """All examples against all but one: what agrees in no layout of the rows depends on the one left out.

        Returns:
            Whether the gradients of all outputs together disagree: then each is to be looked at apart.

        Raises:
            ClippingError: The examples mix before they reach a layer.
        """
        layers = {layer.path: layer for layer in self.layers}
        mixing: dict[str, str] = {}
        for path, kind, x, y in _pairs(whole, fewer):
            layouts = (
                set() if y is None else layouts_of(x, y, whole.count, left_out, whole.tolerance, whole.floor(kind))
            )
            if not layouts and kind in ("input", "output"):
                raise layers[path].refuse(_MIXES.format(what=kind))
            if not layouts:
                mixing.setdefault(kind, str(layers[path].refuse(_MIXES.format(what="output gradient"))))
            elif kind == "input" or (kind == "gradient" and kind not in mixing):
                whole.layouts[path] = whole.layouts.get(path, {MAJOR, MINOR}) & layouts
        suspects = self._suspects.setdefault(self._modes.last, {})
        for place in range(min(len(whole.outputs), len(fewer.outputs))):
            if f"gradient of {place}" in mixing:
                suspects[place] = _LOSS if place in whole.losses else mixing[f"gradient of {place}"]
            elif place not in whole.losses and not self._alike(whole, fewer, place, left_out):
                suspects[place] = _OUTPUT
        return "gradient" in mixing

    def _alike(self, whole: Seen, fewer: Seen, place: int, left_out: int) -> bool:
        """Whether an output has the same rows for the same examples, or no examples in it."""
        x, y, floor = whole.outputs[place], fewer.outputs[place], _floor([whole.outputs[place]])
        if x.shape == y.shape and close(x, y, whole.tolerance, floor):
            return True
        if layouts_of(x, y, whole.count, left_out, whole.tolerance, floor):
            return True
        a, b = whole.seconds[place], fewer.seconds[place]
        return (
            a is not None and b is not None and MINOR in layouts_of(a, b, whole.count, left_out, whole.tolerance, floor)
        )

    def _settle(self, whole: Seen) -> bool:
        """Where an example has several rows, how they are put together is known now.

        Returns:
            Whether it is for all layers. It is not for one that no gradient came to: stochastic depth left it out.
        """
        sure, several = True, {path for (path, _, _), x in whole.rows.items() if x.shape[0] > whole.count}
        for layer in self.layers:
            layouts = whole.layouts.get(layer.path, set())
            if len(layouts) == 1:
                layer.layout = next(iter(layouts))
            else:
                sure &= layer.path not in several or layer.layout is not None
        return sure

    def _chosen(self, arguments: Arguments, batch: int) -> list[list[list[int]]]:
        """Sets of a few examples, those first whose number, and one less, no other dimension has.

        Of two examples each is taken twice in turn: a batch of one tells nothing.
        """
        if batch == 2:
            return [[[0, 1, 1], [0, 0, 1]]]
        dims = {d for p in self._model.parameters() for d in p.shape}
        dims |= {d for x in tensors_in(arguments) for d in x.shape[1 if x.shape[:1] == (batch * self.views,) else 0 :]}
        sizes = sorted((m for m in _SIZES if m <= batch), key=lambda m: sum(d in (m, m - 1) for d in dims))
        return [[list(range(m))] for m in sizes[:_SETS]]


class _Failed(Exception):
    """The user's forward raised on some examples of a batch."""

    def __init__(self, error: Exception, count: int, batch: int) -> None:
        super().__init__(str(error))
        self.error, self.count, self.batch = error, count, batch

    def explained(self) -> ClippingError:
        return ClippingError(
            f"the model's forward pass failed ({type(self.error).__name__}: {self.error}). It was run on {self.count} "
            f"examples of a batch of {self.batch}, to see whether they go through it one by one. If it fails on all "
            f"{self.batch} too, mend that; if not, start with a batch whose size no other dimension of the inputs has, "
            "or pass probe=False to clipping.attach and see to that yourself."
        )


_MIXES = (
    "the model mixes the examples of a batch, or changes their order (sorts them by length, say): its {what} for one "
    "example is not the same with and without another one. Row i of every layer's input must be example i's alone: no "
    "statistic of the batch, no neighbour; sort when the batch is put together."
)
_OUTPUT = (
    "the model mixes the examples of a batch: this output for one example is not the same with and without another "
    "one. Take every statistic within an example; if another part of the output is what you train on, leave this one "
    "out of the loss."
)
_LOSS = (
    "the loss that the model returns is not the declared mean or sum over examples: an example's gradient is not the "
    "same with and without another one (a mean over all tokens of a batch weighs long examples more; statistics over "
    "the batch mix examples). Compute the loss from the model's other outputs, averaged within each example first."
)


def _refuse_gradient(why: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        if gradient.any():
            raise ClippingError(why)

    return refuse


# --- through the loss -------------------------------------------------------------------------------------------------


def check_loss(
    model: nn.Module,
    backward_pass: BackwardPass,
    loss: Loss,
    items: Sequence[Any],
    collate: Callable[[list[Any]], Any],
    *,
    anchor: Tensor,
) -> None:
    """See `Clipper.check_loss`. Norms of per-example gradients are compared: padding changes the shapes of rows."""
    if len(items) < 2:
        return
    noise, state, count = SameNoise(), State(model), len(items)
    devices = [anchor.device] if anchor.is_cuda else []
    with same_numbers(devices) as again:
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
        batch = collate(copy.deepcopy(list(items)))
        if before != (random.getstate(), np.random.get_state()[1].tolist()):  # type: ignore[index]  # noqa: NPY002
            # Another reading would draw other numbers for the same examples: rows of this one are exchanged.
            items, collate = list(range(count)), partial(_rows_of, batch, count)

        def norms(some: Sequence[Any], stage: str) -> Tensor:
            again()
            backward_pass.looking = []
            try:
                if backward_pass.sharded:  # whose backward pass gathers: losses are compared where there is one each
                    with noise.passing(stage), torch.no_grad():
                        value = loss(model, collate(copy.deepcopy(list(some))))
                    return value.detach().double() if value.dim() == 1 else torch.ones(len(some)).double()
                with noise.passing(stage), torch.enable_grad():
                    value = loss(model, collate(copy.deepcopy(list(some))))  # some take labels out of the items
                    value.backward(torch.ones_like(value))
                if len(backward_pass.looking) != 1 or len(backward_pass.looking[0]) != len(some):
                    raise ClippingError(
                        f"the loss of {len(some)} examples ran the model on another number of them, or not at all: it "
                        "is called as loss(model, batch) and must call the model once."
                    )
                return backward_pass.looking[0].double()
            finally:
                backward_pass.looking = None
                backward_pass.reset()
                state.take_back()

        norms(items[:-1], "shapes")
        whole = norms(items, "keep")
        # A norm is a sum over many numbers, whose rounding cancels: a quarter of what a row may differ by.
        tolerance = 0.25 * (0.08 if noise.low else tolerance_of(next(p for p in model.parameters() if p.requires_grad)))
        for j in range(count):
            others = [i for i in range(count) if i != j]
            changed = norms([items[(i + 1) % count] if i == j else items[i] for i in range(count)], "repeat")
            if noise.repeats:
                _refuse_far(whole[others], changed[others], tolerance, count, fewer=False)
        changed = norms(items[:-1], "repeat")
        if noise.repeats:
            _refuse_far(whole[:-1], changed, tolerance, count, fewer=True)
        alone = torch.cat([norms([item], "repeat") for item in items])
        if noise.repeats:
            _refuse_far(whole, alone, tolerance, count, fewer=False)


def _rows_of(batch: Any, count: int, rows: list[int]) -> Any:
    """A batch of some rows of another."""
    taken = take_examples(((batch,), {}), count, rows, 1, lambda args, kwargs: len(rows))
    return batch if taken is None else taken[0][0]


def _refuse_far(one: Tensor, other: Tensor, tolerance: float, count: int, *, fewer: bool) -> None:
    far = (one - other).abs() > tolerance * torch.maximum(one, other).clamp_min(1e-3 * float(one.max()) + 1e-30)
    if not far.any():
        return
    ratio, step = other / one.clamp_min(1e-30), count / (count - 1)
    if fewer and any(bool(((ratio / r - 1).abs() < tolerance).all()) for r in (step, 1 / step)):
        raise ClippingError(
            "the gradients of all examples change with the size of the batch: loss_reduction does not describe the "
            "loss (a mean over examples is 'mean', a sum is 'sum'), or the loss of an example depends on the other "
            "examples of its batch."
        )
    k = int(far.nonzero()[0])
    raise ClippingError(
        f"the loss of an example depends on the other examples of its batch: the gradient of one of {count} has norm "
        f"{float(one[k]):.4g}, and {float(other[k]):.4g} where another one is exchanged or left out. Clipping one "
        "example then does not bound what it changes. Look for a mean over all tokens of the batch (average within "
        "each example first), a root or power of the mean, contrastive terms, mixup in collate_fn, padding on the "
        "left (pad on the right), padding without an attention mask."
    )


# --- what a pass shows ------------------------------------------------------------------------------------------------


class Seen:
    """What one pass of the probe shows: the rows of every layer's input, output and output gradient.

    Attributes:
        count: How many examples it had.
        rows: By layer, kind ("input", "output", "gradient" of all the model's outputs, or "gradient of k", the k-th)
            and how many of that kind came before.
        outputs: The model's outputs, by rows; ``seconds``: the same where dimension 1 may be the examples, else None.
        losses: Which of them are single numbers with a gradient.
        strays: Parameters that got a gradient past the rules: they are read outside their own module.
        layouts: How the rows of each layer can be put together, by its path.
    """

    def __init__(self, count: int, names: dict[int, str]) -> None:
        """``names``: of all parameters, by their id."""
        self.count, self.kind, self._names = count, "gradient", names
        self.rows: dict[tuple[str, str, int], Tensor] = {}
        self.outputs: list[Tensor] = []
        self.seconds: list[Tensor | None] = []
        self.losses: set[int] = set()
        self.strays: set[str] = set()
        self.layouts: dict[str, set[str]] = {}
        self.tolerance = 0.0
        self._calls: dict[tuple[str, str], int] = {}
        self._floors: dict[str, float] = {}

    def number(self, path: str, kind: str) -> int:
        """How many of this kind this layer had before."""
        place = self._calls[path, kind] = self._calls.get((path, kind), -1) + 1
        return place

    def add(self, path: str, kind: str, x: Any, place: int | None = None) -> None:
        """Keep the rows of a tensor; what is none is left out."""
        if isinstance(x, Tensor) and x.dim() and x.numel():
            number = self.number(path, kind) if place is None else place
            self.rows[path, kind, number] = sample(plain(x))
            self.tolerance = max(self.tolerance, tolerance_of(x))

    def floor(self, kind: str) -> float:
        """See `_floor`."""
        if kind not in self._floors:
            self._floors[kind] = _floor(x for (_, k, _), x in self.rows.items() if k == kind)
        return self._floors[kind]

    def note(self, x: Tensor) -> None:
        """A tensor that stand-ins meet has a gradient and no examples: parameters of others may be behind it."""
        waiting, done = [x.grad_fn], set[Any]()
        self.strays |= {self._names[id(x)]} if id(x) in self._names else set()
        while waiting and len(done) < _WALKED:
            node = waiting.pop()
            if node is None or node in done:
                continue
            done.add(node)
            leaf = getattr(node, "variable", None)
            self.strays |= {self._names[id(leaf)]} if id(leaf) in self._names else set()
            waiting += [edge[0] for edge in node.next_functions]


def _pairs(whole: Seen, fewer: Seen) -> Iterator[tuple[str, str, Tensor, Tensor | None]]:
    """What to compare of two passes, by layer and kind.

    A layer that is called once for every step of the longest example may be called less often without it: then the sums
    of its output gradients are compared, which its per-example gradients are made of.
    """
    calls = [Counter((path, kind) for path, kind, _ in seen.rows) for seen in (whole, fewer)]
    for (path, kind, number), x in whole.rows.items():
        if calls[0][path, kind] == calls[1][path, kind]:
            yield path, kind, x, fewer.rows.get((path, kind, number))
        elif kind not in ("input", "output") and number == min(n for p, k, n in whole.rows if (p, k) == (path, kind)):
            sums = [_sums(seen, path, kind) for seen in (whole, fewer)]
            yield from ((path, kind, total, sums[1].get(width)) for width, total in sums[0].items())


def _sums(seen: Seen, path: str, kind: str) -> dict[int, Tensor]:
    """The output gradients of all calls of a layer, added up over calls and over steps, by their width."""
    totals: dict[int, Tensor] = {}
    for (p, k, _), x in seen.rows.items():
        if (p, k) == (path, kind):
            total = x.flatten(1, -2).sum(1) if x.dim() > 2 else x
            totals[total.shape[1]] = totals.get(total.shape[1], 0) + total
    return totals


def sample(x: Tensor) -> Tensor:
    """Rows of a tensor as they are compared, a copy: of long ones some numbers of every step, and the norm of all.

    Which ones does not depend on the number of steps, which may be another without the longest example.
    """
    with torch.no_grad():
        x = x.detach().unsqueeze(1) if x.dim() == 1 else x.detach()
        parts = x.flatten(2)[:, :_STEPS] if x.dim() > 2 else x.unsqueeze(1)  # [rows, steps, numbers of each]
        wide = x.dtype == torch.float64 or not x.is_floating_point()
        parts = parts.to(torch.float64 if wide else torch.float32, copy=True).nan_to_num_(0.0, 0.0, 0.0)
        most = _EACH if x.dim() > 2 else _EACH * _STEPS
        if parts.shape[2] <= most:
            return parts
        return torch.cat([parts[..., :: -(-parts.shape[2] // most)], parts.norm(dim=2, keepdim=True)], 2)


def tolerance_of(x: Tensor) -> float:
    """How far two results for one example may lie apart, relative to the example's row, and be rounding.

    Products over other numbers of examples are added up in another order, by other kernels, which costs a few units of
    roundoff in every layer. One example of five moves a mean of the batch by a fifth of its distance from it: these
    are chosen between the two: about 20 units of bfloat16, tens of thousands of float32 on the CPU. How large rounding
    really gets was not measured; that small models raise no alarm was (tests, and the zoo).
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        return 0.08
    if x.dtype == torch.float32:
        return 0.02 if x.is_cuda else 2e-3  # TF32, also where cuDNN alone uses it
    return 1e-7


def layouts_of(x: Tensor, y: Tensor, count: int, left_out: int, tolerance: float, floor: float) -> set[str]:
    """In which layouts the rows ``y`` are those of ``x`` without one of ``count`` examples.

    MAJOR: all rows of one example, then those of the next. MINOR: the first row of every example, then the second.
    """
    each, rest = divmod(x.shape[0], count)
    if rest or y.shape[0] != each * (count - 1) or x.dim() != y.dim():
        return set()
    kept = [i for i in range(count) if i != left_out]
    major = x.unflatten(0, (count, each))[kept].flatten(0, 1)
    minor = major if each == 1 else x.unflatten(0, (each, count))[:, kept].flatten(0, 1)
    layouts = {MAJOR} if close(major, y, tolerance, floor) else set()
    layouts |= {MINOR} if close(minor, y, tolerance, floor) else set()
    if len(layouts) == 2 and each > 1 and major.shape == y.shape:  # small gradients: rounding tells them apart, too
        far = {MAJOR: float((major - y).norm()), MINOR: float((minor - y).norm())}
        layouts -= {name for name in far if far[name] > 1e2 * min(far.values()) + 1e-30}
    return layouts


def close(x: Tensor, y: Tensor, tolerance: float, floor: float) -> bool:
    """Whether all rows agree. Where one has a longer dimension (padded to its longest example), what both have."""
    if x.shape != y.shape:
        common = [slice(0, min(a, b)) for a, b in zip(x.shape, y.shape, strict=True)]
        if sum(a != b for a, b in zip(x.shape, y.shape, strict=True)) > 1:
            return False
        x, y = x[common], y[common]
    x, y = x.flatten(1), y.flatten(1)
    size = torch.linalg.vector_norm(x, dim=1).clamp_min(floor)
    return bool((torch.linalg.vector_norm(x - y, dim=1) <= tolerance * size).all())


def _floor(rows: Iterable[Tensor]) -> float:
    """Rows this small are rounding of larger ones: gradients that cancel out (a bias before a softmax)."""
    sizes = sorted(float(torch.linalg.vector_norm(x.flatten(1), dim=1).max()) for x in rows)
    return 1e-3 * sizes[len(sizes) // 2] + 1e-30 if sizes else 1e-30


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """All tensors in a nest of containers, dataclasses and plain objects, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1) if depth else ()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1) if depth else ()
    elif depth and _is_object(value):
        yield from tensors_in(vars(value), depth - 1)


def _is_object(value: Any) -> bool:
    """Whether it is an object that holds others: a dataclass, a tokenizer's output, a distribution."""
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)) and not callable(value)


def _cotangent(x: Tensor, other: torch.Size, count: int, weights: list[float]) -> Tensor | None:
    """The same direction for all examples, with their weights where every row is an example's; None without examples.

    Args:
        x: An output.
        other: Its shape for another number of examples: the dimension that differs is theirs.
        count: How many examples there are.
        weights: One for each.
    """
    dims = [d for d, (a, b) in enumerate(zip(x.shape, other, strict=False)) if a != b]
    if len(dims) != 1:
        return None
    shape = [1 if d == dims[0] else s for d, s in enumerate(x.shape)]
    direction = torch.linspace(0.5, 1.5, math.prod(shape), device=x.device).view(shape)
    if x.shape[dims[0]] == count:
        rows = torch.tensor(weights, device=x.device).view([-1 if d == dims[0] else 1 for d in range(x.dim())])
        direction = direction * rows
    return direction.expand(x.shape).to(x.dtype)


# --- the same passes again --------------------------------------------------------------------------------------------


def take_examples(
    arguments: Arguments, batch: int, rows: Sequence[int], views: int, count: Callable[..., int]
) -> Arguments | None:
    """The arguments for some examples of a batch, cut where the batch is first or, by ``batch_of``, second; None where
    they cannot be cut.
    """
    for dim in (0, 1):

        def take(x: Any, dim: int = dim) -> Any:
            if isinstance(x, PackedSequence) and int(x.batch_sizes[0]) == batch:
                padded, lengths = pad_packed_sequence(x, batch_first=True)
                index = torch.tensor(list(rows))
                some = padded.index_select(0, index.to(padded.device))
                return pack_padded_sequence(some, lengths[index], batch_first=True, enforce_sorted=False)
            if _is_object(x):
                held = copy.copy(x)
                vars(held).update({name: tree_map(take, value, is_leaf=_whole) for name, value in vars(x).items()})
                return held
            if not (isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == views * batch):
                return x
            places = [view * batch + row for view in range(views) for row in rows]
            return x.index_select(dim, torch.tensor(places, device=x.device))

        args, kwargs = tree_map(take, arguments, is_leaf=_whole)
        first = next(tensors_in((args, kwargs)), None)
        cut = first is not next(tensors_in(arguments), None)  # if not, examples lie in it one behind the other (bags)
        if cut and count(args, kwargs) == len(rows):
            return args, kwargs
    return None


def _whole(x: Any) -> bool:
    return isinstance(x, PackedSequence)


@contextlib.contextmanager
def same_numbers(devices: Sequence[torch.device]) -> Iterator[Callable[..., None]]:
    """Yields what sets Python's, NumPy's and torch's generators back to where they stood, or, for turns after the
    first, to some other place of their own; at the end they stand where they stood.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    on_devices = [(d, torch.cuda.get_rng_state(d)) for d in devices]

    def again(turn: int = 0) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        for device, state in on_devices:
            torch.cuda.set_rng_state(state, device)
        if turn:
            random.seed(turn)
            np.random.seed(turn)  # noqa: NPY002
            torch.default_generator.manual_seed(turn)
            for device, _ in on_devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(turn)

    try:
        yield again
    finally:
        again()


class SameNoise(DispatchMode):
    """Random numbers of the probe's passes: those of one example, for all examples and in all passes alike.

    Generators set back are not enough: with one example less, the numbers of all later operations move. So passes over
    other numbers of examples tell which dimensions of a random tensor are theirs, the pass over all of them keeps what
    was drawn (the first of each such dimension), and the others are given that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeats = True  #: whether the passes ask for the same random tensors, up to the examples
        self.low = False  #: whether anything was computed in 16 bits
        self._shapes: list[torch.Size] = []
        self._kept: list[Tensor] = []
        self._stage, self._place = "shapes", 0
        self._known: dict[Any, tuple[bool, int | None]] = {}

    @contextlib.contextmanager
    def passing(self, stage: str) -> Iterator[None]:
        """A pass: "shapes" looks on, "keep" keeps what is drawn, "repeat" gives it again."""
        self._stage, self._place = stage, 0
        if stage == "shapes":
            self._shapes = []
        elif stage == "keep":
            self._kept = []
        with self:
            yield
        if stage == "repeat" and self._place != len(self._kept):
            self.repeats = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws, dropout = self._known.get(func) or self._known.setdefault(func, _random(func))
        if dropout is not None:  # fused attention draws its own, out of reach
            if dropout < len(args):
                args = (*args[:dropout], 0.0, *args[dropout + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype in (torch.bfloat16, torch.float16):
            self.low = True
        if not draws:
            return out
        if isinstance(out, tuple) and len(out) == 2 and "dropout" in func.__name__:
            mask = self._same(out[1])
            return args[0] * mask.to(args[0].dtype) / max(1.0 - float(args[1]), 1e-6), mask
        return self._same(out) if isinstance(out, Tensor) else out

    def _same(self, drawn: Tensor) -> Tensor:
        place, self._place = self._place, self._place + 1
        if self._stage == "shapes":
            self._shapes.append(drawn.shape)
            return drawn
        if self._stage == "keep":
            kept = drawn.detach().clone()
            seen = self._shapes[place] if place < len(self._shapes) else drawn.shape
            if len(seen) != drawn.dim():
                self.repeats = False
                seen = drawn.shape
            for dim, (one, other) in enumerate(zip(drawn.shape, seen, strict=True)):
                if one != other and one:  # whole numbers are places among the examples (randperm): all have the least
                    whole = not kept.is_floating_point() and kept.dtype != torch.bool
                    kept = kept.amin(dim, keepdim=True) if whole else kept.narrow(dim, 0, 1)
            self._kept.append(kept)
            return drawn.copy_(kept.expand_as(drawn))
        if place >= len(self._kept) or self._kept[place].dim() != drawn.dim():
            self.repeats = False
            return drawn
        kept = self._kept[place]
        if any(k != 1 and k < d for k, d in zip(kept.shape, drawn.shape, strict=True)):
            self.repeats = False
            return drawn
        kept = kept[tuple(slice(0, d) for d in drawn.shape)]  # shorter without the longest example
        return drawn.copy_(kept.expand_as(drawn))


def _random(func: Any) -> tuple[bool, int | None]:
    """Whether an operation draws random numbers, and which of its arguments is the rate of a dropout inside it."""
    names = [argument.name for argument in func._schema.arguments]
    dropout = names.index("dropout_p") if "dropout_p" in names else None
    return torch.Tag.nondeterministic_seeded in func.tags and dropout is None, dropout


# --- what forward passes write ----------------------------------------------------------------------------------------


class State:
    """What a model holds besides its parameters: buffers, and numbers and tensors that are plain attributes of modules.

    `take_back` undoes what a pass of the probe wrote, and keeps it in ``last``. What then comes out differently without
    one example holds something of that example. Counters and power iterations come out the same; what is as long as the
    batch is a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = {  # buffers that a state_dict holds; asking for one would make FSDP2 let go of gathered parameters
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name in own_buffers(module).keys() - non_persistent_buffers(module)
        }
        self._before = {key: (v, _copy(v)) for key, v in self._places()}
        self.last: dict[tuple[str, str, bool], Any] = {}

    def _places(self) -> Iterator[tuple[tuple[str, str, bool], Any]]:
        for path, module in self._model.named_modules():
            for name, b in own_buffers(module).items():
                yield (path, name, True), b
            for name, value in vars(module).items():
                if (
                    name != "training"
                    and isinstance(value, (Tensor, int, float))
                    and not isinstance(value, nn.Parameter)
                ):
                    yield (path, name, False), value

    @torch.no_grad()
    def take_back(self) -> None:
        """Everything as it was before the probe."""
        self.last = {}
        for key, now in list(self._places()):
            path, name, buffer = key
            module = self._model.get_submodule(path)
            slots = own_buffers(module) if buffer else vars(module)
            if key not in self._before:
                self.last[key] = _copy(now)
                del slots[name]
                continue
            held, value = self._before[key]
            if now is held and _same(now, value):
                continue
            self.last[key] = _copy(now)
            if now is not held:
                slots[name] = held
            if isinstance(held, Tensor) and not _same(held, value):
                held.copy_(value)
        for (path, name, buffer), (held, _) in self._before.items():
            slots = own_buffers(self._model.get_submodule(path)) if buffer else vars(self._model.get_submodule(path))
            slots.setdefault(name, held)

    @torch.no_grad()
    def compare(self, one: dict[Any, Any], other: dict[Any, Any], tolerance: float) -> None:
        """What two passes wrote.

        Raises:
            ClippingError: It depends on the examples.
        """
        for key in one.keys() | other.keys():
            before = self._before.get(key, (None, None))[1]
            x, y = one.get(key, before), other.get(key, before)
            path, name, buffer = key
            full = f"{path}.{name}" if path else name
            if buffer and isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape:
                differs = full in self._kept  # if not, a cache as long as the batch
            else:
                differs = _differs(x, y, before, tolerance)
            if differs:
                raise ClippingError(
                    f"the forward pass writes what depends on the examples into the "
                    f"{'buffer' if buffer else 'attribute'} '{full}': statistics of examples would leave the model "
                    "without clipping or noise. Freeze them (eval mode), or use a layer without running statistics: "
                    "lambdacgd.clipping.convert(model)."
                )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and not value.requires_grad else value


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def _differs(x: Any, y: Any, before: Any, tolerance: float) -> bool:
    """Whether two values that passes over other examples wrote differ by more than rounding."""
    if isinstance(x, float) and isinstance(y, float):
        x, y = torch.tensor(x), torch.tensor(y)
        before = torch.tensor(before) if isinstance(before, float) else None
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.shape != y.shape or x.requires_grad or _same(x, y):
        return False  # other things, a cache, a part of the loss
    if not x.is_floating_point():
        return True
    x, y = x.double(), y.double()
    change = x - before if isinstance(before, Tensor) and before.shape == x.shape else x
    rounding = 8 * torch.finfo(torch.float32).eps * y.abs().max()
    return bool((x - y).abs().max() > min(tolerance, 1e-5) * change.abs().max() + rounding)


class Modes:
    """Which modules were in train mode and which in eval mode when the model was probed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self.last, self._seen = b"", set[bytes]()

    def new(self) -> bool:
        """Whether the model is in a mode that was not probed."""
        self.last = bytes(m.training for m in self._modules)
        return self.last not in self._seen and len(self._seen) < MOST_MODES

    def probed(self) -> None:
        """The probe has seen the mode that ``new`` was asked about last."""
        self._seen.add(self.last)


class Writes:
    """``begin()`` before a forward pass; ``since()`` says which buffers it has written that no probe has seen written.

    A parameter must not be written at all (a frozen one as a running average, ``Embedding(max_norm=…)``).
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{path}.{name}" if path else name, own_buffers(module), name)
            for path, module in model.named_modules()
            for name in own_buffers(module)
            if name not in non_persistent_buffers(module)
        ]
        self._norms = [(path, m) for path, m in model.named_modules() if isinstance(m, AnyNormWithStatistics)]
        named = [(name, p) for name, p in model.named_parameters() if not p.is_inference()]
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._before: list[tuple[int, int]] = []
        self._parameters_before: list[int] | None = None
        self._compared: set[str] = set()
        self._quietly: set[str] = set()  # by passes without gradients, so that no probe compares it

    def begin(self, sharded: bool) -> None:
        """Before a forward pass. Sharded parameters are gathered, that is written, in the middle of it."""
        self._before = self._versions()
        self._parameters_before = None if sharded else versions(self._parameters)

    def begin_quietly(self, sharded: bool) -> None:
        """Before a forward pass without gradients. PyTorch's kernels write running statistics without counting it."""
        for path, norm in self._norms:
            if norm.training and norm.running_mean is not None:
                raise _quiet(f"would write the statistics of '{path}' ({type(norm).__name__})")
        self.begin(sharded)

    def refuse_parameters(self) -> None:
        """After a forward pass: nobody has written a parameter."""
        if self._parameters_before is None:
            return
        now = versions(self._parameters)
        if now != self._parameters_before:
            name = next(n for n, a, b in zip(self._names, self._parameters_before, now, strict=True) if a != b)
            raise ClippingError(
                f"the forward pass writes the parameter '{name}': what it holds of examples would leave the model with "
                "its state_dict, without clipping or noise (a running average, a table that is renormalised where it "
                "is read: Embedding(max_norm=…)). Leave that out; parameters change in optimizer steps alone."
            )

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
