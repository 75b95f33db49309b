"""What must not happen in training, each with what to do instead; and the warning of runs that claim nothing."""

from __future__ import annotations

import warnings

from lambdacgd.planning import Plan


class TrainingError(RuntimeError):
    """The loop did something that private training cannot allow. Nothing was released; the message says what to do."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written, or must not be resumed from; the message says what differs."""


class NotPrivateWarning(UserWarning):
    """The run claims nothing: ε = inf (no noise, no clipping), or a σ that is only an estimate."""


def check_claim(plan: Plan) -> None:
    """Refuse a changed plan; say it loudly where σ is a point estimate, whose card will claim nothing."""
    plan.check()
    if plan.certificate.kind != "bound":
        warnings.warn(
            "NOT CERTIFIED: the plan's σ is a point estimate, so nothing may be claimed about this run. Make the plan "
            "without estimate=True before training on data that needs protection",
            NotPrivateWarning,
            stacklevel=3,
        )
