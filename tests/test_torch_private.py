"""torch's private names: each one that the package uses exists, is listed, and is named in one file only."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lambdacgd import torch_private
from lambdacgd.clipping.backward import holders

PACKAGE = Path(torch_private.__file__).parent
PRIVATE = re.compile(
    r"\btorch\._(?!_)\w+|\btorch\.[a-z_.]+\._(?!_)\w+|nn\.modules\.[a-z]+\._\w+|utils\._pytree|\._(version|local_tensor|spec)\b"
    r"|\._(reversed_padding_repeated_twice|flat_weights_names|weights_have_changed|module_parameters|backward_hooks)\b"
    r"|\._non_persistent_buffers_set\b|_active_ddp_module\b|_step_supports_amp_scaling\b"
)


SEEN_IN = "2.11 to 2.13"
# Dotted paths: a module, then attributes. An attribute that only instances have is written as one of its class.
KNOWN = [
    "torch.Tensor._backward_hooks",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._FunctionBase.apply",
    "torch._C._are_functorch_transforms_active",
    "torch._C._current_graph_task_id",
    "torch._C._storage_Use_Count",
    "torch._C._will_engine_execute_node",
    "torch._VF",
    "torch._cudnn_rnn_flatten_weight",
    "torch._dynamo.disable",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_div_",
    "torch._foreach_lerp_",
    "torch._foreach_mul",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_zero_",
    "torch._use_cudnn_rnn_flatten_weight",
    "torch.autograd.Variable._execution_engine",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor.DTensor._spec",
    "torch.nn.Module._buffers",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._modules",
    "torch.nn.Module._non_persistent_buffers_set",
    "torch.nn.Module._parameters",
    "torch.nn.MultiheadAttention._qkv_same_embed_dim",
    "torch.nn.RNNBase._flat_weights_names",
    "torch.nn.RNNBase._weights_have_changed",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._LazyNormBase",
    "torch.nn.modules.conv._ConvNd._reversed_padding_repeated_twice",
    "torch.nn.modules.dropout._DropoutNd",
    "torch.nn.modules.instancenorm._InstanceNorm",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    "torch.nn.parallel.DistributedDataParallel._module_parameters",
    "torch.optim.SGD._step_supports_amp_scaling",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
]


@pytest.mark.parametrize("dotted", KNOWN)
def test_every_private_name_exists_in_this_torch(dotted: str) -> None:
    assert _exists(dotted), f"torch {torch.__version__} has no {dotted}; it was seen in {SEEN_IN}"


def test_the_list_is_that_of_the_file() -> None:
    source = Path(torch_private.__file__).read_text()
    assert f"torch {SEEN_IN}" in source
    named = set(re.findall(r"(?:\.|[(]\"|= \")(_(?!_)\w+)", source)) | {"_pytree", "_FunctionBase", "_ConvNd"}
    assert named == {part for dotted in KNOWN for part in dotted.split(".") if part.startswith("_")}


def test_a_name_that_torch_does_not_have_is_noticed() -> None:
    assert not _exists("torch._foreach_nothing_")
    assert not _exists("torch.nn.Module._nothing")
    assert not _exists("torch.nn.modules.nowhere._Nothing")


def test_private_names_stand_in_one_file_only() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        local = file.relative_to(PACKAGE).as_posix()
        if local == "torch_private.py":
            continue
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            assert not PRIVATE.search(line), f"{local}:{number} names something private of torch: {line.strip()}"


def test_the_functions_answer_what_their_names_say() -> None:
    layer, tensor = nn.Conv2d(2, 2, 3, padding=1), torch.zeros(3, requires_grad=True)
    assert torch_private.own_parameters(layer)["weight"] is layer.weight
    assert not torch_private.backward_hooks(tensor)
    tensor.register_hook(lambda g: g)
    assert torch_private.backward_hooks(tensor)
    before = torch_private.version(tensor)
    with torch.no_grad():
        tensor.add_(1)
    assert torch_private.version(tensor) == before + 1
    assert list(torch_private.repeated_padding(layer)) == [1, 1, 1, 1]
    assert torch_private.backward_task() == -1
    alone = torch.zeros(3)
    assert holders(alone) == 1
    others = alone.detach(), alone.view(1, 3), alone.numpy()
    assert holders(alone) == 1 + len(others)
    assert not torch_private.functorch_is_active()
    assert not torch_private.recurrent_weights_have_changed(nn.LSTM(2, 2))
    assert torch_private.recurrent_weight_names(nn.GRU(2, 2))[0] == "weight_ih_l0"


def _exists(dotted: str) -> bool:
    """Whether the name resolves: as an attribute, or as one that the class declares or sets on its instances."""
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if hasattr(found, part):
            found = getattr(found, part)
        elif inspect.isclass(found):
            return depth == len(parts) and _on_instances(found, part)
        else:
            try:
                found = importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                return False
    return True


def _on_instances(cls: type, name: str) -> bool:
    for base in cls.__mro__[:-1]:
        if name in inspect.get_annotations(base) or re.search(rf"self\.{name}\b.*=", inspect.getsource(base)):
            return True
    return False
