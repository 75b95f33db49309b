"""The noise field on a CUDA device: tables in device memory, one kernel launch for all tensors of a model."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

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
    """All tensors of one dtype, as addresses in a table: it keeps no tensor alive."""

    table: _Table
    stamp: int
    rows: int
    programs: int
    turns: int
    dtype: torch.dtype

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
        self.key = torch.tensor([*struct.unpack("<8i", subkey), 1], dtype=torch.int32).to(device)
        self.flags = torch.zeros(1, dtype=torch.int32, device=device)
        self._no_step = torch.zeros(1, dtype=torch.int64, device=device)
        self._tables: dict[int, list[_Table]] = {}  # by size, the longest unused first; a graph's are kept for good
        self._constants: dict[tuple[float, ...], torch.Tensor] = {}

    def prepare(self, jobs: Sequence[Job]) -> list[Launch]:
        """Tables for these contiguous tensors, one launch a dtype. Valid until ``current`` says otherwise."""
        launches = []
        for dtype in (torch.float32, torch.float64):
            batch = [job for job in jobs if job.tensor.dtype == dtype and job.tensor.numel()]
            if not batch:
                continue
            turns = turns_of(batch)
            rows, programs = table_rows(batch, turns)
            table = self._write(np.concatenate([rows.reshape(-1), programs[:-1]]))
            launches.append(Launch(table, table.stamp, len(batch), int(programs[-1]), turns, dtype))
        return launches

    def launch(
        self, launches: Sequence[Launch], combination: Combination, step: int | torch.Tensor, *, read: bool = True
    ) -> None:
        """Add scale·d_t·Σ a_j z[t−j] to the tensors (write the noise alone if not ``read``)."""
        from lambdacgd.noise.kernel import META_COLUMNS, noise_kernel  # Triton: only where there is CUDA

        counter, base = (step, 0) if isinstance(step, torch.Tensor) else (self._no_step, step)
        scales, scale = combination.column_scales, combination.scale
        if scales is not None and base:
            scale, scales = scale * scales[combination.since(base) - 1], None
        coefficients = self._constant(combination.coefficients)
        column_scales = self._no_step.view(torch.float64) if scales is None else self._constant(scales)
        scale_bits = struct.unpack("<q", struct.pack("<d", scale))[0]
        lattice = math.ldexp(1.5, 53 - combination.fineness) if read else 0.0
        capturing = self._capturing()
        for launch in launches:
            launch.table.captured |= capturing
            meta, first_programs = launch.table.device, launch.table.device[launch.rows * META_COLUMNS :]
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                noise_kernel[(launch.programs,)](
                    first_programs, meta, self.key, coefficients, column_scales, counter, self.flags,
                    base, combination.horizon, combination.period, len(combination.coefficients),
                    launch.rows, launch.turns, scale_bits, lattice,
                    READ=read, WIDE=launch.dtype == torch.float64, SCALED=scales is not None, num_warps=1,
                )  # fmt: skip

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
        tables = self._tables.setdefault(len(content), [])
        free = [table for table in tables if not table.captured]
        cuda, capturing = self.device.type == "cuda", self._capturing()
        if capturing and not free:
            raise RuntimeError("no table is ready: add noise to these tensors once before torch.cuda.graph(...)")
        while not capturing and len(free) < _TABLES:
            host = torch.zeros(len(content), dtype=torch.int64, pin_memory=cuda)
            free.append(_Table(host, torch.zeros(len(content), dtype=torch.int64, device=self.device)))
            tables.append(free[-1])
        table = free[0]
        tables.remove(table)
        tables.append(table)
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
    return 4 if sum(job.tensor.numel() for job in jobs) >= _LARGE else 1


def table_rows(jobs: Sequence[Job], turns: int) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's table: (tensors, META_COLUMNS) numbers, and each tensor's first program with the total behind.

    Columns: 0 address, 1 elements, 2 offset, 3 first block, 4 first group.
    """
    from lambdacgd.noise.kernel import META_COLUMNS

    rows = np.zeros((len(jobs), META_COLUMNS), dtype=np.int64)
    programs = np.zeros(len(jobs) + 1, dtype=np.int64)
    for index, job in enumerate(jobs):
        count = job.tensor.numel()
        first_group = job.offset // GROUP_ELEMENTS
        last_group = -(-(job.offset + count) // GROUP_ELEMENTS)
        programs[index + 1] = programs[index] - (-(last_group - first_group) // turns)
        rows[index] = job.tensor.data_ptr(), count, job.offset, job.entry.first_block, first_group
    if programs[-1] >= 1 << 31:
        raise ValueError(f"{programs[-1]} programs exceed one launch (2**31); shard the model over more devices")
    return rows, programs
