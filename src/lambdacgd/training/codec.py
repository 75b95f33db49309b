"""Plain data as JSON and named tensors, and back: what checkpoints are made of. Nothing here pickles or unpickles.

`encode` turns nested dicts, lists, tuples, numbers, strings, bytes and tensors into a value that JSON can hold, and a
dict of the tensors that it refers to by name. `decode` is its inverse. Tensors are written in the safetensors format,
one after another, so that a tensor of a GPU passes through host memory alone.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdacgd.errors import CheckpointError
from lambdacgd.files import write_new

# A JSON object that holds this key stands for something that JSON lacks; the key's value says for what.
_TAG = "$"
MOST_JSON = 1 << 30  # bytes: the user's ``extra`` is part of it, and longer files are not read
_SAFE_INTEGER = 1 << 53  # larger ones are written in hexadecimal: other readers of JSON would round them
_NUMPY = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Turn nested plain data into a JSON value and the tensors that it names.

    Args:
        value: Dicts, lists, tuples, numbers (NumPy's too), strings, bytes, None and tensors, nested at will. Subclasses
            of these count as what they derive from.

    Returns:
        A value for ``json.dumps``, and the tensors by name. They are those given, not copies. Two places that hold
        the same memory share one name.

    Raises:
        CheckpointError: Something else is in it; the sentence says where.
    """
    encoder = _Encoder()
    try:
        return encoder.encode(value, ""), encoder.tensors
    except RecursionError:
        raise CheckpointError("this state is nested too deeply, or holds itself: it cannot be saved") from None


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, np.generic):  # before float: np.float64 is one
            if value.dtype.name not in _NUMPY:
                raise _not_plain(value, path)
            return {_TAG: "numpy", "dtype": value.dtype.name, "value": self.encode(value.item(), path)}
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            whole = int(value)
            return whole if abs(whole) < _SAFE_INTEGER else {_TAG: "integer", "hex": hex(whole)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
        if isinstance(value, bytes):
            return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": self._name(value, path)}
        if isinstance(value, list):
            return [self.encode(item, f"{path}.{k}") for k, item in enumerate(value)]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": [self.encode(item, f"{path}.{k}") for k, item in enumerate(value)]}
        if isinstance(value, Mapping):
            if all(type(key) is str and key != _TAG for key in value):
                return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
            items = [[self.encode(k, f"{path}.(key)"), self.encode(v, f"{path}.{k}")] for k, v in value.items()]
            return {_TAG: "dict", "items": items}
        raise _not_plain(value, path)

    def _name(self, value: Tensor, path: str) -> str:
        if value.layout != torch.strided or value.dtype not in _DTYPES or value.is_quantized:
            raise CheckpointError(
                f"{path[1:]} is a tensor of {value.dtype} and layout {value.layout}, which a checkpoint cannot hold: "
                "make it a dense tensor of an ordinary type"
            )
        memory = _memory(value)
        if memory is not None and memory in self._names:
            return self._names[memory]
        name = path[1:]
        while name in self.tensors:  # keys such as "a.b" and "a" -> "b" meet
            name += "'"
        self.tensors[name] = value
        if memory is not None:
            self._names[memory] = name
        return name


def _memory(value: Tensor) -> Any:
    """Equal for tensors that are the same numbers in the same memory; None where nobody can tell."""
    if hasattr(value, "placements") or not value.numel() or value.device.type == "meta":
        return None
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def _not_plain(value: Any, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path[1:] or 'this'} is a {type(value).__name__}, which cannot be part of a checkpoint: give tensors, "
        "numbers, strings, lists and dicts (a state_dict, not the object itself)"
    )


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`.

    Args:
        value: What ``encode`` returned, after JSON.
        tensor: What to put in a tensor's place, by its name.

    Returns:
        The nested data. Mappings have become dicts; lists, tuples and numbers are of the types that were given.

    Raises:
        CheckpointError: ``value`` holds something that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        match value[_TAG]:
            case "tensor":
                return tensor(value["name"])
            case "tuple":
                return tuple(decode(item, tensor) for item in value["items"])
            case "dict":
                return {decode(k, tensor): decode(v, tensor) for k, v in value["items"]}
            case "float":
                return float(value["value"])
            case "integer":
                return int(value["hex"], 16)
            case "bytes":
                return base64.b64decode(value["base64"], validate=True)
            case "numpy" if value["dtype"] in _NUMPY:
                return np.dtype(value["dtype"]).type(decode(value["value"], tensor))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a checkpoint holds a {value[_TAG]!r} that cannot be read ({error})") from error
    raise CheckpointError(f"a checkpoint holds a {str(value[_TAG])[:20]!r}, which this version does not know")


def content_digest(state: Any) -> str:
    """A SHA-256 over all keys, numbers and tensor bytes of nested plain data; the same after saving and loading it."""
    plain, tensors = encode(state)
    running = hashlib.sha256(json.dumps(plain).encode())
    for value in tensors.values():
        running.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        running.update(_bytes(value))
    return running.hexdigest()


def _bytes(value: Tensor) -> Any:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, mode: int = 0o600) -> str:
    """Write a new safetensors file, synced to disk.

    Args:
        path: A file that does not exist yet.
        tensors: Dense tensors by name, on any device. They may share memory.
        mode: Who may read it: by default its owner alone.

    Returns:
        The SHA-256 of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each begins aligned
    for name in ordered:
        value = tensors[name]
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    parts = itertools.chain((len(start).to_bytes(8, "little"), start), (_bytes(tensors[name]) for name in ordered))
    return write_new(path, parts, mode=mode)


def write_json(path: Path, value: Any) -> str:
    """As `write_tensors`, for a value that `encode` returned.

    Raises:
        CheckpointError: It takes more bytes than are ever read again.
    """
    content = json.dumps(value, allow_nan=False).encode()
    if len(content) > MOST_JSON:
        raise CheckpointError(
            f"the numbers and texts of this checkpoint take {len(content)} bytes, and {MOST_JSON} are allowed: give "
            "long lists in extra= as tensors"
        )
    return write_new(path, [content])
