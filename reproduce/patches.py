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

_SEED = 20261119
_IMAGE, _PATCH = 32, 6  # heights and widths
_FAR = 0.8  # what a patch must be alike to be counted, in about standard deviations
_WEIGHT = 2.0  # of patches beside scattering, whose numbers together have the variance one
_POWER = 0.4  # components are divided by their variance to this power; ½ would make all alike
_AT_A_TIME, _DRAWN_AT_A_TIME = 64, 512


@dataclass(frozen=True)
class Kind:
    """How features are made.

    Attributes:
        filters: Patches that an image is compared with.
        drawn: How many images are drawn for means, deviations and components.
        kept: Principal components that are kept, the largest first.
        exponent: Numbers are raised to this power, with their sign, before components are taken: ½ keeps the few places
            where an image is most like a patch from counting for all others, as in Fisher vectors.
    """

    filters: int
    drawn: int = 8192
    kept: int = 4096
    exponent: float = 1.0


KINDS = {
    "patches": Kind(4096),
    "wide": Kind(16_384, drawn=12_288, kept=8192),
    "roots": Kind(8192, kept=7168, exponent=0.5),
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
        self.exponent = kind.exponent
        generator = torch.Generator(device).manual_seed(_SEED)
        counts = [min(_DRAWN_AT_A_TIME, kind.drawn - i) for i in range(0, kind.drawn, _DRAWN_AT_A_TIME)]
        drawn = torch.cat([dead_leaves(count, _IMAGE, generator=generator) for count in counts])
        self.scattering = Scattering().to(device)
        self.patches = Patches(_numbers(drawn[:2048]), kind.filters, _PATCH, generator)
        self.means = nn.Buffer(quarters(_IMAGE - _PATCH + 1).to(device), persistent=False)
        rows = torch.cat([self._raw(_numbers(images)) for images in drawn.split(_AT_A_TIME)])
        patches = 2 * kind.filters * self.means.shape[1]
        scale = torch.full((rows.shape[1],), (rows.shape[1] - patches) ** -0.5, device=device)
        scale[-patches:] = _WEIGHT * patches**-0.5
        self.components = Components(rows, kind.kept, _POWER, scale)

    def _raw(self, images: Tensor) -> Tensor:
        both = (self._half(images) + self._half(images.flip(3))) / 2
        return both.sign() * both.abs() ** self.exponent

    def _half(self, images: Tensor) -> Tensor:
        maps = self.patches(images).flatten(2)
        sides = [F.relu(side * maps - _FAR) @ self.means for side in (1, -1)]
        return torch.cat(
            [F.adaptive_avg_pool2d(self.scattering(images), 4).flatten(1), *(x.flatten(1) for x in sides)], 1
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.components(self._raw(x)) for x in images.split(_AT_A_TIME)])


def quarters(size: int) -> Tensor:
    """A matrix [size², 4] that takes means over the quarters of a square; they overlap where its size is odd."""
    return F.adaptive_avg_pool2d(torch.eye(size * size).unflatten(1, (size, size)), 2).flatten(1)


def _numbers(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1
