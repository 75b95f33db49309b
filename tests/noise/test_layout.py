from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd.noise import Layout, LayoutError
from lambdacgd.noise.layout import clean_name


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("weight", "weight"),
        ("module.weight", "weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.weight", "a.b.weight"),
        ("encoder.module.layers.0.bias", "encoder.layers.0.bias"),
        ("submodule.weight", "submodule.weight"),
    ],
)
def test_wrapper_names_are_taken_out(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@given(
    st.dictionaries(
        st.text("abcxyz.", min_size=1, max_size=6).filter(lambda s: s.strip(".")),
        st.lists(st.integers(0, 40), max_size=4),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_and_tensors_never_share_a_block(shapes: dict[str, list[int]], random: object) -> None:
    layout = Layout.of(shapes)
    names = list(shapes)
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = Layout.of({name: shapes[name] for name in names})
    assert shuffled == layout
    assert shuffled.digest == layout.digest
    end = 0
    for entry in layout.entries:
        assert entry.first_block == end
        assert 32 * 16 * entry.groups >= entry.elements
        end += 32 * entry.groups


def test_the_digest_names_names_and_shapes() -> None:
    digest = Layout.of({"a": (2, 3), "b": (4,)}).digest
    assert digest == Layout.of({"module.b": [4], "module.a": [2, 3]}).digest
    assert digest != Layout.of({"a": (3, 2), "b": (4,)}).digest
    assert digest != Layout.of({"a": (2, 3), "c": (4,)}).digest
    assert len(digest) == 64
    assert digest == "f6b9ee63ac0ea503f32ff80ce15d3036046cb95e8f7a3e93a7fb27487f586af5"


def test_only_trainable_parameters_count() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    layout = Layout.of_parameters(model.named_parameters())
    assert [entry.name for entry in layout.entries] == ["0.bias", "1.bias", "1.weight"]
    assert layout.elements == 4 + 2 + 8


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, "no tensor"),
        ({"module": (1,)}, "nothing but wrapper"),
        ({"a.module.b": (1,), "a.b": (1,)}, "both called 'a.b'"),
        ({"a": (2, -1)}, "negative"),
    ],
)
def test_bad_layouts(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.of(shapes)
