"""Fixed features of images, all of whose numbers come from images that a program drew: no photograph, no training.

A layer compares every patch of an image with patches of drawn images, whitened by the covariance of the drawn ones, and
keeps what is far enough on either side, as Coates and Ng (2011) do with patches of photographs; a second layer may do
the same with the maps of a first. Sums over a grid, of an image and its mirror image, beside smoothed wavelet
scattering, are numbers, whose principal components over drawn images are scaled to nearly the same deviation. So a
gradient is no longer spent on what all images share, and noise is not added to what hardly any has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reproduce.random_images import dead_leaves
from reproduce.scattering import Scattering

_SEED, _SIZE = 20261119, 32


@dataclass(frozen=True)
class Kind:
    """How features are made.

    Attributes:
        filters: Patches that an image is compared with.
        deep: Patches that maps of a small first layer are compared with; 0 is no second layer.
        grid: Sums are taken over so many by so many parts of the image.
        drawn: How many images are drawn for means, deviations and components.
        kept: Principal components that are kept, the largest first.
        power: Components are divided by their variance to this power; ½ makes all alike.
    """

    filters: int
    deep: int = 0
    grid: int = 2
    drawn: int = 8192
    kept: int = 4096
    power: float = 0.4


KINDS = {
    "patches": Kind(4096),
    "wide": Kind(16_384, drawn=12_288, kept=8192),
    "deep": Kind(4096, deep=4096, drawn=12_288, kept=8192),
    "few": Kind(8, deep=8, drawn=48, kept=32),  # for quick versions
}


class Patches(nn.Module):
    """Maps [n, c, h, w] to [n, filters, h − size + 1, w − size + 1]: how alike each patch is to some whitened ones.

    Args:
        maps: What patches are drawn from, of drawn images.
        filters: How many are kept.
        size: Their height and width.
        generator: Where they are drawn by.
        ridge: What is added to the eigenvalues of their covariance, whose mean is one.
    """

    def __init__(self, maps: Tensor, filters: int, size: int, generator: torch.Generator, ridge: float = 0.01) -> None:
        super().__init__()
        high, wide = (length - size + 1 for length in maps.shape[2:])
        rounds = -(-max(4 * filters, 100_000) // len(maps))
        down, right = (torch.randint(n, (rounds,), generator=generator, device=maps.device) for n in (high, wide))
        places = zip(down.tolist(), right.tolist(), strict=True)
        rows = torch.cat([maps[:, :, i : i + size, j : j + size].flatten(1) for i, j in places])
        rows = rows - rows.mean(1, keepdim=True)
        self.floor = 0.1 * float(rows.square().mean())
        rows = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + self.floor)
        values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
        whitening = vectors * torch.rsqrt(values.clamp_min(0) + ridge) @ vectors.T
        chosen = rows[torch.randperm(len(rows), generator=generator, device=maps.device)[:filters]] @ whitening
        weights = F.normalize(chosen, dim=1) @ whitening
        weights = weights - weights.mean(1, keepdim=True)  # so that a patch's own mean does not count
        self.size = size
        self.register_buffer("weights", weights.unflatten(1, (maps.shape[1], size, size)), persistent=False)
        self.weights: Tensor

    def forward(self, maps: Tensor) -> Tensor:
        mean, square = (F.avg_pool2d(x.mean(1, keepdim=True), self.size, 1) for x in (maps, maps.square()))
        return F.conv2d(maps, self.weights) * torch.rsqrt((square - mean.square()).clamp_min(0) + self.floor)


def far(maps: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """What is above the threshold, and what is below minus the threshold."""
    return F.relu(maps - threshold), F.relu(-maps - threshold)


class First(nn.Module):
    """What a second layer reads: 64 components of the maps of a first one and of colours, at every second pixel."""

    def __init__(self, images: Tensor, generator: torch.Generator, filters: int = 64, kept: int = 64) -> None:
        super().__init__()
        self.patches = Patches(images, filters, 5, generator)
        rows = self._maps(images).permute(0, 2, 3, 1).flatten(0, 2)
        self.components = Components(rows, kept, 0.35)

    def _maps(self, images: Tensor) -> Tensor:
        return F.avg_pool2d(torch.cat([*far(self.patches(images), 0.5), F.avg_pool2d(images, 5, 1)], 1), 2)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.components(self._maps(images).movedim(1, -1)).movedim(-1, 1)
        return out


class Components(nn.Module):
    """Standardised numbers [..., d] to principal components of ``rows`` [n, d], scaled by a power of their variance."""

    def __init__(self, rows: Tensor, kept: int, power: float, parts: tuple[tuple[int, float], ...] = ()) -> None:
        super().__init__()
        self.mean = nn.Buffer(rows.mean(0), persistent=False)
        scale = 1 / (rows.std(0) + 1e-4)
        if parts:
            scale *= torch.cat([torch.full((n,), weight / n**0.5, device=rows.device) for n, weight in parts])
        rows = (rows - self.mean) * scale
        n, d = rows.shape
        values, vectors = torch.linalg.eigh((rows.T @ rows if d <= n else rows @ rows.T) / n)
        values, vectors = values.flip(0)[:kept].clamp_min(1e-12), vectors.flip(1)[:, :kept]
        if d > n:
            vectors = rows.T @ vectors * torch.rsqrt(n * values)
        weights = vectors * (values + 1e-3 * values[0]) ** -power
        self.weights = nn.Buffer(scale.unsqueeze(1) * weights, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) @ self.weights


class DrawnFeatures(nn.Module):
    """Images [n, 3, 32, 32] in [−1, 1] to [n, kept] numbers of mean square about one. It has no parameters.

    Args:
        kind: How they are made.
        device: Where.
        at_a_time: How many images.
    """

    def __init__(self, kind: Kind, device: torch.device, at_a_time: int = 256) -> None:
        super().__init__()
        self.kind, self.at_a_time = kind, at_a_time
        generator = torch.Generator(device).manual_seed(_SEED)
        counts = [min(at_a_time, kind.drawn - i) for i in range(0, kind.drawn, at_a_time)]
        drawn = torch.cat([dead_leaves(count, _SIZE, generator=generator) for count in counts])
        few = _numbers(drawn[:2048])
        self.scattering = Scattering().to(device)
        self.patches = Patches(few, kind.filters, 6, generator)
        self.first = self.second = None
        if kind.deep:
            self.first = First(few, generator)
            self.second = Patches(self.first(few), kind.deep, 3, generator, ridge=0.05)
        rows, parts = [], ()
        for images in drawn.split(at_a_time):
            made = self._raw(_numbers(images))
            rows.append(torch.cat(made, 1))
        weights = (1.0, 2.0, 2.0)
        parts = tuple((part.shape[1], weight) for part, weight in zip(made, weights, strict=False))
        self.components = Components(torch.cat(rows), kind.kept, kind.power, parts)
        size = torch.cat([self.components(part).square().mean(1) for part in rows]).mean()
        self.components.weights *= torch.rsqrt(size)

    def _raw(self, images: Tensor) -> list[Tensor]:
        both = zip(self._half(images), self._half(images.flip(3)), strict=True)
        return [((a + b) / 2).flatten(1) for a, b in both]

    def _half(self, images: Tensor) -> list[Tensor]:
        parts = [F.adaptive_avg_pool2d(self.scattering(images), 4)]
        parts.append(self._pooled(self.patches(images)))
        if self.first is not None and self.second is not None:
            parts.append(self._pooled(self.second(self.first(images))))
        return parts

    def _pooled(self, maps: Tensor) -> Tensor:
        return torch.cat([F.adaptive_avg_pool2d(side, self.kind.grid) for side in far(maps, 0.8)], 1)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        parts = [self.components(torch.cat(self._raw(x), 1)) for x in images.split(self.at_a_time)]
        return torch.cat(parts)


def _numbers(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1
