"""The envelope: a proposal under which every importance weight is provably small.

δ_remove = E_Q (W − K)₊ with W = (1/b) Σ_j e^{X_j} and K = e^ε, and δ_add = E_Q (1 − KW)₊. Both functions are convex
in W, so Jensen's inequality bounds them by the average over the bins of the same function of e^{X_j} alone:

    (W − K)₊ ≤ (1/b) Σ_j (e^{X_j} − K)₊,   with Q-mean Δ = (1/b) Σ_j δ_Gauss(ε, σ/√G_jj).

The right-hand side, divided by Δ, is a density with respect to Q: the *envelope* S. Sampled from S, the weight
(W − K)₊ / (dS/dQ) lies in [0, Δ], and Δ is no more than δ *without* amplification: a few hundred to a few thousand
times δ, where a sample from P itself only gives [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri_exp

from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.monte_carlo.gram import Gram

Array = NDArray[np.float64]
OneWay = Literal["remove", "add"]


def excess(likelihood_ratio: Array, epsilon: float, direction: OneWay) -> Array:
    """(W − K)₊ or (1 − KW)₊."""
    strike = math.exp(epsilon)
    if direction == "remove":
        return np.maximum(likelihood_ratio - strike, 0.0)
    return np.maximum(1.0 - strike * likelihood_ratio, 0.0)


@dataclass(frozen=True)
class Envelope:
    """The envelope of one direction at one (ε, σ). ``bound`` is Δ."""

    gram: Gram
    epsilon: float
    sigma: float
    direction: OneWay
    bound: float
    chances: Array  # of each bin: δ_Gauss of that bin over the sum

    @classmethod
    def of(cls, gram: Gram, epsilon: float, sigma: float, direction: OneWay) -> Envelope:
        norms, inverse = np.unique(np.sqrt(gram.diagonal), return_inverse=True)
        deltas = np.array([gaussian_delta(epsilon, sigma / norm) for norm in norms])[inverse]
        mean = float(deltas.mean())
        chances = deltas / deltas.sum() if mean > 0 else np.full(len(deltas), 1.0 / len(deltas))
        return cls(gram, epsilon, sigma, direction, mean, chances)

    def density(self, ratios: Array) -> Array:
        """dS/dQ from e^{X_j} (one sample a row)."""
        strike = math.exp(self.epsilon)
        above = ratios - strike if self.direction == "remove" else 1.0 - strike * ratios
        np.maximum(above, 0.0, out=above)
        return above.mean(axis=1) / self.bound

    def shift(self, rng: np.random.Generator, samples: Array) -> None:
        """Turn draws of N(0, G/σ²) into draws of S, in place: one bin gets its envelope law, the rest follow it."""
        count = len(samples)
        bins = rng.choice(len(self.chances), size=count, p=self.chances)
        rows = self.gram.rows(bins, 1) / self.sigma**2
        variances = self.gram.diagonal[bins] / self.sigma**2
        strike = 0.5 * variances  # X_j = t − g/2 equals ±ε at t = g/2 ± ε
        if self.direction == "remove":
            target = strike + self.epsilon + overshoot(rng, self.epsilon, variances)
        else:
            target = strike - self.epsilon - overshoot(rng, self.epsilon, variances)
        samples += ((target - samples[np.arange(count), bins]) / variances)[:, None] * rows


def overshoot(rng: np.random.Generator, epsilon: float, variances: Array) -> Array:
    """Draws of density ∝ (1 − e^{−y}) exp(−κy − y²/2g) on y > 0, κ = (ε − g/2)/g: how far one bin passes the strike.

    This is (e^{t−g/2} − K)₊ φ(t; g) in terms of y = t − g/2 − ε, and (1 − Ke^{t−g/2})₊ φ(t; g) in terms of
    y = g/2 − ε − t. Rejection sampling, exact; which proposal is cheap depends on κ√g.
    """
    found = np.empty(len(variances))
    left = np.arange(len(variances))
    while len(left):
        g = variances[left]
        slope = (epsilon - 0.5 * g) / g
        edge = slope * np.sqrt(g)
        y = np.empty(len(left))
        log_chance = np.empty(len(left))
        steep, below = edge >= 1.0, edge < 0.0
        gentle = ~steep & ~below
        y[steep] = rng.standard_gamma(2.0, int(steep.sum())) / slope[steep]
        log_chance[steep] = -0.5 * y[steep] ** 2 / g[steep]
        y[gentle] = np.sqrt(2.0 * g[gentle] * rng.standard_exponential(int(gentle.sum())))
        log_chance[gentle] = -slope[gentle] * y[gentle]
        log_tail = log_ndtr(-edge[below]) - rng.standard_exponential(int(below.sum()))
        y[below] = np.sqrt(g[below]) * (-ndtri_exp(log_tail) - edge[below])
        np.maximum(y, 1e-300, out=y)
        log_chance[below] = np.log(y[below])
        accepted = -rng.standard_exponential(len(left)) < log_chance + np.log(-np.expm1(-y) / y)
        found[left[accepted]] = y[accepted]
        left = left[~accepted]
    return found
