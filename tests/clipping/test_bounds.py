"""No example adds more than ζ to a sum, however its gradient rounds, cancels or overflows."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F

from lambdacgd.clipping import attach
from lambdacgd.clipping.backward import Stored, outer
from lambdacgd.clipping.bounds import clip_factors, folding_unit
from lambdacgd.clipping.layers.embedding import Rows, Tied
from reproduce.bench_models import ViT
from tests.clipping.small import mlp, step, total_norm

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trial", range(6))
def test_rounded_contributions_stay_below_the_norm(dtype: torch.dtype, trial: int) -> None:
    """Tokens that cancel: Σ_t b_t a_tᵀ is tiny beside its terms, where norms from Gram matrices lose all their digits.

    The contribution is recomputed in float64 from the operands as they are rounded in the sum.
    """
    tokens, inner, width = 64, 40, 200
    a, b = torch.randn(2, tokens // 2, inner), torch.randn(2, tokens // 2, width)
    wobble = 10.0 ** -(trial + 1)
    a = torch.cat([a, a + wobble * torch.randn_like(a)], 1).to(dtype)
    b = torch.cat([b, -b], 1).to(dtype)
    record = outer("w", a, b, torch.Size((width, inner)))
    factors = clip_factors([[record.norm().upper()]], max_grad_norm=1e-3, mode="flat", scale=1.0, weights=None)
    for i in range(2):
        alone = torch.zeros(2)
        alone[i] = factors.weight[0, i]
        total = torch.empty(width, inner)
        record.add(total, alone, None, fresh=True)
        folded = (a[i].float() * alone[i]).to(dtype) if inner < width else a[i]
        true = torch.einsum("ti,to->oi", folded.double(), b[i].double())
        assert float(true.norm()) <= 1e-3 * (1 + 2**-10)
        assert float(total.double().norm()) <= 1e-3 * (1 + 2**-10)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_tied_weights_that_cancel_stay_below_the_norm(scale: float) -> None:
    """The embedding's gradient is minus the output layer's, up to ``scale``: only their inner product sees it."""
    tokens, vocabulary, width = 6, 9, 8
    index = torch.randint(0, vocabulary, (3, tokens))
    inputs, outputs = torch.randn(3, tokens, width), F.one_hot(index, vocabulary).float()
    rows = Rows("w", index, -inputs + scale * torch.randn_like(inputs), torch.Size((vocabulary, width)))
    head = outer("w", inputs, outputs, torch.Size((vocabulary, width)))
    tied = rows.merge(head)
    assert isinstance(tied, Tied)
    factors = clip_factors([[tied.norm().upper()]], max_grad_norm=1e-5, mode="flat", scale=1.0, weights=None)
    exact = tied.materialise(slice(0, 3)).double().flatten(1).norm(dim=1)
    assert (factors.weight[0].double() * exact <= 1e-5 * (1 + 2**-10)).all()
    if scale == 1.0:  # where little cancels, little is given away
        assert (factors.weight[0].double() * exact >= 0.9e-5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_equal_tokens_that_cancel_stay_below_the_norm(dtype: torch.dtype, scale: float) -> None:
    """Each token comes twice with opposite gradients, up to ``scale``; both ways to the norm, padding among them."""
    half = torch.randint(-1, 5, (4, 20))
    b = torch.randn(4, 20, 3)
    b = torch.cat([b, scale * torch.randn_like(b) - b], 1).to(dtype)
    rows = Rows("w", torch.cat([half, half], 1), b, torch.Size((5, 3)))
    exact = rows.materialise(slice(0, 4)).double().flatten(1).norm(dim=1)
    for parts in (rows._from_rows(slice(0, 4)), rows._from_gram(rows.index, b)):
        rounding = 1e-12 if dtype == torch.float64 else 1e-4
        assert torch.allclose(parts[0].double(), exact.square(), rtol=rounding, atol=rounding)
        assert (parts[3] <= parts[1] * (1 + 1e-6)).all()  # Frobenius norms of Gram matrices are below their traces
        assert (parts[4] <= parts[2] * (1 + 1e-6)).all()
    factors = clip_factors([[rows.norm().upper()]], max_grad_norm=1e-5, mode="flat", scale=1.0, weights=None)
    contribution = factors.weight[0].double() * exact
    assert (contribution <= 1e-5 * (1 + 2**-10)).all()
    assert (contribution >= 0.9e-5).all() or scale < 1  # where little cancels, little is given away


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("mode", ["flat", "per-layer", "automatic"])
def test_each_example_alone_stays_below_the_norm(low: bool, mode: Any) -> None:
    model, x, y = ViT(32, 2, 4, patch=4, image=16), torch.randn(5, 3, 16, 16), torch.tensor([0, 1, 2, 3, 4])
    clipper = attach(model, 1e-2, mode=mode)
    for i in range(5):
        clipper.weigh(F.one_hot(torch.tensor(i), 5).float())
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = total_norm(clipper.take())
        assert norm <= 1e-2 * (1 + clipper.sensitivity_tolerance)
        assert norm >= 0.9e-2 or mode == "per-layer"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_and_weightless_examples_contribute_exactly_zero(bad: float) -> None:
    model, x = (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(9, 2)),
        torch.randn(4, 2, 4),
    )
    clipper = attach(model, 0.1)
    step(model, x[[0, 3]])
    wanted = {n: t.clone() for n, t in clipper.take().items()}
    spoiled = x.clone()
    spoiled[1:3] = bad
    step(model, spoiled)
    assert clipper.dropped == 2
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])
    clipper.weigh(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    step(model, spoiled)
    assert clipper.dropped == 0
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])
    clipper.weigh(torch.zeros(4))
    step(model, spoiled)
    assert total_norm(clipper.take()) == 0.0


def test_long_gradients_are_normed_in_pieces() -> None:
    """Millions of equal numbers, added one by one in float32, lose a percent."""
    for length in (1 << 23, (1 << 23) + 7):
        found = Stored("w", torch.full((2, length), 1.3)).norm().square
        torch.testing.assert_close(found.double(), torch.full((2,), 1.3**2 * length).double(), rtol=2e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 3])
def test_squares_that_underflow_do_not_hide_a_gradient(tokens: int) -> None:
    """b² is zero in float32, a is huge: the norm from traces or Gram matrices would be zero, the gradient is not."""
    model = nn.Linear(3, 3, bias=False)
    clipper = attach(model, 1e-7)
    (model(torch.full((1, tokens, 3), 1e18)) * 1e-23).sum().backward()
    assert total_norm(clipper.take()) <= 1e-7 * (1 + clipper.sensitivity_tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    scales=st.tuples(*[st.integers(-44, 38)] * 2),
    tokens=st.sampled_from([1, 2, 64]),
    width=st.sampled_from([3, 40]),
    largest=st.sampled_from([1e-9, 1.0, 2.0**40]),
)
def test_finite_norms_make_finite_sums(
    dtype: torch.dtype, scales: tuple[int, int], tokens: int, width: int, largest: float
) -> None:
    """Also where huge tokens cancel to nothing, so that the gradient itself says nothing of the terms."""
    a, b = torch.rand(3, tokens, 7) + 1, torch.rand(3, tokens, width) + 1
    if tokens > 1:
        a[:, 1::2], b[:, 1::2] = a[:, ::2], -b[:, ::2]
    a, b = ((x.double() * 10.0**scale).float().to(dtype) for x, scale in zip((a, b), scales, strict=True))
    record = outer("w", a, b, torch.Size((width, 7)))
    factors = clip_factors([[record.norm().upper()]], max_grad_norm=largest, mode="flat", scale=1.0, weights=None)
    if factors.finite.all():
        total = torch.empty(width, 7)
        record.add(total, factors.weight[0], None, fresh=True)
        assert total.isfinite().all()


def test_infinite_norm_is_the_plain_gradient() -> None:
    model, x = mlp(), torch.randn(7, 4)
    step(model, x)
    wanted = {n: 7 * p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    clipper = attach(model, math.inf)
    step(model, x)
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])


@pytest.mark.parametrize("leave_room", [False, True])
def test_equal_values_in_bfloat16_stay_below_the_norm(leave_room: bool) -> None:
    """Every product of factor and operand rounds alike here, for some ζ up by nearly half an ulp (2⁻⁸ of the value).
    Operands of varying magnitude hide this: their roundings average out.
    """
    excess = []
    for zeta in torch.linspace(1.40, 1.46, 80).tolist():  # ζ/√128 passes a power of two
        model = nn.Linear(16, 8, bias=False).bfloat16()
        clipper = attach(model, zeta, loss_reduction="sum")
        if leave_room:  # as privatize does
            clipper.leave_room()
        (4 * model(torch.ones(1, 16, dtype=torch.bfloat16))).sum().backward()
        excess.append(total_norm(clipper.take()) / zeta)
    assert max(excess) <= (1 if leave_room else 1 + clipper.sensitivity_tolerance)


@pytest.mark.parametrize("batch", [4096, 65536])
def test_a_contribution_rounds_with_a_large_sum(batch: int) -> None:
    """Equal examples: whoever is zeroed out, all coordinates of the float32 sum round alike, up by nearly half an ulp
    of a sum that is as many times as large as there are examples.
    """

    def total(width: int, without: int | None) -> torch.Tensor:
        model = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(model.weight)
        clipper = attach(model, 1.0)
        clipper.allow_probe(False)
        clipper.leave_room(batch)  # as privatize does
        for first in range(0, batch, 1024):
            weights = torch.ones(1024)
            if without is not None and first <= without < first + 1024:
                weights[without - first] = 0
            clipper.weigh(weights)
            F.mse_loss(model(torch.ones(1024, width)), torch.full((1024, 1), -1e4)).backward()
        return clipper.take()["weight"].double()

    for width in (16, 40, 56, 60, 64):
        whole = total(width, None)
        assert all(float((whole - total(width, k)).norm()) <= 1 for k in (0, batch // 2, batch - 1))


def test_the_folding_unit_covers_the_unit_roundoff() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        assert folding_unit(dtype, torch.device("cpu")) >= torch.finfo(dtype).eps / 2
    with pytest.MonkeyPatch.context() as patch:  # float32 products in bfloat16: both operands, in both products
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        assert folding_unit(torch.float32, torch.device("cpu")) >= 4 * torch.finfo(torch.bfloat16).eps / 2
