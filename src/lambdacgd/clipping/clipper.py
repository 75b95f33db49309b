"""`attach`: per-example clipped gradient sums from one forward and one backward pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lambdacgd.clipping import layers, precision, sites
from lambdacgd.clipping.capture import Call, Site, uncast
from lambdacgd.clipping.errors import ClippingError
from lambdacgd.clipping.factors import Factors, Mode, clip_factors, sensitivity_tolerance
from lambdacgd.clipping.passes import NormPass, Totals, merge, pack_small, resolve_sums
from lambdacgd.clipping.probing import Probing
from lambdacgd.clipping.records import Norm, Record, Stored
from lambdacgd.clipping.sizing import Sizing

__all__ = ["Clipper", "LossReduction", "attach", "layers"]

LossReduction = Literal["mean", "sum", "none"]
BatchOf = Callable[[tuple[Any, ...], dict[str, Any]], int]


def attach(
    model: nn.Module,
    max_grad_norm: float = 1.0,
    *,
    loss_reduction: LossReduction = "mean",
    mode: Mode = "flat",
    nonfinite: Literal["zero", "raise"] = "zero",
    batch_of: BatchOf | None = None,
    probe: bool = True,
) -> Clipper:
    """Clip per example from now on: every ``backward()`` adds Σ_i min(1, ζ/‖g_i‖) g_i to `Clipper.sums`.

    ``max_grad_norm`` is ζ (``math.inf``: no clipping). ``loss_reduction`` says how the loss combines the examples of
    the batch it saw. ``mode``: one norm over all parameters ("flat"), one per layer at ζ/√layers ("per-layer"), or
    normalising instead of clipping ("automatic"); the sum's sensitivity is ζ in each. ``nonfinite="raise"`` turns
    a non-finite gradient into an error, which tells everybody something about one example. ``batch_of(args,
    kwargs)`` gives the number of examples where it is not the first dimension of the model's first tensor argument.
    ``probe`` runs the first batch twice more, once without its last example, to learn which dimensions are the batch
    and whether examples stay in their rows (see `sizing`).
    """
    return Clipper(
        model,
        max_grad_norm,
        loss_reduction=loss_reduction,
        mode=mode,
        nonfinite=nonfinite,
        batch_of=batch_of,
        probe_sizes=probe,
    )


class Clipper:
    """What `attach` returns. Parameters keep ``grad = None``; sums are in buffers of our own, float32 or float64.

    Guarantee
    ---------
    Zeroing out one example changes the mathematical sum by at most ``max_grad_norm · (1 + sensitivity_tolerance)``
    in ℓ₂ norm, provided the model treats examples independently and the loss adds them up (`check_model` tests both).
    """

    def __init__(
        self,
        model: nn.Module,
        max_grad_norm: float,
        *,
        loss_reduction: LossReduction,
        mode: Mode,
        nonfinite: Literal["zero", "raise"],
        batch_of: BatchOf | None,
        probe_sizes: bool = True,
    ) -> None:
        _choice("loss_reduction", loss_reduction, get_args(LossReduction))
        _choice("mode", mode, get_args(Mode))
        _choice("nonfinite", nonfinite, ("zero", "raise"))
        if isinstance(max_grad_norm, bool) or not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise ClippingError(f"max_grad_norm must be a positive number (or math.inf), not {max_grad_norm!r}.")
        if mode == "automatic" and math.isinf(max_grad_norm):
            raise ClippingError("mode='automatic' scales every gradient to max_grad_norm, which must be finite.")
        self.model, self._max_grad_norm, self.mode, self.nonfinite = model, float(max_grad_norm), mode, nonfinite
        self.loss_reduction, self._batch_of = loss_reduction, batch_of
        self.loss_scale: float | Tensor = 1.0  # set to GradScaler's scale under float16
        self.before_adding: Callable[[], None] | None = None  # called before a backward pass writes the sums
        self._totals = Totals()
        self._norm_pass = NormPass()
        self.batch = 0  # examples in the forward pass under way
        self.running = False  # whether one is
        self.generation = 0
        self.sizing = Sizing()
        self._probing = Probing(model) if probe_sizes else None
        self.views = 1  # rows of every example in the model's arguments, one view of all after another
        self.linear_sites: list[Site] = []
        self.casts: dict[Site, tuple[Tensor, Tensor | None]] = {}
        self._last_cast: tuple[Tensor, int, Tensor] | None = None
        self._norms: list[Tensor] = []
        self._dropped: Tensor | None = None
        self._weights: Tensor | None = None
        self._pending: dict[str, list[Record]] = {}
        self._task, self._batch, self._seen = -1, 0, set[int]()
        self._consumed: set[int] = set()
        self._attached = False
        self.sharded = False  # set by `keep_sums_in`
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self.may_probe = True  # where ranks compute together (FSDP2), all must probe at the same batch
        self.parameters = sites.trainable(model)
        if not self.parameters:
            raise ClippingError(
                "the model has no trainable parameter. Unfreeze what is to be trained: requires_grad_(True)."
            )
        self.shapes = {name: (p.shape, p.dtype) for name, p in self.parameters.items()}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        device = sites.compute_device(next(iter(self.parameters.values())))
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.expected_rows = 0  # while the probe differentiates its first rows: how many
        self._asked = (-1, False)  # of the last backward pass: its number, and whether it is for the parameters
        self._undo = sites.install(self)
        self._attached = True

    @property
    def sums(self) -> dict[str, Tensor]:
        """The clipped sums gathered since the last `take`, by parameter name."""
        return self._totals.filled

    def keep_sums_in(self, totals: Totals) -> None:
        """Gather sums elsewhere: for models whose parameters are sharded over processes."""
        self._totals, self.sharded = totals, True
        self.linear_sites = []  # their weights are whole only while their own layer runs

    def watch(self, gathered: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` when autograd gives this tensor a gradient."""
        known = self._watched.get(id(gathered))
        if known is None or known() is not gathered:
            self._watched[id(gathered)] = weakref.ref(gathered)
            self._undo.append(gathered.register_post_accumulate_grad_hook(hook).remove)

    # --- what the operator reads -------------------------------------------------------------------------------------

    @property
    def norms(self) -> Tensor:
        """Per-example gradient norms (rounded up) since the last `take`. Not private: for the operator's eyes only."""
        return torch.cat(self._norms) if self._norms else torch.zeros(0)

    @property
    def dropped(self) -> int:
        """How many examples had a non-finite gradient since the last `take` (they contributed zero). Not private."""
        return 0 if self._dropped is None else int(self._dropped)

    @property
    def max_grad_norm(self) -> float:
        """ζ, fixed while attached: noise is made for it."""
        return self._max_grad_norm

    def leave_room(self) -> None:
        """Clip to a little less, so that a contribution with all its rounding stays within the ζ that was given."""
        self._max_grad_norm /= 1 + self.sensitivity_tolerance

    @property
    def sensitivity_tolerance(self) -> float:
        """The noise scale must cover ``max_grad_norm · (1 + sensitivity_tolerance)``."""
        return max(sensitivity_tolerance(precision.accumulator(p.dtype)) for p in self.parameters.values())

    # --- the batch ---------------------------------------------------------------------------------------------------

    def weigh(self, weights: Tensor | None) -> None:
        """Weights in [0, 1], one per example, for the next backward pass. Weight zero contributes exactly zero."""
        if weights is not None:
            capturing = weights.is_cuda and torch.cuda.is_current_stream_capturing()
            if weights.dim() != 1:
                raise ClippingError(f"weights must be one number per example, got shape {tuple(weights.shape)}.")
            if not capturing and not bool(((weights >= 0) & (weights <= 1)).all()):
                raise ClippingError(
                    "weights must lie in [0, 1]: a larger one would raise the sensitivity above max_grad_norm."
                )
        self._weights = weights

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()`` for a loss of any reduction; a per-example vector is added up."""
        if self.loss_reduction == "none" and loss.dim() != 1:
            raise ClippingError(f"loss_reduction='none' expects one loss per example, got shape {tuple(loss.shape)}.")
        loss.backward(torch.ones_like(loss))

    def take(self) -> dict[str, Tensor]:
        """Hand out the sums of all trainable parameters (zeros where none arrived) and start the next logical batch.

        The buffers are ours and are written again by the next backward pass: use or copy them before.
        """
        filled = self._totals.filled
        out = {n: filled[n] if n in filled else self._totals.zeros(n, p) for n, p in self.parameters.items()}
        self.zero()
        return out

    def zero(self) -> None:
        """Forget the sums, norms and counts gathered so far."""
        self._totals.clear()
        self._norms, self._dropped = [], None

    def detach(self) -> None:
        """Give the model back as it was."""
        if self._attached:
            for undo in reversed(self._undo):
                undo()
            self._undo, self._attached, self._pending = [], False, {}

    # --- the forward pass --------------------------------------------------------------------------------------------

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of examples in the model's arguments."""
        return self._batch_of(args, kwargs) if self._batch_of else sites.batch_size(args, kwargs)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            if self._probing is not None:
                self._probing.begin_quietly()
            return
        batch = self.count(args, kwargs)
        if batch == 0:
            raise ClippingError("the batch is empty. Leave it out: without a backward pass, take() gives zeros.")
        if torch._C._current_graph_task_id() == -1:  # not a recomputation by checkpointing
            self.generation, self.running = self.generation + 1, True
            self._reset()  # what an interrupted backward pass left behind
            sites.check_unchanged(self)
            if self._probing is not None:
                self._probing.begin(self, args, kwargs, batch)
            self.casts = sites.cast_weights(self)
            self.sizing.start(batch)
        self.batch = batch

    def _reset(self) -> None:
        self._pending, self._norm_pass, self._task, self._seen = {}, NormPass(), -1, set()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also where the forward pass raised: what layers do afterwards is outside it."""
        self.casts, self._last_cast = {}, None
        if torch._C._current_graph_task_id() == -1:
            self.running = False

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.check_output(output)
            if self._probing is not None and torch._C._current_graph_task_id() == -1:
                self._probing.end()
        elif self._probing is not None:
            self._probing.end_quietly()

    def check_output(self, output: Any) -> None:
        sites.check_output(self, output)

    def cast_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in autocast's type; query, key and value layers, which share their input, share the copy too."""
        last = self._last_cast
        if last is not None and last[0] is x and last[1] == x._version and last[2].dtype == dtype:
            return last[2]
        copy = x.to(dtype)
        if copy is not x:
            self._last_cast = (x, x._version, copy)
        return copy

    def is_batched(self, site: Site, x: Tensor) -> bool:
        """Whether ``x``, an input of a site, has the batch first."""
        return self.sizing.batch_first(site, x)

    # --- the backward pass -------------------------------------------------------------------------------------------

    def gathers(self) -> bool:
        """Whether the backward pass under way is for the parameters.

        ``torch.autograd.grad(loss, x)`` is not, nor ``backward(inputs=[x])``: they leave ``p.grad`` alone, too.
        """
        task = torch._C._current_graph_task_id()
        if task != self._asked[0]:
            # Asked for anew: a node that is kept belongs to the stream it was made in, and CUDA graphs have their own.
            node = torch.autograd.graph.get_gradient_edge(self.anchor).node
            self._asked = (task, torch._C._will_engine_execute_node(node))
        return self._asked[1]

    def _receive(self, call: Call, records: Iterable[Record]) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if self._pending:
                raise call.site.refuse(
                    "a backward pass inside another one (reentrant checkpointing, torch.autograd.grad in a hook) "
                    "would clip parts of a gradient separately. Use torch.utils.checkpoint(..., "
                    "use_reentrant=False)."
                )
            if self.before_adding is not None:
                self.before_adding()
            self._task, self._batch, self._seen = task, call.batch, set()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if call.generation in self._consumed:
            raise call.site.refuse(
                "this forward pass has already been clipped and added by an earlier backward pass. Add the losses "
                "up and call backward() once."
            )
        self._seen.add(call.generation)
        if len(self._seen) > 1:
            raise call.site.refuse(
                "one backward pass covers two forward passes of the model. Where they saw different examples, call "
                "backward() for each; where row i is one example in both (two views of it), let one module call the "
                "model twice in its forward, and attach to that."
            )
        for record in records:
            if record.examples != call.batch:
                raise call.site.refuse(
                    f"expected {call.batch} examples, found {record.examples}: the batch must be the first dimension."
                )
            if type(record) is Stored and record.gradients.shape[1:] != self.shapes[record.name][0]:
                raise call.site.refuse(
                    f"the gradients its rule gives for '{record.name}' have shape {tuple(record.gradients.shape[1:])}, "
                    f"the parameter has {tuple(self.shapes[record.name][0])}."
                )
            self._pending.setdefault(record.name, []).append(record)
            self._norm_pass.put(record)

    def _finish(self) -> None:
        pending, norm_pass = self._pending, self._norm_pass
        self._consumed |= self._seen
        self._reset()
        if len(self._consumed) > 4096:
            self._consumed = {g for g in self._consumed if g > self.generation - 1024}
        weights, self._weights = self._weights, None
        if not pending:
            return
        with torch.no_grad(), uncast(self.anchor):
            self._clip_and_add(pending, norm_pass, weights)

    def _clip_and_add(self, pending: dict[str, list[Record]], norm_pass: NormPass, weights: Tensor | None) -> None:
        if weights is not None and weights.shape[0] != self._batch:
            raise ClippingError(f"{weights.shape[0]} weights were given for {self._batch} examples.")
        shared = {name for name, found in pending.items() if len(found) > 1}
        merged = resolve_sums({name: merge(found) for name, found in pending.items()})
        packs, alone = pack_small(merged, apart=self.mode == "per-layer" or self.sharded)
        groups: dict[str, list[Norm]] = {}
        for names, norm in norm_pass.finish(alone, shared):
            if self.mode == "per-layer":
                for name, row in zip(names, norm.rows(), strict=True):
                    groups.setdefault(self._group(name), []).append(row)
            else:
                groups.setdefault("", []).append(norm)
        for pack in packs:
            groups.setdefault("", []).append(Norm(precision.squared_norms(pack.flat)))
        factors = self._factors(groups, weights)
        keep = self._keep(factors, weighed=weights is not None)
        order = {group: factor for group, factor in zip(groups, factors.weight.unbind(0), strict=True)}
        try:
            for record in alone:
                self._totals.add(record, self.parameters[record.name], order[self._group(record.name)], keep)
            for pack in packs:
                self._totals.add_pack(pack, order[""], keep)
            self._totals.finish()
        except BaseException:  # out of memory, Ctrl-C: half of these examples' sum, to which a second try would add
            self.zero()
            raise

    def _group(self, name: str) -> str:
        return name.rpartition(".")[0] if self.mode == "per-layer" else ""

    def _factors(self, groups: dict[str, list[Norm]], weights: Tensor | None) -> Factors:
        scale = 1.0 / self.loss_scale * (self._batch if self.loss_reduction == "mean" else 1)
        share = list(groups.values())
        if self.mode == "per-layer":
            share = share + [[] for _ in range(sites.layer_count(self) - len(share))]
        factors = clip_factors(
            [g for g in share if g],
            max_grad_norm=self.max_grad_norm,
            mode=self.mode,
            scale=scale,
            weights=weights,
            layers=len(share),
        )
        self._norms.append(factors.norms)
        missing = (~factors.finite if weights is None else ~factors.finite & (weights.to(factors.norms) != 0)).sum()
        self._dropped = missing if self._dropped is None else self._dropped + missing
        if self.nonfinite == "raise" and bool(missing > 0):
            raise ClippingError(f"{int(missing)} example(s) have a non-finite gradient (nonfinite='raise').")
        return factors

    def _keep(self, factors: Factors, *, weighed: bool) -> Tensor | None:
        """None where every example is kept: then nothing needs masking. On CUDA that question is a synchronisation:
        not asked where weights are given (padding is expected) nor in a graph.
        """
        if factors.keep.is_cuda and (weighed or torch.cuda.is_current_stream_capturing()):
            return factors.keep
        return None if bool(factors.keep.all()) else factors.keep


def _choice(name: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ClippingError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {given!r}.")
