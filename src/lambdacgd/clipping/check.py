"""`check_model`: does this model and this loss have per-example gradients at all, and does clipping find them?
`register` asks the same of a rule of one's own.

The reference stands here, too: one example at a time through plain autograd, the slow twin of every fast path.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping.backward import LossReduction
from lambdacgd.clipping.bounds import AUTOMATIC_STABILITY, Mode
from lambdacgd.clipping.clipper import attach
from lambdacgd.clipping.probe import Loss, State
from lambdacgd.clipping.rules import RULES, Rule, rule_for
from lambdacgd.clipping.rules import register as keep_rule
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import AnyDropout, tree_leaves, tree_map

_EXACT, _SINGLE = 1e-6, 1e-4  #: what rounding may do to a comparison in float64 and in float32


@dataclass(frozen=True)
class Report:
    """What `check_model` measured: how far clipping is from the reference, relative to the sum, by parameter."""

    examples: int
    differences: dict[str, float]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        worst = max(self.differences.items(), key=lambda item: item[1], default=("", 0.0))
        where = "" if self.dtype == torch.float64 else f" in {str(self.dtype).removeprefix('torch.')}"
        return f"{self.examples} examples, largest relative difference {worst[1]:.1e} ('{worst[0]}'){where}"


def check_model(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    loss_reduction: LossReduction = "mean",
    tolerance: float = _EXACT,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Report:
    """Compare clipping on ``batch`` with plain autograd, one example at a time, in float64 on a copy of the model.

    Dropout is switched off for the comparison. Where the model or the loss brings float32 tensors of its own that do
    not compute with float64 ones (class weights), the comparison is in float32, with a tolerance of at least 1e-4.

    Args:
        model: The model; it is not changed.
        batch: A tensor or nest of tensors with the examples first (use at least three, none alike). With
            ``collate_fn``, a list of examples as the dataset gives them: then each is collated alone, too, so that
            padding and what the loss does with it are compared as well.
        loss: ``loss(model, batch)``, the training loss for a batch of any size.
        loss_reduction: How the loss combines the examples.
        tolerance: How far sums may differ, relative to their norm.
        collate_fn: What makes a batch of a list of examples.

    Returns:
        How far clipping is from the reference.

    Raises:
        ClippingError: The model mixes examples, the loss is not the declared mean or sum over examples, or a parameter
            would be missed; the message names the parameters that differ.
    """
    items = batch
    if collate_fn is not None:
        batch = collate_fn(copy.deepcopy(list(items)))
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim() > 0]
    if not leaves:
        raise ClippingError("batch holds no tensor with examples in its first dimension.")
    examples = leaves[0].shape[0]
    if examples < 2:
        raise ClippingError("check_model needs a batch of at least two examples (three or more find more).")
    if collate_fn is None:
        alone = [example(batch, i) for i in range(examples)]
    else:
        alone = [collate_fn([copy.deepcopy(item)]) for item in items]
    try:
        twin, probe, expected = _one_at_a_time(model, batch, alone, loss, torch.float64)
    except TypeError as error:
        raise ClippingError(
            f"the loss failed ({error}). It is called as loss(model, batch): "
            "loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), say."
        ) from error
    except RuntimeError:  # float32 tensors that we cannot reach; or an error of the user's, which comes again
        twin, probe, expected = _one_at_a_time(model, batch, alone, loss, torch.float32)
        tolerance = max(tolerance, _SINGLE)
    norms = torch.stack([torch.stack([g.square().sum() for g in e.values()]).sum().sqrt() for e in expected])
    clip = float(norms.median()) or 1.0
    clipper = attach(twin, clip, loss_reduction=loss_reduction)
    clipper.backward(loss(twin, probe))
    ratio = clipper.norms / norms
    sums, wanted = clipper.take(), clipped_sum(expected, clip)
    size = math.sqrt(sum(float(w.square().sum()) for w in wanted.values())) or 1.0
    differences = {name: float((sums[name] - wanted[name]).norm()) / size for name in wanted}
    wrong = {name: d for name, d in differences.items() if not d <= tolerance}
    if wrong:
        raise ClippingError(_explain(wrong, ratio, loss_reduction, tolerance))
    return Report(examples, differences, dtype=norms.dtype)


def _one_at_a_time(
    model: nn.Module, batch: Any, alone: list[Any], loss: Loss, dtype: torch.dtype
) -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
    """A copy of the model and of the batch in ``dtype``, and every example's gradient by plain autograd."""
    twin = copy.deepcopy(model).to(dtype)
    attach(twin, 1.0).detach()  # layers that no loss makes clippable say so themselves
    for module in twin.modules():
        if isinstance(module, AnyDropout) or hasattr(module, "attention_dropout"):
            module.train(False)
    batch, alone = tree_map(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, (batch, alone)
    )
    return twin, batch, gradients_of(twin, loss, alone)


def _explain(wrong: dict[str, float], ratio: Tensor, loss_reduction: str, tolerance: float) -> str:
    named = ", ".join(f"'{n}' ({d:.1e})" for n, d in sorted(wrong.items(), key=lambda item: -item[1])[:8])
    text = f"clipped sums differ from one-example-at-a-time autograd in {len(wrong)} parameter(s): {named}. "
    mean = float(ratio.mean())
    if float(ratio.std()) < tolerance * mean and abs(mean - 1) > tolerance:
        return f"{text}All gradients are {mean:.3g} times too large: {loss_reduction=} does not describe the loss."
    return text + (
        f"Either the model mixes examples, or the loss is not a {'mean' if loss_reduction == 'mean' else 'sum'} over "
        "them (a mean over all tokens of a batch: average within each example first), or it uses the batch size."
    )


# --- a rule of one's own ----------------------------------------------------------------------------------------------


def register(
    kind: type[nn.Module],
    *,
    example: Callable[[], tuple[nn.Module, Tensor]],
    finds_batch: bool = False,
    pointwise: bool = False,
) -> Callable[[Rule], Rule]:
    """Use the decorated rule for a class of layers, once it has given the right sums for an example of it.

    A rule is called as ``rule(layer, *args, **kwargs)`` in place of the module's forward. It computes the output with
    the parameters hidden from autograd, ``layer.hidden(x)``, and returns it through ``tap(layer, output, recorder,
    *saved)``. The recorder is called with the output's gradient and what was saved, and yields a record for every
    parameter: ``Stored(layer.names["weight"], gradients)`` with per-example gradients [B, *shape], or
    ``outer(layer.names["weight"], a, b, shape)`` where they are Σ_t b_t a_tᵀ.

    Args:
        kind: The class of layers; subclasses that compute alike are meant, too.
        example: Makes a layer of that class and an input for it, of three or more examples. Of an input [B, T, size]
            the first [B, size] is tried, too, and of [B, size] one of [B, 2, size], if the layer takes them.
        finds_batch: Whether the rule looks for the batch dimension itself (``layer.is_batched(x)``). Otherwise it is
            called only if its first argument has the batch first.
        pointwise: Whether the layer treats all leading dimensions of its only argument alike, as Linear does.

    Returns:
        A decorator that keeps the rule and returns it.

    Raises:
        ClippingError: The rule gives other gradients than one example at a time; it is not kept.
    """

    def keep(rule: Rule) -> Rule:
        module, x = example()
        before = RULES.get(kind)
        keep_rule(kind, finds_batch=finds_batch, pointwise=pointwise)(rule)
        try:
            if rule_for(module) is not rule:
                raise ClippingError(f"the example is a {type(module).__name__}, which is no plain {kind.__name__}.")
            _check_rule(module, x)
            _check_other_shape(module, x[:, 0] if x.dim() > 2 else torch.stack((x, x.flip(0)), 1))
        except BaseException:
            RULES.pop(kind)
            if before is not None:
                RULES[kind] = before
            raise
        return rule

    return keep


def _check_rule(module: nn.Module, x: Tensor) -> None:
    report = check_model(nn.Sequential(module), x, loss=_bent, tolerance=math.inf)
    name, worst = max(report.differences.items(), key=lambda item: item[1], default=("", 0.0))
    if worst > (_EXACT if report.dtype == torch.float64 else _SINGLE):  # the norms are wrong then, so all sums
        rule = f"the rule for {type(module).__name__} gives other gradients for '{name[2:]}'"
        raise ClippingError(f"{rule} than autograd does for one example at a time.")


def _check_other_shape(module: nn.Module, x: Tensor) -> None:
    """A rule that is right for one number of dimensions may add up too much or too little for another."""
    try:
        with torch.no_grad():
            apart = torch.allclose(module(x), torch.cat([module(one) for one in x.split(1)]), atol=1e-4)
        if apart:
            _check_rule(module, x)
    except ClippingError as error:
        raise ClippingError(f"{error} That was on an input of shape {tuple(x.shape)}.") from error
    except Exception:  # neither the layer nor its rule need take such an input: then training says so
        return


def _bent(model: nn.Module, x: Any) -> Tensor:
    """A loss whose gradient differs from example to example and from place to place."""
    flat = model(x).flatten(1)
    direction = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype, device=flat.device) + 0.1
    return torch.tanh(flat @ direction / flat.shape[1] ** 0.5).mean() + flat.square().mean(1).mean()


# --- the reference ----------------------------------------------------------------------------------------------------


def example(batch: Any, i: int) -> Any:
    """The batch that holds example ``i`` alone."""
    return tree_map(lambda x: x[i : i + 1] if isinstance(x, Tensor) and x.dim() > 0 else x, batch)


def gradients_of(model: nn.Module, loss: Loss, batches: list[Any]) -> list[dict[str, Tensor]]:
    """The gradient of the loss of each batch, by plain autograd; what forward passes write is taken back."""
    every, state = [], State(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for batch in batches:
        gradients = torch.autograd.grad(loss(model, batch), list(parameters.values()), allow_unused=True)
        state.take_back()
        found = zip(parameters.items(), gradients, strict=True)  # dense: Embedding(sparse=True)
        every.append({name: torch.zeros_like(p) if g is None else g.to_dense() for (name, p), g in found})
    return every


def clipped_sum(gradients: list[dict[str, Tensor]], max_grad_norm: float, *, mode: Mode = "flat") -> dict[str, Tensor]:
    """Σ_i of the clipped gradients, as `attach` defines its modes."""
    total: dict[str, Tensor] = {}
    for g in gradients:
        groups: dict[str, list[str]] = {}
        for name in g:
            groups.setdefault(name.rpartition(".")[0] if mode == "per-layer" else "", []).append(name)
        for names in groups.values():
            norm = torch.stack([g[n].square().sum() for n in names]).sum().sqrt()
            if mode == "automatic":
                factor = max_grad_norm / (norm + AUTOMATIC_STABILITY)
            else:
                factor = (max_grad_norm / len(groups) ** 0.5 / norm).clamp_max(1.0)
            for n in names:
                total[n] = total.get(n, 0) + factor * g[n]
    return total
