"""Moved to `lambdacgd.errors`."""

from lambdacgd.errors import CheckpointError, NotPrivateWarning, TrainingError

__all__ = ["CheckpointError", "NotPrivateWarning", "TrainingError"]
