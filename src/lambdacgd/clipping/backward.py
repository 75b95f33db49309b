"""One backward pass: records come in layer by layer; at its end all norms are known, and the clipped sums are added.

A *record* is what one call of a layer leaves behind for one parameter, until the clip factors are known. It can say its
per-example gradient norms (`norm`), form the per-example gradients of some examples (`materialise`, the slow twin, used
where records of one parameter meet), and add the weighted sum of its per-example gradients to a total (`add`). Two
kinds serve nearly every layer: `Stored`, the per-example gradients themselves, where they are small; and `Outer`,
gradients ``Σ_t b_t a_tᵀ`` kept as the factors ``a`` and ``b`` (Linear, convolution).

Records arrive while autograd walks the graph (`BackwardPass.receive`), and the norms of many layers are formed as they
come (`NormPass`). When the walk has ended, norms become clip factors (`bounds`), and each record adds its weighted sum
to a buffer (`Totals`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.bounds import Factors, Mode, Norm, clip_factors
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import after_backward, storage_handle, storage_holders, version, will_execute

LossReduction = Literal["mean", "sum", "none"]
#: Whether all gradients were finite, to be asked; and what adds the records of those that were.
Hoped = tuple[Callable[[], bool], Callable[[], None]]

_CHANGED = (
    "an example's gradient is not finite, and to leave it out the sums are formed again; but an input of the model or "
    "a gradient was changed in place after backward(). Do so after optimizer.step(), or give the model a copy."
)

# Temporaries of the norm pass are cut into groups of examples of at most this many elements.
CHUNK_CPU, CHUNK_CUDA = 1 << 19, 1 << 27
# Per-example gradients of a convolution are kept up to this many elements, even where Gram matrices would cost less.
_KEPT_PATCHES = 1 << 26

# Stored per-example gradients up to this many elements are put side by side and summed in one product.
_SMALL = 1 << 13
# Layers whose norms share a launch on CUDA, where their shapes are alike.
_TOGETHER = 128
# Sets of small parameters that get a buffer of their own; which take part may change with every batch (LayerDrop).
_PACKS = 16
# Clipping norms up to this one leave sums finite where all norms are; see `bounds`.
_HOPE = 2.0**40


# --- records ----------------------------------------------------------------------------------------------------------


def in_chunks(examples: int, elements_each: int, device: torch.device) -> list[slice]:
    """The examples, as many at a time as temporaries of ``elements_each`` numbers each allow."""
    budget = CHUNK_CUDA if device.type == "cuda" else CHUNK_CPU
    step = max(1, min(examples, budget // max(1, elements_each)))
    return [slice(i, min(i + step, examples)) for i in range(0, examples, step)]


class Record:
    """One parameter's share of one backward pass."""

    name: str
    b: Tensor  # gradients of a layer's output, examples first

    def norm(self) -> Norm:
        raise NotImplementedError

    def materialise(self, rows: slice) -> Tensor:
        raise NotImplementedError

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        """``total += Σ_i factor_i g_i`` over the examples kept; ``fresh``: overwrite what the buffer holds."""
        raise NotImplementedError

    def merge(self, other: Record) -> Record | None:
        """One record for two calls that used the same parameter, cross terms included; None if they do not fit."""
        return None

    def folded(self, examples: int, *, minor: bool) -> Record:
        """The same for a layer that saw several rows of every example: their gradients are added up. ``minor``: the
        first row of every example comes first, then the second of every example.
        """
        return Stored(self.name, fold(self.materialise(slice(0, self.examples)), examples, minor=minor).sum(1))

    def reads(self) -> tuple[Tensor, ...]:
        """Tensors that `add` reads and that others hold, too: inputs of layers, gradients of their outputs."""
        return ()

    @property
    def examples(self) -> int:
        return self.b.shape[0]


def fold(x: Tensor, examples: int, *, minor: bool) -> Tensor:
    """[rows, …] as [examples, rows of each, …]; see `Record.folded`."""
    each = x.shape[0] // examples
    if minor:
        return x.reshape(each, examples, *x.shape[1:]).transpose(0, 1)
    return x.reshape(examples, each, *x.shape[1:])


def masked(x: Tensor, keep: Tensor | None) -> Tensor:
    """``x`` with the examples not kept set to zero, whatever they hold (0·NaN is NaN, so multiplying is not enough)."""
    if keep is None:
        return x
    return torch.where(keep.view(-1, *([1] * (x.dim() - 1))), x, torch.zeros((), dtype=x.dtype, device=x.device))


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """``x_i · factor_i``, computed in the factor's precision and rounded once to ``x``'s (float16 becomes float32)."""
    weight = factor.view(-1, *([1] * (x.dim() - 1)))
    if x.dtype == torch.bfloat16:
        return torch.mul(x, weight, out=torch.empty_like(x))
    return x * weight


@dataclass
class Stored(Record):
    """Per-example gradients of a parameter, [B, *shape], in float32 or float64; ``square``, where it is known, in parts
    to be added up: [parts, B].
    """

    name: str
    gradients: Tensor
    square: Tensor | None = None

    @property
    def size(self) -> int:
        """Numbers in one example's gradient."""
        return self.gradients.numel() // max(1, self.gradients.shape[0])

    def flat(self) -> Tensor:
        g = self.gradients
        return g if g.dim() == 2 else g.reshape(g.shape[0], self.size)

    def norm(self) -> Norm:
        if self.square is not None:
            return Norm(self.square)
        return Norm(bounds.squared_norms(self.flat()))

    def materialise(self, rows: slice) -> Tensor:
        return self.gradients[rows]

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        if total.device.type == gpu.DEVICE and gpu.weighted_sum(total, self.gradients, factor, keep, fresh=fresh):
            return
        flat = masked(self.flat(), keep).t()
        if fresh:
            torch.mv(flat, factor, out=total.view(-1))
        else:
            total.view(-1).addmv_(flat, factor)

    @property
    def examples(self) -> int:
        return self.gradients.shape[0]


class ColumnSum(Stored):
    """Per-example gradients Σ_t b_it of a bias [B, T, d], formed late: the norm pass forms those of all layers together
    (`form_together`).
    """

    def __init__(self, name: str, b: Tensor) -> None:
        self.name, self.b, self.square = name, b, None

    @cached_property
    def gradients(self) -> Tensor:  # type: ignore[override]
        kept = bounds.accumulator(self.b.dtype)
        return self.b[:, 0].to(kept) if self.b.shape[1] == 1 else self.b.sum(1, dtype=kept)

    def folded(self, examples: int, *, minor: bool) -> Record:
        return ColumnSum(self.name, fold(self.b, examples, minor=minor).flatten(1, 2))

    @property
    def examples(self) -> int:
        return self.b.shape[0]


@dataclass
class Outer(Record):
    """Per-example gradients Σ_t b_it a_itᵀ of a parameter viewed as a matrix [out, in].

    ``a`` is [B, T, in] or makes the rows asked for (patches of a convolution's input); ``b`` is [B, T, out].
    """

    name: str
    a: Tensor | Callable[[slice], Tensor]
    b: Tensor
    shape: torch.Size
    transposed: bool = False  # the parameter is stored [in, out] (Hugging Face Conv1D)
    image: Tensor | None = None  # what patches are made of

    def __post_init__(self) -> None:
        examples, tokens, out = self.b.shape
        patches = not isinstance(self.a, Tensor)
        inner = self.shape.numel() // out if patches else self.a.shape[2]  # type: ignore[union-attr]
        self.sizes = examples, tokens, inner, out
        self.matrix = (inner, out) if self.transposed else (out, inner)  # the parameter's shape as one
        self.is_direct = direct(self.sizes, patches=patches)

    def reads(self) -> tuple[Tensor, ...]:
        given = self.image if callable(self.a) else self.a
        return (self.b,) if given is None else (given, self.b)

    def left(self, rows: slice) -> Tensor:
        return self.a(rows) if callable(self.a) else self.a[rows]

    def in_chunks(self, examples: int, elements_each: int = 0) -> list[slice]:
        """See `in_chunks`: beside other temporaries, rows that are made of patches."""
        _, tokens, inner, _ = self.sizes
        return in_chunks(examples, max(elements_each, tokens * inner if callable(self.a) else 0), self.b.device)

    def folded(self, examples: int, *, minor: bool) -> Record:
        """Rows of an example are more of its tokens."""
        given = self.a
        if not callable(given):
            a, b = (fold(x, examples, minor=minor).flatten(1, 2) for x in (given, self.b))
            return outer(self.name, a, b, self.shape, transposed=self.transposed)
        if minor:
            return super().folded(examples, minor=minor)
        each = self.examples // examples

        def patches(rows: slice) -> Tensor:
            some = given(slice(each * (rows.start or 0), each * rows.stop))
            return fold(some, some.shape[0] // each, minor=False).flatten(1, 2)

        b = fold(self.b, examples, minor=False).flatten(1, 2)
        return Outer(self.name, patches, b, self.shape, image=self.image)

    def materialise(self, rows: slice) -> Tensor:
        start, stop = rows.start or 0, min(rows.stop, self.examples)
        kept = bounds.accumulator(self.b.dtype)
        whole = torch.empty(stop - start, *self.matrix, dtype=kept, device=self.b.device)
        for part in self.in_chunks(stop - start):
            here = slice(start + part.start, start + part.stop)
            a, b = self.left(here), self.b[here]
            first, second = (a, b) if self.transposed else (b, a)
            bounds.bmm_into(whole[part], first.transpose(1, 2), second)
        return whole.view(-1, *self.shape)

    def norm(self) -> Norm:
        examples, tokens, inner, outer = self.sizes
        dtype, device, kept = self.b.dtype, self.b.device, bounds.accumulator(self.b.dtype)
        gamma, kappa = bounds.accumulation_unit(max(inner, outer), dtype), bounds.folding_unit(dtype, device)
        if callable(self.a):  # their sum is formed in float32
            kappa = max(kappa, bounds.folding_unit(kept, device))
        if tokens == 1:
            pair = self.left(slice(0, examples)), self.b
            traces = [torch.linalg.vector_norm(x[:, 0], dim=1, dtype=kept).square() for x in pair]
            return Norm(traces[0] * traces[1], *traces, gamma=gamma, kappa=kappa)
        parts = [gram_parts(self.left(rows), self.b[rows]) for rows in self.in_chunks(examples, 2 * tokens * tokens)]
        sums = parts[0] if len(parts) == 1 else tuple(torch.cat(p) for p in zip(*parts, strict=True))
        return Norm(*sums, gamma=gamma, kappa=kappa, fold_a=inner < outer)

    def add(self, total: Tensor, factor: Tensor, keep: Tensor | None, *, fresh: bool) -> None:
        matrix = total if total.shape == self.matrix else total.view(self.matrix)
        if not callable(self.a):
            a, b = (self.a, self.b) if keep is None else (masked(self.a, keep), masked(self.b, keep))
            self._add_rows(matrix, a, b, factor, fresh)
            return
        for rows in self.in_chunks(self.examples):
            kept = None if keep is None else keep[rows]
            self._add_rows(matrix, masked(self.left(rows), kept), masked(self.b[rows], kept), factor[rows], fresh)
            fresh = False

    def _add_rows(self, matrix: Tensor, a: Tensor, b: Tensor, factor: Tensor, fresh: bool) -> None:
        """The factor goes into the smaller operand; then one product over all tokens of all examples."""
        _, _, inner, outer = self.sizes
        if inner < outer:
            a = scaled(a, factor)
        else:
            b = scaled(b, factor)
        if a.dtype != b.dtype:
            a, b = same_type(a, b)
        if callable(self.a):
            bounds.sum_of_products_into(matrix, b.transpose(1, 2), a, fresh=fresh)
            return
        a, b = a.flatten(0, 1), b.flatten(0, 1)
        first, second = (a, b) if self.transposed else (b, a)
        bounds.mm_into(matrix, first.t(), second, fresh=fresh)

    def merge(self, other: Record) -> Record | None:
        """Calls of one layer are more tokens of one call: Σ_t over both is the shared parameter's gradient."""
        if not isinstance(other, Outer) or callable(self.a) or callable(other.a):
            return None
        if self.transposed != other.transposed or self.b.dtype != other.b.dtype:
            return None
        a, b = torch.cat([self.a, other.a], 1), torch.cat([self.b, other.b], 1)
        return outer(self.name, a, b, self.shape, transposed=self.transposed)


def direct(sizes: tuple[int, int, int, int], *, patches: bool) -> bool:
    """Whether forming the per-example gradients (B, T, in, out) costs less than the two Gram matrices."""
    examples, tokens, inner, outer = sizes
    if tokens == 1:
        return False
    if inner * outer <= tokens * (inner + outer):
        return True
    # Kept gradients also save making patches again: worth their memory while they are small.
    return patches and examples * inner * outer <= _KEPT_PATCHES


def outer(name: str, a: Tensor, b: Tensor, shape: torch.Size, *, transposed: bool = False) -> Outer:
    """The record of a linear map with inputs ``a`` [B, T, in] and output gradients ``b`` [B, T, out]."""
    return Outer(name, *same_type(a, b), shape, transposed)


def same_type(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider type: a layer kept in float32 under autocast has two, say."""
    if x.dtype == y.dtype:
        return x, y
    wide = torch.promote_types(x.dtype, y.dtype)
    return x.to(wide), y.to(wide)


def gram_parts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Σ_ts (a_t·a_s)(b_t·b_s) = ‖Σ_t b_t a_tᵀ‖² per example, with traces and Frobenius norms of both Gram matrices."""
    gram_a, gram_b = bounds.bmm(a, a.transpose(1, 2)), bounds.bmm(b, b.transpose(1, 2))
    trace_a, trace_b = gram_a.diagonal(dim1=1, dim2=2).sum(1), gram_b.diagonal(dim1=1, dim2=2).sum(1)
    norm_a, norm_b = torch.linalg.vector_norm(gram_a, dim=(1, 2)), torch.linalg.vector_norm(gram_b, dim=(1, 2))
    return gram_a.mul_(gram_b).sum((1, 2)), trace_a, trace_b, norm_a, norm_b


# --- the pass ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Pass:
    """One forward pass of the model, as its backward pass sees it.

    Attributes:
        number: How many there were before it.
        clipped: Whether a backward pass has clipped and added it already.
        seen: Whether the probe can look at what the model handed out, where gradients come from.
    """

    number: int = 0
    clipped: bool = False
    seen: bool = True


class BackwardPass:
    """Gathers the records of a backward pass and, when it ends, adds clipped sums to ``totals``. `clipper.Clipper` is
    one, with a model.

    Attributes:
        parameters: The trainable parameters by name; tied ones once.
        loss_reduction: How the loss combines examples; see `attach`.
        mode: How norms are taken; see `attach`.
        views: K, the rows of every example, neighbours, whose gradients are averaged before clipping.
        anchor: A leaf that every tap hangs on, on the device that gradients are computed on; autograd reaches it in
            every pass that is for the parameters.
        totals: Where the sums are kept.
        looking: None, or where the probe of a loss wants norms put, and nothing added.
        low: Whether a gradient of 16 bits came meanwhile.
        task: The number of the backward pass that is delivering, or −1.
        forward: The forward pass that it goes through.
        before_adding: Called before a backward pass writes the sums.
        sharded: Whether sums are formed one parameter at a time, because nobody holds them all at once (FSDP2).
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        max_grad_norm: float,
        loss_reduction: LossReduction,
        mode: Mode,
    ) -> None:
        for name, given, kind in (("loss_reduction", loss_reduction, LossReduction), ("mode", mode, Mode)):
            if given not in get_args(kind):
                raise ClippingError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, not {given!r}.")
        plain = isinstance(max_grad_norm, (int, float)) and not isinstance(max_grad_norm, bool)
        if not (plain and max_grad_norm > bounds.SMALLEST_CLIP):
            least = f"a number above {bounds.SMALLEST_CLIP:g} (or math.inf)"
            raise ClippingError(f"max_grad_norm must be {least}, not {max_grad_norm!r}.")
        if mode == "automatic" and math.isinf(max_grad_norm):
            raise ClippingError("mode='automatic' scales every gradient to max_grad_norm, which must be finite.")
        self.parameters, self.loss_reduction, self.mode, self.views = parameters, loss_reduction, mode, 1
        self._max_grad_norm = float(max_grad_norm)
        self._groups = len({self._group(name) for name in parameters})
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.totals = Totals()
        self.looking: list[Tensor] | None = None
        self.low = False
        self.sharded = False
        self._norms: list[tuple[Tensor, Tensor | None]] = []  # of each pass, and the examples' weights
        self._hoped: Hoped | None = None  # sums that may not stand
        self._weights: Tensor | None = None  # for the next pass
        self.before_adding: Callable[[], None] | None = None
        self._over = -1  # the number of the newest forward pass that saw an earlier batch than the one under way
        self._for_parameters = (-1, False)  # of the last pass that was asked about: its number, and the answer
        self.reset()

    def _group(self, name: str) -> str:
        """Parameters of one group share a norm: those of a layer, or all."""
        return name.rpartition(".")[0] if self.mode == "per-layer" else ""

    # --- what a loop asks ---------------------------------------------------------------------------------------------

    @property
    def sums(self) -> dict[str, Tensor]:
        """The clipped sums gathered since the last `take`, by parameter name."""
        self.settle()
        return self.totals.filled

    def take(self) -> dict[str, Tensor]:
        """Hand out the sums of all trainable parameters and start the next logical batch.

        Returns:
            The sums by parameter name, zeros where none arrived. The buffers are ours and are written again by the
            next backward pass: use or copy them before.
        """
        self.settle()
        sums = self.gathered()
        self.zero()
        return sums

    def gathered(self) -> dict[str, Tensor]:
        """The sums that `take` hands out, before it is settled whether they stand."""
        filled, zeros = self.totals.filled, self.totals.zeros
        return {name: filled[name] if name in filled else zeros(name, p) for name, p in self.parameters.items()}

    @property
    def hopes(self) -> bool:
        """Whether the sums were formed as if every gradient were finite, and nobody has asked for them since: then
        they are finite if they stand.
        """
        return self._hoped is not None

    def stands(self) -> bool:
        """Whether the sums stand, which were formed as if every gradient were finite. Waits for the norms."""
        return self._hoped is None or self._hoped[0]()

    def settle(self) -> None:
        """Where the sums do not stand, form them again, without the examples whose gradients are not finite. Whoever
        has used them does so again.

        Raises:
            ClippingError: They cannot be formed again: what they are formed of was changed in place.
        """
        if self._hoped is None:
            return
        try:
            if not self.stands():
                self.totals.clear()
                with torch.no_grad(), bounds.uncast(self.anchor):
                    self._hoped[1]()
        except BaseException:  # as in `_clip_and_add`
            self.zero()
            raise
        self._hoped = None

    def zero(self) -> None:
        """Forget the sums, norms and counts gathered so far."""
        self.totals.clear()
        self._norms, self._hoped = [], None

    @property
    def norms(self) -> Tensor:
        """Per-example gradient norms (rounded up) since the last `take`. Not private: for the operator's eyes only."""
        return torch.cat([norms for norms, _ in self._norms]) if self._norms else torch.zeros(0)

    @property
    def examples(self) -> int:
        """How many examples backward passes have covered since the last `take`."""
        return sum(len(norms) for norms, _ in self._norms)

    @property
    def dropped(self) -> int:
        """How many examples with a weight had a non-finite gradient since the last `take`, and contributed zero. Not
        private; waits for the device.
        """
        return sum(
            int((~norms.isfinite() if weights is None else ~norms.isfinite() & (weights.to(norms) != 0)).sum())
            for norms, weights in self._norms
        )

    @property
    def max_grad_norm(self) -> float:
        """ζ, fixed while attached: noise is made for it."""
        return self._max_grad_norm

    @property
    def sensitivity_tolerance(self) -> float:
        """The noise scale must cover ``max_grad_norm · (1 + sensitivity_tolerance)``."""
        return max(bounds.sensitivity_tolerance(bounds.accumulator(p.dtype)) for p in self.parameters.values())

    # --- what a loop says ---------------------------------------------------------------------------------------------

    def leave_room(self, batch_size: float = 1.0) -> None:
        """Clip to a little less, so that a contribution with all its rounding stays within the ζ that was given.

        Args:
            batch_size: How many examples a sum has, about.
        """
        self._max_grad_norm /= bounds.room_below(self.sensitivity_tolerance, batch_size)

    def weigh(self, weights: Tensor | None) -> None:
        """Give every example of the next backward pass a weight; one of weight zero contributes exactly zero.

        Args:
            weights: Numbers in [0, 1], one per example; None: all are one.

        Raises:
            ClippingError: A weight lies outside [0, 1], or ``weights`` is no vector.
        """
        if weights is not None and weights.dim() != 1:
            raise ClippingError(f"weights must be one number per example, got shape {tuple(weights.shape)}.")
        if weights is not None and not is_capturing(weights) and not bool(((weights >= 0) & (weights <= 1)).all()):
            raise ClippingError("weights must lie in [0, 1]: a larger one would raise the sensitivity.")
        # On its way now, where nothing is queued that a copy would wait for. To the host it must have come.
        device = self.anchor.device
        self._weights = None if weights is None else weights.to(device, non_blocking=device.type == "cuda")

    def expect_views(self, views: int) -> None:
        """Every example comes as this many rows of the model's arguments, which are neighbours.

        The gradient of an example is the mean over its views: a loss that adds rows up has ``views`` times as many.
        """
        self.views = views

    # --- one pass -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the pass under way: what an interrupted one left behind."""
        self._pending: dict[str, list[Record]] = {}
        self._norm_pass, self.task, self._batch, self.forward = NormPass(), -1, 0, Pass()

    def gathers(self, task: int) -> bool:
        """Whether the backward pass under way is for the parameters: ``torch.autograd.grad(loss, x)`` is not, nor
        ``backward(inputs=[x])``, which leave ``p.grad`` alone, too.
        """
        if task != self._for_parameters[0]:
            # Asked for anew: a node that is kept belongs to the stream it was made in, and CUDA graphs have their own.
            node = torch.autograd.graph.get_gradient_edge(self.anchor).node
            self._for_parameters = (task, will_execute(node))
        return self._for_parameters[1]

    def begin(self, task: int, batch: int, forward: Pass, refuse: Callable[[str], ClippingError]) -> None:
        """The first call of a layer is about to deliver in this backward pass, or the first one from another forward
        pass, over ``batch`` examples. It is refused where its gradient would be clipped in parts, or twice.
        """
        if task != self.task:
            if self._pending:
                raise refuse(
                    "a backward pass inside another one (a hook, reentrant checkpointing) would clip parts of a "
                    "gradient. Use torch.utils.checkpoint(..., use_reentrant=False)."
                )
            self.settle()
            if self.before_adding is not None and self.looking is None:
                self.before_adding()
            self.task, self._batch, self.forward = task, batch, forward
            after_backward(self._finish)
        if forward.number <= self._over:
            raise refuse("its forward pass saw an earlier one than the loader's last batch. Run the model on that.")
        if not forward.seen:
            raise ClippingError("whether examples are kept apart could not be seen: return tensors or containers.")
        if forward.clipped:
            raise refuse("an earlier backward pass clipped this forward pass. Add the losses up, call backward() once.")
        if forward is not self.forward:
            raise refuse(
                "one backward pass covers two forward passes of the model. Call backward() for each; or, where row i "
                "is one example in both (two views of it), attach to a module that calls the model twice."
            )

    def receive(self, record: Record, refuse: Callable[[str], ClippingError]) -> None:
        """Keep what a call yields for one parameter."""
        parameter = self.parameters.get(record.name)
        if parameter is None:
            raise refuse(f"its rule gives a record for '{record.name}', which is no name in layer.names.")
        if isinstance(record, Outer):
            if record.is_direct:  # the gradients themselves are the cheaper way
                record = Stored(record.name, record.materialise(slice(0, record.examples)))
            else:
                self._norm_pass.add(record)
        if type(record) is Stored and record.gradients.shape[1:] != parameter.shape:
            raise refuse(
                f"the gradients its rule gives for '{record.name}' have shape {tuple(record.gradients.shape[1:])}, "
                f"the parameter has {tuple(parameter.shape)}."
            )
        uses = self._pending.get(record.name)
        if uses is None:
            self._pending[record.name] = [record]
        else:
            uses.append(record)

    def _finish(self) -> None:
        pending, norm_pass, batch = self._pending, self._norm_pass, self._batch
        self.forward.clipped = True
        self.reset()
        if not pending:
            return
        weights = None if self.looking is not None else self._weights
        if weights is not None and weights.shape[0] != batch:
            raise ClippingError(f"{weights.shape[0]} weights were given for {batch} examples.")
        with torch.no_grad(), bounds.uncast(self.anchor):
            self._clip_and_add(pending, norm_pass, batch, weights)
        if self.looking is None:  # nor where it failed: whoever tries again has the same examples
            self._weights = None

    def _clip_and_add(
        self, pending: dict[str, list[Record]], norm_pass: NormPass, batch: int, weights: Tensor | None
    ) -> None:
        per_layer = self.mode == "per-layer"
        shared = {name for name, uses in pending.items() if len(uses) > 1}
        records = [uses[0] if len(uses) == 1 else merge(uses) for uses in pending.values()]
        form_together(records)
        if not (per_layer or self.sharded):
            records = pack_small(records)
        groups: dict[str, list[Tensor]] = {}
        for names, norm in norm_pass.finish(records, shared):
            upper = norm.upper()
            apart = per_layer and len(names) > 1
            for name, rows in zip(names, upper, strict=True) if apart else [(names[0], upper)]:
                groups.setdefault(self._group(name), []).append(rows)
        factors = clip_factors(
            list(groups.values()),
            max_grad_norm=self.max_grad_norm,
            mode=self.mode,
            scale=float(batch) if self.loss_reduction == "mean" else 1.0 / self.views,
            weights=weights,
            layers=self._groups,
        )
        if self.looking is not None:
            self.looking.append(factors.norms)
            return
        self._norms.append((factors.norms, weights))
        factor_of = dict(zip(groups, factors.weight.unbind(0), strict=True))

        def add(keep: Tensor | None) -> None:
            for record in records:
                factor = factor_of[self._group(record.name)]
                if isinstance(record, Pack):
                    self.totals.add_pack(record, factor, keep)
                else:
                    self.totals.add(record, self.parameters[record.name], factor, keep)
            self.totals.finish(keep)

        try:
            self._add_finite(add, factors, records)
        except BaseException:  # out of memory, Ctrl-C: half of these examples' sum, to which a second try would add
            self.zero()
            raise

    def _add_finite(self, add: Callable[[Tensor | None], None], factors: Factors, records: list[Record]) -> None:
        """Add the examples whose gradients are finite: masked where some are not, since 0·NaN is NaN.

        On CUDA the host would wait for that answer with nothing queued. So the sums are first formed as if all were
        finite, where they can be formed again (nothing else is in their buffers), and the answer is read when somebody
        needs it: `settle`. Until then what the records read must stay as it is, a loop's own input buffer, say.
        """
        if is_capturing(factors.keep):
            add(factors.keep)
            return
        finite = on_its_way(factors.finite.all())
        at_once = self.sharded or self.totals.filled or self.max_grad_norm > _HOPE
        if factors.keep.device.type != gpu.DEVICE or at_once:
            add(None if finite() else factors.keep)
            return
        add(None)
        read = [x for record in records for x in record.reads()]
        written = list(map(version, read))

        def again() -> None:
            if list(map(version, read)) != written:
                raise ClippingError(_CHANGED)
            add(factors.keep)

        self._hoped = finite, again


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: nothing of it can be read by the host."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def on_its_way(answer: Tensor) -> Callable[[], bool]:
    """A yes or no of the device, to be read later: what is queued meanwhile need not be over then."""
    if not answer.is_cuda:
        return lambda: bool(answer)
    copy = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(answer, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> bool:
        event.synchronize()
        return bool(copy)

    return read


# --- norms ------------------------------------------------------------------------------------------------------------


def merge(uses: list[Record]) -> Record:
    """One record for all uses of a parameter, cross terms included; per-example gradients where nothing shorter is."""
    whole, *others = uses
    for record in others:
        every = slice(0, whole.examples)
        whole = (
            whole.merge(record)
            or record.merge(whole)
            or Stored(whole.name, whole.materialise(every) + record.materialise(every))
        )
    return whole


def form_together(records: list[Record]) -> None:
    """Form the biases' gradients, on CUDA those of all layers in one launch."""
    waiting = [r for r in records if isinstance(r, ColumnSum)]
    if len(waiting) > 1 and waiting[0].b.device.type == gpu.DEVICE and gpu.may_use_tables():
        for record, gradients in zip(waiting, gpu.column_sums([r.b for r in waiting]) or (), strict=False):
            record.gradients = gradients


class NormPass:
    """Norms of records as they come. On CUDA, layers are collected and normed many at a time while the backward pass
    goes on. A parameter that turns out to have several uses is normed again from its merged record.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Tensor, Tensor]] = []
        self._blocks: list[tuple[list[str], Tensor, gpu.Rounding]] = []
        self._together: bool | None = None  # whether norms share launches: one answer for a backward pass

    def add(self, record: Outer) -> None:
        if self._together is None:
            self._together = record.b.device.type == gpu.DEVICE and gpu.may_use_tables()
        if self._together and isinstance(record.a, Tensor):
            self._waiting.append((record.name, record.a, record.b))
            if len(self._waiting) >= _TOGETHER:
                self._launch()

    def _launch(self) -> None:
        waiting, self._waiting = self._waiting, []
        for members, grams, rounding in gpu.gram_norms([(a, b) for _, a, b in waiting]):
            self._blocks.append(([waiting[k][0] for k in members], grams, rounding))

    def finish(self, records: list[Record], merged: set[str]) -> list[tuple[list[str], Norm]]:
        """(names, norms as rows) covering every record; ``merged`` names have several uses."""
        if self._waiting:
            self._launch()
        done: dict[str, gpu.Rounding] = {}
        grams: dict[gpu.Rounding, list[Tensor]] = {}
        for names, block, rounding in self._blocks:
            if merged.isdisjoint(names):
                done |= dict.fromkeys(names, rounding)
                grams.setdefault(rounding, []).append(block)
        # One bound for all that round alike, whatever their shapes: it takes a dozen launches.
        norms = [([n for n in done if done[n] == key], gpu.norm_of(torch.cat(g), key)) for key, g in grams.items()]
        return norms + [([r.name], r.norm()) for r in records if r.name not in done]


# --- sums -------------------------------------------------------------------------------------------------------------


class Pack(Stored):
    """Small per-example gradients side by side: one norm and one product for all biases and scales of a model."""

    def __init__(self, records: list[Stored]) -> None:
        super().__init__("", torch.cat([r.flat() for r in records], 1))
        self.records = records

    def buffers(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One buffer for the sums of all, and its views by name."""
        whole = torch.empty(self.size, dtype=self.gradients.dtype, device=self.gradients.device)
        parts = whole.split([r.size for r in self.records])
        return whole, {r.name: p.view(r.gradients.shape[1:]) for r, p in zip(self.records, parts, strict=True)}


def pack_small(records: list[Record]) -> list[Record]:
    """The records, small stored ones in packs by type. Odd sizes go last in them, to keep the others aligned."""
    kinds: dict[torch.dtype, tuple[list[Stored], list[Stored]]] = {}
    alone: list[Record] = []
    for record in records:
        if isinstance(record, Stored) and (size := record.size) <= _SMALL:
            kinds.setdefault(record.gradients.dtype, ([], []))[size % 64 != 0].append(record)
        else:
            alone.append(record)
    for even, odd in kinds.values():
        some = even + odd
        alone.append(Pack(some) if len(some) > 1 else some[0])
    return alone


def holders(x: Tensor) -> int:
    """How many tensors and arrays lie in the memory of ``x``, itself among them; other processes count as one."""
    storage = x.untyped_storage()  # which is one more
    sent = x.device.type == "cpu" and storage.is_shared()  # by torch.multiprocessing, which moves it to shared memory
    return storage_holders(storage_handle(storage)) - 1 + sent


class Totals:
    """Buffers for the sums, kept from step to step: stable addresses for noise tables and CUDA graphs."""

    def __init__(self) -> None:
        self.filled: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._packs: dict[tuple[str, ...], tuple[Tensor, dict[str, Tensor]]] = {}
        self._together: dict[bool, list[gpu.WeightedSum]] = {True: [], False: []}  # what one launch adds: fresh, or not

    def add(self, record: Record, like: Tensor, factor: Tensor, keep: Tensor | None) -> None:
        name = record.name
        fresh = name not in self.filled
        if fresh:
            if name not in self._buffers:
                kind = bounds.accumulator(like.dtype)
                self._buffers[name] = torch.empty(like.shape, dtype=kind, device=like.device)
            self.filled[name] = self._buffers[name]
        self._add(record, self.filled[name], factor, keep, fresh)

    def _add(self, record: Record, total: Tensor, factor: Tensor, keep: Tensor | None, fresh: bool) -> None:
        factor, on_gpu = factor.to(total.dtype), total.device.type == gpu.DEVICE
        if on_gpu and isinstance(record, Stored) and gpu.may_sum_together(total, record.gradients, factor):
            self._together[fresh].append((total, record.gradients, factor))
        else:
            record.add(total, factor, keep, fresh=fresh)

    def add_pack(self, pack: Pack, factor: Tensor, keep: Tensor | None) -> None:
        names = tuple(r.name for r in pack.records)
        known = self._packs.get(names)
        if known is None and len(self._packs) < _PACKS:
            known = self._packs[names] = pack.buffers()
        if known is not None:
            whole, views = known
            fresh = not any(name in self.filled for name in views)
            if fresh or all(self.filled.get(name) is view for name, view in views.items()):
                self._add(pack, whole, factor, keep, fresh)
                self.filled.update(views)
                return
        for record in pack.records:  # the small parameters of this physical batch are not those of the last one
            self.add(record, record.gradients[0], factor, keep)

    def finish(self, keep: Tensor | None) -> None:
        """All records of a backward pass have been added."""
        together, self._together = self._together, {True: [], False: []}
        for fresh, sums in together.items():
            if sums:
                gpu.weighted_sums(sums, keep, fresh=fresh)

    def clear(self) -> None:
        self.filled, self._together = {}, {True: [], False: []}

    def leave(self) -> None:
        """Leave buffers in which somebody still sees the sums of the step before (a gradient) to them."""
        if not self.filled:
            self._buffers = {name: x for name, x in self._buffers.items() if holders(x) == 1}
            self._packs = {key: pack for key, pack in self._packs.items() if holders(pack[0]) == 1 + len(pack[1])}

    @property
    def memory(self) -> list[int]:
        """Where the buffers lie."""
        return [x.data_ptr() for x in (*self._buffers.values(), *(whole for whole, _ in self._packs.values()))]

    def zeros(self, name: str, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=bounds.accumulator(like.dtype), device=like.device)
