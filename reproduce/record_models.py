"""The models of ``record``: heads over fixed features, and a WideResNet with weight standardisation.

Normalisation is GroupNorm or LayerNorm within an example. Nothing here keeps a statistic of the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH = 16.0  # of the features that a linear head sees


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

    def __init__(self, inner: int, outer: int, stride: int, conv: type[nn.Conv2d], groups: int) -> None:
        super().__init__()
        self.conv1 = conv(inner, outer, 3, stride=stride, padding=1)
        self.conv2 = conv(outer, outer, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(groups, outer), nn.GroupNorm(groups, outer)
        same = inner == outer and stride == 1
        self.short = nn.Identity() if same else conv(inner, outer, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(F.relu(self.conv1(x)))
        out: Tensor = self.norm2(F.relu(self.conv2(h))) + self.short(x)
        return out


class WideResNet(nn.Module):
    """WideResNet-``depth``-``width`` for 32×32 images: weight standardisation, order convolution, ReLU, GroupNorm.

    ``stages`` gives the maps behind each of its three stages.
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 4,
        classes: int = 10,
        *,
        conv: type[nn.Conv2d] = StandardConv2d,
        groups: int = 16,
    ) -> None:
        super().__init__()
        blocks, inner = (depth - 4) // 6, 16
        self.stem, self.first = conv(3, inner, 3, padding=1), nn.GroupNorm(min(groups, inner), inner)
        parts: list[nn.Module] = []
        for stage, outer in enumerate((16 * width, 32 * width, 64 * width)):
            of_stage: list[nn.Module] = []
            for i in range(blocks):
                of_stage.append(Block(inner, outer, 2 if stage and i == 0 else 1, conv, groups))
                inner = outer
            parts.append(nn.Sequential(*of_stage))
        self.parts, self.norm, self.head = nn.Sequential(*parts), nn.GroupNorm(groups, inner), nn.Linear(inner, classes)

    def stages(self, x: Tensor) -> list[Tensor]:
        h = self.first(F.relu(self.stem(x)))
        out = []
        for part in self.parts:
            h = part(h)
            out.append(h)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.stages(x)[-1]).mean((2, 3)))
        return out


def plain(model: WideResNet, depth: int = 16, width: int = 4, classes: int = 10) -> WideResNet:
    """The same function with plain convolutions, whose weights are the standardised ones; a new output layer."""
    other = WideResNet(depth, width, classes, conv=nn.Conv2d, groups=model.norm.num_groups)
    state = {
        name: standardised(value) if value.dim() == 4 else value
        for name, value in model.state_dict().items()
        if not name.startswith("head.")
    }
    other.load_state_dict(state, strict=False)
    return other


class ScatteringLinear(nn.Module):
    """A linear layer over normalised scattering maps, which begins at zero. 155 530 parameters."""

    def __init__(self, numbers: int = 243 * 8 * 8, classes: int = 10) -> None:
        super().__init__()
        self.output = nn.Linear(numbers, classes)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(_of_length(x.flatten(1).float()))
        return out


def _of_length(x: Tensor) -> Tensor:
    """Make normalised numbers a vector of length ``LENGTH``, in place: so heads of any width learn at like rates."""
    return x.mul_(LENGTH / math.sqrt(x.shape[1]))


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


class PriorLinear(nn.Module):
    """Each part of the features normalised within an example, then a linear layer that begins at zero.

    Args:
        parts: How many numbers each part has; of further numbers behind them none is read.
        classes: How many classes.
    """

    def __init__(self, parts: tuple[int, ...], classes: int = 10) -> None:
        super().__init__()
        self.parts = parts
        self.output = nn.Linear(sum(parts), classes)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(_of_length(_normalised(x, self.parts)))
        return out


def _normalised(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    given = x[:, : sum(parts)].float().split(parts, 1)
    return torch.cat([F.layer_norm(part, part.shape[1:]) for part in given], 1)


class PriorMLP(nn.Module):
    """As `PriorLinear`, with one hidden layer."""

    def __init__(self, parts: tuple[int, ...], hidden: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.parts = parts
        self.hidden, self.output = nn.Linear(sum(parts), hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.hidden(_normalised(x, self.parts)))
        out: Tensor = self.output(F.layer_norm(h, h.shape[1:]))
        return out
