"""The noise field on a CUDA device: tables in device memory, one kernel launch for all tensors of a model."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from lambdacgd.noise.layout import GROUP_ELEMENTS, Combination, Job

_LARGE = 1 << 23  # elements from which on a device is full even if a program serves four groups
_TABLES = 3  # of one size, written in turn; also a reserve for graph capture, which cannot allocate on the host


@dataclass(eq=False)
class _Table:
    """Pinned and device memory for one launch's table; ``stamp`` counts how often it was written."""

    host: torch.Tensor
    device: torch.Tensor
    sent: torch.cuda.Event | None = None
    stamp: int = 0
    captured: bool = False  # a CUDA graph reads it at every replay, so it is never written again


@dataclass(frozen=True)
class Launch:
    """All tensors of one pair of dtypes, as addresses in a table: it keeps no tensor alive."""

    table: _Table
    stamp: int
    rows: int
    programs: int
    turns: int
    source: torch.dtype
    target: torch.dtype

    @property
    def current(self) -> bool:
        return self.table.stamp == self.stamp


class CudaBackend:
    """One device's share of a field: the key's words, the tables of the last launches, and the flags.

    ``flags`` is one int32 in device memory: bit 0 says that a sum was not finite, bit 1 that a step left the run.
    """

    def __init__(self, subkey: bytes, device: torch.device) -> None:
        self.device = device
        # Data, never a compile-time constant: Triton keeps compiled constants in a cache on disk. And no variable: a
        # traceback may show those, and a device that is full raises here.
        self.key = torch.from_numpy(np.append(np.frombuffer(subkey, dtype="<i4").astype(np.int32), np.int32(1))).to(
            device
        )
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._free: dict[int, list[_Table]] = {}  # by size, the longest unused first
        self._constants: dict[tuple[float, ...], torch.Tensor] = {}

    def prepare(self, jobs: Sequence[Job]) -> list[Launch]:
        """Tables for these jobs, one launch a pair of dtypes. Valid until ``current`` says otherwise."""
        launches = []
        kind = lambda job: (str(job.source.dtype), str(job.target.dtype))  # noqa: E731
        for _, group in groupby(sorted(jobs, key=kind), key=kind):
            batch = [job for job in group if job.source.numel()]
            if not batch:
                continue
            turns = turns_of(batch)
            rows, programs = table_rows(batch, turns)
            table = self._write(np.concatenate([rows.reshape(-1), programs[:-1]]))
            types = batch[0].source.dtype, batch[0].target.dtype
            launches.append(Launch(table, table.stamp, len(batch), int(programs[-1]), turns, *types))
        return launches

    def launch(
        self, launches: Sequence[Launch], combination: Combination, step: int | torch.Tensor, *, read: bool = True
    ) -> None:
        """target = source + scale·d_t·Σ a_j z[t−j] (the noise alone if not ``read``)."""
        from lambdacgd.noise.kernel import META_COLUMNS, noise_kernel  # Triton: only where there is CUDA

        counter, base = (step, 0) if isinstance(step, torch.Tensor) else (self._no_step, step)
        scales, scale = combination.column_scales, combination.scale
        if scales is not None and base:
            scale, scales = scale * scales[combination.since(base) - 1], None
        capturing = self._capturing()
        for launch in launches:
            launch.table.captured |= capturing
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                noise_kernel[(launch.programs,)](
                    launch.table.device[launch.rows * META_COLUMNS :],
                    launch.table.device,
                    self.key,
                    self._constant(combination.coefficients),
                    self._constant(scales) if scales is not None else self._no_step.view(torch.float64),
                    counter,
                    self.flags,
                    base,
                    combination.horizon,
                    combination.period,
                    len(combination.coefficients),
                    launch.rows,
                    launch.turns,
                    struct.unpack("<q", struct.pack("<d", scale))[0],
                    math.ldexp(1.5, 53 - combination.fineness) if read else 0.0,
                    READ=read,
                    WIDE=launch.source == torch.float64,
                    WIDE_OUT=launch.target == torch.float64,
                    BF16_OUT=launch.target == torch.bfloat16,
                    SCALED=scales is not None,
                    num_warps=1,
                )

    def read_flags(self) -> int:
        """Wait for the device and return the flags, cleared for the next step."""
        value = int(self.flags.item())
        if value:
            self.flags.zero_()
        return value

    def _constant(self, values: tuple[float, ...]) -> torch.Tensor:
        if values not in self._constants:
            self._constants[values] = torch.tensor(values, dtype=torch.float64).to(self.device)
        return self._constants[values]

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _write(self, content: np.ndarray) -> _Table:
        """A table with this content, sent to the device. Captured tables are never written again, others in turn."""
        free = self._free.setdefault(len(content), [])
        free[:] = [table for table in free if not table.captured]
        cuda, capturing = self.device.type == "cuda", self._capturing()
        if capturing and not free:
            raise RuntimeError(
                "the noise has no table ready for capture: add noise to these tensors once before torch.cuda.graph(...)"
            )
        while not capturing and len(free) < _TABLES:
            host = torch.zeros(len(content), dtype=torch.int64, pin_memory=cuda)
            free.append(_Table(host, torch.zeros(len(content), dtype=torch.int64, device=self.device)))
        table = free.pop(0)
        free.append(table)
        if table.sent is not None and not capturing:
            table.sent.synchronize()  # the copy out of its host half is over; only then may it be written again
        table.stamp += 1
        table.host.copy_(torch.from_numpy(content))
        table.device.copy_(table.host, non_blocking=True)
        if cuda and not capturing:
            table.sent = torch.cuda.Event()
            table.sent.record(torch.cuda.current_stream(self.device))
        return table


def turns_of(jobs: Sequence[Job]) -> int:
    """Groups that one program serves in turn: several in a large model, one in a small one, to fill the device."""
    return 4 if sum(job.source.numel() for job in jobs) >= _LARGE else 1


def table_rows(jobs: Sequence[Job], turns: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's table: (tensors, META_COLUMNS) numbers, and each tensor's first program with the total behind.

    Columns: 0 source, 1 target address, 2 unused, 3 elements, 4 offset, 5 first block, 6 first group, 7 strided,
    8–11 sizes, 12–15 source strides, 16–19 target strides (of at most four merged dimensions, outermost first).
    """
    from lambdacgd.noise.kernel import META_COLUMNS

    rows = np.zeros((len(jobs), META_COLUMNS), dtype=np.int64)
    programs = np.zeros(len(jobs) + 1, dtype=np.int64)
    for index, job in enumerate(jobs):
        count = job.source.numel()
        first_group = job.offset // GROUP_ELEMENTS
        last_group = -(-(job.offset + count) // GROUP_ELEMENTS)
        programs[index + 1] = programs[index] - (-(last_group - first_group) // turns)
        rows[index, :7] = (
            job.source.data_ptr(), job.target.data_ptr(), 0, count, job.offset, job.entry.first_block, first_group,
        )  # fmt: skip
        if not (job.source.is_contiguous() and job.target.is_contiguous()):
            dimensions = merged_dimensions(job)
            rows[index, 7] = 1
            rows[index, 8:12] = [d[0] for d in dimensions]
            rows[index, 12:16] = [d[1] for d in dimensions]
            rows[index, 16:20] = [d[2] for d in dimensions]
    if programs[-1] >= 1 << 31:
        raise ValueError(f"{programs[-1]} programs exceed one launch (2**31); shard the model over more devices")
    return rows, programs


def merged_dimensions(job: Job) -> list[tuple[int, int, int]]:
    """(size, source stride, target stride) of four dimensions, neighbours merged where both tensors allow it."""
    merged: list[tuple[int, int, int]] = []
    for size, source, target in zip(job.source.shape, job.source.stride(), job.target.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * source and merged[-1][2] == size * target:
            merged[-1] = (merged[-1][0] * size, source, target)
        else:
            merged.append((size, source, target))
    if len(merged) > 4:
        raise ValueError(
            f"{job.entry.name!r} has strides {job.source.stride()} that do not merge into four dimensions; "
            f"make it contiguous or channels_last"
        )
    return [(1, 0, 0)] * (4 - len(merged)) + merged
