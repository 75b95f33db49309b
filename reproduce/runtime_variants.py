"""The ways to make the noise that runtimes compare, and what their times come to in an epoch.

A logical batch is gathered in physical ones and then acted on once (noise and optimizer), so an epoch of b logical
batches of m physical ones takes b·(first + (m−1)·later + act): ``first`` begins the sums, ``later`` adds to them. The
three are timed on logical batches of two physical ones (``runtime_measure``), by medians. Gathering is the same code
whatever the noise, so its times are pooled over our variants; what a variant's own times give is reported beside.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms import BISR, Identity, LambdaCGD, Mechanism
from lambdacgd.noise import BufferedNoise
from lambdacgd.planning import Plan, plan

_STEPS_PER_EPOCH, _EPOCHS = 100, 10
_FAR = 20  # steps behind us, so that 16 bands are all in use


@dataclass
class Times:
    """Seconds of each part, a list a round."""

    first: list[list[float]] = field(default_factory=list)
    later: list[list[float]] = field(default_factory=list)
    act: list[list[float]] = field(default_factory=list)
    error: str | None = None

    def medians(self) -> tuple[float, float, float]:
        return _median(self.first), _median(self.later), _median(self.act)


@dataclass
class Variant:
    """One way to make the noise, with where its run stands."""

    title: str
    bands: int
    on_cpu: bool
    plan: Plan
    key: SecretKey = field(default_factory=SecretKey.generate)
    stage: BufferedNoise | None = None
    done: int = 0
    times: Times = field(default_factory=Times)


def mechanism(bands: int) -> Mechanism:
    """DP-SGD, λCGD, or for more bands BISR: what a step takes depends on the number of bands alone."""
    return {1: Identity(), 2: LambdaCGD(0.9)}.get(bands) or BISR(bands)


def variants(bands: list[int], physical: int) -> list[Variant]:
    def made(title: str, count: int, on_cpu: bool) -> Variant:
        found = plan(
            2 * physical * _STEPS_PER_EPOCH,
            2 * physical,
            epochs=_EPOCHS,
            epsilon=8.0,
            delta=1e-7,
            mechanism=mechanism(count),
            sampling="cyclic",
        )
        return Variant(title, count, on_cpu, found, done=0 if on_cpu else _FAR)

    return [
        made("DP-SGD", 1, False),
        *(made(f"regenerated, {count} bands", count, False) for count in bands),
        *(made(f"CPU buffer, {count} bands", count, True) for count in bands),
    ]


def summary(todo: list[Variant], m: int, b: int, parameters: int) -> dict[str, dict[str, Any]]:
    """Seconds an epoch of b logical batches of m physical ones, and each over DP-SGD."""
    good = [variant for variant in todo if variant.times.error is None]
    if not good:
        return {variant.title: {"error": variant.times.error} for variant in todo}
    first = _median([part for variant in good for part in variant.times.first])
    later = _median([part for variant in good for part in variant.times.later])
    found: dict[str, dict[str, Any]] = {}
    for variant in todo:
        if variant.times.error is not None:
            found[variant.title] = {"error": variant.times.error}
            continue
        own_first, own_later, act = variant.times.medians()
        each = zip(variant.times.first, variant.times.later, variant.times.act, strict=True)
        own = [b * (_median([f]) + (m - 1) * _median([l]) + _median([a])) for f, l, a in each]
        found[variant.title] = {
            "epoch_s": b * (first + (m - 1) * later + act),
            "own_epoch_s": b * (own_first + (m - 1) * own_later + act),
            "own_epoch_s_sd": statistics.stdev(own) if len(own) > 1 else None,
            "first_ms": 1e3 * own_first,
            "later_ms": 1e3 * own_later,
            "act_ms": 1e3 * act,
            "pooled_first_ms": 1e3 * first,
            "pooled_later_ms": 1e3 * later,
            "rounds": len(own),
            "steps": sum(map(len, variant.times.act)),
            "host_buffer_mib": (variant.bands - 1) * 4 * parameters / 2**20 if variant.on_cpu else 0.0,
        }
    base = found["DP-SGD"]
    for row in found.values():
        if "error" not in row and "error" not in base:
            row["over_dp_sgd"] = row["epoch_s"] / base["epoch_s"]
            row["own_over_dp_sgd"] = row["own_epoch_s"] / base["own_epoch_s"]
    return found


def _median(parts: list[list[float]]) -> float:
    flat = [value for part in parts for value in part]
    return statistics.median(flat) if flat else math.nan
