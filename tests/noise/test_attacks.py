"""Two attacks that read the lowest bits of released numbers, without the key: format 1 of the noise lost to both.

*Angles*: a generator with few angles puts every Box–Muller pair on a ray of a known fan; subtracting the right
candidate for the sum leaves pairs on rays, subtracting a wrong one does not. *Grid*: float32(g + noise) lies on a
coarser grid than float32(0 + noise) where g is larger than the result. Each test states a false-alarm rate of at most
10⁻⁶: with true and false positive rates that are equal, Fisher's exact test gives a smaller p-value no more often than
that. That the attacks work is tested on format 1's own numbers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import lambdacgd as lc

TRIALS = 40
Array = np.ndarray


def angle_score(noise: Array, error: Array, angles: float, half: int) -> float:
    """Log-likelihood ratio that pairs lie on the rays of the fan, against anywhere; ``error`` is their rounding."""
    whole = len(noise) // (2 * half) * 2 * half
    x, y = noise[:whole].reshape(-1, 2, half).transpose(1, 0, 2).reshape(2, -1)
    ex, ey = np.broadcast_to(error, noise.shape)[:whole].reshape(-1, 2, half).transpose(1, 0, 2).reshape(2, -1)
    turn = np.arctan2(y, x) / (2 * np.pi) * angles - 0.5
    spread = np.maximum(np.sqrt((y * ex) ** 2 + (x * ey) ** 2) / (x * x + y * y) / (2 * np.pi) * angles, 1e-3)
    residual = turn - np.round(turn)
    # Spread wider than a ray's distance tells nothing: its wrapped density is 1.
    clear = spread < 1.0
    density = sum(np.exp(-0.5 * ((residual + k) / spread) ** 2) for k in range(-4, 5)) / (spread * math.sqrt(2 * np.pi))
    return float(np.log(0.001 + 0.999 * density[clear]).sum())


def ulp(x: Array, dtype: torch.dtype) -> Array:
    bits = {torch.float32: 23, torch.float64: 52, torch.bfloat16: 7}[dtype]
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**-120))) - bits)


def grid_score(out: Array, g: Array, dtype: torch.dtype = torch.float32) -> float:
    """Log-likelihood ratio (sum = g : sum = 0) from the grid of g and of the noise; −∞ for a number off that grid."""
    use = (g != 0) & (out != 0)
    out, g = out[use], g[use]
    step = np.minimum(ulp(g, dtype), ulp(out - g, dtype) / 2)
    gained = np.log2(step / ulp(out, dtype))
    coarse = gained > 0
    if np.any(np.mod(out[coarse] / step[coarse], 1) != 0):
        return -math.inf
    return float(gained[coarse].sum() * math.log(2))


def equal_rates(present: list[bool], absent: list[bool]) -> bool:
    table = [[sum(present), len(present) - sum(present)], [sum(absent), len(absent) - sum(absent)]]
    return stats.fisher_exact(table).pvalue > 1e-6


def canary(d: int, trial: int) -> Array:
    g = np.random.default_rng(trial).standard_normal(d)
    return (g / np.linalg.norm(g)).astype(np.float32).astype(np.float64)


def plan(lam: float, sigma: float, *, epochs: int, steps: int = 1, bins: str = "fixed") -> lc.Plan:
    examples = 8 * steps
    return lc.plan(
        examples, 8, epochs=epochs, noise_multiplier=sigma, delta=1e-3, mechanism=lc.LambdaCGD(lam),
        sampling=lc.BallsInBins(bins), steps_per_epoch=steps,
    )  # fmt: skip


def verdicts(outputs: list[Array], g: Array, lam: float, sigma: float, restart: int | None) -> tuple[bool, bool]:
    """Whether each attack says "present" of the first steps' numbers, the sum being g or 0 in all of them."""
    angle, before = {0: 0.0, 1: 0.0}, {0: np.zeros(len(g)), 1: np.zeros(len(g))}
    for t, out in enumerate(outputs):
        if restart and t % restart == 0:
            before = dict.fromkeys(before, np.zeros(len(g)))
        for h in (0, 1):
            noise = (out - h * g) / sigma + lam * before[h]
            # An adversary who hopes that the noise is exact: an error of a rounding only.
            angle[h] += angle_score(noise, np.abs(noise) * 2.0**-53, 2.0**50, 192)
            before[h] = noise
    return angle[1] > angle[0], sum(grid_score(out, g) for out in outputs) > -math.inf


@pytest.mark.parametrize(
    ("dtype", "lam", "bins"),
    [
        (torch.float32, 0.0, "fixed"),
        (torch.float32, 0.9, "fixed"),
        (torch.float32, 0.9, "fresh"),
        (torch.float64, 0.9, "fixed"),
        (torch.float64, 0.9, "fresh"),
        (torch.bfloat16, 0.9, "fixed"),
    ],
)
def test_sums(dtype: torch.dtype, lam: float, bins: str) -> None:
    """First steps, and steps after a restart (fresh bins restart at every epoch, here of one step)."""
    d, sigma, steps = 20_000, 4.0, 3
    p = plan(lam, sigma, epochs=steps, bins=bins)
    said: dict[bool, list[tuple[bool, bool]]] = {True: [], False: []}
    for trial in range(TRIALS):
        g = canary(d, trial)
        for present in (True, False):
            noiser = lc.Noiser(p, lc.SecretKey.generate(), max_grad_norm=1.0)
            outputs = []
            for _ in range(steps):
                kind = torch.float32 if dtype == torch.bfloat16 else dtype
                sums = {"w": torch.tensor(g * present, dtype=kind)}
                outputs.append(noiser.add(sums)["w"].to(dtype).double().numpy())
            said[present].append(verdicts(outputs, g, lam, sigma, 1 if bins == "fresh" else None))
    for attack in (0, 1):
        assert equal_rates([v[attack] for v in said[True]], [v[attack] for v in said[False]]), (said[True], said[False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_of_a_real_loop(dtype: torch.dtype) -> None:
    """A layer that starts at zero shows B/η times its change: the released sum itself, at the first step and later."""
    d, sigma = 4000, 1.0
    p = plan(0.9, sigma, epochs=2, steps=2, bins="fresh")  # restarts at step 3
    said: dict[bool, list[tuple[bool, bool]]] = {True: [], False: []}
    for trial in range(TRIALS // 2):
        g = canary(d, trial)
        for present in (True, False):
            model = torch.nn.Linear(d, 1, bias=False, dtype=dtype)
            torch.nn.init.zeros_(model.weight)
            # All examples are zero but one, whose gradient at any weights is longer than ζ and so clipped to it.
            x = torch.zeros(16, d, dtype=dtype)
            x[0] = torch.tensor(1e3 * g * present, dtype=dtype)
            data = torch.utils.data.TensorDataset(x, torch.full((16, 1), -1e3, dtype=dtype))
            optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
            private = lc.privatize(model, optimizer, data, p, max_grad_norm=1.0)
            outputs, before = [], np.zeros(d)
            for a, b in private.loader:
                torch.nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
                optimizer.zero_grad()
                weights = model.weight.detach().double().numpy().ravel().copy()
                outputs.append(before - weights)
                before = weights
            private.detach()
            said[present].append(verdicts(outputs, g, 0.9, sigma, 2))
    for attack in (0, 1):
        assert equal_rates([v[attack] for v in said[True]], [v[attack] for v in said[False]]), (said[True], said[False])


def format_1(d: int, rng: np.random.Generator) -> Array:
    """Format 1's pairs: a radius of 48 bits and one of 2³² angles, elements i and i + 256."""
    a, b = rng.integers(0, 1 << 32, (2, d // 512, 256))
    radius = np.sqrt(-2 * np.log((a * 2.0**16 + b % 2**16 + 0.5) * 2.0**-48))
    turn = 2 * np.pi * (b + 0.5) * 2.0**-32
    return np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=1).ravel()


def test_the_attacks_win_against_format_1() -> None:
    """So a leak of that kind would be seen: both are right in all of their trials, and equal_rates says so."""
    rng, d, sigma = np.random.default_rng(0), 512 * 40, 4.0
    angle: dict[bool, list[bool]] = {True: [], False: []}
    grid: dict[bool, list[bool]] = {True: [], False: []}
    for trial in range(20):
        g = canary(d, trial)
        for present in (True, False):
            out = g * present + sigma * format_1(d, rng)  # float64
            scores = [angle_score((out - h * g) / sigma, np.abs(out) * 2.0**-52, 2.0**32, 256) for h in (0, 1)]
            angle[present].append(scores[1] > scores[0])
            narrow = (g * present).astype(np.float32) + (sigma * format_1(d, rng)).astype(np.float32)
            grid[present].append(grid_score(narrow.astype(np.float64), g) > -math.inf)
    for said in (angle, grid):
        assert all(said[True])
        assert not any(said[False])
        assert not equal_rates(said[True], said[False])
