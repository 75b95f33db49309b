"""`convert`: make a model clippable in place, keeping its parameters. And attention that can be seen into."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping.layers.norm import FittedGroupNorm
from lambdacgd.clipping.layers.recurrent import OpenGRU, OpenGRUCell, OpenLSTM, OpenLSTMCell, OpenRNN, OpenRNNCell
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import (
    AnyBatchNorm,
    AnyInstanceNorm,
    AnyLazyNorm,
    forward_hooks,
    own_modules,
    projects_together,
)


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
    new: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in own_modules(module).items():
            if isinstance(child, AnyBatchNorm):  # one that has several places has one replacement
                new[child] = new.get(child) or _group_norm(child, groups)
                setattr(module, name, new[child])
    return _group_norm(model, groups) if isinstance(model, AnyBatchNorm) else model


def _refuse(path: str, module: nn.Module) -> None:
    where, kind = f"module '{path}'" if path else "the model itself", type(module).__name__
    wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
    if wrapped or any(hasattr(p, "device_mesh") for p in module.parameters(recurse=False)):
        # Wrappers know the modules they were given: what is exchanged later is neither synchronised nor sharded.
        raise ClippingError(
            f"{where} is {'wrapped in DistributedDataParallel' if wrapped else 'sharded (fully_shard)'} already. "
            "Convert first, then wrap or shard it, then make the optimizer, then privatize."
        )
    if type(module) in _OPEN and getattr(module, "proj_size", False):
        raise ClippingError(f"{where}: proj_size > 0 has no drop-in. Use proj_size=0 and a Linear behind it.")
    if isinstance(module, AnyBatchNorm):
        if isinstance(module, AnyLazyNorm):
            raise ClippingError(f"{where} ({kind}) is not initialised yet. Run one forward pass before convert.")
        own = "forward" in vars(module) or type(module).forward not in {AnyBatchNorm.forward, nn.SyncBatchNorm.forward}
        own |= type(module).__call__ is not nn.Module.__call__ or nn.utils.parametrize.is_parametrized(module)
        if own or forward_hooks(module):
            raise ClippingError(
                f"{where} ({kind}) is a BatchNorm with a forward of its own (an activation, a hook), which GroupNorm "
                "would drop. Replace it by a GroupNorm followed by what it does besides (timm: norm_layer=)."
            )


def _group_norm(batch_norm: AnyBatchNorm, groups: int) -> nn.Module:
    norm = FittedGroupNorm(groups, batch_norm.num_features, eps=batch_norm.eps, affine=batch_norm.affine)
    if batch_norm.affine:
        norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm.train(batch_norm.training)


class OpenMultiheadAttention(nn.MultiheadAttention):
    """Drop-in for ``nn.MultiheadAttention`` (see `convert`): parameters, names and results are those of the original.

    The input projection is a plain ``F.linear`` on a tensor with the batch first, which clipping follows exactly.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() != 3:  # one example without a batch, which nothing is clipped of
            masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return super().forward(query, key, value, *masks)
        same = query is key and key is value
        if not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._project(query, key, value, same)
        k, v, extra = self._extend(k, v)
        mask = _merge_masks(attn_mask, key_padding_mask, extra, q, self.num_heads)
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        drop = self.dropout if self.training else 0.0
        if need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), drop)
            mixed: Tensor = weights @ v
        else:
            weights, mixed = None, F.scaled_dot_product_attention(q, k, v, mask, drop)
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        return out, weights.mean(1) if weights is not None and average_attn_weights else weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, Tensor, Tensor]:
        if projects_together(self) and same:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)  # type: ignore[return-value]
        if projects_together(self):
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))  # type: ignore[return-value]

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Learned and zero keys and values at the end of the sequence, and how many."""
        extra, batch = 0, k.shape[0]
        if self.bias_k is not None:
            assert self.bias_v is not None
            k = torch.cat([k, self.bias_k.expand(batch, -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(batch, -1, -1)], 1)
            extra += 1
        if self.add_zero_attn:
            zero = k.new_zeros(batch, 1, k.shape[2])
            k, v, extra = torch.cat([k, zero], 1), torch.cat([v, zero], 1), extra + 1
        return k, v, extra


def _as_float(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -math.inf)


def _merge_masks(attention: Tensor | None, padding: Tensor | None, extra: int, q: Tensor, heads: int) -> Tensor | None:
    """Both masks as one additive mask that broadcasts against scores [B, heads, L, S]."""
    merged: Tensor | None = None
    if attention is not None:
        attention = F.pad(_as_float(attention, q), (0, extra))
        merged = attention.unflatten(0, (-1, heads)) if attention.dim() == 3 else attention
    if padding is not None:
        padding = F.pad(_as_float(padding, q), (0, extra))[:, None, None, :]
        merged = padding if merged is None else merged + padding
    return merged


_OPEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: OpenMultiheadAttention,
    nn.LSTM: OpenLSTM,
    nn.GRU: OpenGRU,
    nn.RNN: OpenRNN,
    nn.LSTMCell: OpenLSTMCell,
    nn.GRUCell: OpenGRUCell,
    nn.RNNCell: OpenRNNCell,
}
