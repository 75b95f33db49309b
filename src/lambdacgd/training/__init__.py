"""Private training that drops into any PyTorch loop: `privatize` binds a Plan to model, optimizer and dataset."""

from lambdacgd.errors import CheckpointError, NotPrivateWarning, TrainingError
from lambdacgd.training.card import Spent
from lambdacgd.training.export import export
from lambdacgd.training.loop import EMA, Epoch
from lambdacgd.training.noiser import Noiser
from lambdacgd.training.privatize import Private, privatize

__all__ = [
    "EMA", "CheckpointError", "Epoch", "Noiser", "NotPrivateWarning", "Private", "Spent", "TrainingError", "export",
    "privatize",
]  # fmt: skip
