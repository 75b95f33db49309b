"""Every name of PyTorch that this package uses although PyTorch does not promise to keep it.

No other module names them. Each name stands here behind a small function or an alias that says what it is for. All
were seen in torch 2.11 to 2.13. ``tests/test_torch_private.py`` lists and resolves them, so that an upgrade which
drops one fails there first, and not in the middle of somebody's training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Operations over lists of tensors: one launch for the whole list, which matters where a model has hundreds of small
# parameters.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

#: ``view`` of a tensor that nobody else has: what comes is no view to autograd, so it may be written in place.
unsafe_view = torch.ops.aten._unsafe_view.default

#: Views of one flat tensor with the shapes of some tensors.
unflatten: Callable[[Tensor, list[Tensor]], list[Tensor]] = torch._C._nn.unflatten_dense_tensors

# Base classes of layers, so that subclasses of users and of torch are recognised.
AnyBatchNorm = nn.modules.batchnorm._BatchNorm
AnyDropout = nn.modules.dropout._DropoutNd
AnyInstanceNorm = nn.modules.instancenorm._InstanceNorm
AnyLazyNorm = nn.modules.batchnorm._LazyNormBase

# Nested inputs and outputs of models.
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten

#: A context in which tensor subclasses are treated as plain tensors.
WithoutTorchFunction = torch._C.DisableTorchFunctionSubclass

#: How often a tensor was written in place: tells whether anybody changed it since. Inference tensors have no count and
#: raise ``RuntimeError``.
version: Callable[[Tensor], int] = attrgetter("_version")

#: The hooks that somebody registered on a tensor's gradient; empty or None where there is none.
backward_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")


#: This process's shard of a ``DTensor``, without ``to_local``'s autograd node.
local_tensor: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")


#: How many tensors, arrays and others hold a storage, which its handle names.
storage_handle: Callable[[Any], int] = attrgetter("_cdata")
storage_holders: Callable[[int], int] = torch._C._storage_Use_Count


def dtensor_like(shard: Tensor, like: Tensor) -> DTensor:
    """A ``DTensor`` placed as ``like`` is, over the given local shard.

    The shard stays where it lives; ``DTensor.from_local`` would move it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor

    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[attr-defined]


#: The number of the backward pass that this thread is in, or -1 outside of one. A forward pass inside a backward pass
#: is a recomputation by activation checkpointing.
backward_task: Callable[[], int] = torch._C._current_graph_task_id


#: Whether the backward pass that is running will reach an autograd node.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


#: Calls a function when the backward pass that is running has ended.
after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its checks for functorch wrappers, which cost microseconds on every layer."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


#: Whether a transform such as vmap or grad runs this code.
functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def not_compiled(function: Callable[..., Any]) -> Any:
    """The function as a graph break, which torch.compile does not trace into."""
    return torch._dynamo.disable(function)


#: The parameters registered on a module itself, None included; not a copy.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")


#: The buffers registered on a module itself, None included; not a copy.
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")


#: A module's direct children, under every name they have; not a copy.
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def forward_hooks(module: nn.Module) -> bool:
    """Whether somebody registered a hook that may change what a module is given or returns."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


#: Names of a module's own buffers that its state_dict leaves out.
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")


#: A convolution's padding as ``F.pad`` takes it: last dimension first.
repeated_padding: Callable[[nn.Module], Sequence[int]] = attrgetter("_reversed_padding_repeated_twice")


#: The parameters that DistributedDataParallel reduces by itself.
ddp_parameters: Callable[[nn.Module], list[nn.Parameter]] = attrgetter("_module_parameters")


def active_ddp() -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass is running."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


#: GradScaler asks an optimizer for this attribute: does it take care of scales by itself? If so, it leaves the two of
#: ``GIVEN_BY_SCALER`` on the optimizer and calls ``step()``. If not, it looks for gradients in ``p.grad``.
SCALES_BY_ITSELF = "_step_supports_amp_scaling"
GIVEN_BY_SCALER = ("grad_scale", "found_inf")


#: Whether query, key and value share one projection matrix.
projects_together: Callable[[nn.MultiheadAttention], bool] = attrgetter("_qkv_same_embed_dim")


def fused_recurrence(mode: str) -> Callable[..., Any]:
    """torch's kernel for all steps of a recurrence, cuDNN's where it can be; ``mode`` is ``nn.RNNBase.mode``."""
    kernel: Callable[..., Any] = getattr(torch._VF, mode.lower())
    return kernel


#: Names of an RNN's weights in the order in which its kernels take them.
recurrent_weight_names: Callable[[nn.RNNBase], list[str]] = attrgetter("_flat_weights_names")

#: Whether the weights that an RNN's kernel sees are not its parameters any more.
recurrent_weights_have_changed: Callable[[nn.RNNBase], bool] = methodcaller("_weights_have_changed")

#: Whether this build of torch can pack an RNN's weights for cuDNN.
packs_recurrent_weights: Callable[[], bool] = torch._use_cudnn_rnn_flatten_weight


def pack_recurrent_weights(weights: list[Tensor], *, inputs: int, mode: int, hidden: int) -> None:
    """Move the weights of an RNN with one layer and one direction into one block for cuDNN, as ``nn.LSTM`` does.

    ``weights`` come in torch's order, ``mode`` is cuDNN's number of the cell.
    """
    torch._cudnn_rnn_flatten_weight(weights, len(weights), inputs, mode, hidden, 0, 1, False, False)
