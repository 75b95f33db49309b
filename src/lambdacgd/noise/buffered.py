"""Correlated noise with memory: for mechanisms whose past cannot be computed again from the last few fields.

Buffers are noise. They are never saved: after a resume they are made again from the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy, BufferedToeplitz, Recurrence
from lambdacgd.noise.field import UNIT, CorrelatedNoise, NoiseField
from lambdacgd.noise.layout import Job, Offsets, Tensors, match
from lambdacgd.torch_private import foreach_add_, foreach_div_, foreach_mul, foreach_mul_, foreach_zero_

Vectors = list[torch.Tensor]  # one tensor for each tensor of the layout, in its order


class BufferedNoise(CorrelatedNoise):
    """Adds ζσ·d_t·x_t to clipped sums, x = C⁻¹z by the mechanism's recurrence, from stored vectors.

    Serves ``BandedStrategy`` (BSR, BandMF: the last p−1 outputs), ``BufferedToeplitz`` (BLT: one vector a buffer) and,
    for comparison, ``BandedInverse`` (the last p−1 fields, which ``RegeneratedNoise`` computes again). The arguments
    are those of ``CorrelatedNoise``, and ``buffers``, which says where the vectors live: ``"device"``, beside the sums,
    or ``"cpu"``, in (pinned) host memory.

    Steps are meant to come in order. Any other step first rebuilds the buffers from the field, so the noise of a step
    never depends on what was asked before.

    Guarantee
    ---------
    As for ``RegeneratedNoise``, except for memory: vectors of the gradients' size, in float64, are stored. Nothing of
    them is part of any saved state.
    """

    def __init__(
        self, field: NoiseField, recurrence: Recurrence, *, buffers: Literal["device", "cpu"] = "device", **terms: Any
    ) -> None:
        if not isinstance(recurrence, BandedInverse | BandedStrategy | BufferedToeplitz):
            raise TypeError(f"recurrence is a {type(recurrence).__name__}; it must be one of lambdacgd.mechanisms.base")
        if buffers not in ("device", "cpu"):
            raise ValueError(f"buffers is {buffers!r}; it must be 'device' or 'cpu'")
        super().__init__(field, recurrence, **terms)
        self._where = buffers
        self._store: list[Vectors] = []  # newest first for banded recurrences, buffer by buffer for BLT
        self._next: int | None = None  # the step the store is ready for
        self._signature: object = None

    def _add(self, step: int | torch.Tensor, sums: Tensors, out: Tensors | None, offsets: Offsets) -> None:
        if isinstance(step, torch.Tensor):
            raise TypeError("buffered noise needs its step as an int: its buffers advance with every call")
        jobs = match(self.field.layout, sums, out=out, offsets=offsets)
        self._prepare(jobs, step)
        self._next = None  # until the step is done: one that fails half-way leaves buffers that must be made again
        scale, lattice = self._combination.scale_at(step), self._combination.lattice_at(step)
        results = list(foreach_mul(self._advance(jobs, step), scale))
        for job, result in zip(jobs, results, strict=True):
            result.add_(job.source).add_(lattice).sub_(lattice)  # in float64: only lattice points become float32
            job.target.copy_(result)
        self.field.flag([job.target for job in jobs])
        self._next = step + 1

    def _prepare(self, jobs: Sequence[Job], step: int) -> None:
        """Make the buffers ready for this step: from the field alone, unless they are."""
        signature = [(job.source.shape, job.source.device, job.offset) for job in jobs]
        if self._next == step and signature == self._signature:
            if self._combination.since(step) == 1:
                self._clear()
            return
        self._next = None
        if signature != self._signature:
            self._store = [[self._vector(job) for job in jobs] for _ in range(self.recurrence.past_vectors)]
            self._signature = signature
        self._clear()
        start = step - self._combination.since(step) + 1
        if isinstance(self.recurrence, BandedInverse):
            start = max(start, step - self.recurrence.past_vectors)  # further back nothing counts
        for past in range(start, step):
            self._advance(jobs, past)
        self._next = step

    def _vector(self, job: Job) -> torch.Tensor:
        on_device = self._where == "device" or job.source.device.type == "cpu"
        return torch.zeros(
            job.source.shape,
            dtype=torch.float64,
            device=job.source.device if on_device else "cpu",
            pin_memory=not on_device and job.source.device.type == "cuda",
        )

    def _clear(self) -> None:
        if any(vector.is_pinned() for vectors in self._store for vector in vectors):
            torch.cuda.synchronize()  # a copy from the device may still be on its way into them
        for vectors in self._store:
            foreach_zero_(vectors)

    def _field(self, jobs: Sequence[Job], step: int) -> Vectors:
        z = [torch.empty(job.source.shape, dtype=torch.float64, device=job.source.device) for job in jobs]
        self.field.apply([Job(j.entry, v, v, j.offset) for j, v in zip(jobs, z, strict=True)], UNIT, step, read=False)
        return z

    def _advance(self, jobs: Sequence[Job], step: int) -> Vectors:
        """x_t of the step, on the sums' devices; moves the store on to the next step."""
        x = self._field(jobs, step)
        recurrence = self.recurrence
        if isinstance(recurrence, BufferedToeplitz):
            for weight, vectors in zip(recurrence.weights, self._store, strict=True):
                _add(x, vectors, -weight)
            for decay, vectors in zip(recurrence.decays, self._store, strict=True):
                near = [v.to(value.device, non_blocking=True) for value, v in zip(x, vectors, strict=True)]
                foreach_mul_(near, decay)  # where the arithmetic is fast; in place if the buffers live there
                foreach_add_(near, x)
                _store(vectors, near)
            return x
        if isinstance(recurrence, BandedInverse):
            z = x
            x = list(foreach_mul(z, recurrence.coefficients[0]))
            for a, vectors in zip(recurrence.coefficients[1:], self._store, strict=True):
                _add(x, vectors, a)
            self._push(z)
            return x
        for c, vectors in zip(recurrence.coefficients[1:], self._store, strict=True):
            _add(x, vectors, -c)
        foreach_div_(x, recurrence.coefficients[0])
        self._push(x)
        return x

    def _push(self, newest: Vectors) -> None:
        if not self._store:
            return
        self._store.insert(0, self._store.pop())
        _store(self._store[0], newest)


def _add(x: Vectors, vectors: Vectors, weight: float) -> None:
    foreach_add_(x, [v.to(value.device, non_blocking=True) for value, v in zip(x, vectors, strict=True)], alpha=weight)


def _store(buffers: Vectors, values: Vectors) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if buffer is not value:
            buffer.copy_(value, non_blocking=True)
