"""The noise field on the CPU: keystream from OpenSSL, Gaussian transform in float64, in pieces that stay in cache.

The transform runs in double precision and is rounded once, so this backend is also the oracle for the others.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lambdacgd.keys import keystream_into
from lambdacgd.noise.layout import GROUP_BLOCKS, GROUP_ELEMENTS, PAIRS, RARE, SECOND, Job

_GROUPS = 192  # groups of a piece: 61 440 elements, in arrays of 240 KiB: smaller ones would queue for Python's lock
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
        self.sources = words[:PAIRS], words[PAIRS : 2 * PAIRS], words[2 * PAIRS : 15], words[15]
        self.blocks = words.permute(1, 2, 0)
        count = PAIRS * groups * GROUP_BLOCKS
        shape = (PAIRS, groups, GROUP_BLOCKS)
        self.low, self.turn_low, self.shared, self.bits = (array[:count].view(shape) for array in scratch.integers)
        self.last = scratch.last[: groups * GROUP_BLOCKS].view(shape[1:])
        self.near = scratch.near[:count].view(shape)
        self.radius, self.angle, self.high, self.cosine = (array[:count].view(shape) for array in scratch.arrays)
        self.x, self.y = (scratch.total[j * count : (j + 1) * count].view(shape) for j in (0, 1))
        self.ordered = scratch.ordered[: 2 * count]
        numbers = self.ordered.view(groups, 2, PAIRS, GROUP_BLOCKS)
        self.places = numbers[:, 0].transpose(0, 1), numbers[:, 1].transpose(0, 1)


class _Scratch(threading.local):
    """Each thread's own buffers, about 4 MiB, made once."""

    def __init__(self) -> None:
        self.bytes = bytearray(len(_ZEROS))
        self.words = torch.frombuffer(self.bytes, dtype=torch.int32)
        pairs = _GROUPS * PAIRS * GROUP_BLOCKS
        self.integers = [torch.empty(pairs, dtype=torch.int32) for _ in range(4)]
        self.last = torch.empty(_GROUPS * GROUP_BLOCKS, dtype=torch.int32)
        self.near = torch.empty(pairs, dtype=torch.bool)
        self.arrays = [torch.empty(pairs, dtype=torch.float64) for _ in range(4)]
        self.total = torch.empty(2 * pairs, dtype=torch.float64)
        self.ordered = torch.empty(2 * pairs, dtype=torch.float64)
        self.views: dict[int, _Views] = {}


_scratch = _Scratch()
_TOP = -(1 << 31)  # as an int32: the highest bit
_SHIFTS = torch.arange(0, 6 * PAIRS, 6, dtype=torch.int32).view(PAIRS, 1, 1)
_RADIUS_START = torch.tensor(2.0**-21 + 2.0**-53, dtype=torch.float64)  # undoes the flipped bit, and half a cell
_TURN_START = torch.tensor(2.0**-19 + 2.0**-51 - 0.5, dtype=torch.float64)  # and from the middle of the turn


def combined(subkey: bytes, first_group: int, groups: int, bands: Bands, scale: float) -> torch.Tensor:
    """scale·Σ a·z[step] over ``bands`` for whole groups: a float64 tensor that the thread's next call overwrites."""
    v = _scratch.views.get(groups)
    if v is None:
        v = _scratch.views[groups] = _Views(_scratch, groups)
    v.x.zero_()
    v.y.zero_()
    for step, coefficient in bands:
        _fill_words(subkey, first_group * GROUP_BLOCKS, groups * GROUP_BLOCKS, step)
        for part, source in zip((v.low, v.turn_low, v.shared, v.last), v.sources, strict=True):
            part.copy_(source)
        # int32 is signed: with the highest bit flipped, a word is its value minus 2³¹, which the constants add again.
        v.radius.copy_(v.low.bitwise_xor_(_TOP))
        v.angle.copy_(v.turn_low.bitwise_xor_(_TOP))
        torch.bitwise_right_shift(v.shared, 12, out=v.low)
        torch.add(v.low, RARE, out=v.bits).bitwise_and_(-2 * RARE)  # 0 for −32 … 31: u near 0 or, signed, near 1
        rare = torch.nonzero(torch.eq(v.bits, 0, out=v.near).view(-1)).view(-1)
        v.high.copy_(v.low.bitwise_and_(0xFFFFF))
        # u = ((X >> 12)·2³² + R + ½)/2⁵², exactly
        torch.add(_RADIUS_START, v.radius, alpha=2.0**-52, out=v.radius).add_(v.high, alpha=2.0**-20)
        v.radius.log_().mul_(-2.0).sqrt_()
        for index in rare.tolist():
            _refine(subkey, first_group, groups, step, v, index)
        # v − ½ with v = (2⁴⁴e + 2³²(X mod 2¹²) + A + ½)/2⁵⁰, exactly. Half a turn changes the sign of cosine and sine.
        torch.bitwise_right_shift(v.last, _SHIFTS, out=v.bits)
        v.bits.bitwise_and_(63).bitwise_left_shift_(12).bitwise_or_(v.shared.bitwise_and_(0xFFF))
        v.high.copy_(v.bits)
        torch.add(_TURN_START, v.angle, alpha=2.0**-50, out=v.angle).add_(v.high, alpha=2.0**-18).mul_(_TURN)
        torch.cos(v.angle, out=v.cosine)
        v.angle.sin_()
        v.radius.mul_(-coefficient)
        v.x.addcmul_(v.cosine, v.radius)
        v.y.addcmul_(v.angle, v.radius)
    for place, part in zip(v.places, (v.x, v.y), strict=True):
        torch.mul(part, scale, out=place)
    return v.ordered


def _refine(subkey: bytes, first_group: int, groups: int, step: int, v: _Views, index: int) -> None:
    """The radius of one pair whose uniform is near 0 or 1: 84 more bits, from the second block."""
    pair, block = divmod(index, groups * GROUP_BLOCKS)
    group, lane = divmod(block, GROUP_BLOCKS)
    words = [int(word) & 0xFFFFFFFF for word in v.blocks[group, lane].tolist()]
    at = first_group * GROUP_BLOCKS + block
    out = bytearray(64)
    tail = (at & 0xFFFFFFFF, (at >> 32) | SECOND, step & 0xFFFFFFFF, step >> 32)
    keystream_into(subkey, tail, _ZEROS[:64], out)
    second = struct.unpack("<16I", out)
    m = (words[2 * PAIRS + pair] >> 12) << 32 | words[pair]
    more = (second[2 * PAIRS + pair] >> 12) << 32 | second[pair]
    further = (more + (second[PAIRS + pair] + 0.5) * 2.0**-32) * 2.0**-52
    if m < 1 << 51:
        logarithm = math.log((m + further) * 2.0**-52)
    else:
        logarithm = math.log1p(-((1 << 52) - 1 - m + further) * 2.0**-52)
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
    return all(list(_pool(threads).map(work, cut)))


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


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # by process and size: a forked child has none of these threads


def _pool(threads: int) -> ThreadPoolExecutor:
    which = os.getpid(), threads
    if which not in _pools:
        _pools[which] = ThreadPoolExecutor(threads, thread_name_prefix="lambdacgd-noise")
    return _pools[which]
