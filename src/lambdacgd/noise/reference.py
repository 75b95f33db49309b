"""The noise field in a few lines of NumPy: slow, in float64, and what every backend is tested against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lambdacgd.keys import scattered_blocks
from lambdacgd.mechanisms.base import Recurrence
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, Entry

Array = NDArray[np.float64]


def gaussian_pairs(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> tuple[Array, Array]:
    """Two standard normals from two words (Box–Muller): a radius of 48 bits, an angle of 32, of which 16 are shared."""
    u = (a.astype(np.float64) * 2**16 + (b & np.uint32(0xFFFF)) + 0.5) * 2.0**-48
    v = (b.astype(np.float64) + 0.5) * 2.0**-32
    radius = np.sqrt(-2.0 * np.log(u))
    return radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)


def normals(subkey: bytes, entry: Entry, step: int, index: NDArray[np.integer]) -> Array:
    """z[step, index] for row-major indices into one tensor."""
    group, within = np.divmod(np.asarray(index, dtype=np.int64), GROUP_ELEMENTS)
    word, lane = np.divmod(within, GROUP_BLOCKS)
    block = entry.first_block + group * GROUP_BLOCKS + lane
    tails = np.stack(
        [block & 0xFFFFFFFF, block >> 32, np.full_like(block, step & 0xFFFFFFFF), np.full_like(block, step >> 32)]
    )
    words = scattered_blocks(subkey, tails.T.astype(np.uint32))
    row, pair = np.arange(block.size), word % 8
    x, y = gaussian_pairs(words[row, pair], words[row, pair + 8])
    return np.where(word < 8, x, y)


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
