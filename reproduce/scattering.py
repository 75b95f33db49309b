"""Wavelet scattering of images (Bruna and Mallat, 2013): fixed features, no parameter of which ever saw an image.

An image is convolved with Morlet wavelets of 2^j pixels and L orientations, the modulus is taken, twice at most, and
everything is smoothed and subsampled by 2^J. A 32×32 channel becomes 81 maps of 8×8 (J = 2, L = 8), as Oyallon and
Mallat (2015) use it for CIFAR and Tramèr and Boneh (2021) for private learning. Convolutions are circular, on the
image padded by reflection, as products of Fourier transforms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _gabor(size: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A Gaussian of width σ (σ / slant across) times a plane wave, in space, circular: wrapped five times around."""
    rotation = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
    )
    curvature = rotation @ torch.diag(torch.tensor([1.0, slant**2], dtype=torch.float64)) @ rotation.T / (2 * sigma**2)
    out = torch.zeros(size, size, dtype=torch.complex128)
    for i in range(-2, 3):
        for j in range(-2, 3):
            x, y = torch.meshgrid(
                torch.arange(size, dtype=torch.float64) + i * size,
                torch.arange(size, dtype=torch.float64) + j * size,
                indexing="ij",
            )
            decay = curvature[0, 0] * x * x + 2 * curvature[0, 1] * x * y + curvature[1, 1] * y * y
            wave = frequency * (x * math.cos(angle) + y * math.sin(angle))
            out += torch.polar(torch.exp(-decay), wave)
    return out / (2 * math.pi * sigma**2 / slant)


def _morlet(size: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A wave under a Gaussian, less as much of the Gaussian as makes its mean zero."""
    wave, envelope = _gabor(size, sigma, angle, frequency, slant), _gabor(size, sigma, angle, 0.0, slant)
    return wave - wave.sum() / envelope.sum() * envelope


class Scattering(nn.Module):
    """Images [n, c, size, size] to [n, c · (1 + LJ + L²J(J−1)/2), size / 2^J, size / 2^J]. It has no parameters.

    Args:
        size: Height and width of images, a multiple of 2^J.
        scales: J.
        angles: L.
    """

    def __init__(self, size: int = 32, *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        self.size, self.scales, self.angles = size, scales, angles
        self.border = 2**scales  # on every side; what the smoothing kernel reaches
        whole = size + 2 * self.border
        waves = [
            _morlet(whole, 0.8 * 2**j, math.pi * l / angles, 0.75 * math.pi / 2**j, 4 / angles)
            for j in range(scales)
            for l in range(angles)
        ]
        smooth = _gabor(whole, 0.8 * 2 ** (scales - 1), 0.0, 0.0, 1.0)
        self.register_buffer("waves", torch.fft.fft2(torch.stack(waves)).real.float(), persistent=False)
        self.register_buffer("smooth", torch.fft.fft2(smooth).real.float(), persistent=False)
        self.waves: Tensor
        self.smooth: Tensor

    @property
    def maps(self) -> int:
        """How many maps one channel becomes."""
        return 1 + self.angles * self.scales + self.angles**2 * self.scales * (self.scales - 1) // 2

    def forward(self, images: Tensor) -> Tensor:
        n, channels = images.shape[:2]
        padded = F.pad(images.float(), (self.border,) * 4, mode="reflect").flatten(0, 1)
        spectrum = torch.fft.fft2(padded)
        out = [self._smoothed(spectrum.unsqueeze(1))]
        first = torch.fft.fft2(torch.fft.ifft2(spectrum.unsqueeze(1) * self.waves).abs())
        out.append(self._smoothed(first))
        for j in range(self.scales - 1):
            for l in range(self.angles):
                waves = self.waves[(j + 1) * self.angles :]
                second = torch.fft.ifft2(first[:, j * self.angles + l].unsqueeze(1) * waves).abs()
                out.append(self._smoothed(torch.fft.fft2(second)))
        return torch.cat(out, 1).unflatten(0, (n, channels)).flatten(1, 2)

    def _smoothed(self, spectrum: Tensor) -> Tensor:
        """Smooth, take every 2^J-th pixel (in the spectrum: add what falls on the same frequency), cut the border."""
        step = 2**self.scales
        side = spectrum.shape[-1] // step
        folded = (spectrum * self.smooth).unflatten(-1, (step, side)).unflatten(-3, (step, side)).mean((-4, -2))
        inner = torch.fft.ifft2(folded).real
        cut = self.border // step
        return inner[..., cut : side - cut, cut : side - cut]
