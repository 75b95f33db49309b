"""The peer of regenerated noise: the past fields of a banded C⁻¹, stored on the device or, in float32, in pinned host
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise import BufferedNoise, NoiseField
from lambdacgd.noise.field import UNIT, Vectors
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
        if self._where == "device":
            return super()._vectors(jobs)
        return [torch.empty(job.tensor.shape, pin_memory=torch.cuda.is_available()) for job in jobs]

    def _advance(self, jobs: Sequence[Job], step: int) -> Vectors:
        z = super()._vectors(jobs)
        self.field.apply([Job(j.entry, v, j.offset) for j, v in zip(jobs, z, strict=True)], UNIT, step, read=False)
        first, *rest = self.recurrence.coefficients  # type: ignore[union-attr]
        x = list(foreach_mul(z, first))
        for a, vectors in zip(rest, self._store, strict=True):
            near = [v.to(value.device, non_blocking=True).to(value.dtype) for value, v in zip(x, vectors, strict=True)]
            foreach_add_(x, near, alpha=a)
        if self._store:
            self._store.insert(0, self._store.pop())
            for kept, value in zip(self._store[0], z, strict=True):
                kept.copy_(value, non_blocking=True)
        return x
