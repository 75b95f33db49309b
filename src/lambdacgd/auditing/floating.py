"""What the last bits of released numbers tell: two attacks on floating point, which no accountant of real numbers sees.

Both know two candidates for a sum, g and 0, and ask which of them, taken off the release, leaves something that the
noise generator can have made. They need neither the key nor little noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy import stats

from lambdacgd.auditing.bounds import Array, bound_of_counts
from lambdacgd.planning import Plan
from lambdacgd.training.card import NOT_COVERED
from lambdacgd.training.noiser import Noiser

ELEMENTS = 1 << 17
HALF = 50  # trials with g, and as many with 0
PAIR = 256  # Box–Muller made elements i and i + PAIR of one angle of 32 bits


def floating_point(plan: Plan, rng: np.random.Generator) -> dict[str, Any]:
    """Guess from first releases whether a gradient g of norm ζ = 1 was in the sum, by the grids that floats lie on.

    Returns:
        For each attack its true and false positive rates, a lower bound on ε at 95%, and the p-value of Fisher's exact
        test that its guesses have nothing to do with the truth; and whether the claim covers floating point at all.
    """
    truth = rng.permutation(np.arange(2 * HALF) % 2 == 0)
    guesses: dict[str, list[bool]] = {"granularity": [], "angles": []}
    for present in truth:
        g = rng.standard_normal(ELEMENTS)
        g = (g / np.linalg.norm(g)).astype(np.float32)
        total = torch.from_numpy(g.copy() if present else np.zeros_like(g))
        released = Noiser(plan, max_grad_norm=1.0).add({"sum": total})["sum"].numpy().astype(np.float64)
        guesses["granularity"].append(_granularity(released, g.astype(np.float64)) > 0)
        guesses["angles"].append(_angles(released, g.astype(np.float64), plan.sigma) > 0)
    attacks = {}
    for name, guess in guesses.items():
        right, wrong = int((np.array(guess) & truth).sum()), int((np.array(guess) & ~truth).sum())
        attacks[name] = {
            "tpr": right / HALF,
            "fpr": wrong / HALF,
            "epsilon_at_least": bound_of_counts(right, HALF, wrong, HALF, delta=plan.delta, error=0.05),
            "p_value": float(stats.fisher_exact([[right, wrong], [HALF - right, HALF - wrong]]).pvalue),
        }
    covered = not any("floating point" in sentence for sentence in NOT_COVERED)
    return {"covered": covered, "trials": 2 * HALF, "elements": ELEMENTS, "attacks": attacks}


def _granularity(released: Array, g: Array) -> float:
    """float32(g + noise) is a multiple of the finer of two units in the last place; float32(0 + noise) need not be."""
    rest = released - g
    unit = np.minimum.reduce([_unit(g), _unit(rest), _unit(rest * (1 + 2**-22)), _unit(rest * (1 - 2**-22))])
    gain = np.log2(unit / _unit(released))
    informative = (gain > 0) & (released != 0)
    if (np.mod(released[informative] / unit[informative], 1) != 0).any():
        return -math.inf
    return float(gain[informative].sum())


def _unit(values: Array) -> Array:
    return np.spacing(np.maximum(np.abs(values), 2.0**-120).astype(np.float32)).astype(np.float64)


def _angles(released: Array, g: Array, sigma: float) -> float:
    """A pair of Gaussians by Box and Muller lies on one of 2³² angles: which candidate leaves such pairs?"""
    error = (np.abs(released) + np.abs(released - g)) * 2.0**-24 * 0.6 / sigma
    return _on_angles((released - g) / sigma, error) - _on_angles(released / sigma, error)


def _on_angles(noise: Array, error: Array) -> float:
    (x, y), (dx, dy) = (np.moveaxis(values.reshape(-1, 2, PAIR), 1, 0) for values in (noise, error))
    turns = np.arctan2(y, x) / (2 * math.pi) * 2.0**32 - 0.5
    distance = turns - np.round(turns)
    spread = np.sqrt((y * dx) ** 2 + (x * dy) ** 2) / (x * x + y * y) / (2 * math.pi) * 2.0**32
    sharp = spread < 0.3
    distance, spread = distance[sharp], np.maximum(spread[sharp], 1e-3)
    density = sum(np.exp(-0.5 * ((distance + k) / spread) ** 2) for k in (-1, 0, 1)) / (spread * math.sqrt(2 * math.pi))
    return float(np.log(0.001 + 0.999 * density).sum())
