"""Plans that claim nothing, of a σ for each epoch with fresh bins: for ``lower-noise``.

What an epoch leaves in the weights stays for all later ones, so early epochs get less noise. No accountant here
composes epochs that differ: σ is simulated, and **nothing may be claimed for such a run**. The library has no way to
train one either: ``noise_of_epochs`` reaches into it.

Plans are made here, say that they are estimates, and are kept as the numbers that they are made from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import lambdacgd as lc
from lambdacgd.accounting.certificate import Array, Certificate, OneWay, set_aside
from lambdacgd.accounting.root import Secant, find_root
from lambdacgd.mechanisms import Horizon, Mechanism, error_norms, sensitivity
from lambdacgd.planning import Plan
from lambdacgd.training import Private
from lambdacgd.training.step import PrivateStep
from reproduce.simulated import Pool, Simulation

POWER = 0.2  # σ of an epoch ∝ (what its noise weighs in the mean squared error)^−POWER; .15 to .25 differ by .5%
BANDS = {"epochs": 2, "bands-4-epochs": 4}  # of the normalised C⁻¹; two are the default's
_GROUPS = 3


@dataclass(frozen=True)
class ScaledEpochs(lc.BandInvMF):
    """Normalised bands, and what σ is multiplied by in each epoch (nothing: 1)."""

    epoch_scales: tuple[float, ...] = ()
    name: ClassVar[str] = "normalized-bands"
    title: ClassVar[str] = "normalised bands"

    @classmethod
    def of(cls, tail: Sequence[float], epoch_scales: Sequence[float] = ()) -> ScaledEpochs:
        """With the coefficients after the first."""
        return cls(len(tail) + 1, (1.0, *tail), normalized=True, epoch_scales=tuple(epoch_scales))


def weights_of_epochs(mechanism: Mechanism, horizon: Horizon) -> Array:
    """What the noise of each epoch adds to k times the mean squared error of the running sums, at σ = 1."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    once, both = (error_norms(mechanism, e * b, restart_every=b)[0] ** 2 for e in (1, 2))
    left = 2 * (both - once)  # two epochs: the first one's noise stays for the second: once + left/2
    return np.asarray(once + np.arange(k - 1, -1, -1) * left, dtype=np.float64)


def rmse(mechanism: ScaledEpochs, horizon: Horizon, sigma: float) -> float:
    """With its epochs' own σ."""
    scales = np.asarray(mechanism.epoch_scales or (1.0,))
    return sigma * math.sqrt(float((weights_of_epochs(mechanism, horizon) * scales**2).mean()))


def delta_of_epochs(pools: Sequence[Pool], way: OneWay, epsilon: float, *, cells: int = 400) -> float:
    """δ(ε) of a sum of one loss of each pool: ``Pool.delta`` for epochs that differ."""
    losses, weights = [pool.losses[way] for pool in pools], [pool.weights[way] for pool in pools]
    peaks = [float(each.max()) for each in losses]
    if sum(peaks) <= epsilon:
        return 0.0

    def log_mgfs(theta: float) -> list[float]:
        return [
            theta * peak + math.log(float(w @ np.exp(theta * (x - peak))))
            for x, w, peak in zip(losses, weights, peaks, strict=True)
        ]

    most = 300.0 / max(float(np.abs(each).max()) for each in losses)
    tilted_at = minimize_scalar(lambda t: sum(log_mgfs(t)) - t * epsilon, bounds=(0.0, most), method="bounded")
    theta = float(tilted_at.x)
    logs = log_mgfs(theta)
    tilted = [w * np.exp(theta * x - log) for x, w, log in zip(losses, weights, logs, strict=True)]
    spreads = [math.sqrt(max(float(p @ (x - p @ x) ** 2), 0.0)) for x, p in zip(losses, tilted, strict=True)]
    cell = max(4 * min(spreads) / cells, sum(map(float, map(np.ptp, losses))) / 2**21, 1e-12)
    lows = [math.floor(float(x.min()) / cell) for x in losses]
    tops = [int(np.floor(x / cell - low).max()) + 2 for x, low in zip(losses, lows, strict=True)]
    length = 1 << sum(tops).bit_length()
    product = np.ones(length // 2 + 1, dtype=np.complex128)
    for x, p, low, size in zip(losses, tilted, lows, tops, strict=True):
        at = x / cell - low
        first = np.floor(at).astype(np.intp)
        share = at - first
        masses = np.bincount(first, p * (1 - share), size) + np.bincount(first + 1, p * share, size)
        product *= np.fft.rfft(masses, length)
    sums = np.fft.irfft(product, length)[: sum(tops)]
    values = (np.arange(len(sums)) + sum(lows)) * cell
    above = values > epsilon
    kept = values[above]
    return float(np.sum(-np.expm1(epsilon - kept) * np.exp(sum(logs) - theta * kept) * sums[above]))


def simulated_sigma(
    mechanism: ScaledEpochs, horizon: Horizon, epsilon: float, delta: float, *, start: float, samples: int = 6144
) -> tuple[float, float]:
    """σ at which δ(ε) of the simulated epochs is ``delta``, and its standard error. An estimate: no claim."""
    simulation = Simulation(mechanism, horizon.steps_per_epoch)
    scales = mechanism.epoch_scales or (1.0,) * horizon.epochs
    error = 0.0

    def gap(log_sigma: float) -> float:
        nonlocal error
        drawn = []
        for group in range(_GROUPS):
            pools = [
                simulation.pool(math.exp(log_sigma) * scale, samples=samples, seed=1000 * group + epoch)
                for epoch, scale in enumerate(scales)
            ]
            drawn.append(max(delta_of_epochs(pools, way, epsilon) for way in ("remove", "add")))
        error = float(np.std(drawn, ddof=1) / np.mean(drawn) / math.sqrt(_GROUPS))
        return math.log(max(float(np.mean(drawn)), 1e-300) / delta)

    search = Secant(-12.0, limits=(math.log(start / 4), math.log(start * 4)))
    x, value = find_root(gap, math.log(start), search, lambda v: abs(v) < 0.03, most=6)
    return math.exp(x - value / search.slope), error / -search.slope


def found(variant: str, *, examples: int, batch_size: int, epochs: int, epsilon: float, delta: float) -> dict[str, Any]:
    """The numbers of a variant's plan: coefficients, what σ is multiplied by in each epoch, σ, and who says so."""
    sampling = lc.BallsInBins("fresh")
    bands = lc.BandInvMF(BANDS[variant], normalized=True, amplified=True)
    alike = lc.plan(
        examples, batch_size, epochs=epochs, epsilon=epsilon, delta=delta, mechanism=bands, sampling=sampling
    )
    mechanism = ScaledEpochs.of([float(f"{value:.5g}") for value in alike.mechanism.to_dict()["coefficients"][1:]])
    weights = weights_of_epochs(mechanism, alike.horizon)
    scales = (weights / weights.mean()) ** -POWER
    mechanism = replace(mechanism, epoch_scales=tuple(float(f"{scale:.5g}") for scale in scales))
    kept = set_aside(epsilon, delta)
    budget = epsilon - kept["epsilon"], delta - kept["delta"]  # of real numbers, as for any plan
    sigma, error = simulated_sigma(mechanism, alike.horizon, *budget, start=alike.sigma)
    answer = {"coefficients": mechanism.to_dict()["coefficients"][1:], "epoch_scales": mechanism.epoch_scales}
    return answer | {"sigma": float(f"{sigma:.5g}"), "by": f"simulated, ± {error * 100:.1g}%"}


def plan_of(request: dict[str, Any], numbers: dict[str, Any]) -> Plan:
    """A plan that claims nothing, as the library wants to see one before it trains."""
    asked = {name: request[name] for name in ("examples", "batch_size", "epochs", "delta")}
    base, epsilon = _unplanned(**asked), request["epsilon"]
    mechanism = ScaledEpochs.of(numbers["coefficients"], numbers["epoch_scales"])
    certificate = Certificate(
        numbers["by"].partition(",")[0], "both", 0.0, epsilon, base.delta, "estimate",
        {"floating_point": set_aside(epsilon, base.delta)},
    )  # fmt: skip
    return replace(
        base, mechanism=mechanism, epsilon=epsilon, sigma=numbers["sigma"], certificate=certificate, selection=None,
        rmse=rmse(mechanism, base.horizon, numbers["sigma"]),
        maxse=numbers["sigma"] * error_norms(mechanism, base.steps, restart_every=base.restart_every)[1],
        sensitivity=sensitivity(mechanism, base.horizon, restart_every=base.restart_every).value,
    )  # fmt: skip


def _unplanned(*, examples: int, batch_size: int, epochs: int, delta: float) -> Plan:
    """A plan without noise: the sampling, bound as ``lc.plan`` does it."""
    sampling = lc.BallsInBins("fresh")
    return lc.plan(
        examples, batch_size, epochs=epochs, epsilon=math.inf, delta=delta, mechanism=lc.Identity(), sampling=sampling
    )


@contextmanager
def noise_of_epochs(private: Private, plan: Plan) -> Iterator[None]:
    """Within it, steps of ``private`` have σ times their epoch's scale: sums are divided by it, noised, multiplied."""
    scales = getattr(plan.mechanism, "epoch_scales", ())
    if not scales:
        yield
        return
    device = next(iter(private.model.parameters())).device
    table, now = (torch.tensor(values, device=device) for values in (scales, scales[0]))  # read there: one capture
    original = PrivateStep.add_noise_

    def follow() -> None:
        if private.steps_taken % plan.steps_per_epoch == 0 and not private.finished:
            now.copy_(table[private.steps_taken // plan.steps_per_epoch])

    def add(self: PrivateStep, sums: dict[str, Tensor], step: int | Tensor, *, check: bool = True) -> None:
        for total in sums.values():
            total.div_(now)
        original(self, sums, step, check=check)
        for total in sums.values():
            total.mul_(now)

    private.after_step.append(follow)
    with patch.object(PrivateStep, "add_noise_", add):
        yield
