"""Where a model's trainable parameters live, what replaces each owner's forward, and what is refused at the door."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lambdacgd.clipping.batchfree import BatchFree, parameter_stand_in
from lambdacgd.clipping.capture import Site
from lambdacgd.clipping.errors import ClippingError
from lambdacgd.clipping.registry import Rule, rule_for

if TYPE_CHECKING:
    from lambdacgd.clipping.clipper import Clipper

Undo = Callable[[], None]
_LISTS = (nn.ParameterList, nn.ParameterDict)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._LazyNormBase)
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", "x", "input", "inputs")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their first name in the model; tied ones once."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    devices = sorted({str(p.device) for p in found.values()})
    if len(devices) > 1:
        raise ClippingError(f"the trainable parameters lie on several devices ({', '.join(devices)}). Put them on one.")
    for name, p in found.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ClippingError(f"parameter '{name}' is not initialised yet: run one forward pass before attaching.")
        if not p.is_floating_point():
            raise ClippingError(f"parameter '{name}' has type {p.dtype}; only real floating point can be clipped.")
    return found


def compute_device(parameter: Tensor) -> torch.device:
    """Where a parameter's layer computes: for a shard kept in host memory, the device of its mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type != "cuda":
        return parameter.device
    return torch.device("cuda", torch.cuda.current_device())


def install(clipper: Clipper) -> list[Undo]:
    """Replace the forward of every owner of trainable parameters; the returned calls give everything back."""
    model, names = clipper.model, {id(p): name for name, p in clipper.parameters.items()}
    refuse_modules(model)
    undo: list[Undo] = []
    try:
        for path, module in model.named_modules():
            own = dict(_owned(module, names))
            if own and not isinstance(module, _LISTS):
                undo.append(_replace(clipper, module, path, own))
            elif isinstance(module, _BATCH_NORMS):
                undo.append(_guard(module, path))
        for name, parameter in clipper.parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(partial(_stray, name))
            undo.append(handle.remove)
        begin, leave, end = (torch._dynamo.disable(f) for f in (clipper._begin, clipper._leave, clipper._end))
        undo.append(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        undo.append(model.register_forward_hook(leave, always_call=True).remove)
        undo.append(model.register_forward_hook(end).remove)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return undo


def _owned(module: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, str]]:
    """(local name, model's name) of trainable parameters of a module and of the parameter lists it holds."""
    for local, parameter in module._parameters.items():
        if parameter is not None and id(parameter) in names:
            yield local, names[id(parameter)]
    for child_name, child in module._modules.items():
        if isinstance(child, _LISTS):
            for local, name in _owned(child, names):
                yield f"{child_name}.{local}", name


class Replaced:
    """A forward put on a module's instance. A deep copy of the module gets its own plain forward instead: this one
    would compute with the original's weights.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run, self._before = module, run, module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        return type(self._module).forward.__get__(memo.get(id(self._module), self._module))

    def undo(self) -> None:
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


def _replace(clipper: Clipper, module: nn.Module, path: str, own: dict[str, str]) -> Undo:
    before = module.__dict__.get("forward")
    if isinstance(before, Replaced):
        raise ClippingError(f"module '{path}' is attached already. Call detach() on the clipper it has first.")
    site = Site(clipper, module, path, own, module.forward)
    site.slots = [(slots, local, slots[local]) for slots, local in _slots(site)]
    rule = rule_for(module) if before is None else None  # somebody's own forward is followed as it is
    if isinstance(module, nn.Linear) and rule is not None and module.weight.dtype == torch.float32:
        clipper.linear_sites.append(site)
    replaced = Replaced(module, torch._dynamo.disable(partial(_run, site, rule)))  # a graph break in torch.compile
    module.forward = replaced
    return replaced.undo


def _run(site: Site, rule: Rule | None, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return site.original(*args, **kwargs)
    if torch._C._are_functorch_transforms_active():
        raise site.refuse("torch.func transforms cannot run over an attached model. Detach first: clipper.detach().")
    if not site.clipper.running and torch._C._current_graph_task_id() == -1:  # nor a recomputation by checkpointing
        raise site.refuse(
            "it was called outside the model's own forward, so its examples are unknown. Call the whole model, "
            "model(x), or privatize only the part that you call (in Lightning: submodule=…)."
        )
    if site.clipper.sharded:
        _watch(site)
    else:
        for slots, local, parameter in site.slots:
            if slots[local] is not parameter and not isinstance(slots[local], BatchFree):
                raise site.refuse(
                    f"its parameter '{local}' is another tensor than when clipping was attached (functional_call, or a "
                    "new parameter). Detach, change the model, attach again."
                )
    if rule is not None:
        if getattr(rule, "finds_batch", False):
            return rule(site, *args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and not isinstance(x, BatchFree) and site.clipper.is_batched(site, x):
            return rule(site, *args, **kwargs)
    return _followed(site, *args, **kwargs)


def _slots(site: Site) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the parameters of ``site.names`` are kept."""
    for local in site.names:
        owner, _, last = local.rpartition(".")
        yield site.module.get_submodule(owner)._parameters, last


def _followed(site: Site, *args: Any, **kwargs: Any) -> Any:
    """The original forward with stand-ins in place of this module's own parameters."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for (slots, last), name in zip(_slots(site), site.names.values(), strict=True):
        kept.append((slots, last, slots[last]))
        slots[last] = parameter_stand_in(site, name, slots[last])
    try:
        return site.original(*args, **kwargs)
    finally:
        for slots, last, parameter in kept:
            slots[last] = parameter


def _stray(name: str, parameter: Tensor) -> None:
    """A gradient that reached a parameter by way of autograd has not been clipped."""
    parameter.grad = None
    raise ClippingError(
        f"parameter '{name}' received a gradient that was not clipped: it is used outside the forward of the module "
        "that owns it (a weight passed to a function elsewhere, a penalty on weights in the loss, or a forward "
        "called before attach). Call the owning module instead, move penalties to the optimizer's weight_decay, or "
        "freeze the parameter."
    )


def _watch(site: Site) -> None:
    """Under FSDP2 autograd sees the gathered parameter, not the shard that `install` watches."""
    for (slots, last), name in zip(_slots(site), site.names.values(), strict=True):
        gathered = slots[last]
        if gathered is not None:
            site.clipper.watch(gathered, partial(_stray, name))


def _guard(module: nn.Module, path: str) -> Undo:
    def refuse(m: nn.Module, args: Any) -> None:
        if _uses_the_batch(m) and torch.is_grad_enabled():
            raise ClippingError(_batch_norm_message(path, m) + " (It was in eval mode when clipping was attached.)")

    return module.register_forward_pre_hook(refuse).remove


def _uses_the_batch(batch_norm: nn.Module) -> bool:
    """Its statistics are the batch's: in training, and without running statistics always."""
    return batch_norm.training or batch_norm.running_mean is None


def _batch_norm_message(path: str, module: nn.Module) -> str:
    return (
        f"module '{path}' ({type(module).__name__}) mixes the examples of a batch, so no example has a gradient of "
        "its own. Use GroupNorm: lambdacgd.clipping.convert(model) replaces it in place."
    )


def refuse_modules(model: nn.Module) -> None:
    """Modules that no rule can make exact, each with what to do."""
    for path, m in model.named_modules():
        learns = any(p.requires_grad for p in m.parameters(recurse=False))
        if isinstance(m, _BATCH_NORMS) and (_uses_the_batch(m) or learns):
            raise ClippingError(_batch_norm_message(path, m))
        if isinstance(m, nn.modules.instancenorm._InstanceNorm) and m.track_running_stats:
            raise ClippingError(
                f"module '{path}' ({type(m).__name__}) keeps running statistics over examples: an unclipped, "
                "un-noised leak. Set track_running_stats=False, or lambdacgd.clipping.convert(model)."
            )
        inside = any(p.requires_grad for p in m.parameters())
        if type(m) in (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN) and inside:
            raise ClippingError(
                f"module '{path}' ({type(m).__name__}) computes with fused kernels that hide its layers. "
                "lambdacgd.clipping.convert(model) replaces it in place by one with the same parameters and outputs."
            )
        if isinstance(m, torch.jit.ScriptModule) and inside:
            raise ClippingError(
                f"module '{path}' is a TorchScript module, which cannot be seen into. Use its Python form."
            )
        if isinstance(m, nn.parallel.DistributedDataParallel):
            raise ClippingError(
                f"module '{path}' is wrapped in DistributedDataParallel, which would average gradients that were not "
                "clipped. lambdacgd.privatize takes the wrapped model; to clip alone, attach to its .module."
            )
        if isinstance(m, (nn.DataParallel,)):
            raise ClippingError(
                "DataParallel splits batches behind our back. Use DistributedDataParallel, or one device."
            )


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of examples: the first dimension of the first tensor given to the model."""
    found = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dim() > 0]
    if not found:
        named = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and v.dim() > 0}
        found = [named[k] for k in _MAIN_INPUTS if k in named] or list(named.values())
        found = found or [x for x in tree_leaves(list(kwargs.values())) if isinstance(x, Tensor) and x.dim() > 0]
    if not found:
        raise ClippingError(
            "cannot tell the number of examples: the model was given no tensor. Make tensors of the data before the "
            "model (in the dataset or collate_fn), or pass batch_of=lambda args, kwargs: … to privatize or attach."
        )
    return found[0].shape[0]


def check_unchanged(clipper: Clipper) -> None:
    for name, p in clipper.parameters.items():
        if not p.requires_grad:
            raise _changed(name, "was frozen")
        if (p.shape, p.dtype) != clipper.shapes[name]:
            raise _changed(name, f"changed its shape to {tuple(p.shape)} or its type to {p.dtype}")
        if p._backward_hooks:
            raise ClippingError(
                f"parameter '{name}' has a hook on its gradient (register_hook), which a clipped sum does not pass "
                "through. Remove it; to train a part of a parameter, multiply by a mask in the forward pass."
            )
    for name, p in clipper.frozen.items():
        if p.requires_grad:
            raise _changed(name, "was unfrozen")


def _changed(name: str, what: str) -> ClippingError:
    return ClippingError(
        f"parameter '{name}' {what} after clipping was attached. Detach, change the model, attach again."
    )


def check_output(clipper: Clipper, output: Any) -> None:
    if any(isinstance(x, BatchFree) for x in tree_leaves(output)):
        raise ClippingError(
            f"the model's output does not have the batch ({clipper.batch} examples) first: some layer sees examples "
            "folded into another dimension (x.view(B*T, …), or batch_first=False). Keep the batch as the first "
            "dimension of every layer's input."
        )


def layer_count(clipper: Clipper) -> int:
    return len({name.rpartition(".")[0] for name in clipper.parameters})


def cast_weights(clipper: Clipper) -> dict[Site, tuple[Tensor, Tensor | None]]:
    """Weights and biases of all Linear layers in autocast's type, by one launch instead of two for each layer.

    Made anew in every forward pass, as autocast does, since the backward pass needs the values of its own forward pass.
    """
    kind = clipper.anchor.device.type
    if kind != "cuda" or not torch.is_autocast_enabled(kind) or not clipper.linear_sites:
        return {}
    low = torch.get_autocast_dtype(kind)
    layers: list[nn.Linear] = [site.module for site in clipper.linear_sites]  # type: ignore[misc]
    found: list[Tensor] = [p for m in layers for p in (m.weight, m.bias) if p is not None]
    found.sort(key=lambda p: p.numel() % 8 != 0)  # odd sizes last: the others stay aligned
    flat = torch.empty(sum(p.numel() for p in found), dtype=low, device=clipper.anchor.device)
    parts = [part.view(p.shape) for p, part in zip(found, flat.split([p.numel() for p in found]), strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(parts, found)
    by_parameter = {id(p): part for p, part in zip(found, parts, strict=True)}
    return {
        site: (by_parameter[id(m.weight)], by_parameter.get(id(m.bias)))
        for site, m in zip(clipper.linear_sites, layers, strict=True)
    }
