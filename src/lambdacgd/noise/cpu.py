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

from lambdacgd.keys import keystream_into
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, Job

_GROUPS = 128  # groups of a piece: 65 536 elements, in arrays of 256 KiB: smaller ones would queue for Python's lock
_SERIAL = 1 << 15  # torch spreads a call over threads of its own beyond this many elements; our threads are enough
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
    cut: list[Piece] = []
    first = end = 0
    parts: list[tuple[Job, int, int]] = []
    for job in jobs:
        base = job.entry.first_block // GROUP_BLOCKS
        done, count = 0, job.source.numel()
        while done < count:
            group = base + (job.offset + done) // GROUP_ELEMENTS
            if parts and (group > end or group - first >= _GROUPS):
                cut.append(Piece(first, end - first, tuple(parts)))
                parts = []
            if not parts:
                first = group
            # As much of this tensor as fits into the piece.
            take = min(count - done, (first + _GROUPS - base) * GROUP_ELEMENTS - job.offset - done)
            parts.append((job, done, done + take))
            done += take
            end = base + -(-(job.offset + done) // GROUP_ELEMENTS)
    if parts:
        cut.append(Piece(first, end - first, tuple(parts)))
    return cut


class _Views:
    """A thread's buffers for one number of groups, sliced once: each slice a piece would cost Python's lock."""

    def __init__(self, scratch: _Scratch, groups: int) -> None:
        elements = groups * GROUP_ELEMENTS
        words = scratch.words[:elements].view(groups, GROUP_BLOCKS, 16).transpose(1, 2)
        halves = scratch.halves[: 2 * elements : 2].view(groups, GROUP_BLOCKS, 16).transpose(1, 2)
        self.radius_words, self.angle_words, self.shared_bits = words[:, :8], words[:, 8:], halves[:, 8:]
        self.radius, self.angle, self.cosine = (array[:groups] for array in scratch.arrays)
        self.x, self.y = scratch.total[:groups, 0], scratch.total[:groups, 1]
        self.total = scratch.total[:groups].view(-1)


class _Scratch(threading.local):
    """Each thread's own buffers, about 2 MiB, made once."""

    def __init__(self) -> None:
        self.bytes = bytearray(len(_ZEROS))
        self.words = torch.frombuffer(self.bytes, dtype=torch.uint32)
        self.halves = torch.frombuffer(self.bytes, dtype=torch.uint16)  # little-endian: even ones are low halves
        self.arrays = [torch.empty((_GROUPS, 8, GROUP_BLOCKS), dtype=torch.float64) for _ in range(3)]
        self.total = torch.empty((_GROUPS, 2, 8, GROUP_BLOCKS), dtype=torch.float64)
        self.single = torch.empty(_SERIAL, dtype=torch.float32)
        self.views: dict[int, _Views] = {}


_scratch = _Scratch()
_HALF_CELL = torch.tensor(2.0**-49, dtype=torch.float64)
_TURN = 2.0 * math.pi * 2.0**-32  # the angle of one unit of a word
_HALF_TURN = torch.tensor(0.5 * _TURN, dtype=torch.float64)


def combined(subkey: bytes, first_group: int, groups: int, bands: Bands, scale: float) -> torch.Tensor:
    """scale·Σ a·z[step] over ``bands`` for whole groups: a float64 tensor that the thread's next call overwrites."""
    v = _scratch.views.get(groups)
    if v is None:
        v = _scratch.views[groups] = _Views(_scratch, groups)
    v.x.zero_()
    v.y.zero_()
    for step, coefficient in bands:
        _fill_words(subkey, first_group * GROUP_BLOCKS, groups * GROUP_BLOCKS, step)
        v.radius.copy_(v.radius_words)
        v.cosine.copy_(v.shared_bits)
        torch.add(_HALF_CELL, v.radius, alpha=2.0**-32, out=v.radius).add_(v.cosine, alpha=2.0**-48)  # u
        v.radius.log_().mul_(-2.0).sqrt_()
        v.angle.copy_(v.angle_words)
        torch.add(_HALF_TURN, v.angle, alpha=_TURN, out=v.angle)
        torch.cos(v.angle, out=v.cosine)
        v.angle.sin_()
        v.x.addcmul_(v.radius, v.cosine, value=coefficient * scale)
        v.y.addcmul_(v.radius, v.angle, value=coefficient * scale)
    return v.total


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

    cut = pieces(jobs)
    threads = torch.get_num_threads()
    if threads == 1 or len(cut) == 1:
        return all([work(piece) for piece in cut])
    return all(list(_pool(threads).map(work, cut)))


def _add(part: tuple[Job, int, int], noise: torch.Tensor, first_group: int, read: bool) -> bool:
    job, begin, end = part
    skip = job.offset - (first_group - job.entry.first_block // GROUP_BLOCKS) * GROUP_ELEMENTS
    finite = True
    for a in range(begin, end, _SERIAL):
        b = min(a + _SERIAL, end)
        values = noise[skip + a : skip + b]
        if job.source.dtype == torch.float32:
            values = _scratch.single[: b - a].copy_(values)
        for views in _views(job.source, job.target, a, b, values):
            finite &= _add_view(*views, read)
    return finite


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
    views = []
    first, last = -(-begin // row), end // row  # the whole rows inside
    for a, b in ((begin, min(end, first * row)), (max(end if first > last else last * row, begin), end)):
        if a < b:
            index = a // row
            piece = values[a - begin : b - begin]
            inner, outer = source[index], target[index]
            views += _views(inner, inner if same else outer, a - index * row, b - index * row, piece)
    if first < last:
        block = source[first:last]
        piece = values[first * row - begin : last * row - begin].view(block.shape)
        views.append((block, block if same else target[first:last], piece))
    return views


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # by process and size: a forked child has none of these threads


def _pool(threads: int) -> ThreadPoolExecutor:
    which = os.getpid(), threads
    if which not in _pools:
        _pools[which] = ThreadPoolExecutor(threads, thread_name_prefix="lambdacgd-noise")
    return _pools[which]
