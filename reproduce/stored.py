"""The peer of regenerated noise: the past fields of a banded C⁻¹, stored on the device or in pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise import BufferedNoise, NoiseField
from lambdacgd.noise.field import Vectors
from lambdacgd.noise.layout import Job
from lambdacgd.torch_private import foreach_add_, foreach_mul


class StoredNoise(BufferedNoise):
    """The noise of ``RegeneratedNoise``, from the last p−1 fields. The library has no use for it: it computes them."""

    serves = (BandedInverse,)

    def __init__(
        self, field: NoiseField, recurrence: BandedInverse, *, buffers: Literal["device", "cpu"], **terms: Any
    ) -> None:
        super().__init__(field, recurrence, **terms)
        self._where = buffers

    def _prepare(self, jobs: Sequence[Job], step: int) -> None:
        if self._next != step and torch.cuda.is_available():
            torch.cuda.synchronize()  # a copy from the device may still be on its way into the buffers
        super()._prepare(jobs, step)

    def _vectors(self, jobs: Sequence[Job]) -> Vectors:
        if self._where == "device" or all(job.tensor.device.type == "cpu" for job in jobs):
            return super()._vectors(jobs)
        return [torch.empty(job.tensor.shape, dtype=torch.float64, pin_memory=True) for job in jobs]

    def _advance(self, jobs: Sequence[Job], step: int) -> Vectors:
        z = self._field(jobs, step)
        first, *rest = self.recurrence.coefficients  # type: ignore[union-attr]
        x = list(foreach_mul(z, first))
        for a, vectors in zip(rest, self._store, strict=True):
            near = [v.to(value.device, non_blocking=True) for value, v in zip(x, vectors, strict=True)]
            foreach_add_(x, near, alpha=a)
        if self._store:
            self._store.insert(0, self._store.pop())
            for kept, value in zip(self._store[0], z, strict=True):
                kept.copy_(value, non_blocking=True)
        return x
