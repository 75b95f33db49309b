"""The noise field in a few lines of NumPy: slow, in float64, and what every backend is tested against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lambdacgd.keys import scattered_blocks
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, MORE, PAIRS, RARE, Entry

Array = NDArray[np.float64]
Words = NDArray[np.uint32]


def uniforms(words: Words) -> tuple[Array, Array]:
    """Of each row of 16 words and each of its six pairs: u, with 52 bits, and the turn v, with 50.

    80 of these bits are the pair's own: words p and 6 + p and half of word 12 + p mod 3. The lowest 10 bits of u and 12
    of v are the last word's, so all six pairs have the same.
    """
    w = words.astype(np.int64)
    half = np.concatenate([w[:, 12:15] & 0xFFFF, w[:, 12:15] >> 16], axis=1)
    m = (w[:, :PAIRS] ^ 1 << 31) << 20 | (half & 0x3FF) << 10 | w[:, 15:] & 0x3FF
    k = w[:, PAIRS : 2 * PAIRS] << 18 | half >> 10 << 12 | w[:, 15:] >> 10 & 0xFFF
    return np.multiply(2 * m + 1, 2.0**-53), np.multiply(2 * k + 1, 2.0**-51)


def radii(words: Words, more: NDArray[np.uint32]) -> Array:
    """√(−2 ln u). Within 2⁻¹⁵ of 0 or 1 the distance of u is the pair's own word and the four words of ``more``."""
    own = (words[:, :PAIRS] ^ np.uint32(1 << 31)).astype(np.float64)
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
    """Six pairs of standard normals from each row of 16 words (Box–Muller)."""
    radius, (_, v) = radii(words, more), uniforms(words)
    return radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)


def normals(subkey: bytes, entry: Entry, step: int, index: NDArray[np.integer]) -> Array:
    """z[step, index] for row-major indices into one tensor."""
    group, within = np.divmod(np.asarray(index, dtype=np.int64), GROUP_ELEMENTS)
    number, lane = np.divmod(within, GROUP_BLOCKS)
    block, row = np.unique(entry.first_block + group * GROUP_BLOCKS + lane, return_inverse=True)
    tails = np.stack(
        [block & 0xFFFFFFFF, block >> 32, np.full_like(block, step & 0xFFFFFFFF), np.full_like(block, step >> 32)]
    )
    words = scattered_blocks(subkey, tails.T)
    more = np.zeros((block.size, PAIRS, 4), dtype=np.uint32)
    rare = words[:, :PAIRS] + np.uint32((1 << 31) + RARE) < 2 * RARE
    for p in range(PAIRS):
        tail = tails[:, rare[:, p]].copy()
        tail[1] |= MORE | p << 28
        more[rare[:, p], p] = scattered_blocks(subkey, tail.T)[:, :4]
    x, y = gaussian_pairs(words, more)
    return np.where(number < PAIRS, x[row, number % PAIRS], y[row, number % PAIRS])
