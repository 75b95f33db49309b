"""What must not happen in training, each with what to do instead; and the warning of runs that claim nothing."""

from __future__ import annotations

import math
import warnings

from lambdacgd.errors import CheckpointError, NotPrivateWarning, TrainingError
from lambdacgd.planning import Plan

__all__ = ["CheckpointError", "NotPrivateWarning", "TrainingError", "check_claim"]


def check_claim(plan: Plan) -> None:
    """Refuse a changed plan; say it loudly where σ is an estimate, whose card will claim nothing, or δ above 1/N."""
    plan.check()
    if plan.certificate.kind != "bound":
        warnings.warn(
            "NOT CERTIFIED: the plan's σ is a point estimate, so nothing may be claimed about this run. Make the plan "
            "without estimate=True before training on data that needs protection",
            NotPrivateWarning,
            stacklevel=3,
        )
    elif plan.delta * plan.examples > 1 and plan.epsilon < math.inf:
        warnings.warn(
            f"δ = {plan.delta:g} is above 1/N = {1 / plan.examples:.2g}: such a δ allows publishing an example "
            "outright. Plan with one well below 1/N",
            stacklevel=3,
        )


def warn_of_noise_alone(dropped: int, examples: int, step: int) -> None:
    """Say it where not one example of a batch has a gradient: training would go on, and learn nothing."""
    if dropped >= examples > 0:
        warnings.warn(
            f"no example of step {step} has a finite gradient, so it adds noise and nothing else. Look for NaN and "
            "infinities in the data, the loss and the learning rate (steps are looked at once an epoch)",
            stacklevel=4,
        )
