"""The shapes and parameters that Opacus tests its layers with (its ``grad_samples`` tests), against our oracle.

Opacus draws from these lists at random; here a fixed draw of each family, with every value of every list in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lambdacgd.clipping import ClippingError, attach, convert

pytestmark = pytest.mark.usefixtures("seeded")
Oracle = Callable[..., None]
DRAWS = 14


def drawn(**lists: list[Any]) -> list[Any]:
    """Some combinations of the lists, the same every time, in which every value occurs."""
    every = list(itertools.product(*lists.values()))
    source = random.Random(11)
    source.shuffle(every)
    missing = {(place, repr(value)) for place, values in enumerate(lists.values()) for value in values}
    cases = []
    for count, choice in enumerate(every):
        new = {(place, repr(value)) for place, value in enumerate(choice)} & missing
        if new or count < DRAWS:
            missing -= new
            cases.append(pytest.param(dict(zip(lists, choice, strict=True)), id="-".join(str(v) for v in choice)))
    return cases


class Taken(nn.Module):
    """A layer whose output, or first output, is bent: so that no gradient is constant."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Tensor:
        y = self.layer(*x) if isinstance(x, tuple) else self.layer(x)
        return torch.tanh(y[0] if isinstance(y, tuple) else y)


def shape_of(case: dict[str, Any], *sizes: int) -> Tensor:
    return torch.randn(case["N"], *sizes, dtype=torch.float64)


N = [1, 2, 3, 4]
CONV = {"C": [1, 3, 32], "out": [1, 2], "k": [2, 3], "stride": [1, 2], "padding": [0, 2, "same", "valid"]}
CONV |= {"dilation": [1, 2], "groups": [1, "C"]}


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("case", drawn(N=N, **CONV))
def test_convolutions(oracle: Oracle, case: dict[str, Any], dims: int) -> None:
    channels = case["C"] if dims < 3 else min(case["C"], 3)
    groups = channels if case["groups"] == "C" else 1
    stride = 1 if case["padding"] == "same" else case["stride"]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = kind(channels, channels * case["out"], case["k"], stride, case["padding"], case["dilation"], groups)
    oracle(Taken(layer), shape_of(case, channels, *(11, 10, 6)[-dims:]), case["N"])


@pytest.mark.parametrize("case", drawn(N=N, W=[10, 17], out=[1, 15], bias=[True, False], dim=[2, 3, 4]))
def test_linear(oracle: Oracle, case: dict[str, Any]) -> None:
    middle = [5, 3][: case["dim"] - 2]
    oracle(Taken(nn.Linear(case["W"], case["out"], bias=case["bias"])), shape_of(case, *middle, case["W"]), case["N"])


@pytest.mark.parametrize("case", drawn(N=N, Z=[1, 2, 6], H=[1, 3], W=[5, 10], dim=[2, 3, 4], norm=[1, 2, 3]))
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_layer_and_rms_norms(oracle: Oracle, case: dict[str, Any], kind: Any) -> None:
    sizes = [case["Z"], case["H"], case["W"]][-(case["dim"] - 1) :]
    oracle(Taken(kind(sizes[-min(case["norm"], len(sizes)) :])), shape_of(case, *sizes), case["N"])


@pytest.mark.parametrize("case", drawn(N=N, C=[1, 4, 8], H=[5, 10], W=[4, 8], groups=[1, 4, "C"]))
def test_group_norm(oracle: Oracle, case: dict[str, Any]) -> None:
    groups = case["C"] if case["groups"] == "C" or case["C"] % case["groups"] else case["groups"]
    oracle(Taken(nn.GroupNorm(groups, case["C"])), shape_of(case, case["C"], case["H"], case["W"]), case["N"])


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("case", drawn(N=N, C=[1, 3], W=[5, 10], H=[4, 8], Z=[1, 4]))
def test_instance_norms(oracle: Oracle, case: dict[str, Any], dims: int) -> None:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    sizes = [case["W"], case["H"], case["Z"]][:dims]
    oracle(Taken(kind(case["C"], affine=True)), shape_of(case, case["C"], *sizes), case["N"])


@pytest.mark.parametrize("case", drawn(N=N, T=[1, 5], Q=[1, 4], R=[1, 2], V=[2, 32], D=[10, 17], dim=[1, 2, 3, 4]))
def test_embedding(oracle: Oracle, case: dict[str, Any]) -> None:
    sizes = [case["N"], case["T"], case["Q"], case["R"]][: case["dim"]]
    oracle(Taken(nn.Embedding(case["V"], case["D"])), torch.randint(0, case["V"], sizes), case["N"])


@pytest.mark.parametrize("case", drawn(N=N, sz=[1, 3, 5], V=[2, 32], D=[10, 17], mode=["sum", "mean"]))
def test_embedding_bag(oracle: Oracle, case: dict[str, Any]) -> None:
    index = torch.randint(0, case["V"], (case["N"], case["sz"]))
    oracle(Taken(nn.EmbeddingBag(case["V"], case["D"], mode=case["mode"])), index, case["N"])


RECURRENT = {"T": [1, 3], "D": [4, 5], "H": [6, 7], "layers": [1, 2], "bias": [True, False], "both": [True, False]}


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("case", drawn(N=[1, 3], packed=[True, False], **RECURRENT))
def test_recurrent_layers(oracle: Oracle, case: dict[str, Any], kind: Any) -> None:
    options = {"num_layers": case["layers"], "bias": case["bias"], "bidirectional": case["both"], "batch_first": True}
    model = convert(Taken(kind(case["D"], case["H"], **options)))

    def packed(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return m(batch).square().flatten(1).sum(1).mean()  # type: ignore[no-any-return]

    x = shape_of(case, case["T"], case["D"])
    if not case["packed"]:
        oracle(model, x, case["N"])
        return

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.layer

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            sequence = pack_padded_sequence(*batch, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.inner(sequence)[0], batch_first=True, total_length=case["T"])[0]  # type: ignore[operator, no-any-return]

    lengths = torch.randint(1, case["T"] + 1, (case["N"],))
    oracle(Packed(), (x, lengths), case["N"], loss=packed)


ATTENTION = {"T": [1, 5], "S": [1, 3], "D": [4, 8], "P": [1, 2], "bias": [True, False], "kv": [True, False]}


@pytest.mark.parametrize("case", drawn(N=[1, 3], zero=[True, False], **ATTENTION))
def test_attention(oracle: Oracle, case: dict[str, Any]) -> None:
    layer = nn.MultiheadAttention(
        case["D"], case["P"], bias=case["bias"], add_bias_kv=case["kv"], add_zero_attn=case["zero"], batch_first=True
    )
    q, kv = shape_of(case, case["T"], case["D"]), shape_of(case, case["S"], case["D"])
    oracle(convert(Taken(layer)), (q, kv, kv), case["N"])


def test_an_empty_batch() -> None:
    """Opacus takes one, of no examples; we say what to do."""
    attach(model := nn.Linear(3, 2))
    with pytest.raises(ClippingError, match="the batch is empty"):
        model(torch.randn(0, 3))
