"""What floating point costs: how far the released numbers can be from those of the ideal Gaussian mechanism.

The accountants speak of real numbers. A run computes its noise from finitely many random bits, in float64, and releases
sum plus noise on a lattice. `docs/noise-proof.md` proves the bound that this module evaluates: the law of everything a
run releases is within (ε₁, δ₁) of the ideal one, in both directions and for whatever data. So an (ε, δ)-DP mechanism
becomes (ε + 2ε₁, e^ε₁ δ + (1 + e^(ε + ε₁))δ₁)-DP. A plan sets a small share of its ε and δ aside for this, and a run
takes the finest lattice whose cost the share covers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from lambdacgd.accounting.certificate import set_aside
from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms import Mechanism
from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy, Recurrence

PAIRS = 6  #: of normals that one ChaCha20 block makes (``noise.layout``; no torch here)
FINEST, COARSEST = 10, 5  #: Δ is at least 2⁻¹⁰ of the noise's standard deviation, and at most 2⁻⁴ of it

_LONGEST = 11.78  # a radius beyond it has u < 2⁻¹⁰⁰ and is not covered: its probability is part of δ₁
_WIDEST = 0.25  # lemma 1 covers cells up to this width, in units of z
_SMALL = 0.09  # lemmas 5 and 7 cover log-likelihood ratios up to this size
_TINY = 2.0**-12  # lemmas 6 and 7 cover products of the errors of two pairs up to this size
_SEEN = 16.66  # the later noise of a pair, |N₁| + |N₂|, is covered up to √2·11.78: a radius beyond it is as improbable


@dataclass(frozen=True)
class FloatingPointCost:
    """The released numbers are (ε₁, δ₁)-close to those of the ideal mechanism, both ways, on a lattice this fine."""

    epsilon: float
    delta: float
    fineness: int


def cover(
    mechanism: Mechanism, *, steps: int, restart_every: int | None, parameters: int, epsilon: float, delta: float
) -> FloatingPointCost:
    """The finest lattice whose cost fits into what a plan for (ε, δ) has set aside.

    Args:
        mechanism: What correlates the noise.
        steps: n, the run's steps.
        restart_every: After how many steps the noise forgets its past, if it does.
        parameters: d, the trainable numbers of the model.
        epsilon: What the plan claims; finite.
        delta: What the plan claims.

    Returns:
        The cost, with the lattice's fineness.

    Raises:
        InvalidInput: The run is so long and the model so large that even the coarsest lattice costs more.
    """
    share = set_aside(epsilon, delta)
    # δ₁ counts e^ε times; so that what replacing an example costs is covered too, up to e^{3ε} or e²⁰ times.
    often = 1 + math.exp(min(max(epsilon, min(3 * epsilon, 20.0)), 600.0))
    small = share["delta"] / 4 / often
    for fineness in range(FINEST, COARSEST - 1, -1):
        cost = floating_point_cost(
            mechanism, steps=steps, restart_every=restart_every, parameters=parameters, fineness=fineness, delta=small
        )
        if 2 * cost.epsilon > share["epsilon"]:
            continue
        if math.expm1(cost.epsilon) * delta + math.exp(cost.epsilon) * often * cost.delta <= share["delta"]:
            return cost
    if 2 * cost.epsilon <= share["epsilon"]:
        why = "what the generator's tail adds to δ counts e^ε times. Plan for an ε of at most 30, or for a larger δ."
    else:
        why = f"at best it adds {2 * cost.epsilon:.1e} to ε. Train fewer parameters or steps, or plan for a larger ε."
    run = f"{steps} steps of a model with {parameters} parameters"
    raise InvalidInput("plan", f"Floating-point noise cannot keep ε = {epsilon:g}, δ = {delta:g} over {run}: {why}")


def floating_point_cost(
    mechanism: Mechanism, *, steps: int, restart_every: int | None, parameters: int, fineness: int, delta: float
) -> FloatingPointCost:
    """ε₁ for a run, and a δ₁ of about ``delta``: the theorem of `docs/noise-proof.md`.

    Args:
        mechanism, steps, restart_every, parameters: As for ``cover``.
        fineness: Δ_t is the least power of two above 2^−fineness·ζσd_t.
        delta: The probability with which ε₁ may be exceeded.

    Returns:
        The cost.
    """
    period = min(restart_every or steps, steps)
    return _cost(mechanism.recurrence(period), steps, period, parameters, fineness, delta)


@functools.lru_cache(maxsize=64)  # a run asks for its lattice, and its card and every checkpoint again
def _cost(
    recurrence: Recurrence, steps: int, period: int, parameters: int, fineness: int, delta: float
) -> FloatingPointCost:
    blocks = -(-steps // period)
    column = np.abs(recurrence.strategy(period))
    diagonal, later = float(column[0]), float(np.sqrt(np.sum(column[1:] ** 2)) / column[0])  # c₀ and β
    # A cell of the lattice in units of z: at least `narrow`, at most `wide`.
    narrow, wide = (2.0 ** (k - fineness) * (1 + s * 2.0**-12) * diagonal for k, s in ((0, -1), (1, 1)))
    computed = _arithmetic(recurrence, period) * diagonal  # for noise of unit size
    noising = np.abs(recurrence.noising(period))
    past = float(noising[1:].sum()) * diagonal  # with which weight earlier normals come again
    too_much = FloatingPointCost(math.inf, 1.0, fineness)
    if wide > _WIDEST or noising.sum() > 2.0**25:  # lemma 1, and noise that fits between the lattice's ends
        return too_much

    # |ℓ| of a pair whose cells are seen is at most κ = 4·tilt·(displacement)/narrow (lemma 1).
    probability, displacement, radius = _displacements(wide, 2.0**-53, 2.0**-51)
    factor = 4 * (1 + wide * (_LONGEST + 1) / 2 + 2.0**-20) / narrow
    log = math.log(30 * steps / delta)
    # Earlier normals may have been computed by another device, so each time with other errors.
    largest = computed * _LONGEST + past * (2.0**-49 * _LONGEST + 2.0**-43)

    def kappa(numbers: int, share: float | np.ndarray = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Typical size, for noise of the size that so many numbers have together, and largest size."""
        usual = math.sqrt(1 + 2 * math.sqrt(log / numbers) + 2 * log / numbers) + wide
        inverse = math.sqrt(min(5.5 + math.sqrt(2.0**16 * log / numbers) + 2.0**15 * log / (3 * numbers), 2.0**14))
        again = past * (2.0**-49 * 1.42 * usual + 2.0**-50 * inverse)
        sizes = (displacement + computed * np.maximum(usual, radius) + again, displacement + largest)
        usual_size, largest_size = (factor * size[:, None] * share for size in sizes)
        return usual_size.ravel(), largest_size.ravel()

    epsilon = _composed(steps * parameters / 2, probability, *kappa(steps * parameters), delta / 5)

    # What it costs that the pairs of a ChaCha20 block share bits: |x| of a pair, given those bits (lemma 6).
    farthest = _displacements(wide, 2.0**-42, 2.0**-38)[1] + largest
    if farthest.max() > narrow**2 / 8:  # lemma 1 needs this much room
        return too_much
    coarse = factor * farthest
    given = np.expm1(coarse + factor * (displacement + largest))
    shared, size = _products(probability, given)
    size *= math.comb(PAIRS, 2) * math.exp((PAIRS + 1) * given.max() + 2.0**-10)
    if size.max() > _TINY:
        return too_much
    epsilon += _composed(steps * parameters / PAIRS, shared, size, size, delta / 5)

    # What later steps show of a number inside its cell, one position in a block after the other (lemma 5).
    if later > 0:
        ends = np.append(np.linspace(0.0, 8.0, 41), np.linspace(8.0, _SEEN, 6)[1:])
        beyond = np.array([math.erfc(x / 2) * (2 - math.erfc(x / 2)) for x in ends])
        share = beyond[:-1] - beyond[1:]  # of |N₁| + |N₂|, two standard normals
        o = later * wide * (ends[1:] + 4 * later * wide)
        relative = np.minimum(4 * o * np.exp(np.minimum(2 * o, 300.0)), 2 + o / 2)
        numbers = blocks * parameters
        joint = (probability[:, None] * share).ravel()
        epsilon += period * _composed(numbers / 2, joint, *kappa(numbers, relative), delta / 5 / period)
        # The same for the bits that a block shares (lemma 7).
        if coarse.max() * relative.max() > _SMALL:
            return too_much
        more = (1 + 1.2 * relative) ** 2 - 1 + math.expm1(PAIRS * given.max()) * ((1 + 1.2 * relative) ** PAIRS - 1)
        joint, sizes = (shared[:, None] * share).ravel(), (size[:, None] * more).ravel()
        if sizes.max() > _TINY:
            return too_much
        epsilon += period * _composed(numbers / PAIRS, joint, sizes, sizes, delta / 5 / period)
    outside = 2 * steps * parameters * 2.0**-100  # one event of u and one of N₁, N₂ for each pair that is used
    return FloatingPointCost(epsilon, math.exp(min(epsilon, 700.0)) * (delta + outside), fineness)


def _displacements(wide: float, unit: float, turn: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The law of a pair's displacement, rounded up: probabilities of shells of the plane, and in each the largest
    displacement and the largest radius.

    A pair of normals is that far, at most, from the one that the exact transform of an ideal uniform gives, if the
    uniforms u and v are within ``unit`` and ``turn`` of ideal ones (lemma 2). A cell may reach out of its shell by
    three times its width.
    """
    low, high = math.sqrt(-2 * math.log1p(-(2.0**-15))), math.sqrt(30 * math.log(2))  # beyond them u has 160 bits

    def farthest(r: np.ndarray) -> np.ndarray:
        inner = unit * (1 + 2.0**-10) * np.exp(r * r / 2) / r + 2.0**-50 / r
        return inner + r * (2 * math.pi * turn + 2.0**-49)

    ends = np.concatenate([[0.0], np.geomspace(low, 1.0, 24), np.linspace(1.0, high, 97)[1:], [_LONGEST]])
    reach = np.stack([ends[:-1] - 3 * wide, ends[1:] + 3 * wide])
    coarse = farthest(np.clip(reach, low, high)).max(axis=0)  # convex: the largest is at an end
    fine = 2.0**-51 + _LONGEST * (2 * math.pi * turn + 2.0**-49)  # where u has 160 bits
    largest = np.where((reach[1] < low) | (reach[0] > high), fine, np.maximum(coarse, fine * (reach[1] > high)))
    return np.exp(-(ends[:-1] ** 2) / 2) - np.exp(-(ends[1:] ** 2) / 2), largest, reach[1]


def _products(probability: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The law of a product of two independent numbers with these values, each rounded up to a power of 2^(1/16)."""
    place = np.ceil(16 * np.log2(values)).astype(int)
    law = np.bincount(place - place.min(), weights=probability)
    law = np.convolve(law, law)
    kept = np.flatnonzero(law)
    return law[kept], 2.0 ** ((2 * place.min() + kept) / 16)


def _composed(count: float, probability: np.ndarray, usual: np.ndarray, most: np.ndarray, delta: float) -> float:
    """ε with P(Σℓ > ε) ≤ δ for ``count`` log-likelihood ratios (lemma 4).

    Each is at most ``most`` in size with these probabilities; their squares add up to no more than those of ``usual``.
    """
    if most.max() > _SMALL:
        return math.inf
    log = math.log(1 / delta)
    order = np.geomspace(2.0, 2.0**50, 100)[:, None]
    with np.errstate(over="ignore"):
        squares = count * (probability * usual**2 * np.exp(order * most)).sum(axis=1, keepdims=True)
        return float(((log + order**2 * squares / 2) / (order - 1)).min())


def _arithmetic(recurrence: Recurrence, period: int) -> float:
    """How far the computed x_t = (C⁻¹z)_t can be from the exact one, by float64 arithmetic, if |z| ≤ 1 (lemma 3)."""
    noising = recurrence.noising(period)
    total = float(np.abs(noising).sum())
    unit = 2.0**-53
    if isinstance(recurrence, BandedInverse):
        return unit * (len(recurrence.coefficients) + 3) * total
    if isinstance(recurrence, BandedStrategy):
        coefficients = np.abs(recurrence.coefficients)
        local = unit * (len(coefficients) + 3) * (1 + float(coefficients.sum()) * total)
        return total * local + 2 * unit * total
    error, held = 0.0, 1.0
    for decay, weight in zip(recurrence.decays, recurrence.weights, strict=True):
        # The buffer is a filter of z; a rounding of the buffer reaches x through the same filter.
        size = float(np.abs(lfilter([1.0], [1.0, -decay], noising)).sum())
        error += abs(weight) * size * 2 * unit * (size + total)
        held += abs(weight) * size
    return error + total * unit * (len(recurrence.decays) + 3) * held + 2 * unit * total
