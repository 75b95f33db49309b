"""What a data set is here: training and test examples in memory, and where its files are looked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lambdacgd.validation import InvalidInput


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and labels in memory, read singly or many at once. Images kept as bytes become float32 when read."""

    def __init__(self, inputs: Tensor, labels: Tensor, *, shift: float = 0.0, scale: float = 1.0) -> None:
        if len(inputs) != len(labels):
            raise InvalidInput("labels", len(labels), f"there must be one for each of the {len(inputs)} inputs")
        self.inputs, self.labels, self.shift, self.scale = inputs, labels, shift, scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._numbers(self.inputs[index]), self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        chosen = torch.as_tensor(indices)
        return list(zip(self._numbers(self.inputs[chosen]).unbind(0), self.labels[chosen].unbind(0), strict=True))

    def _numbers(self, x: Tensor) -> Tensor:
        return x.float().sub_(self.shift).mul_(self.scale) if x.dtype == torch.uint8 else x

    def part(self, indices: Tensor | slice) -> Examples:
        """Some of the examples, in the order given."""
        return Examples(self.inputs[indices], self.labels[indices], shift=self.shift, scale=self.scale)


@dataclass(frozen=True)
class Splits:
    """Training and test examples of one data set."""

    train: Examples
    test: Examples
    classes: int


def missing(name: str, folder: Path | None, layouts: str, library: str) -> InvalidInput:
    """The error of a data set that is neither here nor can be fetched."""
    where = "nothing was given" if folder is None else str(folder)
    return InvalidInput(
        "data",
        where,
        f"{name} was not found there. Give --data DIR with {layouts}; or install {library} to download it",
    )
