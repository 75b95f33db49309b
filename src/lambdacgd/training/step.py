"""One private step, from the plan's batch to the gradient that the optimizer sees. Read this file first.

    batch  = the plan's own examples of step t              `PrivateStep.batches`      (sampling)
    sums   = Σ_i clip(g_i, ζ)                                `clipper.gathered`         (clipping, in backward passes)
    sums   = added up over all processes                     `all_reduce_`              (distributed)
    sums  += ζσ · (C⁻¹z)_t, for λCGD ζσ · (z_t − λ·z_{t−1})  `PrivateStep.add_noise_`   (noise, computed from the key)
    p.grad = sums / plan.batch_size                          `PrivateStep.write`        (then the optimizer acts)

Every path goes through here: the hooks in the user's loop (`loop`, which decides what may happen when), the captured
step (`captured`), `Noiser`, and, by way of the loop, the integrations.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lambdacgd.accounting.certificate import set_aside
from lambdacgd.accounting.floating_point import FloatingPointCost, cover
from lambdacgd.clipping import Clipper
from lambdacgd.errors import InvalidInput
from lambdacgd.noise import BufferedNoise, Layout, NoiseField, NonFiniteSum, RegeneratedNoise
from lambdacgd.noise.layout import FINENESS
from lambdacgd.planning import Plan
from lambdacgd.torch_private import dtensor_like, foreach_div_
from lambdacgd.training.distributed.models import is_sharded, local
from lambdacgd.training.distributed.reduction import ShardedTotals, all_reduce_
from lambdacgd.training.run import Run


class PrivateStep:
    """The steps of one run: a plan, the run's key and id, and the clipping norm ζ, all fixed.

    Guarantee
    ---------
    If a batch is that of ``batches`` and its sums hold each of its examples at most once with norm at most ζ over all
    tensors together, and no other data, then what ``add_noise_`` makes of them over the run is (ε, δ)-DP as the plan
    says, as the floating-point numbers that they are (`docs/noise-proof.md`). Everything after it only post-processes.
    The noise of a step is a function of the key, the run, the step and the element, so the same on any number of
    processes.
    """

    def __init__(
        self, plan: Plan, run: Run, layout: Layout | None, *, max_grad_norm: float, shards: ShardedTotals | None = None
    ) -> None:
        """``layout`` names the tensors of the sums and their shapes. Set it later where the first sums tell it."""
        self.plan, self.run, self.layout, self.max_grad_norm, self.shards = plan, run, layout, max_grad_norm, shards
        self._reduces = run.world.many and shards is None  # sums of sharded models are reduced in the backward pass
        self._offsets = None if shards is None else shards.offsets  # where each shard begins in the noise field
        self._divisor = plan.batch_size
        # Whether a step can be done again on the same sums: others have not received them, and noise has no buffers.
        self._repeats = not run.world.many and plan.sigma > 0 and plan.mechanism.regenerates(plan.block.steps)
        self._noise: RegeneratedNoise | BufferedNoise | None = None

    def batches(self, start: int) -> Iterator[NDArray[np.int64]]:
        """The indices of the examples of step ``start``, of the step after it, and so on to the plan's last."""
        return self.plan.sampling.batches(self.run.key, run=self.run.id, start_step=start)

    @torch.no_grad()
    def __call__(self, clipper: Clipper, step: int | Tensor, *, check: bool = True) -> None:
        """Turn the sums that the clipper has gathered of the step's whole batch into gradients, noised once.

        With ``check`` it raises ``NonFiniteSum`` before the weights change. On CUDA the host then waits for the norms
        where the sums follow from them alone (`BackwardPass.hopes`), elsewhere for the noised sums. Without, ``step``
        may be an int64 tensor of one element on CUDA, for graphs.
        """
        late = check and self._repeats and clipper.hopes
        if not late:
            clipper.settle()
        sums = clipper.gathered()  # Σ_i clip(g_i, ζ)
        if self._reduces:
            all_reduce_(sums, int(step), self.run.world)  # over all processes
        self.add_noise_(sums, step, check=check and not late)  # + ζσ · (C⁻¹z)_t
        self.write(clipper.parameters, sums)  # p.grad = sums / plan.batch_size
        if late and not clipper.stands():  # the sums are formed again, and nobody has seen the first ones
            for p in clipper.parameters.values():
                p.grad = None  # it lies where they are formed, without noise
            clipper.settle()
            with contextlib.suppress(NonFiniteSum):
                self.noise.check()
            return self(clipper, step)
        clipper.zero()

    def add_noise_(self, sums: Mapping[str, Tensor], step: int | Tensor, *, check: bool = True) -> None:
        """Add the plan's noise of this step, ζσ · (C⁻¹z)_t, to the sums in place."""
        if self.plan.sigma:
            self.noise.add_(sums, step, offsets=self._offsets, check=check)
        elif check and not all(math.isfinite(float(total.sum())) for total in sums.values()):
            raise NonFiniteSum("a gradient sum holds a NaN or an infinity, so this step is refused: look for overflow")

    def write(self, parameters: Mapping[str, nn.Parameter], sums: dict[str, Tensor]) -> None:
        """Divide by the expected batch size and write ``p.grad``, in the parameter's dtype, device and strides.

        A gradient is the clipper's own buffer, by an alias that counts its own in-place changes: the next backward pass
        writes the buffer again, and only ``zero_grad`` writes the alias.
        """
        foreach_div_(list(sums.values()), self._divisor)
        for name, p in parameters.items():
            sharded = self.shards is not None and is_sharded(p)
            own = local(p) if sharded else p
            gradient = sums[name].data
            if gradient.dtype != own.dtype or gradient.device != own.device:
                gradient = gradient.to(device=own.device, dtype=own.dtype)
            if gradient.stride() != own.stride():  # channels_last: fused optimizers walk both through memory together
                gradient = torch.empty_like(own.detach()).copy_(gradient)
            p.grad = dtensor_like(gradient, p) if sharded else gradient

    @property
    def noise(self) -> RegeneratedNoise | BufferedNoise:
        """The plan's noise over the layout, made when it is first needed: it asks for the run's id, which starts a run.

        Regenerated where the mechanism allows it, buffered where not. With fresh bins it restarts at every epoch's
        first step, as the plan's accounting assumes.
        """
        if self._noise is None:
            plan = self.plan
            assert self.layout is not None
            field = NoiseField(self.run.key, self.layout, run_id=self.run.id)
            kind = RegeneratedNoise if plan.mechanism.regenerates(plan.block.steps) else BufferedNoise
            self._noise = kind.of(
                field,
                plan.mechanism,
                sigma=plan.sigma,
                clip=self.max_grad_norm,
                horizon=plan.steps,
                restart_every=plan.restart_every,
                fineness=FINENESS if self.floating_point is None else self.floating_point.fineness,
            )
        return self._noise

    @property
    def floating_point(self) -> FloatingPointCost | None:
        """What floating point takes of the plan's ε and δ for this many parameters; None where nothing is claimed."""
        assert self.layout is not None
        return floating_point_of(self.plan, self.layout.elements)

    def forget(self) -> None:
        """Let go of the noise and its buffers: they are made anew from the key, at whatever step comes next."""
        self._noise = None


def check_is_plan(plan: Any) -> None:
    """Before anything reads it."""
    if not isinstance(plan, Plan):
        raise InvalidInput.of_type("plan", plan, "a Plan (lc.plan(…) makes one, Plan.load reads one)")


def check_plan(plan: Any) -> None:
    """Refuse what is no plan, a changed one, or one of an earlier release that claims less."""
    check_is_plan(plan)
    plan.check()
    aside = plan.certificate.details.get("floating_point")
    covered = math.isinf(plan.epsilon) or aside == set_aside(plan.epsilon, plan.delta)
    if plan.certificate.kind != "bound" or not covered:
        old = "It is of an earlier release: its σ is an estimate that claims nothing, or it sets no ε and δ aside"
        raise InvalidInput("plan", f"{old} for floating point. Make it again with lc.plan.")


def floating_point_of(plan: Plan, parameters: int) -> FloatingPointCost | None:
    """What floating point takes of a plan's ε and δ, and the lattice on which sums plus noise are released; None where
    nothing is claimed. ``parameters`` is how many trainable numbers the model has.

    Raises:
        InvalidInput: The plan has set too little aside for so many, or its noise is so small beside a sum of all
            examples that float64 cannot hold both.
    """
    if not math.isfinite(plan.epsilon):
        return None
    scales = plan.mechanism.column_scales(plan.block.steps)
    least = plan.sigma * (1.0 if scales is None else float(np.min(scales)))
    if plan.examples > 2.0**29 * least:
        large = f"A sum of {plan.examples} examples can be more than 2^29 times the noise of a step, {least:.2g} ζ"
        raise InvalidInput("plan", f"{large}, too much for float64. Plan for a smaller ε.")
    return cover(
        plan.mechanism,
        steps=plan.steps,
        restart_every=plan.restart_every,
        parameters=parameters,
        epsilon=plan.epsilon,
        delta=plan.delta,
    )
