"""The one error of this package's own: a training step that must not happen, with what to do instead."""


class TrainingError(RuntimeError):
    """The loop did something that private training cannot allow. Nothing was released; the message says what to do."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written, or must not be resumed from; the message says what differs."""
