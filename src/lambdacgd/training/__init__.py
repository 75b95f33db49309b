"""Private training that drops into any PyTorch loop: `privatize` binds a Plan to model, optimizer and dataset."""

from lambdacgd.training.errors import CheckpointError, TrainingError
from lambdacgd.training.private import Epoch, Private
from lambdacgd.training.privatize import NotPrivateWarning, privatize
from lambdacgd.training.spent import Spent

__all__ = ["CheckpointError", "Epoch", "NotPrivateWarning", "Private", "Spent", "TrainingError", "privatize"]
