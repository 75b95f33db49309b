"""Ways to break the library, each planted into the running process by a monkeypatch: what runs is really changed.

Every mutant says which tests of the audit may catch it: one of them must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lambdacgd.auditing.canaries import NORMS
from lambdacgd.clipping import Clipper
from lambdacgd.mechanisms import Mechanism
from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise import RegeneratedNoise
from lambdacgd.sampling import BallsInBins
from lambdacgd.training.run import Run

Patch = pytest.MonkeyPatch


class Mutant(NamedTuple):
    plant: Callable[[Patch], None]
    bins: str
    caught_by: set[str]


MUTANTS: dict[str, Mutant] = {}


def mutant(bins: str, *caught_by: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[plant.__name__] = Mutant(plant, bins, set(caught_by))
        return plant

    return register


# --- the noise -------------------------------------------------------------------------------------------------------


def _terms(patch: Patch, change: Callable[[Mechanism, dict[str, Any]], Mechanism]) -> None:
    """Make the noise of other terms than the plan's."""
    original = RegeneratedNoise.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, field: Any, mechanism: Mechanism, **terms: Any) -> Any:
        mechanism = change(mechanism, terms)
        return original(cls, field, mechanism, **terms)

    patch.setattr(RegeneratedNoise, "of", classmethod(of))


def _scaled(factor: float) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def change(mechanism: Mechanism, terms: dict[str, Any]) -> Mechanism:
            terms["sigma"] *= factor
            return mechanism

        _terms(patch, change)

    return plant


@dataclass(frozen=True)
class Bands(Mechanism):
    coefficients: tuple[float, ...]

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse(self.coefficients)


@mutant("fixed", "noise scale", "ε")
def sigma_halved(patch: Patch) -> None:
    _scaled(0.5)(patch)


@mutant("fresh", "noise scale")
def sigma_five_percent_low(patch: Patch) -> None:
    _scaled(0.95)(patch)


@mutant("fixed", "noise over steps, by lag")
def lambda_of_the_wrong_sign(patch: Patch) -> None:
    _terms(patch, lambda mechanism, terms: Bands((1.0, 0.9)))


@mutant("fresh", "noise over steps, by lag")
def cancellation_off(patch: Patch) -> None:
    _terms(patch, lambda mechanism, terms: Bands((1.0,)))


@mutant("fixed", "noise over steps, by lag")
def lambda_a_little_off(patch: Patch) -> None:
    _terms(patch, lambda mechanism, terms: Bands((1.0, -0.8)))


@mutant("fresh", "noise over steps")
def no_restart(patch: Patch) -> None:
    def change(mechanism: Mechanism, terms: dict[str, Any]) -> Mechanism:
        terms["restart_every"] = None
        return mechanism

    _terms(patch, change)


@mutant("fixed", "noise over steps")
def restarts_against_the_plan(patch: Patch) -> None:
    def change(mechanism: Mechanism, terms: dict[str, Any]) -> Mechanism:
        terms["restart_every"] = 4
        return mechanism

    _terms(patch, change)


def _around_noise(patch: Patch, change: Callable[[dict[str, Any], dict[str, Any], int], None]) -> None:
    """Change sums after they got their noise: ``change(sums, what they were before, step)``."""
    original = RegeneratedNoise.add_

    def add_(self: Any, sums: dict[str, Any], step: int, **options: Any) -> None:
        before = {name: value.clone() for name, value in sums.items()}
        original(self, sums, step, **options)
        change(sums, before, int(step))

    patch.setattr(RegeneratedNoise, "add_", add_)


@mutant("fixed", "noise over steps")
def one_z_twice(patch: Patch) -> None:
    original = RegeneratedNoise.add_

    def add_(self: Any, sums: dict[str, Any], step: int, **options: Any) -> None:
        original(self, sums, 6 if step == 9 else step, **options)

    patch.setattr(RegeneratedNoise, "add_", add_)


@mutant("fresh", "noise over runs", "bins over runs")
def key_and_run_reused(patch: Patch) -> None:
    from lambdacgd.keys import SecretKey

    patch.setattr(Run, "_start", lambda self: "the same")
    patch.setattr(SecretKey, "generate", classmethod(lambda cls: cls.from_bytes(bytes(range(32)))))


@mutant("fresh", "noise over coordinates")
def two_layers_share_their_noise(patch: Patch) -> None:
    def change(sums: dict[str, Any], before: dict[str, Any], step: int) -> None:
        noise = (sums["embedding.weight"] - before["embedding.weight"]).flatten()
        width = sums["linear.weight"].numel()
        sums["linear.weight"].copy_(before["linear.weight"] + noise[:width])

    _around_noise(patch, change)


@mutant("fresh", "law of the noise")
def noise_is_not_gaussian(patch: Patch) -> None:
    def change(sums: dict[str, Any], before: dict[str, Any], step: int) -> None:
        for name, value in sums.items():
            noise = value - before[name]
            width = noise.abs().mean()
            value.copy_(before[name] + noise.sign() * width * 1.25)

    _around_noise(patch, change)


@mutant("fixed", "largest residual")
def one_element_with_more_noise(patch: Patch) -> None:
    """One coordinate gets ten times the noise: harmless for privacy, but not what the plan says."""

    def change(sums: dict[str, Any], before: dict[str, Any], step: int) -> None:
        value, was = sums["embedding.weight"], before["embedding.weight"]
        value[7] = was[7] + 10 * (value[7] - was[7])

    _around_noise(patch, change)


# --- who takes part --------------------------------------------------------------------------------------------------


@mutant("fresh", "bins over epochs")
def bins_kept(patch: Patch) -> None:
    original = BallsInBins.bin_of

    def bin_of(self: Any, key: Any, ids: Any, *, run: str = "0", epoch: int | None = None) -> Any:
        return original(self, key, ids, run=run, epoch=1)

    patch.setattr(BallsInBins, "bin_of", bin_of)


@mutant("fixed", "bins over epochs")
def bins_redrawn(patch: Patch) -> None:
    original = BallsInBins._batches
    patch.setattr(BallsInBins, "_batches", lambda self, *given: original(replace(self, bins="fresh"), *given))


@mutant("fixed", "bins over runs")
def bins_without_a_key(patch: Patch) -> None:
    def bin_of(self: Any, key: Any, ids: Any, *, run: str = "0", epoch: int | None = None) -> Any:
        return np.random.default_rng(5).integers(0, self.steps_per_epoch, self.examples)[np.asarray(ids)]

    patch.setattr(BallsInBins, "bin_of", bin_of)


@mutant("fixed", "bins are uniform")
def bins_not_uniform(patch: Patch) -> None:
    original = BallsInBins.bin_of

    def bin_of(self: Any, key: Any, ids: Any, **options: Any) -> Any:
        bins = original(self, key, ids, **options)
        return np.where(np.asarray(ids) % 8 == 3, 0, bins)

    patch.setattr(BallsInBins, "bin_of", bin_of)


def _batches(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    original = BallsInBins._batches

    def batches(self: Any, *given: Any) -> Any:
        previous = np.zeros(0, dtype=np.int64)
        for batch in original(self, *given):
            yield change(batch, previous)
            previous = batch

    patch.setattr(BallsInBins, "_batches", batches)


@mutant("fresh", "participation")
def some_examples_twice_an_epoch(patch: Patch) -> None:
    _batches(patch, lambda batch, previous: np.concatenate([batch, previous[:20]]))


@mutant("fresh", "participation")
def bins_cut_to_the_batch_size(patch: Patch) -> None:
    _batches(patch, lambda batch, previous: batch[:1000])


# --- clipping and division -------------------------------------------------------------------------------------------


def _sums(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    """Change clipped sums before they get their noise."""
    original = Clipper.gathered

    def gathered(self: Any) -> dict[str, Any]:
        sums = original(self)
        change(sums)
        return sums

    patch.setattr(Clipper, "gathered", gathered)


@mutant("fresh", "weight in an epoch")
def clip_times_two(patch: Patch) -> None:
    def change(sums: dict[str, Any]) -> None:
        for value in sums.values():
            value.mul_(2)

    _sums(patch, change)


@mutant("fixed", "largest residual")
def a_layer_not_clipped(patch: Patch) -> None:
    def change(sums: dict[str, Any]) -> None:
        first = len(sums["embedding.weight"]) - 1
        width = sums["linear.weight"].numel()
        sums["linear.weight"].mul_(torch.tensor([NORMS[(first + i) % len(NORMS)] for i in range(width)]))

    _sums(patch, change)


@mutant("fixed", "weight a step late")
def sums_not_emptied(patch: Patch) -> None:
    last: dict[str, Any] = {}

    def change(sums: dict[str, Any]) -> None:
        now = {name: value.clone() for name, value in sums.items()}
        for name, value in sums.items():
            value.add_(last.get(name, torch.zeros(1)) if last.get(name, value).shape == value.shape else 0)
        last.update(now)

    _sums(patch, change)


@mutant("fixed", "division")
def division_by_the_drawn_size(patch: Patch) -> None:
    drawn: list[int] = []

    def count(batch: Any, previous: Any) -> Any:
        drawn.append(len(batch))
        return batch

    _batches(patch, count)

    def change(sums: dict[str, Any], before: dict[str, Any], step: int) -> None:
        size = drawn[-1]  # the loader reads one batch at a time
        for value in sums.values():
            value.mul_(1000 / size)

    _around_noise(patch, change)
