"""Fixed features of images, all of whose numbers come from images that a program drew: no photograph, no training.

Every patch of an image is compared with patches of drawn images, whitened by the covariance of the drawn ones, and what
is far enough on either side is kept, as Coates and Ng (2011) do with patches of photographs. Means over the quarters of
an image and its mirror image, beside wavelet scattering, are numbers whose principal components over drawn images are
scaled to nearly the same deviation. So a gradient is no longer spent on what all images share, and noise is not added
to what hardly any has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reproduce.random_images import dead_leaves
from reproduce.scattering import Scattering

_SEED, _SIZE = 20261119, 32
_AT_A_TIME, _DRAWN_AT_A_TIME = 64, 512


@dataclass(frozen=True)
class Kind:
    """How features are made.

    Attributes:
        filters: Patches of each size that an image is compared with.
        sizes: Their heights and widths.
        threshold: What a patch must be alike to be counted, in standard deviations.
        drawn: How many images are drawn for means, deviations and components.
        kept: Principal components that are kept, the largest first.
        power: Components are divided by their variance to this power; ½ makes all alike.
    """

    filters: int
    drawn: int = 8192
    kept: int = 4096
    sizes: tuple[int, ...] = (6,)
    threshold: float = 0.8
    power: float = 0.4


KINDS = {
    "patches": Kind(4096),
    "wide": Kind(16_384, drawn=12_288, kept=8192),
    "few": Kind(16, drawn=48, kept=32),  # for quick versions
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


class Components(nn.Module):
    """Numbers [n, d], standardised over ``rows``, to the principal components of those.

    Args:
        rows: Of drawn images; they are overwritten.
        kept: How many components.
        power: Each is divided by its variance to this power.
        scale: How much each number counts; by default all alike. All components are then multiplied by one number, so
            that their mean square over ``rows`` is one.
    """

    def __init__(self, rows: Tensor, kept: int, power: float, scale: Tensor | None = None) -> None:
        super().__init__()
        self.mean = nn.Buffer(rows.mean(0), persistent=False)
        each = (1 if scale is None else scale) / (rows.sub_(self.mean).std(0) + 1e-4)
        rows *= each
        n, d = rows.shape
        values, vectors = torch.linalg.eigh((rows.T @ rows if d <= n else rows @ rows.T) / n)
        values, vectors = values.flip(0)[:kept].clamp_min(1e-12), vectors.flip(1)[:, :kept]
        if d > n:
            vectors = rows.T @ vectors * torch.rsqrt(n * values)
        divisors = (values + 1e-3 * values[0]) ** power
        divisors *= (values / divisors.square()).mean().sqrt()
        self.weights = nn.Buffer(each.unsqueeze(1) * vectors / divisors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) @ self.weights


class DrawnFeatures(nn.Module):
    """Images [n, 3, 32, 32] in [−1, 1] to [n, kept] numbers of mean square one over drawn images. It has no parameters.

    Args:
        kind: How they are made.
        device: Where.
    """

    def __init__(self, kind: Kind, device: torch.device) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator(device).manual_seed(_SEED)
        counts = [min(_DRAWN_AT_A_TIME, kind.drawn - i) for i in range(0, kind.drawn, _DRAWN_AT_A_TIME)]
        drawn = torch.cat([dead_leaves(count, _SIZE, generator=generator) for count in counts])
        few = _numbers(drawn[:2048])
        self.scattering = Scattering().to(device)
        self.patches = nn.ModuleList([Patches(few, kind.filters, size, generator) for size in kind.sizes])
        made = [self._parts(_numbers(images)) for images in drawn.split(_AT_A_TIME)]
        rows = torch.cat([torch.cat(parts, 1) for parts in made])
        weights = (1.0, *(2 / len(kind.sizes) ** 0.5 for _ in kind.sizes))
        scales = [
            torch.full((part.shape[1],), w / part.shape[1] ** 0.5) for part, w in zip(made[0], weights, strict=True)
        ]
        self.components = Components(rows, kind.kept, kind.power, torch.cat(scales).to(device))

    def _parts(self, images: Tensor) -> list[Tensor]:
        both = zip(self._half(images), self._half(images.flip(3)), strict=True)
        return [((a + b) / 2).flatten(1) for a, b in both]

    def _half(self, images: Tensor) -> list[Tensor]:
        parts = [F.adaptive_avg_pool2d(self.scattering(images), 4)]
        for patches in self.patches:
            maps = patches(images)
            means = quarters(maps.shape[2]).to(images.device)
            parts += [torch.cat([F.relu(side * maps.flatten(2) - self.kind.threshold) @ means for side in (1, -1)], 1)]
        return parts

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.components(torch.cat(self._parts(x), 1)) for x in images.split(_AT_A_TIME)])


def quarters(size: int) -> Tensor:
    """A matrix [size², 4] that takes means over the quarters of a square; they overlap where its size is odd."""
    return F.adaptive_avg_pool2d(torch.eye(size * size).unflatten(1, (size, size)), 2).flatten(1)


def _numbers(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1
