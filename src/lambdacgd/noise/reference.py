"""The noise field in a few lines of NumPy: slow, in float64, and what every backend is tested against."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lambdacgd.keys import scattered_blocks
from lambdacgd.mechanisms.base import Recurrence
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, MORE, PAIRS, RARE, Entry

Array = NDArray[np.float64]
Words = NDArray[np.uint32]


def shared_bits(words: Words) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lowest 20 bits of the seven radii's uniforms and the lowest 18 of the angles', from words 14 and 15.

    The upper twelve of these bits are pairwise independent: those of pairs i ≠ j are jointly uniform. They are one
    random polynomial over GF(2) plus xⁱ times another in GF(8)⁴, x³ = x + 1 (nothing, for pair 0).
    """
    low = []
    for word, bits in ((words[:, 14], 20), (words[:, 15], 18)):
        nibbles = [(word.astype(np.int64) >> at) & 15 for at in (20, 24, 28)]
        while len(nibbles) < PAIRS + 1:
            nibbles.append(nibbles[-3] ^ nibbles[-2])
        windows = [nibbles[p - 1] | nibbles[p] << 4 | nibbles[p + 1] << 8 for p in range(1, PAIRS)]
        turned = np.stack([np.zeros_like(windows[0]), *windows], axis=1)
        low.append((word[:, None].astype(np.int64) & ((1 << bits) - 1)) ^ turned << (bits - 12))
    return low[0], low[1]


def uniforms(words: Words) -> tuple[Array, Array]:
    """Of each row of 16 words and each of its seven pairs: u, with 52 bits, and the turn v, with 50."""
    low, turn_low = shared_bits(words)
    m = words[:, :PAIRS].astype(np.int64) << 20 | low
    k = words[:, PAIRS : 2 * PAIRS].astype(np.int64) << 18 | turn_low
    return np.multiply(2 * m + 1, 2.0**-53), np.multiply(2 * k + 1, 2.0**-51)


def radii(words: Words, more: NDArray[np.uint32]) -> Array:
    """√(−2 ln u). Within 2⁻¹⁵ of 0 or 1 the distance of u is the pair's own word and the four words of ``more``."""
    own = words[:, :PAIRS].astype(np.float64)
    low, high = own < RARE, own >= 2.0**32 - RARE
    further = np.full(own.shape, 0.5)
    for j in (3, 2, 1, 0):
        further = (more[:, :, j] + further) * 2.0**-32
    near = (np.where(low, own, 2.0**32 - 1 - own) + further) * 2.0**-32
    u, _ = uniforms(words)
    with np.errstate(invalid="ignore", divide="ignore"):
        logarithm = np.where(low, np.log(near), np.where(high, np.log1p(-near), np.log(u)))
    return np.sqrt(-2.0 * logarithm)


def gaussian_pairs(words: Words, more: NDArray[np.uint32]) -> tuple[Array, Array]:
    """Seven pairs of standard normals from each row of 16 words (Box–Muller)."""
    radius, (_, v) = radii(words, more), uniforms(words)
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
    more = np.zeros((block.size, PAIRS, 4), dtype=np.uint32)
    rare = (words[:, :PAIRS] + np.uint32(RARE)) < 2 * RARE
    for p in range(PAIRS):
        tail = tails[:, rare[:, p]].copy()
        tail[1] |= MORE | p << 28
        more[rare[:, p], p] = scattered_blocks(subkey, tail.T.astype(np.uint32))[:, :4]
    x, y = gaussian_pairs(words, more)
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
