"""`convert`: make a model clippable in place, keeping its parameters."""

from __future__ import annotations

from torch import nn

from lambdacgd.clipping.attention import OpenMultiheadAttention
from lambdacgd.clipping.errors import ClippingError
from lambdacgd.clipping.layers.norm import FittedGroupNorm
from lambdacgd.clipping.recurrent import OpenGRU, OpenGRUCell, OpenLSTM, OpenLSTMCell, OpenRNN, OpenRNNCell
from lambdacgd.torch_private import AnyBatchNorm, AnyInstanceNorm, AnyLazyNorm

_OPEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: OpenMultiheadAttention,
    nn.LSTM: OpenLSTM,
    nn.GRU: OpenGRU,
    nn.RNN: OpenRNN,
    nn.LSTMCell: OpenLSTMCell,
    nn.GRUCell: OpenGRUCell,
    nn.RNNCell: OpenRNNCell,
}


def convert(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """Replace the layers that clipping cannot see into, in place.

    MultiheadAttention, LSTM, GRU, RNN and their cells become drop-ins with the same parameters, state_dict keys and
    outputs. BatchNorm becomes GroupNorm with the same scale and shift, which computes something else: train from
    scratch or fine-tune. InstanceNorm stops keeping running statistics. Parameter objects stay the same, so an
    optimizer built before still holds them.

    Args:
        model: The model to change.
        groups: The most groups that a GroupNorm in place of a BatchNorm has. It has fewer where the number of channels
            asks for it, or where a group of one example would hold fewer than 16 values.

    Returns:
        The model itself, or a new module if the model is a single BatchNorm.

    Raises:
        ClippingError: A layer has no replacement that computes what it computes. Nothing has been changed then.
    """
    if groups < 1:
        raise ClippingError(f"groups must be at least 1, not {groups}.")
    for path, module in model.named_modules():
        _refuse(path, module)
    for module in model.modules():
        if type(module) in _OPEN:
            module.__class__ = _OPEN[type(module)]
        elif isinstance(module, AnyInstanceNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return _without_batch_norm(model, groups)


def _refuse(path: str, module: nn.Module) -> None:
    where, kind = f"module '{path}'" if path else "the model itself", type(module).__name__
    wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
    if wrapped or any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False)):
        # Wrappers know the modules they were given: what is exchanged later is neither synchronised nor sharded.
        what = "wrapped in DistributedDataParallel" if wrapped else "sharded (fully_shard)"
        raise ClippingError(
            f"{where} is {what} already. Convert first: convert(model), then wrap or shard it, then make the "
            "optimizer, then privatize."
        )
    if type(module) in _OPEN and getattr(module, "proj_size", 0):
        raise ClippingError(f"{where}: proj_size > 0 has no drop-in. Use proj_size=0 and a Linear behind it.")
    if isinstance(module, AnyLazyNorm) and isinstance(module, AnyBatchNorm):
        raise ClippingError(f"{where} ({kind}) is not initialised yet. Run one forward pass before convert.")
    if isinstance(module, AnyBatchNorm):
        plain = {AnyBatchNorm.forward, nn.SyncBatchNorm.forward}
        if "forward" in vars(module) or type(module).forward not in plain:
            raise ClippingError(
                f"{where} ({kind}) is a BatchNorm with a forward of its own (an activation, say), which GroupNorm "
                "would drop. Replace it yourself by a GroupNorm followed by what it does besides (models of timm take "
                "norm_layer=)."
            )


def _without_batch_norm(module: nn.Module, groups: int) -> nn.Module:
    if isinstance(module, AnyBatchNorm):
        return _group_norm(module, groups)
    for name, child in module.named_children():
        new = _without_batch_norm(child, groups)
        if new is not child:
            setattr(module, name, new)
    return module


def _group_norm(old: AnyBatchNorm, groups: int) -> nn.GroupNorm:
    new = FittedGroupNorm(groups, old.num_features, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
    new.train(old.training)
    return new
