"""Images from random processes, drawn by a program: no photograph, nothing of any data set, is in them.

Dead leaves (Lee, Mumford and Huang, 2001): shapes of sizes that follow a power law cover each other. Here each shape
(an ellipse, a rectangle or a half plane cut from one, turned) has two colours and an oriented grating between them, and
noise whose power falls with frequency lies over the whole. Baradad et al. (2021) learn features from such images, and
Tang et al. (2023) use features learnt so for private learning.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dead_leaves(count: int, size: int = 40, *, leaves: int = 32, generator: torch.Generator) -> Tensor:
    """``count`` images [count, 3, size, size] as bytes, on the generator's device.

    Args:
        count: How many.
        size: Height and width in pixels.
        leaves: How many shapes are painted, one over the other.
        generator: Where randomness comes from.
    """
    device = generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, 1, 1, generator=generator, device=device)

    place = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) / size
    y, x = place.view(1, 1, size, 1), place.view(1, 1, 1, size)
    # Colours of one image are alike, and grey before they are colourful.
    palette, contrast = 0.5 + 0.18 * normal(1) + 0.09 * normal(3), 0.2 + 0.6 * uniform(1)
    tint = uniform(1)

    def colour() -> Tensor:
        return palette + contrast * (0.5 * normal(1) + tint * 0.3 * normal(3))

    image = colour().expand(count, 3, size, size).clone()
    for _ in range(leaves):
        radius = 0.07 / (1 - uniform(1) * (1 - 0.07 / 0.7))  # density r^−2 between .07 and .7
        turn, stretch = math.pi * uniform(1), 0.35 + 0.65 * uniform(1)
        dx, dy = x - (1.2 * uniform(1) - 0.1), y - (1.2 * uniform(1) - 0.1)
        u = (dx * turn.cos() + dy * turn.sin()) / radius
        v = (dy * turn.cos() - dx * turn.sin()) / (radius * stretch)
        kind = uniform(1)
        power = torch.where(kind < 0.5, 2.0, torch.where(kind < 0.8, 8.0, 1.0))  # ellipse, rectangle, rhombus
        inside = u.abs() ** power + v.abs() ** power
        cut = (u + 0.6 * normal(1) > 0) | (uniform(1) < 0.6)
        edge = (size * radius * 0.5) * (1 - inside) + 0.5
        mask = edge.clamp(0, 1) * cut
        waves = torch.exp(uniform(1) * math.log(size / 4))
        angle = math.pi * uniform(1)
        phase = 2 * math.pi * (waves * (x * angle.cos() + y * angle.sin()) + uniform(1))
        sharp = torch.tanh(phase.sin() * (0.5 + 4 * uniform(1))) * (uniform(1) < 0.5)
        shade = 0.12 * normal(1) * u.clamp(-1, 1)
        first, second = colour(), colour()
        filled = first + (second - first) * (0.5 + 0.5 * sharp) * uniform(1) + shade
        image += mask * (filled - image)
    image += 0.15 * uniform(1) ** 2 * _falling(count, size, generator)
    return (image.clamp(0, 1) * 255).to(torch.uint8)


def _falling(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Noise whose amplitude falls as one over frequency, of standard deviation one; colours partly alike."""
    device = generator.device
    white = torch.randn(count, 3, size, size, generator=generator, device=device)
    white = white + 1.5 * torch.randn(count, 1, size, size, generator=generator, device=device)
    down, across = torch.fft.fftfreq(size, device=device), torch.fft.rfftfreq(size, device=device)
    frequency = (down.view(-1, 1).square() + across.square()).sqrt().clamp_min(1 / size)
    noise = torch.fft.irfft2(torch.fft.rfft2(white) / frequency, s=(size, size))
    out: Tensor = noise / noise.std((1, 2, 3), keepdim=True)
    return out
