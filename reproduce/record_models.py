"""The models of ``record``: heads over fixed features, and a WideResNet with weight standardisation.

Normalisation is GroupNorm or LayerNorm within an example. Nothing here keeps a statistic of the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 16.0  # of the features that a linear layer sees: so heads of any width learn at like rates


class StandardConv2d(nn.Conv2d):
    """A convolution by its weights less their mean, over their norm, for each output channel (Qiao et al., 2019).

    Clipping follows the parameters through that (docs/clipping.md, computed weights).
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, standardised(self.weight), self.bias)


def standardised(weight: Tensor) -> Tensor:
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    return centred * torch.rsqrt(centred.square().sum((1, 2, 3), keepdim=True) + 1e-6)


class Block(nn.Module):
    """Two convolutions, each with ReLU and then GroupNorm behind it, beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = StandardConv2d(inner, outer, 3, stride=stride, padding=1)
        self.conv2 = StandardConv2d(outer, outer, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(groups, outer), nn.GroupNorm(groups, outer)
        same = inner == outer and stride == 1
        self.short = nn.Identity() if same else StandardConv2d(inner, outer, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(F.relu(self.conv1(x)))
        out: Tensor = self.norm2(F.relu(self.conv2(h))) + self.short(x)
        return out


class WideResNet(nn.Module):
    """WideResNet-``depth``-``width`` for 32×32 images: weight standardisation, order convolution, ReLU, GroupNorm."""

    def __init__(self, depth: int = 16, width: int = 4, classes: int = 10, *, groups: int = 16) -> None:
        super().__init__()
        blocks, inner = (depth - 4) // 6, 16
        self.stem, self.first = StandardConv2d(3, inner, 3, padding=1), nn.GroupNorm(min(groups, inner), inner)
        parts: list[nn.Module] = []
        for stage, outer in enumerate((16 * width, 32 * width, 64 * width)):
            for i in range(blocks):
                parts.append(Block(inner, outer, 2 if stage and i == 0 else 1, groups))
                inner = outer
        self.parts, self.norm, self.head = nn.Sequential(*parts), nn.GroupNorm(groups, inner), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.norm(self.parts(self.first(F.relu(self.stem(x)))))
        out: Tensor = self.head(maps.mean((2, 3)))
        return out


class ScatteringLinear(nn.Module):
    """A linear layer over normalised scattering maps, which begins at zero. 155 530 parameters."""

    def __init__(self, numbers: int = 243 * 8 * 8, classes: int = 10) -> None:
        super().__init__()
        self.output = nn.Linear(numbers, classes)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).float()
        out: Tensor = self.output(x * (LENGTH / math.sqrt(x.shape[1])))
        return out


class ScatteringCNN(nn.Sequential):
    """Two convolutions with pooling between over normalised scattering maps, a linear layer. 187 210 parameters."""

    def __init__(self, channels: int = 243, classes: int = 10, width: int = 64) -> None:
        super().__init__(
            AsFloat(),
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GroupNorm(8, width, affine=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(8, width, affine=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * width, classes),
        )


class AsFloat(nn.Module):
    """Numbers kept in 16 bits as float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Head(nn.Module):
    """A linear layer that begins at zero, over the first numbers of an example, or over a hidden layer over them.

    Args:
        numbers: How many are read; of further ones behind them none is.
        hidden: Width of the hidden layer; 0 is none.
        classes: How many classes.
    """

    def __init__(self, numbers: int, hidden: int = 0, classes: int = 10) -> None:
        super().__init__()
        self.numbers = numbers
        self.hidden = nn.Linear(numbers, hidden) if hidden else None
        self.output = nn.Linear(hidden or numbers, classes)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.numbers].float()
        if self.hidden is not None:
            h = F.relu(self.hidden(x))
            x = F.layer_norm(h, h.shape[1:])
        out: Tensor = self.output(x * (LENGTH / math.sqrt(x.shape[1])))
        return out
