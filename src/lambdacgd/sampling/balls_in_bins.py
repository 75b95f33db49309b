"""Balls-in-Bins sampling: in every epoch each example sits in one bin, which is a function of the key alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.keys import SecretKey, prf64
from lambdacgd.sampling.base import DEFAULT_RUN, Indices, Sampling

Bins = Literal["fresh", "fixed"]
BINS: tuple[Bins, ...] = get_args(Bins)


@dataclass(frozen=True)
class BallsInBins(Sampling):
    """Every example sits in one of b bins, and step t trains on bin (t−1) mod b.

    Args:
        bins: "fresh" redraws the bins in every epoch (example e sits in bin ``prf(key, epoch, e) mod b``), and the
            noise restarts at each epoch's first step, so ``restart_every`` is b. "fixed" draws them once, as in the
            paper: example e sits in bin ``prf(key, e) mod b`` in every epoch.
        examples: N; see ``Sampling``, as for the other two.
        steps_per_epoch: b.
        epochs: k.

    Raises:
        InvalidInput: ``bins`` is neither, a number cannot be used, or there are more bins than examples.

    Guarantee
    ---------
    To anyone without the key the bins of different examples are independent and uniform, up to the PRF (ChaCha20) and
    a modulo bias: no bin's probability exceeds 1/b by more than 2⁻⁶⁴, a relative b/2⁶⁴. Each example takes part
    exactly once in each of k epochs: with fixed bins always in the same place, with fresh bins in places that are
    independent of each other and of everything in other epochs. Bins are never truncated, padded or rebalanced: their
    sizes are Binomial(N, 1/b), and empty ones are yielded.
    Adjacency is zero-out of one example: N, b and the example ids are public; the bins are not.

    Examples:
        >>> key = SecretKey.from_bytes(bytes(32))
        >>> sampling = BallsInBins("fixed", examples=8, steps_per_epoch=3, epochs=2)
        >>> sampling.bin_of(key, [0, 5, 7]).tolist() == sampling.bin_of(key, range(8))[[0, 5, 7]].tolist()
        True
    """

    bins: Bins = field(
        default="fresh",
        metadata={
            "help": "Balls-in-Bins drawn anew every epoch, where noise restarts (fresh, the default for λCGD and "
            "DP-SGD), or once (fixed, the paper's)."
        },
    )
    name: ClassVar[str] = "balls-in-bins"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins not in BINS:
            raise InvalidInput("bins", self.bins, "it must be fresh (redrawn every epoch) or fixed (drawn once)")
        if self.steps_per_epoch > self.examples:
            raise InvalidInput(
                "steps_per_epoch",
                self.steps_per_epoch,
                f"there are only {self.examples} examples: more bins than examples leave most steps without any. "
                f"Use at most {self.examples}",
            )

    @property
    def kind(self) -> str:
        """The name and the kind of bins, which a certificate must have been made for."""
        return f"{self.name}, {self.bins} bins"

    @property
    def restart_every(self) -> int | None:
        """b with fresh bins: the accounting composes epochs, so no noise may be cancelled across their boundary."""
        return self.horizon.steps_per_epoch if self.bins == "fresh" else None

    def bin_of(
        self,
        key: SecretKey,
        ids: NDArray[np.integer] | list[int] | range,
        *,
        run: str = DEFAULT_RUN,
        epoch: int | None = None,
    ) -> Indices:
        """Compute the bins of examples: a pure function, the same on any machine, in any order or shard.

        Memory beyond the output is bounded by a constant.

        Args:
            key: the secret key.
            ids: example ids, 0 … N−1.
            run: the run's id.
            epoch: 1 … k. It must be given for fresh bins; fixed bins are the same in all epochs.

        Returns:
            The bin, 0 … b−1, of each id.

        Raises:
            InvalidInput: an id or the epoch is out of range, or fresh bins are asked for without an epoch.
        """
        self._check_bound()
        if epoch is not None:
            epoch = integer("epoch", epoch, maximum=self.epochs, why=": the horizon is fixed")
        elif self.bins == "fresh":
            raise InvalidInput("epoch", f"Fresh bins are drawn every epoch: say which epoch, 1 to {self.epochs}.")
        asked = np.asarray(ids)
        if asked.size and (asked.dtype.kind not in "iu" or int(asked.min()) < 0 or int(asked.max()) >= self.examples):
            raise InvalidInput(
                "ids", f"Example ids are integers from 0 to {self.examples - 1}; these are others, of {asked.dtype}."
            )
        if asked.size == 0:
            return np.zeros(asked.shape, dtype=np.int64)
        # The encoding of a path holds its length: the paths of fixed and fresh bins never meet.
        path: tuple[str | int, ...] = ("run", run, "bins")
        if self.bins == "fresh" and epoch is not None:
            path = (*path, epoch)
        words = prf64(key.derive(*path), asked)
        words %= np.uint64(self.steps_per_epoch)
        return words.astype(np.int64)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        everyone, count = np.arange(self.examples), self.steps_per_epoch
        drawn = 0  # the epoch whose bins are laid out
        for step in range(start_step, self.steps + 1):
            epoch, place = divmod(step - 1, self.steps_per_epoch)
            if drawn == 0 or (self.bins == "fresh" and drawn != epoch + 1):
                drawn = epoch + 1
                bins = self.bin_of(key, everyone, run=run, epoch=drawn)
                order = _sorted_by(bins, count)
                edges = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=count))])
            yield order[edges[place] : edges[place + 1]].copy()


def _sorted_by(bins: Indices, count: int) -> Indices:
    """``argsort(bins, kind="stable")``, 16 bits at a time: NumPy's stable sort of 16-bit integers is a radix sort."""
    order = np.argsort((bins & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(count - 1).bit_length(), 16):
        order = order[np.argsort((bins[order] >> shift & 0xFFFF).astype(np.uint16), kind="stable")]
    return order.astype(np.int64)
