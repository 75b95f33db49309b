"""Shared by the noise tests: fields with fixed keys, tensors, and the reference's answer."""

from __future__ import annotations

import math

import numpy as np
import torch

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import Recurrence
from lambdacgd.noise import Layout, NoiseField
from lambdacgd.noise.layout import Entry
from lambdacgd.noise.reference import normals

KEY = SecretKey.from_bytes(bytes(range(32)))
SUBKEY = KEY.derive("run", "test", "noise")
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (6, 5, 3, 3),
    "conv.bias": (6,),
    "linear.weight": (31, 70),
    "scale": (),
    "empty": (0, 4),
    "big": (41, 1000),
}


def field(shapes: dict[str, tuple[int, ...]] = SHAPES, run_id: str = "test") -> NoiseField:
    return NoiseField(KEY, Layout.of(shapes), run_id=run_id)


def tensors(
    shapes: dict[str, tuple[int, ...]] = SHAPES, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def expected(layout: Layout, name: str, bands: list[tuple[int, float]], subkey: bytes = SUBKEY) -> np.ndarray:
    """Σ a·z[step] for a whole tensor, by the reference."""
    entry = layout.by_name[name]
    index = np.arange(entry.elements)
    total = sum(a * normals(subkey, entry, step, index) for step, a in bands)
    return np.asarray(total, dtype=np.float64).reshape(entry.shape)


def correlated(
    subkey: bytes, entry: Entry, recurrence: Recurrence, steps: int, *, restart_every: int | None = None
) -> np.ndarray:
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


def released(sums: np.ndarray, noise: np.ndarray, scale: float, fineness: int) -> np.ndarray:
    """What leaves: sum plus noise on the lattice of Δ, the least power of two ≥ 2^−fineness·scale."""
    quantum = math.ldexp(1.0, math.frexp(scale)[1] - fineness)
    return np.rint((sums + scale * noise) / quantum) * quantum
