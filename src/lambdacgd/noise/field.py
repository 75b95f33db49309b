"""The noise field: z[step, element], standard normal, a pure function of the secret key and the run id.

Two classes correlate it over steps: ``RegeneratedNoise`` computes the past again, ``BufferedNoise`` stores it. The last
part of this file computes the field on a CPU. It is also the oracle of the GPU's kernel.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import torch

from lambdacgd.errors import NonFiniteSum
from lambdacgd.keys import SecretKey, keystream_into
from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy, BufferedToeplitz, Mechanism, Recurrence
from lambdacgd.noise.cuda import CudaBackend, Launch
from lambdacgd.noise.layout import (
    FINENESS,
    GROUP_BLOCKS,
    GROUP_ELEMENTS,
    MORE,
    PAIRS,
    RARE,
    Combination,
    Job,
    Layout,
    Offsets,
    Tensors,
    combined_scale,
    match,
)
from lambdacgd.torch_private import (
    foreach_add_,
    foreach_div_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_zero_,
)

Bands = Sequence[tuple[int, float]]  #: (field step, coefficient) pairs
Vectors = list[torch.Tensor]  # one tensor for each tensor of the layout, in its order


class NoiseError(RuntimeError):
    """Noise that must not be given: a step outside the run, or the same noise under other terms."""


class NoiseField:
    """z[t, i] for every step t ≥ 1 and every element i of a layout.

    Guarantee
    ---------
    Without the key, the field is computationally indistinguishable from independent standard normals (as far as
    ChaCha20 and BLAKE2b are secure), rounded: a pair of values with radius r lies within about 2⁻⁴⁷ of the real-valued
    one, has 102 random bits, 22 of them shared by the six pairs of a ChaCha20 block, and reaches 14 σ. Runs with
    different run ids have independent fields. The CPU and CUDA agree to 2⁻⁴⁸r + 2⁻⁴⁹/r; one backend gives the same bits
    every time. What is released is sum plus noise on a public lattice, which hides the rest: `docs/noise-proof.md` says
    what that costs.
    """

    def __init__(self, key: SecretKey, layout: Layout, *, run_id: str) -> None:
        if not isinstance(key, SecretKey):
            raise TypeError(f"key is a {type(key).__name__}; it must be a SecretKey")
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is a {type(layout).__name__}; build one with Layout.of or Layout.of_parameters")
        if not isinstance(run_id, str) or not run_id:
            raise ValueError(f"run_id is {run_id!r}; it must be a string, new for every run (ledger.new_run())")
        self.layout = layout
        self.run_id = run_id
        self._subkey = key.derive("run", run_id, "noise")
        self._process = os.getpid()
        self._terms: tuple[Recurrence, Combination] | None = None
        self._devices: dict[torch.device, CudaBackend] = {}
        self._bad = False
        self._seen: tuple[Any, ...] | None = None  # the last CUDA tensors' fingerprint, and their launches
        self._launches: list[tuple[CudaBackend, list[Launch]]] = []

    def agree(self, recurrence: Recurrence, combination: Combination) -> None:
        """Noise and its later cancellation are one function: a field serves one set of terms, fixed at first use.

        And one process: a forked child is a second copy of the run, whose sums would get the same noise.
        """
        if os.getpid() != self._process:
            raise NoiseError("this process was forked from the one that trains: add noise in one process only")
        if self._terms is None:
            self._terms = recurrence, combination
        elif self._terms != (recurrence, combination):
            raise NoiseError("this field's noise is already in use with another σ, ζ or mechanism: start a new run")

    def apply(
        self, jobs: Sequence[Job], combination: Combination, step: int | torch.Tensor, *, read: bool = True
    ) -> None:
        """Add the combination at this step to every job's tensor (write the noise alone if not ``read``)."""
        direct = [job for job in jobs if is_direct(job)]
        for job in jobs:
            if not is_direct(job):  # by a copy, one tensor after the other
                near = job.tensor.device if job.tensor.device.type == "cuda" else "cpu"
                copied = job.tensor.to(near, memory_format=torch.contiguous_format, copy=True)
                self.apply([Job(job.entry, copied, job.offset)], combination, step, read=read)
                job.tensor.copy_(copied)
        for backend, launches in self._prepared([job for job in direct if job.tensor.device.type == "cuda"]):
            backend.launch(launches, combination, step, read=read)
        if on_cpu := [job for job in direct if job.tensor.device.type == "cpu"]:
            if isinstance(step, torch.Tensor):
                raise TypeError("a step in device memory is for CUDA tensors; give the step as an int")
            numbers = combination.bands(step), combination.scale_at(step), combination.lattice_at(step)
            self._bad |= not add_on_cpu(on_cpu, self._subkey, *numbers, read=read)

    def _prepared(self, jobs: Sequence[Job]) -> list[tuple[CudaBackend, list[Launch]]]:
        """Launches for contiguous CUDA tensors, by device."""
        shares = [(d, [job for job in jobs if job.tensor.device == d]) for d in {job.tensor.device for job in jobs}]
        return [(self.backend(device), self.backend(device).prepare(mine)) for device, mine in shares]

    def add_(self, sums: Tensors, offsets: Offsets, combination: Combination, step: int | torch.Tensor) -> None:
        """Check the tensors and add the combination at this step. CUDA tensors that have not moved are known again.

        A model has hundreds of tensors, and checking each anew would take the host longer than the noise the device.
        """
        seen = _fingerprint(sums, offsets)
        if seen is None:
            return self.apply(match(self.layout, sums, offsets=offsets), combination, step)
        if seen != self._seen or not all(launch.current for _, launches in self._launches for launch in launches):
            jobs = match(self.layout, sums, offsets=offsets)
            self._seen = None
            self._launches = self._prepared(jobs)
            self._seen = seen
        for backend, launches in self._launches:
            backend.launch(launches, combination, step)

    def backend(self, device: torch.device) -> CudaBackend:
        """This field's share on a CUDA device, made when it is first asked for."""
        if device not in self._devices:
            self._devices[device] = CudaBackend(self._subkey, device)
        return self._devices[device]

    def flag(self, results: Sequence[torch.Tensor]) -> None:
        """Remember whether all results are finite: on CUDA in device memory, without waiting for it."""
        for device in {result.device for result in results if result.numel()}:
            norms = foreach_norm([r for r in results if r.device == device and r.numel()], float("inf"))
            bad = ~torch.isfinite(torch.stack([norm.float() for norm in norms])).all()
            if device.type == "cuda":
                self.backend(device).flags.bitwise_or_(bad.to(torch.int32))
            else:
                self._bad |= bool(bad)

    def check(self) -> None:
        """Raise ``NonFiniteSum`` if a sum noised since the last check was not finite."""
        bits, self._bad = int(self._bad), False
        for backend in self._devices.values():
            bits |= backend.read_flags()
        if bits & 2:
            raise NoiseError("the step counter in device memory left the run (1 … horizon); the results are NaN")
        if bits & 1:
            raise NonFiniteSum("a clipped sum holds a NaN or an infinity, so this step is refused: look for overflow")

    def __repr__(self) -> str:
        return f"<NoiseField run {self.run_id}, layout {self.layout.digest[:8]}, {self.layout.elements} elements>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a NoiseField holds a sub-key and cannot be pickled or copied; build it again from the key")


def _fingerprint(sums: Tensors, offsets: Offsets) -> tuple[Any, ...] | None:
    """All that a launch depends on, without keeping a tensor alive; None unless all are plain, contiguous, on CUDA."""
    seen: list[Any] = []
    for name, tensor in sums.items():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cuda and not tensor.is_sparse
        if not plain or not tensor.is_contiguous():
            return None
        seen.append((name, tensor.data_ptr(), tensor.shape, tensor.dtype))
    return tuple(seen), None if offsets is None else tuple(offsets.items())


UNIT = Combination(coefficients=(1.0,), scale=1.0, horizon=1 << 62)


class CorrelatedNoise:
    """Noise of standard deviation ζσ, correlated by C⁻¹, over a fixed horizon. See the two subclasses.

    Args:
        field: The run's noise field. It serves one set of terms, fixed at first use.
        recurrence: How x = C⁻¹z is computed.
        sigma: σ, relative to the clipping norm; 0 means no noise.
        clip: The clipping norm ζ.
        horizon: How many steps the run has.
        column_scales: d_1 … d_n of a column-normalised mechanism.
        restart_every: With b, the noise restarts at steps 1, b+1, 2b+1, …
        fineness: Sum plus noise is released in multiples of Δ_t, the least power of two above 2^−fineness of
            ζσd_t. What is claimed depends on it: ``accounting.floating_point`` says how.

    Raises:
        TypeError: The recurrence's past cannot be computed in this way.
        ValueError: A number is out of its range.
    """

    serves: tuple[type, ...] = ()  #: the recurrences that it computes

    def __init__(
        self,
        field: NoiseField,
        recurrence: Recurrence,
        *,
        sigma: float,
        clip: float,
        horizon: int,
        column_scales: Sequence[float] | np.ndarray | None = None,
        restart_every: int | None = None,
        fineness: int = FINENESS,
    ) -> None:
        if not isinstance(recurrence, self.serves):
            wrong = f"{type(self).__name__} does not serve the recurrence {type(recurrence).__name__}"
            raise TypeError(f"{wrong}: RegeneratedNoise or BufferedNoise does")
        self.field, self.recurrence, self.horizon = field, recurrence, horizon
        self._combination = Combination(
            tuple(map(float, recurrence.coefficients)) if isinstance(recurrence, BandedInverse) else (),
            combined_scale(sigma, clip),
            horizon,
            None if column_scales is None else tuple(map(float, column_scales)),
            restart_every,
            fineness,
        )

    @classmethod
    def of(
        cls, field: NoiseField, mechanism: Mechanism, *, horizon: int, restart_every: int | None = None, **terms: Any
    ) -> Self:
        """The noise of a mechanism, which gives recurrence and column scales, over each stretch between restarts.

        The rest, ``sigma`` and ``clip`` among it, is as for the constructor.
        """
        steps = restart_every or horizon
        recurrence, scales = mechanism.recurrence(steps), mechanism.column_scales(steps)
        return cls(field, recurrence, horizon=horizon, column_scales=scales, restart_every=restart_every, **terms)

    @torch.no_grad()
    def add_(self, sums: Tensors, step: int | torch.Tensor, *, offsets: Offsets = None, check: bool = True) -> None:
        """Add step t's noise to the sums in place.

        Args:
            sums: float32 or float64 tensors named as in the layout.
            step: The step of the run, from 1 to the horizon. For CUDA graphs (regenerated noise, ``check=False``) it
                may be an int64 tensor of one element on the device; outside 1 … n it yields NaN.
            offsets: For each tensor that is a shard, the row-major index of its first element in the whole tensor.
            check: Read the flag that a sum which is not finite sets while it is read. On CUDA this waits for the
                device; with ``check=False`` call ``check()`` before the weights change.

        Raises:
            LayoutError: A tensor is missing, unknown, or of another shape. Nothing was written.
            TypeError: A tensor's type does not fit. Nothing was written.
            NoiseError: The step is outside the run, or the field is in use under other terms. Nothing was written.
            NonFiniteSum: A sum held a NaN or an infinity. The results must not reach the weights.
        """
        if isinstance(step, torch.Tensor):
            if step.dtype != torch.int64 or step.numel() != 1 or step.device.type != "cuda":
                raise TypeError(f"a step in device memory is one int64 on CUDA, not {step.dtype} {tuple(step.shape)}")
        elif isinstance(step, bool) or not isinstance(step, (int, np.integer)):
            raise TypeError(f"step is {step!r}; it must be an integer")
        elif not 1 <= step <= self.horizon:
            raise NoiseError(f"step {step} is outside the run's 1 … {self.horizon}: more steps need a new plan")
        else:
            step = int(step)
        self.field.agree(self.recurrence, self._combination)
        self._add(step, sums, offsets)
        if check:
            self.check()

    def _add(self, step: int | torch.Tensor, sums: Tensors, offsets: Offsets) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raise ``NonFiniteSum`` if a sum noised since the last check was not finite."""
        self.field.check()


class RegeneratedNoise(CorrelatedNoise):
    """Adds ζσ·d_t·Σ_{j<p} a_j z[t−j] to clipped sums, for any mechanism whose C⁻¹ has p bands, and stores nothing.

    The arguments are those of ``CorrelatedNoise``; all of them are fixed for the run.

    Guarantee
    ---------
    Step t's noise is the same function of the same arguments whenever and wherever it is asked for: resumed, sharded,
    in another order. What is cancelled at step t+1 is exactly what was added at step t. No memory of the gradient's
    size is allocated, but for a copy of a tensor that is not contiguous. A step beyond the horizon, and the same field
    under other terms, are refused.
    """

    serves = (BandedInverse,)

    def _add(self, step: int | torch.Tensor, sums: Tensors, offsets: Offsets) -> None:
        self.field.add_(sums, offsets, self._combination, step)


class BufferedNoise(CorrelatedNoise):
    """Adds ζσ·d_t·x_t to clipped sums, x = C⁻¹z by the mechanism's recurrence, from stored vectors.

    It is for mechanisms whose past cannot be computed again from the last few fields.
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


# --- On a CPU: keystream from OpenSSL, the Gaussian transform by torch in float64, in pieces that stay in cache -------

_GROUPS = 160  # groups of a piece: 61 440 elements, in arrays of 240 KiB: smaller ones would queue for Python's lock
_SERIAL = 1 << 15  # torch spreads a call over threads of its own beyond this many elements; our threads are enough
_ZEROS = bytes(64 * GROUP_BLOCKS * _GROUPS)
_TURN = 2.0 * math.pi


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
        done, count = 0, job.tensor.numel()
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


def is_direct(job: Job) -> bool:
    """Whether the noise is added to the job's tensor where it is."""
    return job.tensor.device.type in ("cpu", "cuda") and job.tensor.is_contiguous()


def add_on_cpu(
    jobs: Sequence[Job], subkey: bytes, bands: Bands, scale: float, lattice: float, *, read: bool = True
) -> bool:
    """Add scale·Σ a·z to contiguous tensors, on the lattice (write the noise alone if not ``read``).

    Returns:
        Whether all results are finite.
    """

    def work(piece: Piece) -> bool:
        with torch.no_grad():
            noise = combined(subkey, piece.first_group, piece.groups, bands, scale)
            return all([_add_part(part, noise, piece.first_group, lattice, read) for part in piece.parts])

    cut = pieces(jobs)
    threads = torch.get_num_threads()
    if threads == 1 or len(cut) <= 1:
        return all([work(piece) for piece in cut])
    running = [_pool(os.getpid(), threads).submit(work, piece) for piece in cut]
    try:
        return all([each.result() for each in running])
    finally:  # whoever drops these sums after Ctrl-C may be sure that no thread writes them any more
        for each in running:
            each.cancel()
        wait(running)


def _add_part(part: tuple[Job, int, int], noise: torch.Tensor, first_group: int, lattice: float, read: bool) -> bool:
    job, begin, end = part
    skip = job.offset - (first_group - job.entry.first_block // GROUP_BLOCKS) * GROUP_ELEMENTS
    target = job.tensor.view(-1)
    finite = True
    for a in range(begin, end, _SERIAL):
        b = min(a + _SERIAL, end)
        values = noise[skip + a : skip + b]
        if read:
            values.add_(target[a:b]).add_(lattice).sub_(lattice)  # in float64: only lattice points become float32
            low, high = torch.aminmax(values)
            limit = torch.finfo(target.dtype).max
            finite &= -limit <= float(low) and float(high) <= limit
        target[a:b].copy_(values)
    return finite


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One for each process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="lambdacgd-noise")
