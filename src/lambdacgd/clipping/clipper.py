"""`attach`: per-example clipped gradient sums from one forward and one backward pass.

`attach` refuses at the door what cannot be clipped exactly, replaces the forward of every module that owns trainable
parameters by its rule (`rules`, `layers`; `batch_free` where there is none), and hooks the model's own forward to learn
which examples it sees (`probe`). What comes of a backward pass is in `backward`.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lambdacgd.clipping import gpu
from lambdacgd.clipping.backward import BackwardPass, LossReduction, Totals, is_capturing
from lambdacgd.clipping.batch_free import (
    BatchFree,
    own_parameters_of,
    parameter_stand_in,
    refuse_stand_ins,
    standing_in,
)
from lambdacgd.clipping.bounds import Mode
from lambdacgd.clipping.layers import embedding, linear, norm, recurrent  # noqa: F401  (registers rules)
from lambdacgd.clipping.probe import WRITES_PARAMETER, Count, Loss, Probe, check_loss, refuse_gradients
from lambdacgd.clipping.rules import ForwardPass, Layer, Rule, Slot, exchanged, mark, rule_for
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import (
    AnyBatchNorm,
    AnyInstanceNorm,
    AnyLazyNorm,
    backward_hooks,
    backward_task,
    functorch_is_active,
    non_persistent_buffers,
    not_compiled,
    own_buffers,
    own_modules,
    own_parameters,
    tree_leaves,
    version,
)

_UNSEEN = 8  #: writes into a buffer that no probe saw written, until they are refused
_APART = 32  #: passes from one probe to that of an epoch that begins, at least
_MOST_MODES = 32  #: combinations of modes that are probed: a model may draw its own anew for every batch
_LISTS = (nn.ParameterList, nn.ParameterDict)
_FUSED = (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", "x", "input", "inputs")


def attach(
    model: nn.Module,
    max_grad_norm: float = 1.0,
    *,
    loss_reduction: LossReduction = "mean",
    mode: Mode = "flat",
    batch_of: Count | None = None,
) -> Clipper:
    """Clip per example from now on: every ``backward()`` adds Σ_i min(1, ζ/‖g_i‖) g_i to `Clipper.sums`.

    Args:
        model: The model. It stays what it is; `Clipper.detach` gives it back as it was.
        max_grad_norm: The clipping norm ζ (``math.inf``: no clipping).
        loss_reduction: How the loss combines the examples of the batch it saw.
        mode: One norm over all parameters ("flat"), one per layer at ζ/√layers ("per-layer"), or normalising instead
            of clipping ("automatic"). The sum's sensitivity is ζ in each.
        batch_of: ``batch_of(args, kwargs)`` gives the number of examples where it is not the first dimension of the
            model's first tensor argument.

    Returns:
        The clipper, which gathers the sums.

    Raises:
        ClippingError: The model cannot be clipped exactly; the message says what to do.
    """
    return Clipper(model, max_grad_norm, loss_reduction, mode, batch_of)


class Clipper(BackwardPass):
    """What `attach` returns. Parameters keep ``grad = None``; sums are in buffers of our own, float32 or float64.

    Guarantee
    ---------
    Zeroing out one example changes the mathematical sum by at most ``max_grad_norm · (1 + sensitivity_tolerance)``
    in ℓ₂ norm, provided the model treats examples independently and the loss adds them up (`check_model` tests both).

    Attributes:
        model: The model that is clipped.
        parameters: Its trainable parameters by name; tied ones once.
    """

    def __init__(
        self, model: nn.Module, max_grad_norm: float, loss_reduction: LossReduction, mode: Mode, batch_of: Count | None
    ) -> None:
        parameters = trainable(model)
        device = compute_device(next(iter(parameters.values())))
        super().__init__(parameters, device, max_grad_norm, loss_reduction, mode)
        self.model, self._batch_of, self._forward_pass = model, batch_of, ForwardPass()
        self._watch = Watch(model, parameters)
        self._probe = Probe(model, self._forward_pass, self.anchor, self.count, mean=loss_reduction == "mean")
        self._may_probe = True
        self._linear_layers: list[Layer] = []  # whose weights are cast together under autocast
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._standing_in = contextlib.ExitStack()
        self._undo = self._install()

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()`` for a loss of any reduction; a per-example vector is added up.

        Args:
            loss: The loss, a vector of one number per example if ``loss_reduction`` is "none".

        Raises:
            ClippingError: The loss has another shape.
        """
        if self.loss_reduction == "none" and loss.dim() != 1:
            raise ClippingError(f"loss_reduction='none' expects one loss per example, got shape {tuple(loss.shape)}.")
        loss.backward(torch.ones_like(loss))

    def check_loss(self, loss: Loss, items: Sequence[Any], collate: Callable[[list[Any]], Any]) -> bool:
        """See whether a loss adds examples up as declared; nothing is added to the sums.

        A few examples are collated, run and differentiated together, and again with each of them exchanged for another
        one, or alone: the norms of the others' gradients must be what they were.

        Args:
            loss: ``loss(model, batch)``, the training loss of a batch as ``collate`` makes it.
            items: A few examples as the dataset gives them; three or more find more, lengths that differ, too.
            collate: What makes a batch of them.

        Returns:
            Whether anything could be compared: not with one example, nor where random numbers always depend on them.

        Raises:
            ClippingError: The loss, the model or the padding mixes examples, or ``loss_reduction`` does not describe
                the loss; or the model is sharded.
        """
        return check_loss(self.model, self, loss, items, collate)

    def detach(self) -> None:
        """Give the model back as it was."""
        self._undo.close()
        self.reset()

    def keep_sums_in(self, totals: Totals) -> None:
        """Gather sums elsewhere: for models whose parameters are sharded over processes."""
        self.totals = totals
        self.sharded = self._forward_pass.sharded = True
        self._linear_layers = []  # their weights are whole only while their own layer runs

    def begin_batch(self) -> None:
        """Examples are handed out. Forward passes that ran before saw others: their backward passes are refused."""
        self._over = self._forward_pass.now.number

    def begin_epoch(self) -> None:
        """An epoch begins, when loops switch things on and off: the next forward pass is probed, but not too often."""
        if not self.sharded:
            self._watch.begin_epoch()

    def allow_probe(self, allowed: bool) -> None:
        """Whether a few examples of some batches may be run again, to learn which dimensions are the batch and whether
        examples stay in their rows (see `probe`). Where ranks compute together (FSDP2), all must probe the same batch.
        """
        self._may_probe = allowed

    # --- the model's forward pass -------------------------------------------------------------------------------------

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of examples in the model's arguments; of rows, where each has several views."""
        return self._batch_of(args, kwargs) if self._batch_of else batch_size(args, kwargs)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._forward_pass.watch is not None:  # a pass of the probe
            return
        self.settle()  # and let go of the last backward pass's records
        sharded = self._forward_pass.sharded
        if not torch.is_grad_enabled():
            self._watch.begin(sharded)
            return
        batch = self.count(args, kwargs)
        if batch == 0:
            raise ClippingError("the batch is empty. Leave it out: without a backward pass, take() gives zeros.")
        if batch % self.views:
            raise ClippingError(f"{batch} rows are no multiple of augmentations={self.views}: others under no_grad.")
        if backward_task() != -1:  # a recomputation by checkpointing
            self._forward_pass.batch = batch
            return
        self._forward_pass.begin()
        self.reset()
        self._watch.refuse_changes()
        # Of shards values are compared once: when a probe is due may differ from rank to rank afterwards.
        due = self._watch.due(again=not sharded) and batch > 1 and self._may_probe and not is_capturing(self.anchor)
        if self.looking is not None:  # a loss is looked at: probes of the model inside would take their time again
            due &= not self._probe.looked
        if due and self._probe.look((args, kwargs), batch, self._watch.mode):
            self._watch.probed(self._probe.compared)
        self._watch.begin(sharded)
        on_gpu = self.anchor.device.type == gpu.DEVICE
        self._forward_pass.cast_weights = linear.cast_weights(self._linear_layers) if on_gpu else {}
        self._forward_pass.look_at(batch)
        if self._probe.read_elsewhere:
            self._standing_in.enter_context(standing_in(self._probe.read_elsewhere))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._forward_pass.watch is None:
            self._forward_pass.leave()
            if backward_task() == -1:
                self._standing_in.close()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._forward_pass.watch is not None:
            return
        if not torch.is_grad_enabled():
            self._watch.end(quiet=True)
            return
        simple = type(output) is Tensor  # as most models' is
        if not simple:
            refuse_stand_ins(output, self._forward_pass.batch)
        if backward_task() == -1:
            self._watch.end(quiet=False)
            suspects = self._probe.suspects.get(self._watch.mode, {})
            seen = simple and output.requires_grad and not suspects
            self._forward_pass.now.seen = seen or refuse_gradients(self.model, output, suspects)

    # --- attaching ----------------------------------------------------------------------------------------------------

    def _install(self) -> contextlib.ExitStack:
        """Replace the forward of every owner of trainable parameters; to close what is returned undoes that."""
        model, names = self.model, {id(p): name for name, p in self.parameters.items()}
        refuse_modules(model)
        with contextlib.ExitStack() as undo:
            for path, module in model.named_modules():
                own = dict(_owned(module, names))
                if own and not isinstance(module, _LISTS):
                    undo.callback(self._replace(module, path, own).undo)
                elif isinstance(module, (AnyBatchNorm, AnyLazyNorm)):
                    undo.callback(module.register_forward_pre_hook(partial(_guard, path)).remove)
            for name, parameter in self.parameters.items():
                undo.callback(parameter.register_post_accumulate_grad_hook(partial(_stray, name)).remove)
            begin, leave, end = (not_compiled(hook) for hook in (self._begin, self._leave, self._end))
            # Before the hooks of others, which the probe then looks at, too; but behind FSDP2's, which gather.
            first = not any(hasattr(p, "device_mesh") for p in self.parameters.values())
            undo.callback(model.register_forward_pre_hook(begin, with_kwargs=True, prepend=first).remove)
            undo.callback(model.register_forward_hook(_NotSaved(leave), always_call=True).remove)
            undo.callback(model.register_forward_hook(end).remove)
            return undo.pop_all()

    def _replace(self, module: nn.Module, path: str, own: dict[str, str]) -> Replaced:
        before = module.__dict__.get("forward")
        if isinstance(before, Replaced):
            raise ClippingError(f"module '{path}' is attached already. Call detach() on the clipper it has first.")
        layer = Layer(module, path, own, module.forward, self._forward_pass, self)
        for local, name in own.items():
            owner, _, last = local.rpartition(".")  # lists of parameters are modules of their own
            within: dict[str, Any] = own_parameters(module.get_submodule(owner))
            layer.slots.append(Slot(within, last, name, within[last]))
        self._probe.layers.append(layer)
        rule = rule_for(module) if before is None else None  # somebody's own forward is followed as it is
        if isinstance(module, nn.Linear) and rule is not None and module.weight.dtype == torch.float32:
            self._linear_layers.append(layer)
        module.forward = Replaced(not_compiled(partial(self._forward_of, layer, rule)))  # a graph break
        module.forward.module, module.forward.before = module, before
        return module.forward

    def _forward_of(self, layer: Layer, rule: Rule | None, *args: Any, **kwargs: Any) -> Any:
        """What runs in place of a module's forward: its rule, where its input has the batch first, or stand-ins."""
        if not torch.is_grad_enabled():
            return layer.original(*args, **kwargs)
        if functorch_is_active():
            raise layer.refuse("torch.func cannot run over an attached model. Detach first: clipper.detach().")
        if not layer.forward_pass.running and backward_task() == -1:  # nor a recomputation by checkpointing
            raise layer.refuse(
                "it was called outside the model's own forward. Call the whole model, model(x), or privatize only the "
                "part that you call (in Lightning: submodule=…)."
            )
        if layer.forward_pass.sharded:
            self._hook_gathered(layer)
        else:
            for within, local, _, parameter in layer.slots:
                if within[local] is not parameter and not isinstance(within[local], BatchFree):
                    raise layer.refuse(
                        f"its parameter '{local}' is another tensor than when clipping was attached (functional_call, "
                        "or a new parameter). Detach, change the model, attach again."
                    )
        if layer.elsewhere or layer.forward_pass.sizes.learning:
            with own_parameters_of(layer):
                return _by_rule(layer, rule, *args, **kwargs)
        return _by_rule(layer, rule, *args, **kwargs)

    def _hook_gathered(self, layer: Layer) -> None:
        """Under FSDP2 autograd sees the gathered parameter, not the shard that `_install` watches."""
        for within, local, name, _ in layer.slots:
            gathered = within[local]
            known = self._watched.get(id(gathered))
            if gathered is not None and (known is None or known() is not gathered):
                self._watched[id(gathered)] = weakref.ref(gathered)
                self._undo.callback(gathered.register_post_accumulate_grad_hook(partial(_stray, name)).remove)


class Watch:
    """What is looked at in every forward pass, and when one is to be probed.

    Something may begin later: a warm-up, mixup every other batch, another mode of a module. So a probe is due at
    forward passes 1, 2, 3, 5, 8, … (Fibonacci's numbers: whatever happens every k-th time happens in one of them), when
    an epoch begins, in modes that were not probed, and after a buffer was written that no probe has seen written. A
    parameter must not be written at all (a frozen one as a running average, ``Embedding(max_norm=…)``).

    Attributes:
        mode: Which modules were in train mode when `due` was asked last.
    """

    def __init__(self, model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
        self._parameters = [(name, p, name in trained, p.shape, p.dtype) for name, p in model.named_parameters()]
        self._modules = list(model.modules())
        self._buffers = {
            f"{path}.{name}".lstrip("."): (own_buffers(module), name)
            for path, module in model.named_modules()
            for name in own_buffers(module).keys() - non_persistent_buffers(module)
        }
        self.mode, self._probed_modes = b"", set[bytes]()
        self._passes, self._last, self._next = 0, 1, 1  # forward passes so far; those that are probed, last and next
        self._due, self._looked = True, 0  # whether a probe is; the last pass that was probed
        self._before: tuple[Any, Any] = [], self._marks()  # how often parameters were written, and marks of buffers
        self._compared: set[str] = set()  # buffers that a probe has seen written
        self._unseen: Counter[tuple[str, bool]] = Counter()  # how often others were written; whether without gradients

    def refuse_changes(self) -> None:
        """Compare the parameters with what they were when clipping was attached.

        Raises:
            ClippingError: Somebody froze, unfroze, reshaped or cast a parameter, or registered a hook on its gradient.
        """
        for name, p, trained, shape, dtype in self._parameters:
            if p.requires_grad != trained or (trained and (p.shape != shape or p.dtype != dtype)):
                raise ClippingError(
                    f"parameter '{name}' was frozen or unfrozen, or changed its shape or type: detach first."
                )
            if trained and backward_hooks(p):
                raise ClippingError(
                    f"parameter '{name}' has a hook on its gradient (register_hook), which a clipped sum does not pass "
                    "through. Remove it; to train a part of a parameter, multiply by a mask in the forward pass."
                )

    def due(self, *, again: bool) -> bool:
        """Whether the forward pass that begins is to be probed; ``again``: also for its number alone. A probe stays
        due until `probed`: where it raises, and where it could not tell.
        """
        self._passes += 1
        self._refuse_unseen()  # also for whoever caught the error of the pass that wrote
        while again and self._passes >= self._next:
            self._last, self._next, self._due = self._next, self._last + self._next, True
        self.mode = bytes([m.training for m in self._modules])
        self._due |= self.mode not in self._probed_modes and len(self._probed_modes) < _MOST_MODES
        return self._due

    def begin_epoch(self) -> None:
        """A probe is due, unless there was one a short while ago: it takes some twenty passes of eight examples."""
        self._due |= self._passes >= self._looked + _APART

    def probed(self, compared: set[str]) -> None:
        """The pass that begins was probed, and nothing was found. ``compared``: buffers that probes saw written."""
        self._probed_modes.add(self.mode)
        self._looked = self._passes
        self._compared, self._due = compared, False

    def begin(self, sharded: bool) -> None:
        """Before a forward pass. Sharded parameters are gathered, that is written, in the middle of it."""
        self._before = [] if sharded else self._versions(), self._marks()

    def end(self, *, quiet: bool) -> None:
        """After a forward pass, ``quiet``: one without gradients.

        Raises:
            ClippingError: It wrote a parameter, or a buffer that no probe looks at.
        """
        versions, marks = self._before
        if versions and versions != (versions_now := self._versions()):
            wrote = next(p for p, was, is_ in zip(self._parameters, versions, versions_now, strict=True) if was != is_)
            raise ClippingError(WRITES_PARAMETER.format(name=wrote[0]))
        for name, now in self._marks().items():
            if now == marks[name] or name in self._compared:
                continue
            slots, local = self._buffers[name]
            held = slots.get(local)
            if not quiet:
                self._unseen[name, quiet] += 1
                self._due = True  # to be compared in the next forward pass
            elif held is not None and (
                held.is_floating_point() or held.numel() > 1
            ):  # a counter of passes tells nothing
                self._unseen[name, quiet] = _UNSEEN
        self._refuse_unseen()

    def _refuse_unseen(self) -> None:
        """Once a probe has seen what passes with gradients write: others may write no more."""
        if not self._unseen or not self._probed_modes:
            return
        for (name, quiet), times in sorted(self._unseen.items()):
            if times < _UNSEEN or name in self._compared:
                continue
            if quiet:
                raise _quiet(f"wrote the buffer '{name}', which those with gradients leave alone")
            raise ClippingError(
                f"forward passes wrote the buffer '{name}' {_UNSEEN} times, and none of those that were looked at did. "
                "Write it in every pass or in none, or use register_buffer(…, persistent=False)."
            )

    def _marks(self) -> dict[str, tuple[int, int]]:
        return {name: mark(slots.get(local)) for name, (slots, local) in self._buffers.items()}

    def _versions(self) -> list[int]:
        """How often each parameter was written."""
        return [0 if p.is_inference() else version(p) for _, p, *_ in self._parameters]


def _quiet(what: str) -> ClippingError:
    return ClippingError(
        f"a forward pass without gradients {what}: something of examples would leave the model without clipping or "
        "noise. Call the model in eval mode there, or, if the data is public, before it is private (detach first)."
    )


# --- a module's forward, replaced -------------------------------------------------------------------------------------


class _NotSaved(partial[Any]):
    """A hook or a forward of ours: it says why it cannot be saved. Models are pickled hooks first."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ClippingError(
            "this model is attached for training and cannot be pickled, which torch.save(model) does. Save "
            "model.state_dict(), or use private.save or lc.export; or call detach() first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # as functions are


class Replaced(_NotSaved):
    """What stands in for ``forward`` on a module's instance. A deep copy of the module gets its own plain forward."""

    module: nn.Module
    before: Any  #: what stood there

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.before is not None:
            return copy.deepcopy(self.before, memo)
        return type(self.module).forward.__get__(memo.get(id(self.module), self.module))

    def undo(self) -> None:
        if self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before


def _by_rule(layer: Layer, rule: Any, *args: Any, **kwargs: Any) -> Any:
    """A module's output by its rule, where its input has the batch in a place that the rule knows; or by stand-ins."""
    x: Any = args[0] if args else next(iter(kwargs.values()), None)
    if rule is None or not (rule.finds_batch or isinstance(x, Tensor)):
        return _followed(layer, *args, **kwargs)
    rows, plain = 0, isinstance(x, Tensor) and not isinstance(x, BatchFree)
    if plain and (rule.pointwise or not rule.finds_batch):
        alone = rule.pointwise and x.dim() > 1 and len(args) + len(kwargs) == 1
        rows = layer.forward_pass.sizes.rows(layer, x, second=alone)
    layer.batched = rows != 0
    if rows < 0:  # [time, batch, …]: the layer sees all of them as rows
        output = rule(layer, x.flatten(0, 1)).unflatten(0, x.shape[:2])
    elif rows or rule.finds_batch:
        output = rule(layer, *args, **kwargs)
    else:
        return _followed(layer, *args, **kwargs)
    if rows:
        layer.compare(x.flatten(0, 1) if rows < 0 else x)
    return output


def _followed(layer: Layer, *args: Any, **kwargs: Any) -> Any:
    """The original forward with stand-ins in place of this module's own parameters."""
    with exchanged((s.within, s.local, parameter_stand_in(layer, s.name, s.within[s.local])) for s in layer.slots):
        return layer.original(*args, **kwargs)


def _stray(name: str, parameter: Tensor) -> None:
    """A gradient that reached a parameter by way of autograd has not been clipped."""
    parameter.grad = None
    raise ClippingError(
        f"parameter '{name}' received a gradient that was not clipped: it is used outside its module's forward. Call "
        "that module, move penalties on weights to the optimizer's weight_decay, or freeze the parameter."
    )


# --- what is refused at the door --------------------------------------------------------------------------------------

_MIXES = "mixes the examples of a batch. Use GroupNorm: lambdacgd.clipping.convert(model) replaces it in place."


def _guard(path: str, m: nn.Module, args: Any) -> None:
    if _uses_the_batch(m) and torch.is_grad_enabled():
        raise ClippingError(f"module '{path}' ({type(m).__name__}) {_MIXES} (It was in eval mode before.)")
    if m.training and m.running_mean is not None:  # PyTorch's kernels write them without counting it
        raise _quiet(f"would write the statistics of '{path}' ({type(m).__name__})")


def _uses_the_batch(batch_norm: nn.Module) -> bool:
    """Its statistics are the batch's: in training, and without running statistics always."""
    return batch_norm.training or batch_norm.running_mean is None


def refuse_modules(model: nn.Module) -> None:
    """Refuse modules that no rule can make exact, each with what to do."""
    for path, m in model.named_modules():
        inside = any(p.requires_grad for p in m.parameters())
        learns = any(p.requires_grad for p in m.parameters(recurse=False))
        why = ""
        if isinstance(m, (AnyBatchNorm, AnyLazyNorm)) and (_uses_the_batch(m) or learns):
            why = _MIXES
        elif isinstance(m, AnyInstanceNorm) and m.track_running_stats:
            why = "keeps running statistics over examples. Set track_running_stats=False, or convert(model)."
        elif type(m) in _FUSED and inside:
            why = "hides its layers in fused kernels. lambdacgd.clipping.convert(model) opens it, in place."
        elif isinstance(m, torch.jit.ScriptModule) and inside:
            why = "is a TorchScript module, which cannot be seen into. Use its Python form."
        elif isinstance(m, nn.parallel.DistributedDataParallel):
            why = "would average gradients that were not clipped. Use lambdacgd.privatize, or attach to its .module."
        elif isinstance(m, nn.DataParallel):
            why = "splits batches behind our back. Use DistributedDataParallel, or one device."
        if why:
            raise ClippingError(f"module '{path}' ({type(m).__name__}) {why}")


# --- parameters and examples ------------------------------------------------------------------------------------------


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their first name in the model; tied ones once."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1:
        raise ClippingError(f"the trainable parameters lie on several devices ({', '.join(devices)}). Put them on one.")
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ClippingError(f"parameter '{name}' is not initialised yet: run one forward pass before attaching.")
        if not p.is_floating_point():
            raise ClippingError(f"parameter '{name}' has type {p.dtype}; only real floating point can be clipped.")
    if not parameters:
        raise ClippingError("the model has no trainable parameter. Unfreeze some: requires_grad_(True).")
    return parameters


def compute_device(parameter: Tensor) -> torch.device:
    """Where a parameter's layer computes: for a shard kept in host memory, the device of its mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type != "cuda":
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def _owned(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, str]]:
    """(local name, model's name) of trainable parameters of a module and of the parameter lists it holds."""
    for local, parameter in own_parameters(module).items():
        if parameter is not None and id(parameter) in names:
            yield local, names[id(parameter)]
    for child_name, child in own_modules(module).items():
        if isinstance(child, _LISTS):
            for local, name in _owned(child, names):
                yield f"{child_name}.{local}", name


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of examples: the first dimension of the first tensor given to the model; packed sequences know it."""
    packed = next((x for x in (*args, *kwargs.values()) if isinstance(x, PackedSequence)), None)
    if packed is not None:
        return int(packed.batch_sizes[0])
    tensors = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
    main = [tensors[name] for name in _MAIN_INPUTS if name in tensors]
    leaves = tree_leaves((args, main, tensors, kwargs))  # in the order of preference
    first = next((x for x in leaves if isinstance(x, Tensor) and x.dim() > 0), None)
    if first is None:
        raise ClippingError(
            "cannot tell the number of examples: the model was given no tensor. Make tensors of the data before, in "
            "the dataset or collate_fn, or pass batch_of=lambda args, kwargs: … to privatize or attach."
        )
    return first.shape[0]
