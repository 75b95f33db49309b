"""Coefficients in float32 never make a C that is more sensitive than the one the plan accounts for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd.mechanisms import BISR, BLT, BSR, BandInvMF, GammaBIFR, LambdaCGD
from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy, BufferedToeplitz
from lambdacgd.noise import BufferedNoise
from lambdacgd.noise.cuda import CudaBackend
from lambdacgd.noise.layout import rounded_down, rounded_up

from .helpers import SUBKEY, field

UNLUCKY = 1 - 36.4 * 2.0**-24  # its nearest float32, 1 − 36·2⁻²⁴, has a 1% larger 1/(1−λ)


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=5), st.booleans())
def test_directions(values: list[float], negative: bool) -> None:
    exact = -np.array(values) if negative else np.array(values)
    near = 2.0**-23 * np.abs(exact)
    down, up = rounded_down(exact).astype(np.float64), rounded_up(exact).astype(np.float64)
    assert (np.abs(down) <= np.abs(exact)).all()
    assert (np.abs(down - exact) <= near).all()
    assert (up >= exact).all()
    assert (up - exact <= near).all()


@pytest.mark.parametrize(
    "mechanism",
    [LambdaCGD(UNLUCKY), BISR(6), GammaBIFR(5, 0.93), BandInvMF(3, (1.0, -0.999, 0.1))],
    ids=lambda m: m.name,
)
def test_what_cuda_regenerates_is_no_more_sensitive(mechanism: LambdaCGD) -> None:
    n = 2000
    exact = mechanism.recurrence(n)
    given_ = CudaBackend(SUBKEY, torch.device("cpu"))._constant(exact.coefficients)
    assert given_.dtype == torch.float32
    rounded = BandedInverse(tuple(given_.tolist())).strategy(n)
    assert (rounded <= exact.strategy(n)).all()
    np.testing.assert_allclose(rounded, exact.strategy(n), rtol=1e-3)


@pytest.mark.parametrize(
    "recurrence",
    [
        BandedInverse((1.0, -UNLUCKY)),
        BandedStrategy(BSR(5).recurrence(9).coefficients),
        BufferedToeplitz((UNLUCKY, 0.3), (0.1, 0.7)),
    ],
    ids=lambda recurrence: type(recurrence).__name__,
)
def test_what_buffers_follow_is_no_more_sensitive(recurrence: BandedInverse) -> None:
    noise = BufferedNoise(field({"w": (3,)}), recurrence, sigma=1.0, clip=1.0, horizon=9)
    followed, exact = noise.recurrence.strategy(2000), recurrence.strategy(2000)
    assert (followed <= exact).all()
    np.testing.assert_allclose(followed, exact, rtol=1e-3)
    numbers = np.array([v for part in vars(noise.recurrence).values() for v in part])
    assert (numbers == numbers.astype(np.float32)).all()


def test_mechanisms_that_float32_holds_stay_as_they_are() -> None:
    blt = BLT(1, (0.5,), (0.25,)).recurrence(4)
    assert BufferedNoise(field({"w": (3,)}), blt, sigma=1.0, clip=1.0, horizon=9).recurrence == blt
    assert rounded_up((1.0, -0.5)).tolist() == [1.0, -0.5]
