"""Drawing many weights: rounds of a fixed size, slab by slab, on all cores, the same on any number of them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from lambdacgd.accounting.base import device
from lambdacgd.accounting.monte_carlo.envelope import OneWay
from lambdacgd.accounting.monte_carlo.gram import DenseGram, Gram
from lambdacgd.accounting.monte_carlo.proposal import Level, Proposal, learned, tilted
from lambdacgd.accounting.monte_carlo.torch_rounds import TorchRounds

Array = NDArray[np.float64]

_WORTH_A_DEVICE = range(64, 2049)  # bins: fewer are no faster on CUDA, more take gigabytes of its memory
_SLAB = 1 << 20  # numbers held at once by one worker (a few temporaries of this size exist)


def rounds(proposal: Proposal, seeds: np.random.SeedSequence, count: int) -> Iterator[Array]:
    """``count`` rounds of ``proposal.round`` weights; each component has the same places in every round."""
    size = len(proposal.envelope.chances)
    asked = device()
    if isinstance(proposal.envelope.gram, DenseGram) and size in _WORTH_A_DEVICE and asked not in ("auto", "cpu"):
        yield from TorchRounds(proposal, asked).rounds(seeds, count)
        return
    whole = proposal.round
    slab = max(1, min(whole, _SLAB // size))
    cuts = [(first, min(first + slab, whole)) for first in range(0, whole, slab)]

    def work(job: tuple[np.random.SeedSequence, tuple[int, int]]) -> Array:
        seed, (first, stop) = job
        samples = proposal.draw(np.random.default_rng(seed), whole, first=first, stop=stop)
        return proposal.weights(samples)

    workers = max(1, min(os.cpu_count() or 1, 16))
    batch = max(1, math.ceil(workers / len(cuts)))  # rounds in flight
    with ThreadPoolExecutor(workers) as pool:
        for begin in range(0, count, batch):
            now = min(batch, count - begin)
            jobs = [(seed, cut) for cut in cuts * now for seed in seeds.spawn(1)]
            parts = list(pool.map(work, jobs))
            for i in range(now):
                yield np.concatenate(parts[i * len(cuts) : (i + 1) * len(cuts)])


class Pilot:
    """Proposals fitted with a few fixed random numbers, so that neighbouring σ get neighbouring proposals."""

    def __init__(self, gram: Gram, levels: tuple[Level, ...], *, seed: int, most: int = 4096) -> None:
        self.gram, self.levels = gram, levels
        size = len(gram.diagonal)
        self._seed = seed
        self._draws = gram.sample(np.random.default_rng(seed), int(np.clip(400_000 // size, 16, most // 16)))
        self.round = int(np.clip((1 << 22) // size, 512, most))

    def proposal(self, epsilon: float, sigma: float, direction: OneWay, *, envelope_share: float) -> Proposal:
        equal = tilted(self.gram, self.levels, epsilon, sigma, direction, pilot=self._draws)
        equal = equal.rounded(self.round)
        draws = equal.draw(np.random.default_rng(self._seed + 1), self.round)
        return learned(equal, draws, envelope_share=envelope_share).rounded(self.round)


def stratified(weights: Array, proposal: Proposal) -> tuple[float, float]:
    """Mean and its standard error, from whole rounds (a row each): components are strata."""
    edges = np.concatenate([[0], np.cumsum(proposal.counts(proposal.round))])
    variance = 0.0
    for first, stop in itertools.pairwise(edges):
        if stop > first:
            part = weights[:, first:stop]
            spread = float(part.var(ddof=1)) if part.size > 1 else float(part.sum()) ** 2
            variance += ((stop - first) / proposal.round) ** 2 * spread / part.size
    return float(weights.mean()), math.sqrt(variance)


def weights_of(
    proposal: Proposal, seeds: np.random.SeedSequence, count: int, *, tick: Callable[[int], None] | None = None
) -> Array:
    """``count`` rounds as rows of one array."""
    rows = []
    for row in rounds(proposal, seeds, count):
        rows.append(row)
        if tick is not None:
            tick(len(row))
    return np.stack(rows)
