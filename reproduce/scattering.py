"""Wavelet scattering of images (Bruna and Mallat, 2013): fixed features, no parameter of which ever saw an image.

An image is convolved with Morlet wavelets of one and two pixels and eight orientations, the modulus is taken, twice
at most, and everything is smoothed and sampled at every fourth pixel. A 32×32 channel becomes 81 maps of 8×8, as
Oyallon and Mallat (2015) use it for CIFAR and Tramèr and Boneh (2021) for private learning; as in kymatio, which they
use, the modulus behind a wavelet of two pixels is taken at every second pixel. Convolutions are circular, on the image
padded by reflection, as products of Fourier transforms.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ANGLES, STEP = 8, 4  # orientations; the maps have every fourth pixel


def _gabor(size: int, sigma: float, angle: float, frequency: float) -> Tensor:
    """A Gaussian of width σ, twice as wide across, times a plane wave; circular, wrapped five times around."""
    slant = 4 / ANGLES
    out = torch.zeros(size, size, dtype=torch.complex128)
    place = torch.arange(-2 * size, 3 * size, dtype=torch.float64)
    x, y = torch.meshgrid(place, place, indexing="ij")
    along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    wave = torch.polar(torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)), frequency * along)
    for rows in wave.split(size):
        for part in rows.split(size, 1):
            out += part
    return out / (2 * math.pi * sigma**2 / slant)


def _morlets(size: int, scale: int) -> Tensor:
    """The spectra of the wavelets of 2^scale pixels: a wave, less as much of its Gaussian as makes its mean zero."""
    made = []
    for turn in range(ANGLES):
        angle = math.pi * turn / ANGLES
        wave, envelope = (
            _gabor(size, 0.8 * 2**scale, angle, frequency) for frequency in (0.75 * math.pi / 2**scale, 0.0)
        )
        made.append(wave - wave.sum() / envelope.sum() * envelope)
    return torch.fft.fft2(torch.stack(made)).real.float()


def _smoothing(size: int) -> Tensor:
    """A Gaussian of 1.6 pixels around every fourth pixel inside the border: [size / 4 − 2, size]."""
    place = torch.arange(size, dtype=torch.float64)
    apart = place - torch.arange(STEP, size - STEP, STEP).unsqueeze(1)
    return sum(torch.exp(-((apart + size * i) ** 2) / (2 * 1.6**2)) for i in range(-2, 3)) / (1.6 * math.tau**0.5)


class Scattering(nn.Module):
    """Images [n, c, size, size] to [n, 81 c, size / 4, size / 4]. It has no parameters.

    Args:
        size: Height and width of images, a multiple of four.
    """

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        whole = size + 2 * STEP
        smooth = _smoothing(whole)
        for name, values in (
            ("fine", _morlets(whole, 0)),
            ("coarse", _morlets(whole, 1)),
            ("smooth", smooth.float()),
            ("smooth_halves", 2 * smooth[:, ::2].float()),
        ):
            self.register_buffer(name, values, persistent=False)
        self.fine: Tensor
        self.coarse: Tensor
        self.smooth: Tensor
        self.smooth_halves: Tensor

    def forward(self, images: Tensor) -> Tensor:
        padded = F.pad(images.float(), (STEP,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded).unsqueeze(2)
        fine = torch.fft.ifft2(spectrum * self.fine).abs()
        coarse = _at_every_second(spectrum * self.coarse).abs()
        both = _at_every_second(torch.fft.fft2(fine).unsqueeze(3) * self.coarse).abs().flatten(2, 3)
        maps = [self.smooth @ x @ self.smooth.T for x in (padded.unsqueeze(2), fine)]
        maps += [self.smooth_halves @ x @ self.smooth_halves.T for x in (coarse, both)]
        return torch.cat(maps, 2).flatten(1, 2)


def _at_every_second(spectrum: Tensor) -> Tensor:
    """Every second pixel of what has that spectrum: frequencies that look alike there are added up."""
    half = spectrum.shape[-1] // 2
    rows = spectrum[..., :half, :] + spectrum[..., half:, :]
    return torch.fft.ifft2((rows[..., :half] + rows[..., half:]) / 4)
