"""One backward pass: records come in layer by layer; at its end all norms are known, and the clipped sums are added.

Records arrive while autograd walks the graph (`BackwardPass.receive`), and the norms of many layers are formed as they
come (`NormPass`). When the walk has ended, norms become clip factors (`bounds`), and each record adds the weighted sum
of its per-example gradients to a buffer (`Totals`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lambdacgd.clipping import bounds, gpu
from lambdacgd.clipping.bounds import Factors, Mode, Norm, clip_factors
from lambdacgd.clipping.records import ColumnSum, Outer, Record, Stored
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import after_backward, backward_task, will_execute

LossReduction = Literal["mean", "sum", "none"]
NonFinite = Literal["zero", "raise"]

# Stored per-example gradients up to this many elements are put side by side and summed in one product.
_SMALL = 1 << 13
# Layers whose norms share a launch on CUDA; several launches, so that they overlap with the rest of the backward pass.
_TOGETHER = 24
# Sets of small parameters that get a buffer of their own; which take part may change with every batch (LayerDrop).
_PACKS = 16
# Forward passes that are remembered as clipped and added.
_REMEMBERED = 4096


@dataclass
class Settings:
    """How the examples of a batch are clipped and added up; see `attach` for what the fields mean."""

    max_grad_norm: float
    loss_reduction: LossReduction = "mean"
    mode: Mode = "flat"
    nonfinite: NonFinite = "zero"
    loss_scale: float | Tensor = 1.0  #: by how much the loss was multiplied (GradScaler; the views of an example)

    def __post_init__(self) -> None:
        for name, kind in (("loss_reduction", LossReduction), ("mode", Mode), ("nonfinite", NonFinite)):
            given, allowed = getattr(self, name), get_args(kind)
            if given not in allowed:
                raise ClippingError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {given!r}.")
        zeta = self.max_grad_norm
        if isinstance(zeta, bool) or not (isinstance(zeta, (int, float)) and zeta > 0):
            raise ClippingError(f"max_grad_norm must be a positive number (or math.inf), not {zeta!r}.")
        if self.mode == "automatic" and math.isinf(zeta):
            raise ClippingError("mode='automatic' scales every gradient to max_grad_norm, which must be finite.")
        self.max_grad_norm = float(zeta)

    def group(self, name: str) -> str:
        """Parameters of one group share a norm: those of a layer, or all."""
        return name.rpartition(".")[0] if self.mode == "per-layer" else ""


class BackwardPass:
    """Gathers the records of a backward pass and, when it ends, adds clipped sums to ``totals``.

    Attributes:
        anchor: A leaf that every tap hangs on; autograd reaches it in every pass that is for the parameters.
        totals: Where the sums are kept.
        norms: Per-example norms of each pass since the last `forget`. Not private.
        dropped: How many examples had a non-finite gradient since then, on the device; None: nobody counted.
        weights: One weight per example for the next pass, or None.
        before_adding: Called before a pass writes the sums.
        looking: None, or where the probe of a loss wants norms put, and nothing added.
        sharded: Whether sums are formed one parameter at a time, because nobody holds them all at once (FSDP2).
    """

    def __init__(self, settings: Settings, parameters: dict[str, nn.Parameter], device: torch.device) -> None:
        self.settings, self._parameters = settings, parameters
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._groups = len({settings.group(name) for name in parameters})
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.totals = Totals()
        self.norms: list[Tensor] = []
        self.dropped: Tensor | None = None
        self.weights: Tensor | None = None
        self.before_adding: Callable[[], None] | None = None
        self.looking: list[Tensor] | None = None
        self.sharded = False
        self._clipped: set[int] = set()  # forward passes that were added already
        self._for_parameters = (-1, False)  # of the last pass that was asked about: its number, and the answer
        self.reset()

    def reset(self) -> None:
        """Forget the pass under way: what an interrupted one left behind."""
        self._pending: dict[str, list[Record]] = {}
        self._norm_pass, self._task, self._batch = NormPass(), -1, 0
        self._forward_passes: set[int] = set()

    def forget(self) -> None:
        """Forget the sums, norms and counts gathered so far."""
        self.totals.clear()
        self.norms, self.dropped = [], None

    def gathers(self) -> bool:
        """Whether the backward pass under way is for the parameters.

        ``torch.autograd.grad(loss, x)`` is not, nor ``backward(inputs=[x])``: they leave ``p.grad`` alone, too.
        """
        task = backward_task()
        if task != self._for_parameters[0]:
            # Asked for anew: a node that is kept belongs to the stream it was made in, and CUDA graphs have their own.
            node = torch.autograd.graph.get_gradient_edge(self.anchor).node
            self._for_parameters = (task, will_execute(node))
        return self._for_parameters[1]

    def receive(
        self, records: Iterable[Record], *, batch: int, generation: int, refuse: Callable[[str], ClippingError]
    ) -> None:
        """Keep what one call of a layer yields, in forward pass ``generation`` over ``batch`` examples."""
        task = backward_task()
        if task != self._task:
            if self._pending:
                raise refuse(
                    "a backward pass inside another one (reentrant checkpointing, torch.autograd.grad in a hook) "
                    "would clip parts of a gradient separately. Use torch.utils.checkpoint(..., "
                    "use_reentrant=False)."
                )
            if self.before_adding is not None and self.looking is None:
                self.before_adding()
            self._task, self._batch, self._forward_passes = task, batch, set()
            after_backward(self._finish)
        if generation in self._clipped:
            raise refuse(
                "this forward pass has already been clipped and added by an earlier backward pass. Add the losses "
                "up and call backward() once."
            )
        self._forward_passes.add(generation)
        if len(self._forward_passes) > 1:
            raise refuse(
                "one backward pass covers two forward passes of the model. Where they saw different examples, call "
                "backward() for each; where row i is one example in both (two views of it), let one module call the "
                "model twice in its forward, and attach to that."
            )
        for record in records:
            if record.examples != batch:
                raise refuse(
                    f"expected {batch} examples, found {record.examples}: the batch must be the first dimension."
                )
            if type(record) is Stored and record.gradients.shape[1:] != self._shapes[record.name]:
                raise refuse(
                    f"the gradients its rule gives for '{record.name}' have shape {tuple(record.gradients.shape[1:])}, "
                    f"the parameter has {tuple(self._shapes[record.name])}."
                )
            self._pending.setdefault(record.name, []).append(record)
            self._norm_pass.add(record)

    def _finish(self) -> None:
        pending, norm_pass, batch = self._pending, self._norm_pass, self._batch
        self._clipped |= self._forward_passes
        self.reset()
        if len(self._clipped) > _REMEMBERED:
            newest = max(self._clipped)
            self._clipped = {g for g in self._clipped if g > newest - _REMEMBERED // 4}
        weights, self.weights = self.weights, None
        if not pending:
            return
        if weights is not None and weights.shape[0] != batch:
            raise ClippingError(f"{weights.shape[0]} weights were given for {batch} examples.")
        with torch.no_grad(), bounds.uncast(self.anchor):
            self._clip_and_add(pending, norm_pass, batch, weights)

    def _clip_and_add(
        self, pending: dict[str, list[Record]], norm_pass: NormPass, batch: int, weights: Tensor | None
    ) -> None:
        per_layer = self.settings.mode == "per-layer"
        shared = {name for name, uses in pending.items() if len(uses) > 1}
        merged = resolve_sums({name: merge(uses) for name, uses in pending.items()})
        packs, alone = pack_small(merged, apart=per_layer or self.sharded)
        groups: dict[str, list[Norm]] = {}
        for names, norm in norm_pass.finish(alone, shared):
            if per_layer:
                for name, row in zip(names, norm.rows(), strict=True):
                    groups.setdefault(self.settings.group(name), []).append(row)
            else:
                groups.setdefault("", []).append(norm)
        for pack in packs:
            groups.setdefault("", []).append(Norm(bounds.squared_norms(pack.flat)))
        factors = self._factors(list(groups.values()), batch, weights)
        if self.looking is not None:
            return
        keep = _kept(factors, weighed=weights is not None)
        factor_of = dict(zip(groups, factors.weight.unbind(0), strict=True))
        try:
            for record in alone:
                factor = factor_of[self.settings.group(record.name)]
                self.totals.add(record, self._parameters[record.name], factor, keep)
            for pack in packs:
                self.totals.add_pack(pack, factor_of[""], keep)
            self.totals.finish()
        except BaseException:  # out of memory, Ctrl-C: half of these examples' sum, to which a second try would add
            self.forget()
            raise

    def _factors(self, groups: list[list[Norm]], batch: int, weights: Tensor | None) -> Factors:
        s = self.settings
        factors = clip_factors(
            groups,
            max_grad_norm=s.max_grad_norm,
            mode=s.mode,
            scale=1.0 / s.loss_scale * (batch if s.loss_reduction == "mean" else 1),
            weights=weights,
            layers=self._groups,
        )
        if self.looking is not None:
            self.looking.append(factors.norms)
            return factors
        self.norms.append(factors.norms)
        missing = (~factors.finite if weights is None else ~factors.finite & (weights.to(factors.norms) != 0)).sum()
        self.dropped = missing if self.dropped is None else self.dropped + missing
        if s.nonfinite == "raise" and bool(missing > 0):
            raise ClippingError(f"{int(missing)} example(s) have a non-finite gradient (nonfinite='raise').")
        return factors


def _kept(factors: Factors, *, weighed: bool) -> Tensor | None:
    """None where every example is kept: then nothing needs masking. On CUDA that question is a synchronisation: not
    asked where weights are given (padding is expected) nor in a graph.
    """
    if factors.keep.is_cuda and (weighed or torch.cuda.is_current_stream_capturing()):
        return factors.keep
    return None if bool(factors.keep.all()) else factors.keep


# --- norms ------------------------------------------------------------------------------------------------------------


def merge(uses: list[Record]) -> Record:
    """One record for all uses of a parameter, cross terms included; per-example gradients where no shorter way
    exists.
    """
    if len(uses) == 1:
        return uses[0]
    whole, *others = [r.formed() if isinstance(r, ColumnSum) else r for r in uses]
    for record in others:
        joined = whole.merge(record) or record.merge(whole)
        if joined is None:
            every = slice(0, whole.examples)
            joined = Stored(whole.name, whole.materialise(every) + record.materialise(every))
        whole = joined
    return whole


def resolve_sums(merged: dict[str, Record]) -> list[Record]:
    """Form the biases' gradients, on CUDA those of all layers in one launch."""
    waiting = [r for r in merged.values() if isinstance(r, ColumnSum)]
    formed: dict[str, Record] = {}
    if len(waiting) > 1 and gpu.may_use_tables(waiting[0].b.device):
        sums = gpu.column_sums([r.b for r in waiting])
        if sums is not None:
            formed = {r.name: Stored(r.name, s) for r, s in zip(waiting, sums, strict=True)}
    for r in waiting:
        if r.name not in formed:
            formed[r.name] = r.formed()
    return [formed.get(name, record) for name, record in merged.items()]


class NormPass:
    """Norms of records as they come. On CUDA, layers are collected and normed many at a time while the backward pass
    goes on.

    A parameter that turns out to have several uses is normed again from its merged record.
    """

    def __init__(self) -> None:
        self._with_tables: bool | None = None  # asked once
        self._waiting: list[tuple[str, Tensor, Tensor]] = []
        self._blocks: list[tuple[list[str], Norm]] = []

    def add(self, record: Record) -> None:
        if type(record) is not Outer:
            return
        if self._with_tables is None:
            self._with_tables = gpu.may_use_tables(record.device)
        if self._with_tables and isinstance(record.a, Tensor) and isinstance(record.b, Tensor):
            self._waiting.append((record.name, record.a, record.b))
            if len(self._waiting) >= _TOGETHER:
                self._launch()

    def _launch(self) -> None:
        waiting, self._waiting = self._waiting, []
        for members, norm in gpu.gram_norms([(a, b) for _, a, b in waiting]):
            self._blocks.append(([waiting[k][0] for k in members], norm))

    def finish(self, records: list[Record], merged: set[str]) -> list[tuple[list[str], Norm]]:
        """(names, norms as rows) covering every record; ``merged`` names have several uses."""
        if self._waiting:
            self._launch()
        blocks = [block for block in self._blocks if merged.isdisjoint(block[0])]
        done = {name for names, _ in blocks for name in names}
        return blocks + [([r.name], r.norm()) for r in records if r.name not in done]


# --- sums -------------------------------------------------------------------------------------------------------------


class Pack:
    """Small per-example gradients side by side: one norm and one product for all biases and scales of a model."""

    def __init__(self, records: list[Stored]) -> None:
        self.records = records
        self.flat = torch.cat([r.flat() for r in records], 1)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(r.name for r in self.records)

    def buffers(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One buffer for the sums of all, and its views by name."""
        whole = torch.empty(self.flat.shape[1], dtype=self.flat.dtype, device=self.flat.device)
        parts = whole.split([r.size for r in self.records])
        return whole, {r.name: p.view(r.gradients.shape[1:]) for r, p in zip(self.records, parts, strict=True)}


def pack_small(records: list[Record], *, apart: bool) -> tuple[list[Pack], list[Record]]:
    """Split records into packs of small stored ones, by type, and the rest. Odd sizes go last, to keep the others
    aligned.
    """
    kinds: dict[torch.dtype, list[Stored]] = {}
    alone: list[Record] = []
    for record in records:
        if not apart and isinstance(record, Stored) and record.size <= _SMALL:
            kinds.setdefault(record.gradients.dtype, []).append(record)
        else:
            alone.append(record)
    return [Pack(sorted(rs, key=lambda r: r.size % 64 != 0)) for rs in kinds.values()], alone


class Totals:
    """Buffers for the sums, kept from step to step: stable addresses for noise tables and CUDA graphs."""

    def __init__(self) -> None:
        self.filled: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._packs: dict[tuple[str, ...], tuple[Tensor, dict[str, Tensor]]] = {}

    def add(self, record: Record, like: Tensor, factor: Tensor, keep: Tensor | None) -> None:
        name = record.name
        fresh = name not in self.filled
        total = self.filled.get(name)
        if total is None:
            total = self._buffers.get(name)
        if total is None:
            total = torch.empty(like.shape, dtype=bounds.accumulator(like.dtype), device=like.device)
            self._buffers[name] = total
        self.filled[name] = total
        record.add(total, factor.to(total.dtype), keep, fresh=fresh)

    def add_pack(self, pack: Pack, factor: Tensor, keep: Tensor | None) -> None:
        known = self._packs.get(pack.key)
        if known is None and len(self._packs) < _PACKS:
            known = self._packs[pack.key] = pack.buffers()
        if known is not None:
            whole, views = known
            fresh = not any(name in self.filled for name in views)
            if fresh or all(self.filled.get(name) is view for name, view in views.items()):
                Stored("", pack.flat).add(whole, factor.to(whole.dtype), keep, fresh=fresh)
                self.filled.update(views)
                return
        for record in pack.records:  # the small parameters of this physical batch are not those of the last one
            self.add(record, record.gradients[0], factor, keep)

    def finish(self) -> None:
        """All records of a backward pass have been added."""

    def clear(self) -> None:
        self.filled = {}

    def zeros(self, name: str, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=bounds.accumulator(like.dtype), device=like.device)
