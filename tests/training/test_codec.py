"""Plain data becomes JSON and named tensors, and comes back as it was."""

from __future__ import annotations

import collections
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from lambdacgd.training import CheckpointError
from lambdacgd.training.checkpoint import content_digest, decode, encode, write_tensors

NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(),
    st.floats(width=32).map(np.float32), st.floats().map(np.float64), st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.booleans().map(np.bool_),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.just("$"), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
STATES = st.recursive(
    NUMBERS | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def again(value):
    plain, tensors = encode(value)
    return decode(json.loads(json.dumps(plain, allow_nan=False)), tensors.__getitem__)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    a = a.item() if isinstance(a, np.generic) else a  # NumPy's numbers come back as Python's
    return type(a) is type(b) and (a == b or (a != a and b != b)) and repr(a) == repr(b)


@given(STATES)
def test_everything_comes_back(state):
    assert same(state, again(state))


@given(STATES)
def test_the_digest_is_that_of_what_comes_back(state):
    assert content_digest(state) == content_digest(again(state))


def test_degenerate_cases():
    for value in ({}, [], (), 0, -0.0, math.inf, -math.inf, math.nan, 10**400, "\ud800", torch.zeros(0), {(): {}}):
        assert same(value, again(value))


def test_relatives_count_as_what_they_derive_from():
    ordered = collections.OrderedDict(a=1)
    assert again({"o": ordered, "s": torch.Size([2]), "p": nn.Parameter(torch.ones(2))})["o"] == {"a": 1}
    assert again(torch.Size([2])) == (2,)


def test_tied_tensors_are_kept_once_and_stay_tied():
    weight = torch.ones(3)
    _, tensors = encode({"one": weight, "two": weight.detach(), "part": weight[:2]})
    assert list(tensors) == ["one", "part"]
    back = again({"one": weight, "two": weight})
    assert back["one"] is back["two"]


@pytest.mark.parametrize("bad", [{1, 2}, object(), nn.Linear(1, 1), np.zeros(2), 1j, b"", np.longdouble(1)])
def test_what_is_not_plain_data_is_refused_by_its_place(bad):
    with pytest.raises(CheckpointError, match=r"a\.1\.b is a .*, which cannot be part of a checkpoint"):
        encode({"a": [0, {"b": bad}]})


def test_what_holds_itself_is_refused():
    state = []
    state.append(state)
    with pytest.raises(CheckpointError, match="holds itself"):
        encode(state)
    with pytest.raises(CheckpointError, match="make it dense"):
        encode({"t": torch.ones(2, 2).to_sparse()})


@pytest.mark.parametrize(
    "damaged",
    [
        {"$": "pickle", "data": "gASVJA=="},
        {"$": "tuple"},
        {"$": "bytes", "base64": "é"},
        {"$": "numpy", "dtype": "object"},
        {"$": "dict", "items": [[[], 1]]},
        {"$": ["list"]},
        {"$": "integer", "hex": "z"},
    ],
)
def test_unknown_things_are_refused(damaged):
    with pytest.raises(CheckpointError, match="a checkpoint holds"):
        decode({"a": [damaged]}, {}.__getitem__)


def test_tensor_files_are_those_of_safetensors(tmp_path):
    tensors = {
        "flags": torch.tensor([True, False, True]), "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3), "low": torch.randn(3, 2).bfloat16(), "turned": torch.arange(6).view(2, 3).t(),
        "bytes": torch.arange(5, dtype=torch.uint8), "complex": torch.randn(2, dtype=torch.complex64),
    }  # fmt: skip
    write_tensors(tmp_path / "t", tensors)
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
