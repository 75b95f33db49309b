"""What ``lambdacgd train`` can train: a data set, a small model, and settings that work to begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lambdacgd.digits import model as digits_model
from reproduce.data import Splits, cifar10, digits, imdb


@dataclass(frozen=True)
class Task:
    """A data set with a model. The numbers are defaults; learning rates are for SGD on mean gradients.

    They are for λCGD with fresh bins, which is what ``lambdacgd train`` plans by default: of digits the best on a
    validation split at ε = 2 (results/demo_tuning.json), of cifar10 the best at ε = 2 and 4; at ε = 8 twice the
    learning rate is better, at ε = 1 a third of it (results/methods-cifar).
    """

    name: str
    load: Callable[[Path | None], Splits]
    model: Callable[[], nn.Module]
    epochs: int
    batch_size: int
    delta: float
    learning_rate: float
    max_grad_norm: float
    about: str


def cifar10_model() -> nn.Sequential:
    """Six 3×3 convolutions with GroupNorm (no affine) and a linear layer: 3→32→32→64→64→128→128, pooled thrice."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=False),
                nn.GroupNorm(8, width, affine=False),
                nn.ReLU(),
            ]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))


class BagOfWords(nn.Module):
    """The mean of the words' embeddings, then one hidden layer. Padding does not count."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=imdb.PADDING)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = (tokens != imdb.PADDING).unsqueeze(-1)
        mean = (self.embedding(tokens) * seen).sum(1) / seen.sum(1).clamp_min(1)
        out: Tensor = self.output(torch.relu(self.hidden(mean)))
        return out


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "digits", digits.load, digits_model, 2, 8, 1e-4, 0.25, 1.0, "1 437 handwritten digits of 8×8; no download"
        ),
        Task("cifar10", cifar10.load, cifar10_model, 10, 128, 1e-5, 1.0, 0.3, "50 000 small photographs"),
        Task(
            "imdb",
            imdb.load,
            lambda: BagOfWords(imdb.VOCABULARY, 32, 2),
            10,
            128,
            1e-5,
            2.0,
            1.0,
            "25 000 film reviews",
        ),
    )
}
