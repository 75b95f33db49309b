"""The noise field: z[step, element], standard normal, a pure function of the secret key and the run id.

Two classes correlate it over steps: ``RegeneratedNoise``, here, computes the past again; ``BufferedNoise`` stores it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import numpy as np
import torch

from lambdacgd.errors import NonFiniteSum
from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import BandedInverse, Mechanism, Recurrence
from lambdacgd.noise import cpu
from lambdacgd.noise.cuda import CudaBackend, Launch
from lambdacgd.noise.layout import FINENESS, Combination, Job, Layout, Offsets, Tensors, combined_scale, match
from lambdacgd.torch_private import foreach_norm

_log = logging.getLogger(__name__)
_told: set[str] = set()


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
            raise ValueError(
                f"run_id is {run_id!r}; it must be a non-empty string, new for every run (ledger.new_run())"
            )
        self.layout = layout
        self.run_id = run_id
        self._subkey = key.derive("run", run_id, "noise")
        self._process = os.getpid()
        self._terms: tuple[Recurrence, Combination] | None = None
        self._devices: dict[torch.device, CudaBackend] = {}
        self._bad = False
        self._seen: tuple[Any, ...] | None = None  # the last CUDA tensors' fingerprint, and their launches
        self._launches: list[tuple[CudaBackend, list[Launch]]] = []

    def fill_(self, tensors: Tensors, step: int, *, offsets: Offsets = None) -> None:
        """Overwrite the tensors with z[step]: for tests. Sums get their noise from RegeneratedNoise or BufferedNoise.

        Args:
            tensors: float32 or float64 tensors named as in the layout.
            step: Which of the field's steps, from 1.
            offsets: For each tensor that is a shard, the row-major index of its first element in the whole tensor.

        Raises:
            ValueError: ``step`` is not an integer from 1, or a tensor does not fit the layout.
            TypeError: A tensor is of another type.
        """
        if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < 1 << 62:
            raise ValueError(f"step is {step!r}; steps count from 1")
        self.apply(match(self.layout, tensors, offsets=offsets), UNIT, step, read=False)

    def agree(self, recurrence: Recurrence, combination: Combination) -> None:
        """Noise and its later cancellation are one function: a field serves one set of terms, fixed at first use.

        And one process: a forked child is a second copy of the run, whose sums would get the same noise.
        """
        if os.getpid() != self._process:
            raise NoiseError(
                "this process was forked from the one that trains, so both would put the same noise on their sums, "
                "and none would be left in the difference. Add noise in one process only; one that holds shards builds "
                "its own field"
            )
        if self._terms is None:
            self._terms = recurrence, combination
        elif self._terms != (recurrence, combination):
            raise NoiseError(
                "this field's noise is already in use with another σ, ζ, mechanism, horizon or lattice: asking for it "
                "again would release two sums under one noise vector. Start a new run (a new run id) for other settings"
            )

    def apply(
        self, jobs: Sequence[Job], combination: Combination, step: int | torch.Tensor, *, read: bool = True
    ) -> None:
        """target = source + the combination at this step (the noise alone if not ``read``) for every job."""
        for device in {job.source.device for job in jobs}:
            mine = [job for job in jobs if job.source.device == device]
            if device.type == "cuda":
                backend = self.backend(device)
                backend.launch(backend.prepare(mine), combination, step, read=read)
                continue
            if isinstance(step, torch.Tensor):
                raise TypeError("a step in device memory is for CUDA tensors; give the step as an int")
            numbers = combination.bands(step), combination.scale_at(step), combination.lattice_at(step)
            if device.type == "cpu":
                self._bad |= not cpu.apply(mine, self._subkey, *numbers, read=read)
            else:
                self._by_copy(mine, numbers, read)

    def add_(
        self,
        sums: Tensors,
        out: Tensors | None,
        offsets: Offsets,
        combination: Combination,
        step: int | torch.Tensor,
    ) -> None:
        """Check the tensors and add the combination at this step. CUDA tensors that have not moved are known again.

        A model has hundreds of tensors, and checking each anew would take the host longer than the noise the device.
        """
        seen = _fingerprint(sums, out, offsets)
        known = seen is not None and seen == self._seen
        if not known or not all(launch.current for _, launches in self._launches for launch in launches):
            jobs = match(self.layout, sums, out=out, offsets=offsets)
            if seen is None or any(job.source.device.type != "cuda" for job in jobs):
                return self.apply(jobs, combination, step)
            self._seen = None
            devices = {job.source.device for job in jobs}
            shares = [(self.backend(d), [job for job in jobs if job.source.device == d]) for d in devices]
            self._launches = [(backend, backend.prepare(mine)) for backend, mine in shares]
            self._seen = seen
        for backend, launches in self._launches:
            backend.launch(launches, combination, step)

    def _by_copy(self, jobs: Sequence[Job], numbers: tuple[cpu.Bands, float, float], read: bool) -> None:
        kind = jobs[0].source.device.type
        if kind not in _told:
            _told.add(kind)
            _log.warning("no noise kernel for device type %r: computing noise on the CPU and copying it", kind)
        for job in jobs:
            wide = job.source.cpu()
            result = torch.empty(job.target.shape, dtype=job.target.dtype)
            self._bad |= not cpu.apply([Job(job.entry, wide, result, job.offset)], self._subkey, *numbers, read=read)
            job.target.copy_(result)

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
        bits = 0
        for backend in self._devices.values():
            bits |= backend.read_flags()
        bad, self._bad = self._bad, False
        if bits & 2:
            raise NoiseError("the step counter in device memory left the run (1 … horizon); the results are NaN")
        if bad or bits & 1:
            raise NonFiniteSum(
                "a clipped sum holds a NaN or an infinity, so this step is refused: do not apply it to the weights. "
                "Look for overflow in the loss or the model (a lower learning rate, a wider dtype)"
            )

    def __repr__(self) -> str:
        return f"<NoiseField run {self.run_id}, layout {self.layout.digest[:8]}, {self.layout.elements} elements>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a NoiseField holds a sub-key and cannot be pickled or copied; build it again from the key")


def _fingerprint(sums: Tensors, out: Tensors | None, offsets: Offsets) -> tuple[Any, ...] | None:
    """All that a launch depends on, without keeping any tensor alive; None for tensors that are not plain CUDA ones."""
    seen: list[Any] = []
    for tensors in (sums, {} if out is None else out):
        for name, tensor in tensors.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cuda or tensor.is_sparse:
                return None
            seen.append((name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype))
    return (len(sums), tuple(seen), None if offsets is None else tuple(offsets.items()))


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
        """The noise of a mechanism over this horizon (or over each stretch between restarts).

        Args:
            field, horizon, restart_every: As for the constructor.
            mechanism: Gives the recurrence and the column scales.
            **terms: Further arguments of the constructor, ``sigma`` and ``clip`` among them.

        Returns:
            The noise, ready for ``add_``.

        Raises:
            TypeError: The mechanism's past cannot be computed in this way.
            ValueError: A number is out of its range.
        """
        steps = restart_every or horizon
        recurrence, scales = mechanism.recurrence(steps), mechanism.column_scales(steps)
        return cls(field, recurrence, horizon=horizon, column_scales=scales, restart_every=restart_every, **terms)

    @torch.no_grad()
    def add_(
        self,
        sums: Tensors,
        step: int | torch.Tensor,
        *,
        out: Tensors | None = None,
        offsets: Offsets = None,
        check: bool = True,
    ) -> None:
        """Add step t's noise to the sums in place, or write sum + noise to ``out`` (then the sums keep their values).

        Args:
            sums: float32 or float64 tensors named as in the layout.
            step: The step of the run, from 1 to the horizon. For CUDA graphs (regenerated noise, ``check=False``) it
                may be an int64 tensor of one element on the device; outside 1 … n it yields NaN.
            out: Where the results go: float32, float64 or bfloat16 tensors, rounded once after the noise.
            offsets: For each tensor that is a shard, the row-major index of its first element in the whole tensor.
            check: Read the flag that a sum which is not finite sets while it is read. On CUDA this waits for the
                device; with ``check=False`` call ``check()`` before the weights change.

        Raises:
            LayoutError: A tensor is missing, unknown, or of another shape. Nothing was written.
            TypeError: A tensor's type does not fit. Nothing was written.
            NoiseError: The step is outside the run, or the field is in use under other terms. Nothing was written.
            NonFiniteSum: A sum held a NaN or an infinity. The results must not reach the weights.
        """
        if not isinstance(step, torch.Tensor):
            step = self._checked(step)
        elif step.dtype != torch.int64 or step.numel() != 1 or step.device.type != "cuda":
            raise TypeError(f"a step in device memory is one int64 on CUDA, not {step.dtype} {tuple(step.shape)}")
        self.field.agree(self.recurrence, self._combination)
        self._add(step, sums, out, offsets)
        if check:
            self.check()

    def _add(self, step: int | torch.Tensor, sums: Tensors, out: Tensors | None, offsets: Offsets) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raise ``NonFiniteSum`` if a sum noised since the last check was not finite."""
        self.field.check()

    def _checked(self, step: int) -> int:
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)):
            raise TypeError(f"step is {step!r}; it must be an integer")
        if not 1 <= step <= self.horizon:
            raise NoiseError(
                f"step {step} is outside the run's 1 … {self.horizon}. The horizon is fixed by the plan: "
                f"more steps need a new plan"
            )
        return int(step)


class RegeneratedNoise(CorrelatedNoise):
    """Adds ζσ·d_t·Σ_{j<p} a_j z[t−j] to clipped sums, for any mechanism whose C⁻¹ has p bands, and stores nothing.

    The arguments are those of ``CorrelatedNoise``; all of them are fixed for the run.

    Guarantee
    ---------
    Step t's noise is the same function of the same arguments whenever and wherever it is asked for: resumed, sharded,
    in another order. What is cancelled at step t+1 is exactly what was added at step t. No memory of the gradient's
    size is allocated. A step beyond the horizon, and the same field under other terms, are refused.
    """

    def __init__(self, field: NoiseField, recurrence: Recurrence, **terms: Any) -> None:
        if not isinstance(recurrence, BandedInverse):
            raise TypeError(
                f"{type(recurrence).__name__} needs its past outputs, which cannot be computed again from the last few "
                f"fields; use BufferedNoise"
            )
        super().__init__(field, recurrence, **terms)

    def _add(self, step: int | torch.Tensor, sums: Tensors, out: Tensors | None, offsets: Offsets) -> None:
        self.field.add_(sums, out, offsets, self._combination, step)
