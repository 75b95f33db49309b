"""Every mechanism of the library through its noise: regenerated or buffered, it is that of the whole matrix C⁻¹."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lambdacgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    BandInvMF,
    BandMF,
    Diagonal,
    GammaBIFR,
    Horizon,
    Identity,
    LambdaCGD,
    Mechanism,
)
from lambdacgd.noise import BufferedNoise, RegeneratedNoise

from .helpers import SUBKEY, correlated, field

HORIZON = Horizon(steps_per_epoch=10, epochs=5)
REGENERATED: list[Mechanism] = [
    Identity(),
    LambdaCGD(0.9),
    LambdaCGD(0.9, normalized=True),
    BISR(4),
    BandInvMF(4),
    BandInvMF(4, normalized=True),
    GammaBIFR(8, 0.8),
    Diagonal(),
]
BUFFERED: list[Mechanism] = [BLT(2), BSR(4), BandMF(4)]
SHAPES = {"w": (700,)}
TERMS = {"sigma": 1.5, "clip": 2.0, "horizon": 50, "fineness": 40}


@pytest.mark.parametrize("mechanism", REGENERATED, ids=str)
@pytest.mark.parametrize("restart_every", [None, 10])
def test_regenerated_equals_the_whole_matrix_over_fifty_steps(mechanism: Mechanism, restart_every: int | None) -> None:
    mechanism = mechanism.resolve(HORIZON)
    noise = RegeneratedNoise.of(field(SHAPES), mechanism, restart_every=restart_every, **TERMS)  # type: ignore[arg-type]
    period = restart_every or 50
    scales = np.ones(period) if mechanism.column_scales(period) is None else mechanism.column_scales(period)
    recurrence = mechanism.recurrence(period)
    x = correlated(SUBKEY, noise.field.layout.by_name["w"], recurrence, 50, restart_every=restart_every)
    for step in range(1, 51):
        sums = {"w": torch.zeros(700, dtype=torch.float64)}
        noise.add_(sums, step)
        want = 3.0 * scales[(step - 1) % period] * x[step - 1]
        assert np.abs(sums["w"].numpy() - want).max() < 5e-6 * scales.max()


@pytest.mark.parametrize("mechanism", REGENERATED + BUFFERED, ids=str)
def test_the_noise_is_the_inverse_of_the_strategy(mechanism: Mechanism) -> None:
    """C times the noise added is ζσz, with C = T·D⁻¹ built entry by entry from the mechanism's own strategy."""
    mechanism = mechanism.resolve(HORIZON)
    kind = BufferedNoise if mechanism in BUFFERED or not mechanism.regenerates(50) else RegeneratedNoise
    noise = kind.of(field(SHAPES), mechanism, **TERMS)  # type: ignore[arg-type]
    rows = []
    for step in range(1, 51):
        sums = {"w": torch.zeros(700, dtype=torch.float64)}
        noise.add_(sums, step)
        rows.append(sums["w"].numpy())
    column, scales = mechanism.strategy(50), mechanism.column_scales(50)
    strategy = np.array([[column[i - j] if i >= j else 0.0 for j in range(50)] for i in range(50)])
    if scales is not None:
        strategy = strategy / scales[None, :]
    entry = field(SHAPES).layout.by_name["w"]
    z = correlated(SUBKEY, entry, Identity().recurrence(50), 50)
    assert np.abs(strategy @ np.stack(rows) - 3.0 * z).max() < 3e-4
