"""MultiheadAttention that can be seen into: the same parameters, the same outputs, ordinary linear layers inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
        batched, same = query.dim() == 3, query is key and key is value
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
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
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, Tensor, Tensor]:
        if self._qkv_same_embed_dim and same:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)  # type: ignore[return-value]
        if self._qkv_same_embed_dim:
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
