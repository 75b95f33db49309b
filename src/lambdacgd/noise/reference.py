"""The noise field in a few lines of NumPy: slow, in float64, and what every backend is tested against."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lambdacgd.keys import scattered_blocks
from lambdacgd.mechanisms.base import Recurrence
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, PAIRS, RARE, SECOND, Entry

Array = NDArray[np.float64]
Words = NDArray[np.uint32]


def uniforms(words: Words) -> tuple[Array, NDArray[np.int64], Array]:
    """Of each row of 16 words and each of its five pairs: u, the integer m with u = (m + ½)/2⁵², and the turn v."""
    r, a, x = (words[:, j * PAIRS : (j + 1) * PAIRS].astype(np.int64) for j in range(3))
    e = (words[:, 15:].astype(np.int64) >> (6 * np.arange(PAIRS))) & 63
    m = (x >> 12) << 32 | r
    k = e << 44 | (x & 0xFFF) << 32 | a
    return np.multiply(2 * m + 1, 2.0**-53), m, np.multiply(2 * k + 1, 2.0**-51)


def radii(words: Words, second: Words) -> Array:
    """√(−2 ln u). Within 2⁻¹⁵ of 0 or 1, where 52 bits are coarse, the second block adds 84 bits to u's distance."""
    u, m, _ = uniforms(words)
    _, more, _ = uniforms(second)
    further = (more + (second[:, PAIRS : 2 * PAIRS] + 0.5) * 2.0**-32) * 2.0**-52
    low, high = m < RARE << 32, m >= (1 << 52) - (RARE << 32)
    near = (np.where(low, m, (1 << 52) - 1 - m) + further) * 2.0**-52  # the distance of u from 0 or from 1
    with np.errstate(invalid="ignore", divide="ignore"):
        logarithm = np.where(low, np.log(near), np.where(high, np.log1p(-near), np.log(u)))
    return np.sqrt(-2.0 * logarithm)


def gaussian_pairs(words: Words, second: Words) -> tuple[Array, Array]:
    """Five pairs of standard normals from each row of 16 words (Box–Muller): a radius of 52 bits, an angle of 50."""
    radius, (_, _, v) = radii(words, second), uniforms(words)
    return radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)


def normals(subkey: bytes, entry: Entry, step: int, index: NDArray[np.integer]) -> Array:
    """z[step, index] for row-major indices into one tensor."""
    group, within = np.divmod(np.asarray(index, dtype=np.int64), GROUP_ELEMENTS)
    number, lane = np.divmod(within, GROUP_BLOCKS)
    block = entry.first_block + group * GROUP_BLOCKS + lane
    tails = np.stack(
        [block & 0xFFFFFFFF, block >> 32, np.full_like(block, step & 0xFFFFFFFF), np.full_like(block, step >> 32)]
    )
    words = scattered_blocks(subkey, tails.T.astype(np.uint32))
    tails[1] |= SECOND
    second = scattered_blocks(subkey, tails.T.astype(np.uint32))
    x, y = gaussian_pairs(words, second)
    row, pair = np.arange(block.size), number % PAIRS
    return np.where(number < PAIRS, x[row, pair], y[row, pair])


def correlated(
    subkey: bytes, entry: Entry, recurrence: Recurrence, steps: int, *, restart_every: int | None = None
) -> Array:
    """Rows 1 … steps of C⁻¹Z (without column scales, σ and ζ) for one tensor, by the whole noising column."""
    index = np.arange(entry.elements)
    z = np.stack([normals(subkey, entry, t, index) for t in range(1, steps + 1)])
    period = restart_every or steps
    column = recurrence.noising(period)
    rows = []
    for t in range(steps):
        since = t - t % period
        past = range(since, t + 1)
        rows.append(sum(column[t - s] * z[s] for s in past if t - s < len(column)) + np.zeros(entry.elements))
    return np.stack(rows)


def released(sums: Array, noise: Array, scale: float, fineness: int) -> Array:
    """What leaves: sum plus noise on the lattice of the public power of two Δ, as ``Combination.quantum`` gives it."""
    quantum = math.ldexp(1.0, math.frexp(scale)[1] - fineness)
    return np.rint((sums + scale * noise) / quantum) * quantum
