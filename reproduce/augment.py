"""Random crops, flips and mixes on the device, as a function of (run, step, example, view) and of nothing else.

There is no generator whose state a checkpoint would have to keep: random numbers are a hash of where they are used. So
a resumed run, a batch cut elsewhere and a captured step see the same views. They protect nobody.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, from splitmix64


def seed_of(run: str) -> int:
    """The seed of a run's views, from the name of the run."""
    return int.from_bytes(hashlib.blake2b(f"views of {run}".encode(), digest_size=8).digest(), "little", signed=True)


def scrambled(seed: int, step: Tensor, example: Tensor, view: Tensor) -> Tensor:
    """63 random bits for each (step, example, view): splitmix64 over the four numbers, in int64 that wraps."""
    state = torch.full_like(example, seed)
    for part in (step, example, view):
        state = _mixed(state + (part + 1) * _MULTIPLIERS[0])
    return state & 0x7FFF_FFFF_FFFF_FFFF


def _mixed(state: Tensor) -> Tensor:
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2])):
        state = (state ^ _shifted(state, shift)) * multiplier
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & ((1 << (64 - by)) - 1)  # int64 shifts in the sign


class Views:
    """Crop with padding and flip; some views are mixes of two others. ``step`` counts on the device, so that a captured
    step can read it.

    A mix is a convex combination of two views of *one* example, with its label (self-augmentation of DP-Mix, Bao et
    al., 2023; there the weight is of a Beta distribution, here it is uniform). So a row is of its own example alone,
    and clipping an example bounds all that it does.

    Args:
        run: The name of the run, ``private.run.id``.
        views: K, how many neighbouring rows are one example.
        device: Where images lie.
        mixed: How many of the K, the last ones, are mixes of two of the others.
        padding: Pixels by which a crop may move, filled by reflection.
    """

    def __init__(self, run: str, views: int, device: torch.device, *, mixed: int = 0, padding: int = 4) -> None:
        self.seed, self.views, self.mixed, self.padding = seed_of(run), views, mixed, padding
        self.step = torch.ones((), dtype=torch.int64, device=device)

    def __call__(self, images: Tensor, examples: Tensor) -> Tensor:
        """Views of ``images`` [n, channels, height, width], whose row i is a view of example ``examples[i]``."""
        views = torch.arange(len(images), device=images.device) % self.views
        if not self.mixed:
            return self._view(images, examples, views)
        plain = self.views - self.mixed
        bits = scrambled(self.seed, self.step, examples, views)
        one = (bits >> 1) % plain
        other = (one + 1 + (bits >> 24) % (plain - 1)) % plain
        weight = ((bits >> 40) & 0x7F_FFFF).to(images.dtype) / 2**23
        is_plain = views < plain
        one, weight = torch.where(is_plain, views, one), weight.masked_fill(is_plain, 1.0).view(-1, 1, 1, 1)
        return weight * self._view(images, examples, one) + (1 - weight) * self._view(images, examples, other)

    def _view(self, images: Tensor, examples: Tensor, views: Tensor) -> Tensor:
        bits = scrambled(self.seed, self.step, examples, views)
        span = 2 * self.padding + 1
        return moved(images, (bits >> 1) % span, (bits >> 24) % span, (bits & 1).bool(), self.padding)


def moved(images: Tensor, down: Tensor, right: Tensor, flipped: Tensor, padding: int) -> Tensor:
    """Row i cropped at (down[i], right[i]) of the image padded on all sides, and mirrored where ``flipped[i]``."""
    n, channels, height, width = images.shape
    padded = F.pad(images, (padding,) * 4, mode="reflect")
    across = torch.arange(width, device=images.device)
    rows = (down.view(-1, 1) + torch.arange(height, device=images.device)).view(n, 1, height, 1)
    columns = torch.where(flipped.view(-1, 1), width - 1 - across, across) + right.view(-1, 1)
    wide = padded.gather(2, rows.expand(n, channels, height, padded.shape[3]))
    return wide.gather(3, columns.view(n, 1, 1, width).expand(n, channels, height, width))
