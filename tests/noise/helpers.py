"""Shared by the noise tests: fields with fixed keys, tensors, and the reference's answer."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import special, stats

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import Recurrence
from lambdacgd.noise import Layout, NoiseField
from lambdacgd.noise.field import UNIT
from lambdacgd.noise.layout import Entry, Offsets, Tensors, match
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


def fill(f: NoiseField, values: Tensors, step: int, *, offsets: Offsets = None) -> None:
    """Overwrite the tensors with z[step] alone."""
    f.apply(match(f.layout, values, offsets=offsets), UNIT, step, read=False)


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


def law_of_normals(device: str, count: int, rounds: int) -> None:
    """``rounds`` steps of ``count`` values.

    Every assertion alarms falsely with probability 1e-6 at most (4.9 sd two-sided, or a tail probability).
    """
    shapes = {"w": (count,)}
    f = NoiseField(KEY, Layout.of(shapes), run_id="billion")
    z = {"w": torch.empty(count, device=device)}
    moments = torch.zeros(6, dtype=torch.float64, device=device)
    edges = torch.linspace(-6.0, 6.0, 1201, dtype=torch.float64, device=device)
    histogram = torch.zeros(1202, dtype=torch.int64, device=device)
    tails = dict.fromkeys((4.0, 5.0, 6.0), 0)
    lags = (1, 2, 12, 32, 192, 384, 2048)
    products = dict.fromkeys(lags, 0.0)
    across, before = 0.0, None
    for step in range(1, rounds + 1):
        fill(f, z, step)
        for part in z["w"].split(1 << 24):
            wide = part.double()
            moments += torch.stack([(wide**p).sum() for p in (1, 2, 3, 4, 5, 6)])
            histogram += torch.bincount(torch.bucketize(wide, edges), minlength=1202)
            for bound in tails:
                tails[bound] += int((wide.abs() > bound).sum())
            for lag in lags:
                products[lag] += float((wide[:-lag] * wide[lag:]).sum())
        if before is not None:
            across += float((before.double() * z["w"].double()).sum())
        before = z["w"].clone()
    n = count * rounds
    means = (moments / n).tolist()
    for power, (mean, variance) in enumerate(((0, 1), (1, 2), (0, 15), (3, 96), (0, 945), (15, 10395 - 225)), start=1):
        assert abs(means[power - 1] - mean) < 4.9 * math.sqrt(variance / n), power
    distribution = special.ndtr(edges.cpu().numpy())
    seen = (histogram.cumsum(0)[:-1].double() / n).cpu().numpy()
    # Kolmogorov–Smirnov on a grid is below the full statistic, so its bound at 1e-6 stays a bound.
    assert np.abs(seen - distribution).max() < stats.kstwobign.isf(1e-6) / math.sqrt(n)
    for bound, got in tails.items():
        low, high = stats.poisson.ppf([5e-7, 1 - 5e-7], 2 * special.ndtr(-bound) * n)
        assert low <= got <= high, bound
    for lag, total in products.items():
        assert abs(total) < 5.3 * math.sqrt(n), lag
    assert abs(across) < 5.3 * math.sqrt(n)
