"""Attacks on floating point: what the last bits of released numbers tell, which no accountant of real numbers sees.

All of them know two candidates for a sum, g and 0, and ask which of them, taken off the release, leaves something that
the noise generator can have made. They need neither the key nor little noise. What stands in their way is the lattice
on which sum plus noise is released (`docs/noise-proof.md`). Without it they win.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, PAIRS

Array = NDArray[np.float64]


def granularity(released: Array, g: Array, *, mantissa: int = 23) -> float:
    """How many bits of the release say that the sum was g and not 0; −∞ if one of them says that it cannot have been g.

    If sum and noise are added in a type with so many mantissa bits, the result is a multiple of the finer of their two
    units in the last place. That unit can be coarser than the result's own. Noise alone need not be such a multiple.
    """

    def unit(values: Array) -> Array:
        return np.exp2(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-120))) - mantissa)

    rest = released - g
    coarse = np.minimum(unit(g), np.minimum(unit(rest * (1 + 2.0**-22)), unit(rest * (1 - 2.0**-22))))
    gain = np.log2(coarse / unit(released))
    informative = (gain > 0) & (released != 0)
    if (np.mod(released[informative] / coarse[informative], 1) != 0).any():
        return -math.inf
    return float(gain[informative].sum())


def angles(noise: Array, *, bits: int = 50) -> float:
    """Evidence that pairs of normals lie on the 2⁵⁰ angles of the generator, and not anywhere: the v of Box–Muller."""
    x, y = _pairs(noise)
    return _near_whole(np.arctan2(y, x) / (2 * math.pi) * 2.0**bits - 0.5)


def shared_bits(noise: Array) -> float:
    """Evidence that the six pairs of a ChaCha20 block have the same lowest ten bits of u and twelve of v.

    u has 52 bits and v has 50, so the differences of two pairs are multiples of 2⁻⁴² and of 2⁻³⁸. (Six pairs in 10⁵
    have a u whose lowest bits are its own. They add a little chance.)
    """
    x, y = _pairs(noise)
    u, v = np.exp(-(x * x + y * y) / 2), np.arctan2(y, x) / (2 * math.pi)
    first, second = np.triu_indices(PAIRS, 1)
    return sum(_near_whole(place[:, first] - place[:, second]) for place in (u * 2.0**42, v * 2.0**38))


def _pairs(noise: Array) -> tuple[Array, Array]:
    """The pairs of all whole groups: two arrays of (groups, pairs of a block, blocks of a group)."""
    whole = len(noise) // GROUP_ELEMENTS * GROUP_ELEMENTS
    x, y = np.moveaxis(noise[:whole].reshape(-1, 2, PAIRS, GROUP_BLOCKS), 1, 0)
    return x, y


def _near_whole(places: Array) -> float:
    """Log-likelihood ratio that half of the numbers are whole, but for errors of 1/16, against uniform numbers."""
    distance = 16 * (places - np.round(places))
    return float(np.log(0.5 + np.exp(-0.5 * distance**2) * (8 / math.sqrt(2 * math.pi))).sum())
