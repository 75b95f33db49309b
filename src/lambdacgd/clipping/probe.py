"""The probe: does every example go through the model alone, and does nothing of it stay behind?

A forward pass that is probed is preceded by others over a few examples of its batch: all of them, and then again with
one of them exchanged for its neighbour, for each in turn. *Values* are compared. What the other examples have in every
layer's input and output gradient (`Layer.compare`), and in the model's outputs, must be the same as before; what the
forward pass writes (buffers, plain attributes of modules) must be, too, since it would leave the model without clipping
or noise. Passes over two numbers of examples come first. They show which dimensions hold the examples
(`rules.BatchSizes`), how rows are put together where one example has several (`Layer.layout`), and which parameters are
read outside their own module (`Layer.elsewhere`).

Generators of random numbers are set back before each pass (`Numbers`): dropout is no difference. Rounding is hardly
one, since all shapes stay the same (`tolerance_of`). When a probe is due is the clipper's question (`clipper.Watch`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping.backward import BackwardPass
from lambdacgd.clipping.batch_free import plain, refuse_stand_ins, standing_in
from lambdacgd.clipping.rules import MAJOR, MINOR, ForwardPass, Layer, mark
from lambdacgd.errors import ClippingError, InvalidInput
from lambdacgd.torch_private import AnyDropout, non_persistent_buffers, own_buffers, tree_map

Count = Callable[[tuple[Any, ...], dict[str, Any]], int]  #: the number of examples in a model's args and kwargs
Loss = Callable[[nn.Module, Any], Tensor]  #: loss(model, batch), for a batch of any number of examples
_SIZES = (5, 6, 7, 8, 4, 3)  #: examples to probe with; as long as no other dimension of the model has that size
_SETS = 3  #: numbers of examples that are tried until one tells the batch from other dimensions
_TURNS = 3  #: random numbers that are tried until every layer has been seen
_STEPS, _EACH = 512, 32  #: of a row, how many steps and how many numbers of each are compared, with their norm
_FEW = 64  #: attributes of modules with more items than this are no place for outputs
_LOW = (torch.bfloat16, torch.float16)
_CONTAINERS = (Mapping, list, tuple, set, deque)  #: in which tensors are looked for


class Probe:
    """`look` before a forward pass that is to be probed.

    Attributes:
        layers: The layers that are clipped.
        read_elsewhere: Those whose parameters other modules read, too.
        suspects: By the model's mode, the outputs that no gradient may come from, and why.
        compared: Buffers that its passes have written, and whose values it has compared.
        looked: Whether any probe has come to its end.
    """

    def __init__(
        self, model: nn.Module, forward_pass: ForwardPass, anchor: Tensor, count: Count, *, mean: bool
    ) -> None:
        """``mean``: whether a loss that the model returns is the mean over examples."""
        self.layers: list[Layer] = []
        self.read_elsewhere: list[Layer] = []
        self.suspects: dict[bytes, dict[str, str]] = {}
        self.compared: set[str] = set()
        self.looked = False
        self._model, self._forward_pass, self._anchor, self._count = model, forward_pass, anchor, count
        self._mean = mean
        self._shapes: dict[int, dict[str, torch.Size]] = {}  # of the model's outputs, by the number of examples

    def look(self, arguments: Any, size: int, mode: bytes) -> bool:
        """Run a few examples together, and with each of them exchanged; compare, and leave everything as it was.

        Args:
            arguments: What the model is called with, args and kwargs.
            size: How many examples it has.
            mode: Which modules are in train mode.

        Returns:
            Whether that tells anything. It does not where all examples are equal: to exchange one changes nothing.

        Raises:
            ClippingError: The model mixes examples, depends on those of an earlier pass, or writes what must not leave
                it.
        """
        kind, batch = self._anchor.device.type, Batch(arguments, size, self._count)
        suspects = dict(self.suspects.get(mode, {}))
        # What mixes does so in any precision: without autocast rounding hides less.
        for low in (False, True) if torch.is_autocast_enabled(kind) else (False,):
            try:
                with torch.autocast(kind, enabled=low):
                    told = self._look(batch, suspects)
                    self.suspects[mode] = suspects
                    return told
            except _Failed as failed:  # some kernels are for 16 bits alone
                error = failed
        if mode not in self.suspects:  # it has worked before: if this batch is at fault, the pass itself will say so
            raise ClippingError(str(error)) from error.__cause__
        return True

    def _look(self, batch: Batch, suspects: dict[str, str]) -> bool:
        if batch.take([0, 1]) is None:
            # Arguments that cannot be cut: the sizes of later batches have to do, and buffers are taken on trust.
            self.compared |= {name for name, _ in self._model.named_buffers()}
            return True
        different = batch.different(max(_SIZES))
        state, sharded, turn, told = State(self._model), self._forward_pass.sharded, 0, False
        parameters = {} if sharded else dict(self._model.named_parameters())
        before = fingerprints(parameters.values())
        self._forward_pass.sizes.learning, self._shapes = True, {}

        def run(some: Some, *, apart: bool = False) -> Seen:
            try:
                for rows in (some.before, some.rows) if some.before else (some.rows,):
                    start = numbers.again(turn)
                    seen = self._run(batch, rows, some, apart=apart)
                    seen.numbers = start, numbers.now()
            finally:
                written = state.take_back()
            seen.written = written
            return seen

        def compare(one: Some, other: Some, exchanged: int, whole: Seen | None = None) -> dict[str, str]:
            """Which outputs mix examples, and why. ``whole``: what ``one`` shows, where that is known."""
            nonlocal told
            mixing: dict[str, str] = {}
            pair = whole or run(one), run(other)
            if draw_alike(*((seen.numbers, seen.shapes) for seen in pair)):
                told = True
                state.compare(pair[0].written, pair[1].written, pair[0].tolerance)
                if self._compare(*pair, exchanged, mixing):  # some outputs mix: which?
                    self._compare(run(one, apart=True), run(other, apart=True), exchanged, mixing)
            return mixing

        try:
            # Checkpointing around the model keeps tensors by hooks of its own, which the probe's are not for. Detached:
            # outputs that their own nodes keep would never be freed.
            with (
                Numbers(self._model, self._anchor.device) as numbers,
                torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x),
            ):
                chosen = sorted(set(self._learn(run, state, self._sets(batch, different))))
                one, count = Some(chosen), len(chosen)
                state.touched.clear()

                def exchange_each() -> Seen:
                    whole = run(one)
                    # A pass gathers sharded parameters: every rank makes as many, however many examples it has.
                    for j in (0, count - 1) if sharded else range(count):
                        other = Some([*chosen[:j], chosen[(j + 1) % count], *chosen[j + 1 :]])
                        suspects.update(compare(one, other, j, whole))
                    return whole

                for turn in range(1 if sharded else _TURNS):  # noqa: B007  (`run` reads it)
                    whole = exchange_each()
                    if self._settle(whole) and (count > 3 or whole.numbers[0] == whole.numbers[1]):
                        break  # a permutation drawn for two or three may leave each where it is
                if not told and not sharded:  # how much is drawn depends on the examples (dropout over their tokens)
                    with without_dropout(self._model):
                        exchange_each()
                if len(different) > 1:  # where one example was exchanged; what comes now leaves them alike
                    self.compared |= state.touched
                if not sharded:
                    suspects.update(self._look_further(compare, chosen, batch.largest_of(chosen)) | suspects)
                for name, was, now in zip(parameters, before, fingerprints(parameters.values()), strict=True):
                    if was != now:
                        raise ClippingError(WRITES_PARAMETER.format(name=name))
                self.looked = True
                self.read_elsewhere = [layer for layer in self.layers if layer.elsewhere]
        finally:
            self._forward_pass.sizes.learning, self._forward_pass.watch = False, None
        return len(different) > 1 or sharded

    @staticmethod
    def _look_further(compare: Callable[..., dict[str, str]], chosen: list[int], largest: int | None) -> dict[str, str]:
        """Two things that neighbours, exchanged within a pass, do not show: an example larger than all others (where
        every image has the same maximum, dividing by that of the batch changes nothing; so all are halved but one), and
        examples of an earlier pass (a hidden state that is carried on, a queue).
        """
        found, halves, nobody = dict[str, str](), [0.5] * len(chosen), -1
        if largest is not None:
            scales = [1.0 if i == largest else 0.5 for i in range(len(chosen))]
            with contextlib.suppress(_Failed):  # half of an example need not be one
                found = compare(Some(chosen, halves), Some(chosen, scales), largest)
        try:
            late = compare(Some(chosen, before=chosen), Some(chosen, before=[chosen[-1]] * len(chosen)), nobody)
        except ClippingError as error:
            raise ClippingError(_REMEMBERS) from error
        return dict.fromkeys(late, _REMEMBERS) | found

    # --- the passes ---------------------------------------------------------------------------------------------------

    def _sets(self, batch: Batch, different: list[int]) -> list[list[int]]:
        """Sets of a few examples, first those whose number, and one less, no dimension has. Equal rows (views, padding)
        tell nothing where they are exchanged, so rows that differ are taken. Of two one is taken twice for a second
        number: a batch of one tells nothing.
        """
        rows = different if len(different) > 1 else list(range(min(batch.size, max(_SIZES))))
        if len(rows) == 2:
            return [[*rows, rows[1]]]
        dims = {d for p in self._model.parameters() for d in p.shape}
        dims |= {d for x in tensors_in(batch.arguments) for d in x.shape[1 if x.shape[:1] == (batch.size,) else 0 :]}
        sizes = sorted((m for m in _SIZES if m <= len(rows)), key=lambda m: sum(d in (m, m - 1) for d in dims))
        return [rows[:m] for m in sizes[:_SETS]]

    def _learn(self, run: Callable[..., Seen], state: State, sets: list[list[int]]) -> list[int]:
        """Passes of two sizes, until all places know whether the batch is their first dimension: a table with as many
        rows as there are examples looks like a batch until a pass of another size has come by it. Returns the first set
        of examples whose size does not stand in the way.
        """
        once = self.looked or self._forward_pass.sharded
        for chosen in sets[:1] if once else sets:
            failed, read = None, set[str]()
            for _ in range(1 if once else 2):
                failed, written = None, []
                for rows in (chosen, chosen[1:]):
                    try:
                        seen = run(Some(rows, every=True))
                        written.append(seen.written)
                        read |= seen.elsewhere
                    except ClippingError as error:
                        failed = error
            if failed is None:
                state.compare(written[0], written[1], None)
                for layer in self.layers:
                    layer.elsewhere |= read.intersection(layer.names.values())
                return chosen
            if not once:
                self._forward_pass.sizes.forget()
                self._shapes = {}
        assert failed is not None
        raise failed

    def _run(self, batch: Batch, rows: Sequence[int], some: Some, *, apart: bool) -> Seen:
        """One forward pass over some examples, and backward passes from its outputs, together or each ``apart``."""
        args, kwargs = batch.take(rows, some.scales)
        forward_pass, count = self._forward_pass, len(rows)
        seen = forward_pass.watch = Seen(count)
        forward_pass.look_at(count)
        held = list(_held(self._model).values())  # kept, so that what is new has another id
        try:
            call = self._model.forward if forward_pass.sharded else self._model  # with hooks of others on the model
            with standing_in(self.layers, every=some.every and not forward_pass.sharded):
                output = call(*args, **kwargs)
        except (ClippingError, InvalidInput, torch.OutOfMemoryError):  # a batch too large says nothing about dimensions
            raise
        except Exception as error:  # whatever the user's forward raises
            raise _Failed(
                f"the model's forward pass failed ({type(error).__name__}: {error}) on {count} examples of a batch of "
                f"{batch.size}, which were to show whether it keeps them apart. If it does not fail on all, start with "
                "another batch size, or call clipper.allow_probe(False) and see to that yourself."
            ) from error
        refuse_stand_ins(output, count)
        made = _returned(output) | _held(self._model)
        outputs = {place: x for place, x in made.items() if not any(x is old for old in held)}
        self._shapes[count] = {place: x.shape for place, x in outputs.items()}
        other = next((shapes for number, shapes in self._shapes.items() if number != count), {})
        together: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for place, x in outputs.items():
            # The dimension of examples: the one that differs for another number of them.
            sides = enumerate(zip(x.shape, other.get(place, x.shape), strict=False))
            dims = [d for d, (a, b) in sides if a != b]
            dim = dims[0] if len(dims) == 1 else None
            seen.outputs[place] = sample(x.movedim(dim or 0, 0) if x.dim() else x.reshape(1))
            seen.tolerance = max(seen.tolerance, tolerance_of(x))
            if not x.requires_grad or not x.numel() or (x.numel() > 1 and dim is None):
                continue
            if x.numel() == 1:
                seen.losses.add(place)
                vector = torch.full_like(x, float(count) if self._mean else 1.0)
            else:
                vector = _cotangent(x, dims[0], [1.0 + 0.1 * row for row in rows])
            kind = f"gradient of {place}" if apart or place in seen.losses else "gradient"
            together.setdefault(kind, []).append((x, vector))
        for seen.kind, given in {} if forward_pass.sharded else together.items():  # gathered in whole passes alone
            roots, vectors = zip(*given, strict=True)
            try:
                torch.autograd.grad(roots, [self._anchor], vectors, retain_graph=True, allow_unused=True)
            except (ClippingError, torch.OutOfMemoryError):
                raise
            except RuntimeError:  # what fails here fails in the user's own backward pass, and is better explained there
                continue
        return seen

    # --- what they show -----------------------------------------------------------------------------------------------

    def _compare(self, whole: Seen, other: Seen, exchanged: int, suspects: dict[str, str]) -> bool:
        """What agrees in no layout of the rows depends on the example that was exchanged: an error in a layer's input.
        Returns whether the gradients of all outputs together disagree: then each is to be looked at apart.
        """
        layers = {layer.path: layer for layer in self.layers}
        mixing: dict[str, str] = {}
        calls = [Counter((path, kind) for path, kind, _ in seen.rows) for seen in (whole, other)]
        for (path, kind, number), x in whole.rows.items():
            if calls[0][path, kind] != calls[1][path, kind]:
                continue  # a call for every step of the longest example, which was exchanged: others have their turn
            y, floor = other.rows.get((path, kind, number)), whole.floors[kind]
            layouts = set() if y is None else layouts_of(x, y, whole.count, exchanged, whole.tolerance, floor)
            if not layouts and kind == "input":
                raise layers[path].refuse(_MIXES.format(what=kind))
            if not layouts:
                mixing.setdefault(kind, str(layers[path].refuse(_MIXES.format(what="output gradient"))))
            elif kind == "input" or (kind == "gradient" and kind not in mixing):
                whole.layouts[path] = whole.layouts.get(path, {MAJOR, MINOR}) & layouts
        for place in whole.outputs.keys() & other.outputs.keys():
            one, two = whole.outputs[place], other.outputs[place]
            if f"gradient of {place}" in mixing:
                suspects[place] = _LOSS if place in whole.losses else mixing[f"gradient of {place}"]
            elif place not in whole.losses and not _alike(one, two, whole.count, exchanged, whole.tolerance):
                suspects[place] = _OUTPUT
        return "gradient" in mixing

    def _settle(self, whole: Seen) -> bool:
        """Where an example has several rows, how they are put together is known now. Returns whether it is for all
        layers: not for one that no gradient came to (stochastic depth left it out).
        """
        sure, several = True, {path for (path, _, _), x in whole.rows.items() if x.shape[0] > whole.count}
        for layer in self.layers:
            layouts = whole.layouts.get(layer.path, set())
            if len(layouts) == 1:
                before, layer.layout = layer.layout, next(iter(layouts))
                if before not in (None, layer.layout):
                    raise layer.refuse(_OTHER_LAYOUT)
            else:
                sure &= layer.path not in several or layer.layout is not None
        return sure


class Some(NamedTuple):
    """Some examples of a batch, by their rows; what each one's numbers are multiplied by; examples of a pass that runs
    first; and whether ``every`` parameter is a stand-in outside its module, to see which are read there.
    """

    rows: Sequence[int]
    scales: Sequence[float] | None = None
    before: Sequence[int] = ()
    every: bool = False


class _Failed(Exception):
    """The user's forward raised on some examples of a batch."""


_MIXES = (
    "the model mixes the examples of a batch, or changes their order: its {what} for one example is not the same with "
    "and without another one. Take every statistic within an example; sort when the batch is put together."
)
_OTHER_LAYOUT = (
    "the rows that it sees of an example were neighbours in one forward pass and lay apart in another one, so nobody "
    "knows which rows are whose in a third. Put them together in one way always."
)
_OUTPUT = (
    "the model mixes the examples of a batch: this output for one example is not the same with and without another "
    "one. Take every statistic within an example, or leave this output out of the loss."
)
_LOSS = (
    "the loss that the model returns is not the declared mean or sum over examples (a mean over all tokens of a batch, "
    "say). Compute the loss from the model's other outputs, averaged within each example first."
)
_REMEMBERS = (
    "the model's forward pass depends on the examples of an earlier one: a hidden state that is carried on, a queue, a "
    "memory. An example then changes sums of steps that it takes no part in. Begin every forward pass anew."
)
WRITES_PARAMETER = (
    "the forward pass writes the parameter '{name}' (a running average, Embedding(max_norm=…)): something of examples "
    "would leave the model without clipping or noise. Parameters change in optimizer steps alone."
)


def refuse_gradients(model: nn.Module, output: Any, suspects: dict[str, str]) -> bool:
    """Refuse a gradient that comes back to one of a model's outputs in which examples are mixed. Returns whether there
    is a place that a gradient can come from: closures, say, are not looked into.
    """

    def refuse(why: str, gradient: Tensor) -> None:
        if gradient.any():
            raise ClippingError(why)

    outputs = _returned(output)
    if not suspects.keys() <= outputs.keys() or not any(x.requires_grad for x in outputs.values()):
        outputs |= _held(model)  # walks the whole model: milliseconds for a transformer, so not in every pass
    with_gradients = {place: x for place, x in outputs.items() if x.requires_grad}
    for place in with_gradients.keys() & suspects.keys():
        with_gradients[place].register_hook(partial(refuse, suspects[place]))
    return bool(with_gradients)


# What a loss can be made of: the tensors that a model returns, and those with a graph that its modules keep as
# attributes, alone or in a list, a dictionary or a plain object (the balancing loss of a mixture of experts, say).


def _returned(output: Any) -> dict[str, Tensor]:
    return {str(place): x for place, x in enumerate(tensors_in(output))}


def _held(model: nn.Module) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    done = set[int]()  # a configuration is an attribute of every module
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _NO_OUTPUTS or id(value) in done:
                continue
            if isinstance(value, _CONTAINERS) and len(value) > _FEW:
                continue
            done.add(id(value))
            depth = 4 if isinstance(value, _CONTAINERS) else 2  # an object may know the whole program
            tensors = (x for x in tensors_in(value, depth) if x.grad_fn is not None)
            held |= {f"{path}.{name} {place}": x for place, x in enumerate(tensors)}
    return held


# --- through the loss -------------------------------------------------------------------------------------------------


def check_loss(
    model: nn.Module, backward_pass: BackwardPass, loss: Loss, items: Sequence[Any], collate: Callable[[list[Any]], Any]
) -> bool:
    """See `Clipper.check_loss`. Norms of per-example gradients are compared: padding changes the shapes of rows.

    Returns whether any were.
    """
    if backward_pass.sharded:
        raise ClippingError("the loss of a sharded model cannot be looked at. Look at it before the model is sharded.")
    if len(items) < 2:
        return False
    told = False
    state, count, modes = State(model), len(items), [(m, m.training) for m in model.modules()]
    with Numbers(model, backward_pass.anchor.device) as numbers:
        start = numbers.now()
        batch = collate(copy.deepcopy(list(items)))
        draws = numbers.now() != start

        def norms(some: Sequence[Any]) -> tuple[Tensor, Drawn]:
            start, backward_pass.looking = numbers.again(), []
            try:
                given = collate(copy.deepcopy(list(some)))  # some take labels out of the items
                shapes = [x.shape for x in tensors_in(given)]
                value = loss(model, given)
                value.backward(torch.ones_like(value))
                if len(backward_pass.looking) != 1 or len(backward_pass.looking[0]) != len(some):
                    raise ClippingError(f"loss(model, batch) must run the model once, on all of {len(some)} examples.")
                return backward_pass.looking[0].double(), ((start, numbers.now()), shapes)
            finally:
                backward_pass.looking = None
                backward_pass.reset()
                state.take_back()

        def look(items: Sequence[Any], *, sorts: bool) -> None:
            nonlocal collate, told
            whole, drawn = norms(items)
            # A norm is a sum over many numbers, whose rounding cancels; but padding changes shapes here.
            one = next(iter(backward_pass.parameters.values()))
            low = backward_pass.low or one.dtype in _LOW
            tolerance = 0.02 if low else max(tolerance_of(one), 5e-4 if one.dtype == torch.float32 else 0.0)
            for j in range(count):
                others = [i for i in range(count) if i != j]
                changed, also = norms([items[(i + 1) % count] if i == j else items[i] for i in range(count)])
                if draw_alike(drawn, also):
                    told = True
                    pair = _closest(whole, changed, count - 1) if sorts else (whole[others], changed[others])
                    _refuse_far(*pair, tolerance, count, count)
            if drawn[0][0] != drawn[0][1]:  # numbers for fewer examples are others: without dropout, and from one batch
                model.eval()
                if draws:
                    cut = Batch(((batch,), {}), count)
                    items, collate = list(range(count)), lambda rows: (cut.take(rows) or cut.arguments)[0][0]
                whole, drawn = norms(items)
            for fewer in [range(count - 1), *([k] for k in range(count))] if drawn[0][0] == drawn[0][1] else ():
                told, left = True, norms([items[k] for k in fewer])[0]
                pair = _closest(whole, left, len(fewer)) if sorts else (whole[list(fewer)], left)
                _refuse_far(*pair, tolerance, count, len(fewer))

        def sorts() -> bool:
            """Whether examples come out of ``collate`` in an order of their own, whichever they go in."""
            model.eval()
            there, back = norms(items)[0], norms(list(items)[::-1])[0]
            return not _close(there.flip(0), back) and _close(there.sort().values, back.sort().values)

        try:
            try:
                look(items, sorts=False)
            except ClippingError:
                again = False
                with contextlib.suppress(Exception):  # in eval mode some models compute no loss
                    again = not draws and sorts()
                if not again:
                    raise
                look(items, sorts=True)
            return told
        finally:
            for module, training in modes:
                module.training = training


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-3 * one).all())


def _closest(one: Tensor, other: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many of one's norms and of another's that lie closest together, whatever their order."""
    some, others = (list(itertools.combinations(x.sort().values.tolist(), count)) for x in (one, other))
    pairs = (torch.tensor(pair, dtype=one.dtype) for pair in itertools.product(some, others))
    a, b = min(pairs, key=lambda pair: float(pair.clamp_min(1e-30).log().diff(dim=0).abs().max()))
    return a, b


def _refuse_far(one: Tensor, other: Tensor, tolerance: float, count: int, fewer: int) -> None:
    far = (one - other).abs() > tolerance * torch.maximum(one, other).clamp_min(1e-3 * float(one.max()) + 1e-30)
    if not far.any():
        return
    ratio, step = other / one.clamp_min(1e-30), count / fewer
    if fewer < count and any(bool(((ratio / r - 1).abs() < tolerance).all()) for r in (step, 1 / step)):
        raise ClippingError(
            "the gradients of all examples change with the size of the batch: loss_reduction does not describe the "
            "loss, or the loss of an example depends on the others."
        )
    k = int(far.nonzero()[0])
    raise ClippingError(
        f"the loss of an example depends on the other examples of its batch: the gradient of one of {count} has norm "
        f"{float(one[k]):.4g}, and {float(other[k]):.4g} where another one is exchanged or left out. Look for a mean "
        "over all tokens of the batch (average within each example first), class weights or ignore_index in a mean, a "
        "root or power of the mean, contrastive terms, mixup in collate_fn, padding on the left (pad on the right), "
        "padding without an attention mask."
    )


# --- what a pass shows ------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one pass of the probe shows: the rows of every layer's input and output gradient.

    Attributes:
        count: How many examples it had.
        kind: "gradient" in a backward pass from all the model's outputs, "gradient of k" from the k-th.
        rows: By layer, kind ("input" or that) and how many of that kind came before.
        outputs: The model's outputs, by rows.
        losses: Which of them are single numbers with a gradient.
        elsewhere: Parameters that were read outside their own module.
        layouts: How the rows of each layer can be put together, by its path.
        written: What it wrote; see `State`.
        numbers: Where generators of random numbers stood before and behind it.
    """

    count: int
    kind: str = "gradient"
    rows: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    losses: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    layouts: dict[str, set[str]] = field(default_factory=dict)
    written: Written = field(default_factory=dict)
    numbers: tuple[Any, Any] = (None, None)
    tolerance: float = 0.0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    @cached_property
    def floors(self) -> dict[str, float]:
        """Of each kind, what passes for rounding; asked for when all rows are there."""
        kinds = {kind for _, kind, _ in self.rows}
        return {kind: _floor(x for (_, k, _), x in self.rows.items() if k == kind) for kind in kinds}

    @property
    def shapes(self) -> dict[tuple[str, str, int], torch.Size]:
        return {place: x.shape for place, x in self.rows.items()}

    def number(self, path: str, kind: str) -> int:
        """How many of this kind this layer had before."""
        self.calls[path, kind] += 1
        return self.calls[path, kind] - 1

    def add(self, path: str, kind: str, x: Any, place: int | None = None, *, free: bool = False) -> None:
        """Keep the rows of a tensor; what is none is left out. ``free``: its one row is to be that of every example."""
        if isinstance(x, Tensor) and x.dim() and x.numel():
            rows = sample(plain(x))
            rows = rows.expand(self.count, -1, -1) if free else rows
            self.rows[path, kind, self.number(path, kind) if place is None else place] = rows
            self.tolerance = max(self.tolerance, tolerance_of(x))


def sample(x: Tensor) -> Tensor:
    """Rows of a tensor as they are compared, a copy: of long ones some numbers of every step, and the norm of all."""
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

    None at all over 91 models of the zoo on a CPU (docs/clipping.md). Shapes that change with the longest example and
    kernels of CUDA that add up in any order round differently: a thousand units of float32 are left for that, ten of
    TF32 and of bfloat16. The mildest of the tests that mix differ by 1.4%.
    """
    if x.dtype in _LOW:
        return 0.04
    if x.dtype == torch.float32:
        return 5e-3 if x.is_cuda else 1e-4  # TF32, also where cuDNN alone uses it
    return 1e-7


def layouts_of(x: Tensor, y: Tensor, count: int, exchanged: int, tolerance: float, floor: float) -> set[str]:
    """In which layouts the rows of all but one of ``count`` examples are the same in ``x`` and ``y``."""
    apart = differences(x, y)
    if apart is None or x.shape[0] != y.shape[0] or x.shape[0] % count:
        return set()
    distance, size = apart
    row = torch.arange(x.shape[0])
    kept = {MAJOR: row // (x.shape[0] // count) != exchanged, MINOR: row % count != exchanged}
    far = distance > tolerance * size.clamp_min(floor)
    layouts = {name for name, rows in kept.items() if not far[rows].any()}
    if len(layouts) == 2 and x.shape[0] > count:  # small gradients: rounding tells them apart, too
        total = {name: float(distance[rows].norm()) for name, rows in kept.items()}
        layouts -= {name for name in total if total[name] > 1e2 * min(total.values()) + 1e-30}
    return layouts


def differences(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """How far rows lie apart, and how large they are, on the CPU; of a dimension that is longer in one (padded to its
    longest example), what both have. None where more than one is.
    """
    if x.dim() != y.dim() or sum(a != b for a, b in zip(x.shape, y.shape, strict=True)) > 1:
        return None
    common = tuple(slice(0, min(a, b)) for a, b in zip(x.shape, y.shape, strict=True))
    x, y = x[common], y[common]
    apart, size = torch.linalg.vector_norm(torch.stack([x - y, x]).flatten(2), dim=2).cpu()
    return apart, size


def _alike(one: Tensor, two: Tensor, count: int, exchanged: int, tolerance: float) -> bool:
    """Whether an output has the same rows for the same examples, or no examples in it."""
    floor, apart = _floor([one]), differences(one, two)
    if apart is not None and not (apart[0] > tolerance * apart[1].clamp_min(floor)).any():
        return True
    return bool(layouts_of(one, two, count, exchanged, tolerance, floor))


def _floor(rows: Iterable[Tensor]) -> float:
    """Rows this small are rounding of larger ones: gradients that cancel out (a bias before a softmax)."""
    largest = [torch.linalg.vector_norm(x.flatten(1), dim=1).max() for x in rows]
    sizes = sorted(torch.stack([x.double() for x in largest]).tolist()) if largest else []
    return 1e-3 * sizes[len(sizes) // 2] + 1e-30 if sizes else 1e-30


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """All tensors in a nest of containers, dataclasses and plain objects, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif depth and (isinstance(value, _CONTAINERS) or _is_object(value)):
        inner = value if isinstance(value, _CONTAINERS) else vars(value)
        for item in inner.values() if isinstance(inner, Mapping) else inner:
            yield from tensors_in(item, depth - 1)


def _is_object(value: Any) -> bool:
    """Whether it is an object that holds others: a dataclass, a tokenizer's output, a distribution."""
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)) and not callable(value)


def _cotangent(x: Tensor, dim: int, weights: list[float]) -> Tensor:
    """The same direction for all examples, which are in ``dim``, with their weights where each has one row there."""
    shape = [1 if d == dim else s for d, s in enumerate(x.shape)]
    direction = torch.linspace(0.5, 1.5, math.prod(shape), device=x.device).view(shape)
    if x.shape[dim] == len(weights):
        direction = direction * _along(weights, dim, x)
    return direction.expand(x.shape).to(x.dtype)


def _along(numbers: Sequence[float], dim: int, x: Tensor) -> Tensor:
    """Numbers for the rows of a dimension of ``x``."""
    return torch.tensor(list(numbers), device=x.device).view([-1 if d == dim else 1 for d in range(x.dim())])


# --- the same passes again --------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What a model is called with, args and kwargs, and how many examples that is; ``count`` tells it of others."""

    arguments: Any
    size: int
    count: Count | None = None

    def take(self, rows: Sequence[int], scales: Sequence[float] | None = None) -> Any:
        """The arguments for some examples, cut where the batch is first or, by ``batch_of``, second; None where they
        cannot be cut. ``scales``: what each example's numbers and pixels are multiplied by.
        """
        for dim in (0, 1):
            taken = tree_map(partial(self._cut, dim, rows, scales), self.arguments, is_leaf=_is_packed)
            # If the first is not cut, examples lie in it one behind the other (bags).
            cut = next(tensors_in(taken), None) is not next(tensors_in(self.arguments), None)
            if cut and (self.count is None or self.count(*taken) == len(rows)):
                return taken
        return None

    def _cut(self, dim: int, rows: Sequence[int], scales: Sequence[float] | None, x: Any) -> Any:
        if _is_packed(x) and int(x.batch_sizes[0]) == self.size:
            padded, lengths = pad_packed_sequence(x, batch_first=True)
            index = torch.tensor(list(rows))
            some = padded.index_select(0, index.to(padded.device))
            return pack_padded_sequence(some, lengths[index], batch_first=True, enforce_sorted=False)
        if _is_object(x):
            held = copy.copy(x)
            cut = partial(self._cut, dim, rows, scales)
            vars(held).update({name: tree_map(cut, value, is_leaf=_is_packed) for name, value in vars(x).items()})
            return held
        if not (isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == self.size):
            return x
        some = x.index_select(dim, torch.tensor(list(rows), device=x.device))
        return some if scales is None or not _scales(some) else (some * _along(scales, dim, x)).to(some.dtype)

    def different(self, most: int) -> list[int]:
        """The first rows that hold different examples."""
        found: list[tuple[int, list[Tensor]]] = []
        for row in range(self.size):
            one = list(tensors_in(self.take([row])))
            if not any(len(one) == len(x) and all(map(_same, one, x)) for _, x in found):
                found.append((row, one))
            if len(found) == most:
                break
        return [row for row, _ in found]

    def largest_of(self, rows: Sequence[int]) -> int | None:
        """Which of some examples holds the largest number, in the first tensor of numbers or pixels that has one row
        each.
        """
        for x in tensors_in(self.take(rows)):
            if x.shape[:1] == (len(rows),) and x.numel() and _scales(x):
                sizes = x.detach().reshape(len(rows), -1).float().abs().amax(1).nan_to_num(0.0, 0.0, 0.0)
                return int(sizes.argmax()) if x.dim() > 1 and sizes.any() else None
        return None


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedSequence)


def _scales(x: Tensor) -> bool:
    """Whether half of its numbers mean anything: not where they are indices."""
    return x.is_floating_point() or x.dtype == torch.uint8


# --- the same random numbers ------------------------------------------------------------------------------------------

Drawn = tuple[tuple[Any, Any], Any]  #: where generators stood before and behind a pass, and the shapes in it


class Numbers:
    """Python's, NumPy's and torch's generators of random numbers, and those that are attributes of a model's modules.
    At the end they stand where they stood.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._shared = [torch.default_generator]
        if device.type == "cuda":
            self._shared.append(torch.cuda.default_generators[device.index])
        held = (value for module in model.modules() for value in vars(module).values())
        self._all = [*self._shared, *(value for value in held if isinstance(value, torch.Generator))]

    def __enter__(self) -> Numbers:
        states = [generator.get_state() for generator in self._all]
        self._states = random.getstate(), np.random.get_state(), states  # noqa: NPY002
        return self

    def __exit__(self, *_: object) -> None:
        self.again()

    def again(self, turn: int = 0) -> Any:
        """Set them back, or, for turns after the first, to some other place; returns `now`."""
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])  # noqa: NPY002
        for generator, state in zip(self._all, self._states[2], strict=True):
            generator.set_state(state)
        if turn:
            random.seed(turn)
            np.random.seed(turn)  # noqa: NPY002
            for generator in self._shared:
                generator.manual_seed(turn)
        return self.now()

    def now(self) -> Any:
        """Where they stand, to be compared: it moves where numbers are drawn."""
        of_numpy: Any = np.random.get_state()  # noqa: NPY002
        states = [generator.get_state().numpy().tobytes() for generator in self._all]
        return random.getstate(), of_numpy[1].tobytes(), of_numpy[2:], states


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A block in which dropout layers are in eval mode."""
    layers = [module for module in model.modules() if isinstance(module, AnyDropout) and module.training]
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True


def draw_alike(one: Drawn, other: Drawn) -> bool:
    """Whether two passes drew the same random numbers for the same rows: none, or as many for tensors of the same
    shapes, which may be shorter where the longest example is exchanged.
    """
    return one[0] == other[0] and (one[0][0] == one[0][1] or one[1] == other[1])


# --- what forward passes write ----------------------------------------------------------------------------------------

Place = tuple[str, str, str]  #: a module's path, "buffer" or "attribute", and its name
Written = dict[Place, Any]
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, hooks and the like, which are torch's own
_NO_OUTPUTS = _OF_MODULES - {"_buffers"}
_NOTHING = object()


class State:
    """What a model holds besides its parameters: buffers, and numbers and tensors that are plain attributes of modules.

    `take_back` undoes what a pass of the probe wrote, or appended to a list that is an attribute. What comes out
    differently where one example is exchanged holds something of that example. Counters and power iterations come out
    the same; what is as long as the batch is a cache, unless a state_dict holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._containers: list[tuple[Any, Any]] = []  # lists and dictionaries, each with a copy of what it holds
        for module in self._modules.values():
            for value in (value for name, value in vars(module).items() if name not in _OF_MODULES):
                inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
                self._containers += [(x, x.copy()) for x in (value, *inner) if isinstance(x, (list, dict, deque))]
        self._before = {place: (value, _copy(value)) for place, value in self._values().items()}
        self._marks = {place: mark(value) for place, (value, _) in self._before.items()}
        self._caches = set[Place]()
        self.touched = set[str]()  #: names of what passes have written, if only with what it held

    def _slots(self, path: str, kind: str) -> Any:
        return own_buffers(self._modules[path]) if kind == "buffer" else vars(self._modules[path])

    def _values(self) -> dict[Place, Any]:
        return {
            (path, kind, name): value
            for path in self._modules
            for kind in ("buffer", "attribute")
            for name, value in self._slots(path, kind).items()
            if kind == "buffer" or name not in _OF_MODULES
            if value is None or isinstance(value, (Tensor, int, float))
            if not isinstance(value, nn.Parameter)
        }

    @torch.no_grad()
    def take_back(self) -> Written:
        """Everything as it was before the probe. Returns what was written since."""
        values, written = self._values(), {}
        self.touched |= {_name(place) for place, value in values.items() if mark(value) != self._marks.get(place)}
        for place in values.keys() | self._before.keys():
            now, (held, value) = values.get(place, _NOTHING), self._before.get(place, (_NOTHING, None))
            if now is held and _same(now, value):
                continue
            if now is not _NOTHING:
                written[place] = _copy(now)
            if held is _NOTHING:
                del self._slots(*place[:2])[place[2]]
                continue
            self._slots(*place[:2])[place[2]] = held
            if isinstance(held, Tensor) and not _same(held, value):
                held.copy_(value)
        for container, items in self._containers:
            container.clear()
            container.update(items) if isinstance(container, dict) else container.extend(items)
        self._marks = {place: mark(value) for place, value in self._values().items()}
        return written

    @torch.no_grad()
    def compare(self, one: Written, other: Written, tolerance: float | None) -> None:
        """Refuse what two passes wrote where it depends on the examples; without a tolerance, they had two numbers of
        examples: whole numbers count them.
        """
        for place in one.keys() | other.keys():
            before = self._before.get(place, (None, None))[1]
            x, y = one.get(place, before), other.get(place, before)
            path, kind, name = place
            in_state_dict = kind == "buffer" and name not in non_persistent_buffers(self._modules[path])
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape != y.shape and not in_state_dict:
                self._caches.add(place)
            if place not in self._caches and _differs(x, y, before, tolerance):
                raise ClippingError(
                    f"the forward pass writes what depends on the examples into the {kind} '{_name(place)}', which "
                    "would leave the model without clipping or noise. Freeze it (eval mode), or use a layer without "
                    "running statistics: lambdacgd.clipping.convert(model)."
                )


def _name(place: Place) -> str:
    return f"{place[0]}.{place[2]}".lstrip(".")


@torch.no_grad()
def fingerprints(parameters: Iterable[Tensor]) -> list[int]:
    """A number of each that changes with its bits and their places: ``p.data.copy_(…)`` is a write that no version
    counts. Zero for what is frozen and no plain tensor (quantised weights).
    """
    whole, found = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}, []
    for p in parameters:
        number = 0
        plain = p.requires_grad or type(p) in (nn.Parameter, Tensor)
        if plain and p.layout == torch.strided and not p.is_meta:
            flat = (torch.view_as_real(p) if p.is_complex() else p.detach()).contiguous().view(-1)
            for part in flat.view(whole[flat.element_size()]).split(1 << 24):
                place = 2 * torch.arange(part.numel(), device=part.device) + 1  # a shard may be empty
                number = (number * 37 + int((part * place).sum())) % (1 << 63)
        found.append(number)
    return found


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) and not value.requires_grad else value


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and bool(x == y)


def _differs(x: Any, y: Any, before: Any, tolerance: float | None) -> bool:
    """Whether two values that passes over other examples wrote differ by more than rounding."""
    if isinstance(x, float) and isinstance(y, float):
        x, y, before = (torch.tensor(v) if isinstance(v, float) else None for v in (x, y, before))
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.requires_grad or _same(x, y):
        return False  # other things, a part of the loss
    if x.shape != y.shape:
        return True
    if not x.is_floating_point() or tolerance is None:
        return not x.is_floating_point()
    x, y = x.double(), y.double()
    change = x - before if isinstance(before, Tensor) and before.shape == x.shape else x
    rounding = 8 * torch.finfo(torch.float32).eps * y.abs().max()
    return bool((x - y).abs().max() > min(tolerance, 1e-5) * change.abs().max() + rounding)
