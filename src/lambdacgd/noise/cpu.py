"""The noise field on the CPU: keystream from OpenSSL, Gaussian transform in float64, in pieces that stay in cache.

The transform runs in double precision and is rounded once, so this backend is also the oracle for the others.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lambdacgd.chacha import keystream_into
from lambdacgd.noise.jobs import Job
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS

_GROUPS = 64  # groups of a piece: 32 768 elements, each array at most 256 KiB, and no torch call worth splitting
_ZEROS = bytes(64 * GROUP_BLOCKS * _GROUPS)

Bands = Sequence[tuple[int, float]]  #: (field step, coefficient) pairs


@dataclass(frozen=True)
class Piece:
    """A run of groups that some tensors share, and which elements of which tensor lie in it."""

    first_group: int
    groups: int
    parts: tuple[tuple[Job, int, int], ...]  # job, first local element, one past the last


def pieces(jobs: Sequence[Job]) -> list[Piece]:
    """Cut the jobs (in layout order) into pieces. Neighbouring small tensors share one."""
    found: list[Piece] = []
    first = end = 0
    parts: list[tuple[Job, int, int]] = []
    for job in jobs:
        base = job.entry.first_block // GROUP_BLOCKS
        done, count = 0, job.source.numel()
        while done < count:
            group = base + (job.offset + done) // GROUP_ELEMENTS
            if parts and (group > end or group - first >= _GROUPS):
                found.append(Piece(first, end - first, tuple(parts)))
                parts = []
            if not parts:
                first = group
            # As much of this tensor as fits into the piece.
            take = min(count - done, (first + _GROUPS - base) * GROUP_ELEMENTS - job.offset - done)
            parts.append((job, done, done + take))
            done += take
            end = base + -(-(job.offset + done) // GROUP_ELEMENTS)
    if parts:
        found.append(Piece(first, end - first, tuple(parts)))
    return found


class _Scratch(threading.local):
    """Each thread's own buffers, about 1.5 MiB, made once."""

    def __init__(self) -> None:
        self.bytes = bytearray(len(_ZEROS))
        self.words = torch.frombuffer(self.bytes, dtype=torch.uint32)
        self.halves = torch.frombuffer(self.bytes, dtype=torch.uint16)  # little-endian: even ones are low halves
        half = (_GROUPS, 8, GROUP_BLOCKS)
        self.radius, self.angle, self.cosine = (torch.empty(half, dtype=torch.float64) for _ in range(3))
        self.total = torch.empty((_GROUPS, 2, 8, GROUP_BLOCKS), dtype=torch.float64)
        self.single = torch.empty(_GROUPS * GROUP_ELEMENTS, dtype=torch.float32)


_scratch = _Scratch()


def combined(subkey: bytes, first_group: int, groups: int, bands: Bands, scale: float) -> torch.Tensor:
    """scale·Σ a·z[step] over ``bands`` for whole groups: a float64 tensor that the thread's next call overwrites."""
    s = _scratch
    total = s.total[:groups].zero_()
    for step, coefficient in bands:
        _fill_words(subkey, first_group * GROUP_BLOCKS, groups * GROUP_BLOCKS, step)
        words = s.words[: groups * GROUP_ELEMENTS].view(groups, GROUP_BLOCKS, 16).transpose(1, 2)
        radius, angle, cosine = s.radius[:groups], s.angle[:groups], s.cosine[:groups]
        radius.copy_(words[:, :8])
        angle.copy_(words[:, 8:])
        cosine.copy_(s.halves[: 2 * groups * GROUP_ELEMENTS : 2].view(groups, GROUP_BLOCKS, 16).transpose(1, 2)[:, 8:])
        radius.mul_(2.0**-32).add_(cosine, alpha=2.0**-48).add_(2.0**-49).log_().mul_(-2.0).sqrt_()
        angle.add_(0.5).mul_(2.0 * math.pi * 2.0**-32)
        torch.cos(angle, out=cosine)
        angle.sin_()
        total[:, 0].addcmul_(radius, cosine, value=coefficient * scale)
        total[:, 1].addcmul_(radius, angle, value=coefficient * scale)
    return total.view(-1)


def _fill_words(subkey: bytes, block: int, count: int, step: int) -> None:
    out, zeros = memoryview(_scratch.bytes), memoryview(_ZEROS)
    done = 0
    while done < count:
        low, high = (block + done) & 0xFFFFFFFF, (block + done) >> 32
        take = min(count - done, (1 << 32) - low)  # a run never carries out of the 32-bit word 12
        tail = (low, high, step & 0xFFFFFFFF, step >> 32)
        keystream_into(subkey, tail, zeros[: 64 * take], out[64 * done : 64 * (done + take)])
        done += take


def apply(jobs: Sequence[Job], subkey: bytes, bands: Bands, scale: float, *, read: bool = True) -> bool:
    """target = source + scale·Σ a·z (or the noise alone if not ``read``). Returns whether all results are finite."""

    def work(piece: Piece) -> bool:
        with torch.no_grad():
            noise = combined(subkey, piece.first_group, piece.groups, bands, scale)
            return all([_add(part, noise, piece.first_group, read) for part in piece.parts])

    todo = pieces(jobs)
    threads = min(torch.get_num_threads(), len(todo))
    if threads <= 1:
        return all([work(piece) for piece in todo])
    return all(list(_pool(threads).map(work, todo)))


def _add(part: tuple[Job, int, int], noise: torch.Tensor, first_group: int, read: bool) -> bool:
    job, begin, end = part
    skip = job.offset + begin - (first_group - job.entry.first_block // GROUP_BLOCKS) * GROUP_ELEMENTS
    values = noise[skip : skip + end - begin]
    if job.source.dtype == torch.float32:
        values = _scratch.single[: end - begin].copy_(values)
    return all([_add_view(*views, read) for views in _views(job.source, job.target, begin, end, values)])


def _add_view(source: torch.Tensor, target: torch.Tensor, noise: torch.Tensor, read: bool) -> bool:
    if not read:
        target.copy_(noise)
        return True
    if target is source:
        low, high = torch.aminmax(source.add_(noise))
    else:
        low, high = torch.aminmax(noise.add_(source))
        target.copy_(noise)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _views(
    source: torch.Tensor, target: torch.Tensor, begin: int, end: int, values: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views that cover the row-major elements begin … end of both tensors, whatever their strides, with the values."""
    if begin == end:
        return []
    same = source is target
    if source.is_contiguous() and target.is_contiguous():
        flat = source.view(-1)[begin:end]
        return [(flat, flat if same else target.view(-1)[begin:end], values)]
    if begin == 0 and end == source.numel():
        return [(source, target, values.view(source.shape))]
    row = source[0].numel()
    found = []
    first, last = -(-begin // row), end // row  # the whole rows inside
    for a, b in ((begin, min(end, first * row)), (max(end if first > last else last * row, begin), end)):
        if a < b:
            index = a // row
            piece = values[a - begin : b - begin]
            inner, outer = source[index], target[index]
            found += _views(inner, inner if same else outer, a - index * row, b - index * row, piece)
    if first < last:
        block = source[first:last]
        piece = values[first * row - begin : last * row - begin].view(block.shape)
        found.append((block, block if same else target[first:last], piece))
    return found


_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a forked child has none of its parent's threads


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="lambdacgd-noise")
    return _pools[threads]
