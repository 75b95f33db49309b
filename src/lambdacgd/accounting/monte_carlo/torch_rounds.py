"""The same rounds on a CUDA device (or any torch device), for dense Gram matrices. torch is imported when used.

Everything is float64, as on the CPU; only the generator differs. One bin of each envelope sample is drawn on the CPU (a
one-dimensional rejection), the rest of the work, b numbers a sample, on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.monte_carlo.envelope import overshoot
from lambdacgd.accounting.monte_carlo.gram import DenseGram
from lambdacgd.accounting.monte_carlo.proposal import Proposal

Array = NDArray[np.float64]


class TorchRounds:
    """Draws and weighs rounds of one proposal on ``device``."""

    def __init__(self, proposal: Proposal, device: str) -> None:
        import torch

        gram = proposal.envelope.gram
        if not isinstance(gram, DenseGram):
            raise TypeError("only dense Gram matrices are sampled on a device")
        self.torch, self.proposal, self.device = torch, proposal, torch.device(device)
        self._variance = self._put(gram.matrix / proposal.envelope.sigma**2)
        self._factor_t = self._put(gram.factor_t / proposal.envelope.sigma)
        self._half = 0.5 * torch.diagonal(self._variance)
        self._windows = [
            self._put(_window_matrix(tilt.level.starts, tilt.level.length, len(gram.matrix))) for tilt in proposal.tilts
        ]

    def rounds(self, seeds: np.random.SeedSequence, count: int) -> Iterator[Array]:
        """``count`` rounds of ``proposal.round`` weights, as ``engine.rounds`` gives them."""
        for _ in range(count):
            here, there = seeds.spawn(2)
            generator = self.torch.Generator(device=self.device)
            generator.manual_seed(int(there.generate_state(1, np.uint64)[0] >> np.uint64(1)))
            yield self.weights(self.draw(np.random.default_rng(here), generator)).cpu().numpy()

    def draw(self, rng: np.random.Generator, generator: Any) -> Any:
        proposal, envelope, torch = self.proposal, self.proposal.envelope, self.torch
        size = len(self._half)
        samples = torch.randn((proposal.round, size), dtype=torch.float64, device=self.device, generator=generator)
        samples = samples @ self._factor_t
        counts = proposal.counts(proposal.round)
        bins = rng.choice(size, size=counts[0], p=envelope.chances)
        variances = envelope.gram.diagonal[bins] / envelope.sigma**2
        sign = 1.0 if envelope.direction == "remove" else -1.0
        target = 0.5 * variances + sign * (envelope.epsilon + overshoot(rng, envelope.epsilon, variances))
        at = self._put(bins)
        here = samples[: counts[0]]
        step = (self._put(target) - here.gather(1, at[:, None])[:, 0]) / self._put(variances)
        here += step[:, None] * self._variance[at]
        first = counts[0]
        for tilt, windows, count in zip(proposal.tilts, self._windows, counts[1:], strict=True):
            if count:
                chosen = windows[self._put(rng.integers(len(windows), size=count))]
                direction = tilt.local * chosen + tilt.common / size
                samples[first : first + count] += direction @ self._variance
            first += count
        return samples

    def weights(self, samples: Any) -> Any:
        """The weights of ``Proposal.weights``, from the same formulas."""
        proposal, envelope, torch = self.proposal, self.proposal.envelope, self.torch
        strike = float(np.exp(envelope.epsilon))
        ratios = torch.exp(samples - self._half)
        likelihood_ratio = ratios.mean(dim=1)
        if envelope.direction == "remove":
            above = (likelihood_ratio - strike).clamp(min=0)
            density = (ratios - strike).clamp_(min=0).mean(dim=1)
        else:
            above = (1 - strike * likelihood_ratio).clamp(min=0)
            density = (1 - strike * ratios).clamp_(min=0).mean(dim=1)
        density *= proposal.shares[0] / envelope.bound
        whole = samples.mean(dim=1, keepdim=True)
        for tilt, windows, share in zip(proposal.tilts, self._windows, proposal.shares[1:], strict=True):
            exponents = tilt.local * (samples @ windows.T) + tilt.common * whole
            exponents -= self._put(0.5 / envelope.sigma**2 * tilt.penalties())
            density += share * exponents.clamp_(max=600.0).exp_().mean(dim=1)
        return torch.where(above > 0, above / density, torch.zeros_like(above))

    def _put(self, array: Any) -> Any:
        return self.torch.as_tensor(np.ascontiguousarray(array), device=self.device)


def _window_matrix(starts: NDArray[np.intp], length: int, size: int) -> Array:
    """One row a window: 1/length on its bins."""
    matrix = np.zeros((len(starts), size))
    bins = (starts[:, None] + np.arange(length)[None, :]) % size
    np.put_along_axis(matrix, bins, 1.0 / length, axis=1)
    return matrix
