"""What must not happen in training, each with what to do instead; and the warning of runs that claim nothing."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """The loop did something that private training cannot allow. Nothing was released; the message says what to do."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written, or must not be resumed from; the message says what differs."""


class NotPrivateWarning(UserWarning):
    """The run claims nothing: ε = inf (no noise, no clipping), or a σ that is only an estimate."""
