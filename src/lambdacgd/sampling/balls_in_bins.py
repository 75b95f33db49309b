"""Balls-in-Bins: every example has one bin, the same in every epoch, known from the key alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lambdacgd.keys import SecretKey, prf64
from lambdacgd.sampling.base import DEFAULT_RUN, Indices, Sampling
from lambdacgd.validation import InvalidInput


@dataclass(frozen=True)
class BallsInBins(Sampling):
    """Example e sits in bin ``prf(key, e) mod b``; step t trains on bin (t−1) mod b, in every epoch.

    Guarantee
    ---------
    To anyone without the key the bins of different examples are independent and uniform, up to the PRF (ChaCha20) and
    a modulo bias: no bin's probability exceeds 1/b by more than 2⁻⁶⁴, a relative b/2⁶⁴. Each example takes part
    exactly once in each of k epochs, always in the same place, which is what the Balls-in-Bins accountants assume.
    Bins are never truncated, padded or rebalanced: their sizes are Binomial(N, 1/b), and empty ones are yielded.
    Adjacency is zero-out of one example: N, b and the example ids are public; the bins are not.

    >>> key = SecretKey.from_bytes(bytes(32))
    >>> sampling = BallsInBins(examples=8, steps_per_epoch=3, epochs=2)
    >>> sampling.bin_of(key, [0, 5, 7]).tolist() == sampling.bin_of(key, range(8))[[0, 5, 7]].tolist()
    True
    """

    name: ClassVar[str] = "balls-in-bins"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_per_epoch > self.examples:
            raise InvalidInput(
                "steps_per_epoch",
                self.steps_per_epoch,
                f"there are only {self.examples} examples: more bins than examples leave most steps without any. "
                f"Use at most {self.examples}",
            )

    def bin_of(
        self, key: SecretKey, ids: NDArray[np.integer] | list[int] | range, *, run: str = DEFAULT_RUN
    ) -> Indices:
        """The bin (0 … b−1) of each example id: a pure function, the same on any machine, in any order or shard.

        Memory beyond the output is bounded by a constant.
        """
        asked = np.asarray(ids)
        if asked.size and (asked.dtype.kind not in "iu" or int(asked.min()) < 0 or int(asked.max()) >= self.examples):
            raise InvalidInput(
                "ids", f"array of {asked.dtype}", f"example ids must be integers from 0 to {self.examples - 1}"
            )
        if asked.size == 0:
            return np.zeros(asked.shape, dtype=np.int64)
        words = prf64(key.derive("run", run, "bins"), asked)
        words %= np.uint64(self.steps_per_epoch)
        return words.astype(np.int64)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        bins = self.bin_of(key, np.arange(self.examples), run=run)
        order = np.argsort(bins, kind="stable")
        edges = np.searchsorted(bins, np.arange(self.steps_per_epoch + 1), sorter=order)
        for step in range(start_step, self.steps + 1):
            bin_ = (step - 1) % self.steps_per_epoch
            yield order[edges[bin_] : edges[bin_ + 1]].astype(np.int64)
