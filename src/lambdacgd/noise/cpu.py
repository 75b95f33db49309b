"""The noise field on the CPU: keystream from OpenSSL, Gaussian transform in float64, in pieces that stay in cache.

The transform runs in double precision and is rounded once, so this backend is also the oracle for the others.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lambdacgd.keys import keystream_into
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, MORE, PAIRS, RARE, Job

_GROUPS = 160  # groups of a piece: 61 440 elements, in arrays of 240 KiB: smaller ones would queue for Python's lock
_SERIAL = 1 << 15  # torch spreads a call over threads of its own beyond this many elements; our threads are enough
_ZEROS = bytes(64 * GROUP_BLOCKS * _GROUPS)
_TURN = 2.0 * math.pi

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
        words = scratch.words[: groups * 16 * GROUP_BLOCKS].view(groups, GROUP_BLOCKS, 16).permute(2, 0, 1)
        both, count = (2, PAIRS, groups, GROUP_BLOCKS), 2 * PAIRS * groups * GROUP_BLOCKS  # radii and angles
        self.own_words, self.half_words, self.last_word = words[: 2 * PAIRS].view(both), words[12:15], words[15]
        few = groups * GROUP_BLOCKS
        self.halves = scratch.halves[: 3 * few].view(3, groups, GROUP_BLOCKS)
        self.last = scratch.last[:few].view(groups, GROUP_BLOCKS)
        self.shared = scratch.shared[: 2 * few].view(2, 1, groups, GROUP_BLOCKS)
        self.start = scratch.start[: 2 * few].view(2, 1, groups, GROUP_BLOCKS)
        self.bits = scratch.integers[:count].view(2, 2, 3, groups, GROUP_BLOCKS)
        self.bits_of_pairs = self.bits.view(both)
        self.near = scratch.near[: count // 2].view(both[1:])
        self.uniform, self.low = (array[:count].view(both) for array in scratch.arrays)
        self.radius, self.angle = self.uniform
        self.size, self.cosine = self.low
        self.total = scratch.total[:count].view(both)
        self.x, self.y = self.total
        self.ordered = scratch.ordered[:count]
        self.places = self.ordered.view(groups, 2, PAIRS, GROUP_BLOCKS).permute(1, 2, 0, 3)


class _Scratch(threading.local):
    """Each thread's own buffers, about 4 MiB, made once."""

    def __init__(self) -> None:
        self.bytes = bytearray(len(_ZEROS))
        self.words = torch.frombuffer(self.bytes, dtype=torch.int32)
        blocks = _GROUPS * GROUP_BLOCKS
        numbers = 2 * PAIRS * blocks
        self.near = torch.empty(numbers // 2, dtype=torch.bool)
        sizes = numbers, 3 * blocks, blocks, 2 * blocks
        self.integers, self.halves, self.last, self.shared = (torch.empty(size, dtype=torch.int32) for size in sizes)
        *self.arrays, self.total, self.ordered = (torch.empty(numbers, dtype=torch.float64) for _ in range(4))
        self.start = torch.empty(2 * blocks, dtype=torch.float64)
        self.views: dict[int, _Views] = {}


_scratch = _Scratch()


def _constant(*values: float, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """As a tensor: torch would make a Python number into one at every call. The first index: for radii, for angles."""
    return torch.tensor(values, dtype=dtype).view(shape)


# Of each half of a word, the lowest ten bits are u's and the upper six are v's. Here their unit is 2⁻⁴² in both.
_HALVES, _OWN = _constant(0, 16, 6, 22, shape=(2, 2, 1, 1, 1)), _constant(0x3FF, 0x3F0, shape=(2, 1, 1, 1, 1))
# Of the last word, ten bits are every u's and the twelve above are every v's.
_SHARED, _COMMON = _constant(0, 10, shape=(2, 1, 1, 1)), _constant(0x3FF, 0xFFF, shape=(2, 1, 1, 1))
_UNITS = _constant(2.0**-52, 2.0**-50, shape=(2, 1, 1, 1), dtype=torch.float64)
_STARTS = _constant(0.5 + 2.0**-53, 2.0**-51, shape=(2, 1, 1, 1), dtype=torch.float64)
_RARE_SIZE = _constant(2.0**31 - RARE, shape=(), dtype=torch.float64)


def combined(subkey: bytes, first_group: int, groups: int, bands: Bands, scale: float) -> torch.Tensor:
    """scale·Σ a·z[step] over ``bands`` for whole groups: a float64 tensor that the thread's next call overwrites."""
    v = _scratch.views.get(groups)
    if v is None:
        v = _scratch.views[groups] = _Views(_scratch, groups)
    for number, (step, coefficient) in enumerate(bands):
        _fill_words(subkey, first_group * GROUP_BLOCKS, groups * GROUP_BLOCKS, step)
        v.uniform.copy_(v.own_words)  # signed
        # u is near 0 or 1 where the word, as a signed number, is near either end.
        rare = torch.nonzero(torch.ge(torch.abs(v.radius, out=v.size), _RARE_SIZE, out=v.near).view(-1)).view(-1)
        torch.bitwise_right_shift(v.halves.copy_(v.half_words), _HALVES, out=v.bits).bitwise_and_(_OWN)
        v.low.copy_(v.bits_of_pairs)
        torch.bitwise_right_shift(v.last.copy_(v.last_word), _SHARED, out=v.shared).bitwise_and_(_COMMON)
        torch.addcmul(_STARTS, v.start.copy_(v.shared), _UNITS, out=v.start)
        # u, and v (less 1 from ½ on), exactly
        torch.add(v.start, v.uniform, alpha=2.0**-32, out=v.uniform).add_(v.low, alpha=2.0**-42)
        v.radius.log_().mul_(-2.0).sqrt_()
        for index in rare.tolist():
            _refine(subkey, first_group, groups, step, v, index)
        v.angle.mul_(_TURN)
        torch.cos(v.angle, out=v.cosine)
        v.angle.sin_()
        v.radius.mul_(coefficient)
        if number == 0:
            torch.mul(v.cosine, v.radius, out=v.x)
            torch.mul(v.angle, v.radius, out=v.y)
        else:
            v.x.addcmul_(v.cosine, v.radius)
            v.y.addcmul_(v.angle, v.radius)
    torch.mul(v.total, scale, out=v.places)
    return v.ordered


def _refine(subkey: bytes, first_group: int, groups: int, step: int, v: _Views, index: int) -> None:
    """The radius of one pair whose uniform is near 0 or 1: 128 more bits, from a block of its own."""
    pair, block = divmod(index, groups * GROUP_BLOCKS)
    group, lane = divmod(block, GROUP_BLOCKS)
    own = int(v.own_words[0, pair, group, lane]) + (1 << 31)
    if own == RARE:  # as a signed number as large as the least rare one of the other sign
        return
    at = first_group * GROUP_BLOCKS + block
    out = bytearray(64)
    tail = (at & 0xFFFFFFFF, (at >> 32) | MORE | pair << 28, step & 0xFFFFFFFF, step >> 32)
    keystream_into(subkey, tail, _ZEROS[:64], out)
    further = 0.5
    for word in reversed(struct.unpack("<4I", out[:16])):
        further = (word + further) * 2.0**-32
    if own < RARE:
        logarithm = math.log((own + further) * 2.0**-32)
    else:
        logarithm = math.log1p(-((1 << 32) - 1 - own + further) * 2.0**-32)
    v.radius[pair, group, lane] = math.sqrt(-2.0 * logarithm)


def _fill_words(subkey: bytes, block: int, count: int, step: int) -> None:
    out, zeros = memoryview(_scratch.bytes), memoryview(_ZEROS)
    done = 0
    while done < count:
        low, high = (block + done) & 0xFFFFFFFF, (block + done) >> 32
        take = min(count - done, (1 << 32) - low)  # a run never carries out of the 32-bit word 12
        tail = (low, high, step & 0xFFFFFFFF, step >> 32)
        keystream_into(subkey, tail, zeros[: 64 * take], out[64 * done : 64 * (done + take)])
        done += take


def apply(jobs: Sequence[Job], subkey: bytes, bands: Bands, scale: float, lattice: float, *, read: bool = True) -> bool:
    """target = source + scale·Σ a·z on the lattice (or the noise alone if not ``read``).

    Returns:
        Whether all results are finite.
    """

    def work(piece: Piece) -> bool:
        with torch.no_grad():
            noise = combined(subkey, piece.first_group, piece.groups, bands, scale)
            return all([_add(part, noise, piece.first_group, lattice, read) for part in piece.parts])

    cut = pieces(jobs)
    threads = torch.get_num_threads()
    if threads == 1 or len(cut) == 1:
        return all([work(piece) for piece in cut])
    return all(list(_pool(os.getpid(), threads).map(work, cut)))


def _add(part: tuple[Job, int, int], noise: torch.Tensor, first_group: int, lattice: float, read: bool) -> bool:
    job, begin, end = part
    skip = job.offset - (first_group - job.entry.first_block // GROUP_BLOCKS) * GROUP_ELEMENTS
    finite = True
    for a in range(begin, end, _SERIAL):
        b = min(a + _SERIAL, end)
        for source, target, values in _views(job.source, job.target, a, b, noise[skip + a : skip + b]):
            if read:
                values.add_(source).add_(lattice).sub_(lattice)  # in float64: only lattice points become float32
                low, high = torch.aminmax(values)
                limit = torch.finfo(target.dtype).max
                finite &= -limit <= float(low) and float(high) <= limit
            target.copy_(values)
    return finite


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


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One for each process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="lambdacgd-noise")
