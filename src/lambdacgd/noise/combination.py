"""What is added at a step: ζσ·d_t·Σ_{j<p} a_j z[t−j], with z before the run or before a restart counting as zero."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Combination:
    """Public numbers only. ``coefficients`` are a_0 … a_{p−1}; ``scale`` is ζσ; ``column_scales`` d_1 … d_period.

    With ``restart_every`` = b the noise starts anew at steps 1, b+1, 2b+1, …: the correlation never crosses such a
    boundary, and column scales are indexed from it.
    """

    coefficients: tuple[float, ...]
    scale: float
    horizon: int
    column_scales: tuple[float, ...] | None = None
    restart_every: int | None = None

    @property
    def period(self) -> int:
        return self.restart_every or self.horizon

    def since(self, step: int) -> int:
        """Steps since the last restart, this one included: t for a run without restarts."""
        return (step - 1) % self.period + 1

    def bands(self, step: int) -> list[tuple[int, float]]:
        """The (field step, coefficient) pairs of a step."""
        return [(step - j, a) for j, a in enumerate(self.coefficients[: self.since(step)])]

    def scale_at(self, step: int) -> float:
        return self.scale * (1.0 if self.column_scales is None else self.column_scales[self.since(step) - 1])


@dataclass(frozen=True)
class Terms:
    """The fixed terms under which a run uses its field: everything that makes the noise of a step what it is."""

    recurrence: str
    sigma: float
    clip: float
    horizon: int
    restart_every: int | None
    column_scales: str | None

    def __str__(self) -> str:
        restarts = f", restarting every {self.restart_every}" if self.restart_every else ""
        return f"σ = {self.sigma:g}, ζ = {self.clip:g}, {self.horizon} steps{restarts}, {self.recurrence}"


def check_terms(
    *,
    sigma: float,
    clip: float,
    horizon: int,
    column_scales: Sequence[float] | np.ndarray | None,
    restart_every: int | None,
) -> tuple[float, tuple[float, ...] | None]:
    """Validate a stage's numbers; returns ζσ and the column scales."""
    for name, value in (("horizon", horizon), ("restart_every", restart_every)):
        if value is None and name == "restart_every":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 1 << 62:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"sigma is {sigma!r}; it must be finite and not negative (0 means no noise)")
    if not clip > 0 or (math.isinf(clip) and sigma != 0):
        raise ValueError(f"clip is {clip!r} with sigma {sigma!r}; it must be positive, and finite unless sigma is 0")
    scale = 0.0 if sigma == 0 else float(sigma) * float(clip)
    if column_scales is None:
        return scale, None
    scales = tuple(float(d) for d in column_scales)
    period = restart_every or horizon
    if len(scales) < min(period, horizon):
        raise ValueError(f"there are {len(scales)} column scales for {min(period, horizon)} steps; give one a step")
    if not all(math.isfinite(d) and d > 0 for d in scales):
        raise ValueError("column scales must be positive and finite")
    return scale, scales


def rounded_down(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Numbers in float32, rounded towards zero: entries of C, or what it is made of."""
    exact = np.asarray(values, dtype=np.float64)
    found = exact.astype(np.float32)
    grown = np.abs(found.astype(np.float64)) > np.abs(exact)
    return np.where(grown, np.nextafter(found, np.float32(0)), found)


def rounded_up(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Numbers in float32, never below what they were: scales of the noise, and the coefficients of C⁻¹.

    No entry of C ≥ 0 grows when a coefficient a_j of its inverse does (∂C/∂a_j = −C²xʲ). Rounded to the nearest,
    λ = 0.99999 would become a λ with up to 0.3% more sensitivity than the plan accounts for.
    """
    exact = np.asarray(values, dtype=np.float64)
    found = exact.astype(np.float32)
    return np.where(found.astype(np.float64) < exact, np.nextafter(found, np.float32(np.inf)), found)


def scales_digest(scales: tuple[float, ...] | None) -> str | None:
    return None if scales is None else hashlib.sha256(json.dumps(scales).encode()).hexdigest()[:16]
