"""Correlated noise with memory: for mechanisms whose past cannot be computed again from the last few fields.

Buffers are noise. They are never saved: after a resume they are made again from the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lambdacgd.mechanisms.base import BandedStrategy, BufferedToeplitz, Recurrence
from lambdacgd.noise.field import UNIT, CorrelatedNoise, NoiseField
from lambdacgd.noise.layout import Job, Offsets, Tensors, match
from lambdacgd.torch_private import foreach_add_, foreach_div_, foreach_mul, foreach_mul_, foreach_zero_

Vectors = list[torch.Tensor]  # one tensor for each tensor of the layout, in its order


class BufferedNoise(CorrelatedNoise):
    """Adds ζσ·d_t·x_t to clipped sums, x = C⁻¹z by the mechanism's recurrence, from stored vectors.

    Serves ``BandedStrategy`` (BSR, BandMF: the last p−1 outputs) and ``BufferedToeplitz`` (BLT: one vector a buffer).
    The arguments are those of ``CorrelatedNoise``.

    Steps are meant to come in order. Any other step first rebuilds the buffers from the field, so the noise of a step
    never depends on what was asked before.

    Guarantee
    ---------
    As for ``RegeneratedNoise``, except for memory: vectors of the gradients' size, in float64, are stored beside the
    sums. Nothing of them is part of any saved state.
    """

    serves: tuple[type, ...] = (BandedStrategy, BufferedToeplitz)

    def __init__(self, field: NoiseField, recurrence: Recurrence, **terms: Any) -> None:
        super().__init__(field, recurrence, **terms)
        self._store: list[Vectors] = []  # the newest first, or buffer by buffer for BLT
        self._next: int | None = None  # the step the store is ready for
        self._signature: object = None

    def _add(self, step: int | torch.Tensor, sums: Tensors, offsets: Offsets) -> None:
        if isinstance(step, torch.Tensor):
            raise TypeError("buffered noise needs its step as an int: its buffers advance with every call")
        jobs = match(self.field.layout, sums, offsets=offsets)
        self._prepare(jobs, step)
        self._next = None  # until the step is done: one that fails half-way leaves buffers that must be made again
        scale, lattice = self._combination.scale_at(step), self._combination.lattice_at(step)
        results = list(foreach_mul(self._advance(jobs, step), scale))
        for job, result in zip(jobs, results, strict=True):
            result.add_(job.tensor).add_(lattice).sub_(lattice)  # in float64: only lattice points become float32
            job.tensor.copy_(result)
        self.field.flag([job.tensor for job in jobs])
        self._next = step + 1

    def _prepare(self, jobs: Sequence[Job], step: int) -> None:
        """Make the buffers ready for this step: from the field alone, unless they are."""
        signature = [(job.tensor.shape, job.tensor.device, job.offset) for job in jobs]
        start = step - self._combination.since(step) + 1  # the first step after the last restart
        if self._next == step != start and signature == self._signature:
            return
        self._next = None
        if signature != self._signature:
            self._store = [self._vectors(jobs) for _ in range(self.recurrence.past_vectors)]
            self._signature = signature
        for vectors in self._store:
            foreach_zero_(vectors)
        for past in range(start, step):
            self._advance(jobs, past)

    def _vectors(self, jobs: Sequence[Job]) -> Vectors:
        return [torch.empty(job.tensor.shape, dtype=torch.float64, device=job.tensor.device) for job in jobs]

    def _field(self, jobs: Sequence[Job], step: int) -> Vectors:
        z = self._vectors(jobs)
        self.field.apply([Job(j.entry, v, j.offset) for j, v in zip(jobs, z, strict=True)], UNIT, step, read=False)
        return z

    def _advance(self, jobs: Sequence[Job], step: int) -> Vectors:
        """x_t of the step; moves the store on to the next step."""
        x, recurrence = self._field(jobs, step), self.recurrence
        if isinstance(recurrence, BufferedToeplitz):
            for weight, vectors in zip(recurrence.weights, self._store, strict=True):
                foreach_add_(x, vectors, alpha=-weight)
            for decay, vectors in zip(recurrence.decays, self._store, strict=True):
                foreach_mul_(vectors, decay)
                foreach_add_(vectors, x)
            return x
        assert isinstance(recurrence, BandedStrategy)
        for c, vectors in zip(recurrence.coefficients[1:], self._store, strict=True):
            foreach_add_(x, vectors, alpha=-c)
        foreach_div_(x, recurrence.coefficients[0])
        if self._store:
            self._store.insert(0, self._store.pop())
            for kept, value in zip(self._store[0], x, strict=True):
                kept.copy_(value)
        return x
