"""`convert`: make a model clippable in place, keeping its parameters."""

from __future__ import annotations

from torch import nn

from lambdacgd.clipping.attention import OpenMultiheadAttention
from lambdacgd.clipping.errors import ClippingError
from lambdacgd.clipping.recurrent import OpenGRU, OpenGRUCell, OpenLSTM, OpenLSTMCell, OpenRNN, OpenRNNCell

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
    """Replace what clipping cannot see into; returns the model (itself, unless its root is a BatchNorm).

    MultiheadAttention, LSTM, GRU, RNN and their cells become drop-ins with the same parameters, state_dict keys and
    outputs. BatchNorm becomes GroupNorm with the same scale and shift and at most ``groups`` groups, which computes
    something else: train from scratch or fine-tune. InstanceNorm stops keeping running statistics. Parameter objects
    stay the same, so an optimizer built before still holds them.
    """
    if groups < 1:
        raise ClippingError(f"groups must be at least 1, not {groups}.")
    _refuse_wrapped(model)
    for path, module in model.named_modules():
        if type(module) in _OPEN:
            if getattr(module, "proj_size", 0):
                raise ClippingError(
                    f"module '{path}': proj_size > 0 has no drop-in. Use proj_size=0 and a Linear behind it."
                )
            module.__class__ = _OPEN[type(module)]
        elif isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return _without_batch_norm(model, groups)


def _refuse_wrapped(model: nn.Module) -> None:
    """Wrappers know the modules they were given: what is exchanged later is neither synchronised nor sharded."""
    for path, module in model.named_modules():
        wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
        if wrapped or any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False)):
            what = "wrapped in DistributedDataParallel" if wrapped else "sharded (fully_shard)"
            raise ClippingError(
                f"module '{path}' is {what} already. Convert first: convert(model), then wrap or shard it, then make "
                "the optimizer, then privatize."
            )


def _without_batch_norm(module: nn.Module, groups: int) -> nn.Module:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _group_norm(module, groups)
    for name, child in module.named_children():
        new = _without_batch_norm(child, groups)
        if new is not child:
            setattr(module, name, new)
    return module


def _group_norm(old: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = old.num_features
    count = max(g for g in range(1, min(groups, channels) + 1) if channels % g == 0)
    new = nn.GroupNorm(count, channels, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
    new.train(old.training)
    return new
