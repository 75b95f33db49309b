"""Shared by the noise tests: fields with fixed keys, tensors, and the reference's answer."""

from __future__ import annotations

import numpy as np
import torch

from lambdacgd.keys import SecretKey
from lambdacgd.noise import Layout, NoiseField
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
