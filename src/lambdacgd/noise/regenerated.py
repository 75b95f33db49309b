"""Correlated noise with no memory: the past is computed again from the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch

from lambdacgd.mechanisms.base import BandedInverse, Mechanism
from lambdacgd.noise.combination import Combination, Terms, check_terms, scales_digest
from lambdacgd.noise.field import NoiseError, NoiseField


class RegeneratedNoise:
    """Adds ζσ·d_t·Σ_{j<p} a_j z[t−j] to clipped sums, for any mechanism whose C⁻¹ has p bands.

    ``sigma`` is σ (relative to the clipping norm), ``clip`` is ζ, ``horizon`` is n; ``column_scales`` are d_1 … d_n of
    a column-normalised mechanism. With ``restart_every`` = b the noise restarts at every b-th step. All of it is fixed
    for the run.

    Guarantee
    ---------
    Step t's noise is the same function of the same arguments whenever and wherever it is asked for: resumed, sharded,
    in another order. What is cancelled at step t+1 is exactly what was added at step t. No memory of the gradient's
    size is allocated. A step beyond the horizon, and the same field under other terms, are refused.
    """

    def __init__(
        self,
        field: NoiseField,
        recurrence: BandedInverse,
        *,
        sigma: float,
        clip: float,
        horizon: int,
        column_scales: Sequence[float] | np.ndarray | None = None,
        restart_every: int | None = None,
    ) -> None:
        if not isinstance(recurrence, BandedInverse):
            raise TypeError(
                f"{type(recurrence).__name__} needs its past outputs, which cannot be computed again from the last few "
                f"fields; use BufferedNoise"
            )
        scale, scales = check_terms(
            sigma=sigma, clip=clip, horizon=horizon, column_scales=column_scales, restart_every=restart_every
        )
        self.field = field
        self.horizon = int(horizon)
        self._combination = Combination(
            tuple(float(a) for a in recurrence.coefficients), scale, self.horizon, scales, restart_every
        )
        self._terms = Terms(
            str(recurrence), float(sigma), float(clip), self.horizon, restart_every, scales_digest(scales)
        )

    @classmethod
    def of(
        cls,
        field: NoiseField,
        mechanism: Mechanism,
        *,
        sigma: float,
        clip: float,
        horizon: int,
        restart_every: int | None = None,
    ) -> Self:
        """The noise of a mechanism over this horizon (or over each stretch between restarts)."""
        n = restart_every or horizon
        return cls(
            field,
            mechanism.recurrence(n),  # type: ignore[arg-type]  # checked by the constructor
            sigma=sigma,
            clip=clip,
            horizon=horizon,
            column_scales=mechanism.column_scales(n),
            restart_every=restart_every,
        )

    @torch.no_grad()
    def add_(
        self,
        sums: Mapping[str, torch.Tensor],
        step: int | torch.Tensor,
        *,
        out: Mapping[str, torch.Tensor] | None = None,
        offsets: Mapping[str, int] | None = None,
        check: bool = True,
    ) -> None:
        """Add step t's noise to the sums in place, or write sum + noise to ``out`` (then the sums keep their values).

        ``sums`` are float32 or float64 tensors named as in the layout; ``out`` may also be bfloat16, rounded once after
        the noise. ``offsets`` gives, for each tensor that is a shard, the row-major index of its first element in the
        whole tensor. Anything that does not fit is an error before any tensor is touched.

        A sum that is not finite sets a flag while it is read. ``check=True`` reads the flag (on CUDA this waits for
        the device) and raises ``NonFiniteSum``; with ``check=False`` call ``check()`` before the weights change.

        For CUDA graphs (with ``check=False``) ``step`` may be an int64 tensor of one element on the device; outside
        1 … n it yields NaN.
        """
        check_step(step, self.horizon)
        add = self.field._plan(sums, out, offsets)
        self.field._agree(self._terms)
        add(self._combination, step if isinstance(step, torch.Tensor) else int(step))
        if check:
            self.check()

    def check(self) -> None:
        """Raise ``NonFiniteSum`` if a sum noised since the last check was not finite."""
        self.field._check()


def check_step(step: int | torch.Tensor, horizon: int) -> None:
    if isinstance(step, torch.Tensor):
        if step.dtype != torch.int64 or step.numel() != 1 or step.device.type != "cuda":
            raise TypeError(f"a step in device memory is one int64 on CUDA, not {step.dtype} {tuple(step.shape)}")
        return
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
        raise TypeError(f"step is {step!r}; it must be an integer")
    if not 1 <= step <= horizon:
        raise NoiseError(
            f"step {step} is outside the run's 1 … {horizon}. The horizon is fixed by the plan: "
            f"more steps need a new plan"
        )
