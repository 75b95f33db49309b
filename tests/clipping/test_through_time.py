"""Recurrences over time, by hand and by PyTorch's kernels, against autograd through ordinary operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lambdacgd.clipping.layers import recurrent
from lambdacgd.clipping.layers.recurrent import Span, by_hand, fused

MODES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
SEED = 31
quick = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def span_of(lengths: list[int] | None, batch: int, steps: int) -> Span:
    """Of sequences that are sorted, the longest having all steps; None: all have."""
    if lengths is None:
        return Span([batch] * steps)
    return Span([sum(t < n for n in lengths) for t in range(steps)], torch.tensor(lengths))


def problem(mode: str, batch: int, steps: int, hidden: int, bias: bool, **kind: Any) -> list[Any]:
    """px, h, c, W_hh, b_hh of a recurrence; the first three need gradients."""
    torch.manual_seed(SEED)
    gates = MODES[mode] * hidden
    first = [torch.randn(steps, batch, gates, **kind), torch.randn(batch, hidden, **kind)]
    first.append(torch.randn(batch, hidden, **kind) if mode == "LSTM" else None)  # type: ignore[arg-type]
    first = [None if x is None else x.requires_grad_() for x in first]  # type: ignore[misc]
    weight = torch.randn(gates, hidden, **kind) / hidden**0.5
    return [*first, weight, torch.randn(gates, **kind) if bias else None]


def solved(run: Any, mode: str, given: list[Any], span: Span, used: tuple[bool, ...]) -> list[Tensor]:
    """What comes out, and the gradients of what went in, where some of the outputs are used."""
    px, h, c, w, b = given
    y, last_h, last_c, _ = run(mode, px * 1, h, c, w, b, span)  # a copy: by_hand writes over it
    outputs = [x for x in (y, last_h, last_c) if x is not None]
    parts = [x for x, use in zip(outputs, used, strict=False) if use] or [y]
    total = sum((x * torch.linspace(-1, 2, x.numel()).to(x).view(x.shape)).sum() for x in parts)
    needed = [x for x in (px, h, c) if x is not None]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(total, needed))  # type: ignore[arg-type]


@quick
@given(st.data())
@pytest.mark.parametrize("run", [by_hand, fused])
@pytest.mark.parametrize("mode", list(MODES))
def test_states_and_gradients_are_those_of_ordinary_operations(mode: str, run: Any, data: Any) -> None:
    batch, steps, hidden = (data.draw(st.integers(1, n)) for n in (4, 6, 5))
    lengths = None
    if data.draw(st.booleans()):
        lengths = [
            steps,
            *sorted(data.draw(st.lists(st.integers(1, steps), min_size=batch - 1, max_size=batch - 1)))[::-1],
        ]
    span, used = span_of(lengths, batch, steps), tuple(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    given = problem(mode, batch, steps, hidden, data.draw(st.booleans()), dtype=torch.float64)
    wanted = solved(recurrent.plain, mode, given, span, used)
    for x, y in zip(solved(run, mode, given, span, used), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


# --- cuDNN ------------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Of the norm: rounding, and for TF32 and 16 bits that of the operands and states over forty steps.
BOUNDS = {"float64": 1e-10, "float32": 1e-4, "tf32": 2e-2, "bfloat16": 0.1, "float16": 2e-2}


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("error:RNN module weights")  # not in one piece: copied at every call
@pytest.mark.parametrize("precision", list(BOUNDS))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", list(MODES))
def test_cudnn_gives_what_the_loop_gives(mode: str, packed: bool, precision: str) -> None:
    if mode == "RNN_RELU" and precision not in ("float64", "float32"):
        pytest.skip("rounding switches ReLU units on and off")
    steps, batch, hidden = 40, 16, 64
    span = span_of([steps - 2 * i for i in range(batch)] if packed else None, batch, steps)
    given = problem(mode, batch, steps, hidden, packed, device="cuda", dtype=torch.float64)
    kind = torch.float32 if precision == "tf32" else getattr(torch, precision)
    low = [None if x is None else x.detach().to(kind).requires_grad_(x.requires_grad) for x in given]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        found = solved(fused, mode, low, span, (True, True, True))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    exact = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in low]
    for x, y in zip(found, solved(by_hand, mode, exact, span, (True, True, True)), strict=True):
        assert x.dtype == kind
        assert float((x.double() - y).norm()) <= BOUNDS[precision] * float(y.norm())
