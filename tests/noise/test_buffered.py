"""Buffered noise equals the reference, equals regenerated noise, and rebuilds itself at any step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy, BufferedToeplitz, Recurrence
from lambdacgd.noise import BufferedNoise, NoiseError, NonFiniteSum

from .helpers import SUBKEY, correlated, field

SHAPES = {"a": (3, 50), "b": (600,)}
RECURRENCES: list[Recurrence] = [
    BandedStrategy((1.0, 0.5, 0.375)),
    BandedStrategy((2.0, 0.5)),
    BandedStrategy((2.0,)),
    BufferedToeplitz((0.99, 0.6), (0.13, 0.3)),
]


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def stage(recurrence: Recurrence, **more: object) -> BufferedNoise:
    return BufferedNoise(
        field(SHAPES), recurrence, **({"sigma": 1.5, "clip": 2.0, "horizon": 60, "fineness": 40} | more)
    )


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
@pytest.mark.parametrize("restart_every", [None, 7])
def test_equals_the_whole_matrix(recurrence: Recurrence, restart_every: int | None) -> None:
    noise = stage(recurrence, restart_every=restart_every)
    entry = noise.field.layout.by_name["b"]
    want = 3.0 * correlated(SUBKEY, entry, recurrence, 20, restart_every=restart_every)
    for step in range(1, 21):
        sums = zeros()
        noise.add_(sums, step)
        assert np.abs(sums["b"].numpy() - want[step - 1]).max() < 2e-5


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
@pytest.mark.parametrize("restart_every", [None, 7])
def test_resuming_at_any_step_gives_the_same_bits(recurrence: Recurrence, restart_every: int | None) -> None:
    steady = stage(recurrence, restart_every=restart_every)
    for step in range(1, 17):
        one, two = zeros(), zeros()
        steady.add_(one, step)
        stage(recurrence, restart_every=restart_every).add_(two, step)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_asking_out_of_order_does_not_change_the_noise() -> None:
    noise = stage(RECURRENCES[0])
    answers = {}
    for step in (1, 2, 3, 4, 5):
        answers[step] = zeros()
        noise.add_(answers[step], step)
    for step in (4, 2, 5, 5, 1):
        sums = zeros()
        noise.add_(sums, step)
        assert all(torch.equal(sums[name], answers[step][name]) for name in sums)


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
@pytest.mark.parametrize(("fails", "then"), [(9, 9), (11, 9)], ids=["adding", "rebuilding"])
def test_a_step_that_fails_half_way_does_not_spoil_the_next_try(
    recurrence: Recurrence, fails: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, want = stage(recurrence), zeros()
    stage(recurrence).add_(want, then)
    for step in range(1, then):
        noise.add_(zeros(), step)
    real = BufferedNoise._advance

    def fails_at_the_end(self: BufferedNoise, jobs: object, step: int) -> list[torch.Tensor]:
        real(self, jobs, step)  # type: ignore[arg-type]
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BufferedNoise, "_advance", fails_at_the_end)
        with pytest.raises(torch.OutOfMemoryError):
            noise.add_(zeros(), fails)
    got = zeros()
    noise.add_(got, then)
    for name in SHAPES:
        assert torch.equal(got[name], want[name])


def test_shards_get_their_part_of_the_noise() -> None:
    noise, whole = stage(RECURRENCES[0]), stage(RECURRENCES[0])
    for step in (1, 2, 3):
        sums = {"a": torch.zeros(2, 50), "b": torch.zeros(100)}
        noise.add_(sums, step, offsets={"a": 50, "b": 300})
        full = {name: value.float() for name, value in zeros().items()}
        whole.add_(full, step)
        assert torch.equal(sums["a"], full["a"][1:])
        assert torch.equal(sums["b"], full["b"][300:400])


def test_refusals() -> None:
    noise = stage(RECURRENCES[0])
    with pytest.raises(NoiseError, match="outside the run"):
        noise.add_(zeros(), 61)
    bad = zeros()
    bad["a"][0, 0] = float("nan")
    with pytest.raises(NonFiniteSum):
        noise.add_(bad, 1)
    for other in (None, BandedInverse((1.0, -0.9))):
        with pytest.raises(TypeError, match="recurrence"):
            BufferedNoise(field(SHAPES), other, sigma=1.0, clip=1.0, horizon=5)  # type: ignore[arg-type]
