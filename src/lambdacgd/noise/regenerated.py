"""Correlated noise with no memory: the past is computed again from the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise.field import CorrelatedNoise, NoiseField
from lambdacgd.noise.layout import FINENESS


class RegeneratedNoise(CorrelatedNoise):
    """Adds ζσ·d_t·Σ_{j<p} a_j z[t−j] to clipped sums, for any mechanism whose C⁻¹ has p bands.

    The arguments are those of ``CorrelatedNoise``; all of them are fixed for the run.

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
        fineness: int = FINENESS,
    ) -> None:
        if not isinstance(recurrence, BandedInverse):
            raise TypeError(
                f"{type(recurrence).__name__} needs its past outputs, which cannot be computed again from the last few "
                f"fields; use BufferedNoise"
            )
        super().__init__(
            field,
            recurrence,
            sigma=sigma,
            clip=clip,
            horizon=horizon,
            column_scales=column_scales,
            restart_every=restart_every,
            fineness=fineness,
        )
        self._combination = replace(self._combination, coefficients=tuple(float(a) for a in recurrence.coefficients))

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

        Args:
            sums: float32 tensors named as in the layout.
            step: The step of the run, from 1 to the horizon. For CUDA graphs (with ``check=False``) it may be an int64
                tensor of one element on the device; outside 1 … n it yields NaN.
            out: Where the results go: float32, float64 or bfloat16 tensors, rounded once after the noise.
            offsets: For each tensor that is a shard, the row-major index of its first element in the whole tensor.
            check: Read the flag that a sum which is not finite sets while it is read. On CUDA this waits for the
                device; with ``check=False`` call ``check()`` before the weights change.

        Raises:
            LayoutError: A tensor is missing, unknown, or of another shape. Nothing was written.
            TypeError: A tensor's type does not fit: float64 sums, say, have more bits than the noise covers. Nothing
                was written.
            NoiseError: The step is outside the run, or the field is in use under other terms. Nothing was written.
            NonFiniteSum: A sum held a NaN or an infinity. The results must not reach the weights.
        """
        if not isinstance(step, torch.Tensor):
            self._check_step(step)
        elif step.dtype != torch.int64 or step.numel() != 1 or step.device.type != "cuda":
            raise TypeError(f"a step in device memory is one int64 on CUDA, not {step.dtype} {tuple(step.shape)}")
        add = self.field.adder(sums, out, offsets)
        self.field.agree(self._terms)
        add(self._combination, step if isinstance(step, torch.Tensor) else int(step))
        if check:
            self.check()
