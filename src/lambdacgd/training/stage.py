"""The noise that a plan asks for, over a layout: regenerated where the mechanism allows it, buffered where not."""

from __future__ import annotations

from lambdacgd.keys import SecretKey
from lambdacgd.noise import BufferedNoise, Layout, NoiseField, RegeneratedNoise
from lambdacgd.planning import Plan

NoiseStage = RegeneratedNoise | BufferedNoise


def noise_stage(plan: Plan, key: SecretKey, *, run_id: str, layout: Layout, max_grad_norm: float) -> NoiseStage:
    """Noise of standard deviation ζσ on sums, correlated by the plan's mechanism, over the plan's horizon.

    With fresh bins the noise restarts at every epoch's first step, as the plan's accounting assumes.
    """
    field = NoiseField(key, layout, run_id=run_id)
    kind = RegeneratedNoise if plan.mechanism.regenerates(plan.block.steps) else BufferedNoise
    return kind.of(
        field,
        plan.mechanism,
        sigma=plan.sigma,
        clip=max_grad_norm,
        horizon=plan.steps,
        restart_every=plan.restart_every,
    )
