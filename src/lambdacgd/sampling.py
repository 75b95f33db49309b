"""Who takes part when: Balls-in-Bins, Poisson and cyclic sampling. Batches are a function of a secret key. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.keys import SecretKey, prf64
from lambdacgd.mechanisms.base import Horizon, Mechanism, from_dict, parameter

Indices = NDArray[np.int64]
Bins = Literal["fresh", "fixed"]
BINS: tuple[Bins, ...] = get_args(Bins)

DEFAULT_RUN = "0"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Who takes part when. The fields are public; the key is an argument, never a field.

    A sampling that ``lc.plan`` is asked for says only of which kind it is; the plan *binds* it to the data set and the
    horizon. Every training run has its own ``run`` id (or its own key): two runs that shared their batches would not
    compose as independent mechanisms.

    Args:
        examples: N, the number of training examples; 0 as long as the sampling is not bound.
        steps_per_epoch: b; 0 as long as the sampling is not bound.
        epochs: k; 0 as long as the sampling is not bound.

    Raises:
        InvalidInput: a number cannot be used, or some of the three are given and others are not.
    """

    examples: int = 0
    steps_per_epoch: int = 0
    epochs: int = 0
    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.bound:
            return
        for name in ("examples", "steps_per_epoch", "epochs"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))

    @property
    def bound(self) -> bool:
        """Whether the sampling knows its data set and its horizon."""
        return (self.examples, self.steps_per_epoch, self.epochs) != (0, 0, 0)

    def bind(self, *, examples: int, steps_per_epoch: int, epochs: int, batch_size: int | None = None) -> Self:
        """Bind the sampling to a data set and a horizon.

        Args:
            examples: N, the number of training examples.
            steps_per_epoch: b, the steps of an epoch.
            epochs: k, the number of epochs.
            batch_size: the batch size asked for. Only ``Cyclic`` draws batches of a fixed size; the others draw N/b
                examples on average and ignore it.

        Returns:
            The bound sampling; this one itself, if it was bound to the same numbers already.

        Raises:
            InvalidInput: a number cannot be used, or the sampling is bound to others.
        """
        return self._bound_to(examples=examples, steps_per_epoch=steps_per_epoch, epochs=epochs)

    def fitted(self, mechanism: Mechanism) -> Self:
        """The sampling as ``mechanism`` needs it: ``Poisson`` takes as many groups as C has bands.

        Args:
            mechanism: resolved for ``block``.

        Raises:
            InvalidInput: no accountant covers the mechanism under this sampling, or the sampling has other groups.
        """
        return self

    def _bound_to(self, **numbers: int) -> Self:
        for name, value in numbers.items():
            own = getattr(self, name)
            if own and own != value:
                made = f"The sampling is made for {name} = {own} and the plan has {value}: leave it out of one."
                raise InvalidInput("sampling", made)
        return replace(self, **numbers)

    @property
    def horizon(self) -> Horizon:
        """k epochs of b steps."""
        self._check_bound()
        return Horizon(self.steps_per_epoch, self.epochs)

    @property
    def steps(self) -> int:
        """n = k·b."""
        return self.horizon.steps

    @property
    def batch_size(self) -> float:
        """How many examples a step draws on average: N/b. What sums are divided by."""
        self._check_bound()
        return self.examples / self.steps_per_epoch

    @property
    def kind(self) -> str:
        """What a certificate must have been made for: the name, and how often examples are dealt out."""
        return self.name

    @property
    def question(self) -> dict[str, Any]:
        """What a σ depends on, for the cache: the number of examples is not part of it."""
        return {"sampling": self.kind, "b": self.steps_per_epoch, "k": self.epochs}

    @property
    def restart_every(self) -> int | None:
        """After how many steps the noise forgets its past, because the accounting composes such stretches; or never."""
        return None

    @property
    def block(self) -> Horizon:
        """The stretch over which noise is correlated: what a mechanism is resolved for. The whole run, or an epoch."""
        return self.horizon if self.restart_every is None else Horizon(self.restart_every, 1)

    def batches(self, key: SecretKey, *, run: str = DEFAULT_RUN, start_step: int = 1) -> Iterator[Indices]:
        """Draw the batches of a run.

        Args:
            key: the secret key that the draws are a function of.
            run: the run's id.
            start_step: the first step to draw for, 1 … n; n + 1 yields nothing.

        Returns:
            An iterator over the example indices of steps ``start_step`` … n, one array per step. The array is empty
            where nobody takes part.

        Raises:
            InvalidInput: the sampling is not bound, or the step is beyond the horizon.
        """
        integer("start_step", start_step, maximum=self.steps + 1, why=": the horizon is fixed")
        return self._batches(key, run, start_step)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        raise NotImplementedError

    def _check_bound(self) -> None:
        if not self.bound:
            unbound = f"This {self.name} sampling has no data set and no horizon yet"
            raise InvalidInput("sampling", f"{unbound}: lc.plan(…, sampling=…) binds it.")

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields: public numbers, as plan files hold them."""
        return {"name": self.name} | asdict(self)


@dataclass(frozen=True)
class BallsInBins(Sampling):
    """Every example sits in one of b bins, and step t trains on bin (t−1) mod b.

    Args:
        bins: "fresh" redraws the bins in every epoch (example e sits in bin ``prf(key, epoch, e) mod b``), and the
            noise restarts at each epoch's first step, so ``restart_every`` is b. "fixed" draws them once, as in the
            paper: example e sits in bin ``prf(key, e) mod b`` in every epoch.
        examples: N; this, ``steps_per_epoch`` and ``epochs`` are as for ``Sampling``.

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

    bins: Bins = parameter(
        "fresh", "Balls-in-Bins drawn anew every epoch, where noise restarts (fresh, the default), or once (fixed)."
    )
    name: ClassVar[str] = "balls-in-bins"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins not in BINS:
            raise InvalidInput("bins", self.bins, "it must be fresh (redrawn every epoch) or fixed (drawn once)")
        if self.steps_per_epoch > self.examples:
            why = f"there are only {self.examples} examples: use at most {self.examples}"
            raise InvalidInput("steps_per_epoch", self.steps_per_epoch, why)

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
        numbers = np.asarray(ids)
        if numbers.size == 0:
            return np.zeros(numbers.shape, dtype=np.int64)
        if numbers.dtype.kind not in "iu" or int(numbers.min()) < 0 or int(numbers.max()) >= self.examples:
            allowed = f"Example ids are integers from 0 to {self.examples - 1}; these are others, of {numbers.dtype}."
            raise InvalidInput("ids", allowed)
        # The encoding of a path holds its length: the paths of fixed and fresh bins never meet.
        path: tuple[str | int, ...] = ("run", run, "bins")
        if self.bins == "fresh" and epoch is not None:
            path = (*path, epoch)
        words = prf64(key.derive(*path), numbers)
        words %= np.uint64(self.steps_per_epoch)
        return words.astype(np.int64)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        drawn = 0  # the epoch whose bins are laid out
        for step in range(start_step, self.steps + 1):
            epoch, place = divmod(step - 1, self.steps_per_epoch)
            if drawn == 0 or (self.bins == "fresh" and drawn != epoch + 1):
                drawn = epoch + 1
                order, edges = self._laid_out(key, run, drawn)
            yield order[edges[place] : edges[place + 1]].astype(np.int64)

    def _laid_out(self, key: SecretKey, run: str, epoch: int) -> tuple[NDArray[np.integer], Indices]:
        """All examples sorted by bin, and where each bin begins.

        A counting sort, part by part: beyond the answer (4 bytes an example) memory is bounded by b and a constant.
        """
        count, examples = self.steps_per_epoch, self.examples
        part = max(1 << 20, count)

        def parts() -> Iterator[tuple[int, Indices]]:
            for start in range(0, examples, part):
                yield start, self.bin_of(key, np.arange(start, min(start + part, examples)), run=run, epoch=epoch)

        sizes = np.zeros(count, dtype=np.int64)
        for _, bins in parts():
            sizes += np.bincount(bins, minlength=count)
        edges = np.concatenate([[0], np.cumsum(sizes)])
        order: NDArray[np.integer] = np.empty(examples, dtype=np.uint32 if examples <= 1 << 32 else np.int64)
        ends = edges[:-1].copy()  # of what is laid out so far
        for start, bins in parts():
            here = np.bincount(bins, minlength=count)
            places = np.repeat(ends - (np.cumsum(here) - here), here) + np.arange(len(bins))
            order[places] = start + _sorted_by(bins, count)
            ends += here
        return order, edges


def _sorted_by(bins: Indices, count: int) -> Indices:
    """``argsort(bins, kind="stable")``, 16 bits at a time: NumPy's stable sort of 16-bit integers is a radix sort."""
    order = np.argsort(bins.astype(np.uint16), kind="stable")
    for shift in range(16, int(count - 1).bit_length(), 16):
        order = order[np.argsort((bins[order] >> shift).astype(np.uint16), kind="stable")]
    return order


@dataclass(frozen=True)
class Poisson(Sampling):
    """Each example tosses a coin of its own: at every step, or with p groups at every p-th step.

    Example e is in group e mod p, and step t draws from group (t−1) mod p, each of its examples with probability p/b:
    N/b of them on average. One group is plain Poisson sampling, for independent noise (DP-SGD). More are *cyclic
    Poisson sampling* (Choquette-Choo et al. 2023), for mechanisms whose C has p bands (``BandMF``, ``BSR``): an example
    can take part every p steps only, so that its columns of C never overlap.

    Args:
        groups: p, at most b. Not given (0), ``lc.plan`` takes as many as C has bands, and without a plan it is 1.
        examples: N; this, ``steps_per_epoch`` and ``epochs`` are as for ``Sampling``.

    Raises:
        InvalidInput: a number cannot be used, or there are more groups than steps in an epoch.

    Guarantee
    ---------
    To anyone without the key (up to ChaCha20), and given the coins of everybody else and of all other steps, an
    example's coin falls with a probability of at most q = p/b, and of at least q·(1 − 2⁻¹⁹). Groups follow from the
    example ids: they are public, and nothing rests on them being secret or balanced. Batches are never truncated or
    padded. Adjacency is zero-out of one example.
    """

    groups: int = 0
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", integer("groups", self.groups, minimum=0))
        if self.bound:
            integer("groups", self.groups, minimum=0, maximum=self.steps_per_epoch, why=" (the steps of an epoch)")
            for name in ("examples", "steps_per_epoch"):
                integer(name, getattr(self, name), maximum=1 << 38, why=": the proof of fair coins ends there")

    @property
    def kind(self) -> str:
        """The name, and the number of groups if there are several; a certificate must have been made for both."""
        return self.name if self.groups <= 1 else f"cyclic poisson, {self.groups} groups"

    @property
    def rate(self) -> float:
        """q = p/b, the chance of an example at a step of its group."""
        return max(1, self.groups) / self.steps_per_epoch

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields; without ``groups`` where there is one."""
        return {name: value for name, value in super().to_dict().items() if name != "groups" or value > 1}

    def fitted(self, mechanism: Mechanism) -> Self:
        bands, b = mechanism.strategy_bands(self.steps), self.steps_per_epoch
        if bands > b:
            why = (
                f"C of {mechanism.name} has {bands} bands, and Poisson takes at most as many as an epoch has steps, {b}"
            )
            raise InvalidInput("sampling", self.name, f"{why}: use balls-in-bins or cyclic, or bandmf, bsr or dp-sgd")
        return self if bands == max(1, self.groups) else self._bound_to(groups=bands)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        groups = max(1, self.groups)
        for step in range(start_step, self.steps + 1):
            group = range((step - 1) % groups, self.examples, groups)
            if groups == self.steps_per_epoch:
                yield np.arange(group.start, group.stop, group.step)
            else:
                fallen = _fallen(key.derive("run", run, "poisson", step), len(group), groups, self.steps_per_epoch)
                yield group.start + groups * fallen


def _fallen(subkey: bytes, size: int, groups: int, steps: int) -> Indices:
    """Which of ``size`` coins fall, each with probability groups/steps: drawn by the gaps between those that do."""
    thresholds = _survival(groups, steps)
    longest = len(thresholds)
    words = int(1.1 * size * (groups / steps + 1 / longest)) + 64  # nearly always enough
    while True:
        gaps = longest - np.searchsorted(thresholds, prf64(subkey, np.arange(words)), side="right")
        falls = gaps < longest
        decided = np.cumsum(gaps + falls)
        if decided[-1] >= size:
            fallen = decided[falls] - 1
            return fallen[fallen < size]
        words *= 2  # the same words again, and as many more


@lru_cache(maxsize=8)
def _survival(groups: int, steps: int) -> NDArray[np.uint64]:
    """Thresholds t_m < … < t_1 of a 64-bit word: below t_g it says that none of the next g coins falls.

    With t_0 = 2⁶⁴ the next coin but g falls with probability h_g = (t_g − t_{g+1})/t_g. In exact integers
    t_{g+1} = t_g − ⌊t_g·q̃⌋ for q̃ = (1 − 2⁻²⁰)·groups/steps, so q̃ − 2⁻⁶² < h_g ≤ q̃ as long as t_g ≥ 2⁶². A word below
    t_m decides m coins, and the next word goes on behind them.

    Given all other coins, whether one falls shows only in the thresholds of those up to the next that falls. If there
    is a single threshold, it shows in nothing. Otherwise 1 − q̃ > 1/5: each coin up to then changes the odds by a factor
    within 1 ± 5·2⁻⁶², and the one that falls by a factor within 1 ± 2⁻⁶¹/q. With at most 2³⁸ examples and q ≥ 2⁻³⁸, all
    of them together stay within 1 ± 2⁻²¹: less than what q̃ lacks of q, and the odds remain below q/(1 − q).
    """
    falling, of = groups * ((1 << 20) - 1), steps << 20
    survives, thresholds = 1 << 64, list[int]()
    while survives >= 1 << 62 and len(thresholds) < 1 << 16:
        survives -= survives * falling // of
        thresholds.append(survives)
    return np.array(thresholds[::-1], dtype=np.uint64)


@dataclass(frozen=True)
class Cyclic(Sampling):
    """A fixed keyed permutation: position p is in step ⌊p/B⌋ of every epoch; the last N − b·B examples are dropped.

    Args:
        batch_size: B, the size of every batch; 0 takes the batch size that the plan is asked for.
        examples: N; this, ``steps_per_epoch`` and ``epochs`` are as for ``Sampling``.

    Raises:
        InvalidInput: a number cannot be used, or b batches of B take more than N examples.

    Guarantee
    ---------
    Every example takes part at most once an epoch, always in the same place: exactly cyclic participation. No
    amplification is claimed, so nothing rests on the order being secret or uniform.
    """

    batch_size: int = field(default=0, kw_only=True)
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        super().__post_init__()
        smallest = 1 if self.bound else 0
        object.__setattr__(self, "batch_size", integer("batch_size", self.batch_size, minimum=smallest))
        needed, b = self.steps_per_epoch * self.batch_size, self.steps_per_epoch
        if needed > self.examples:
            why = f"{b} steps need {needed} examples and there are {self.examples}; use at most {self.examples // b}"
            raise InvalidInput("batch_size", self.batch_size, why)

    def bind(self, *, examples: int, steps_per_epoch: int, epochs: int, batch_size: int | None = None) -> Self:
        """Bind the sampling; see ``Sampling.bind``. Not given, B is the sampling's own or else ⌊N/b⌋."""
        size = batch_size or self.batch_size or examples // steps_per_epoch
        return self._bound_to(examples=examples, steps_per_epoch=steps_per_epoch, epochs=epochs, batch_size=size)

    def _batches(self, key: SecretKey, run: str, start_step: int) -> Iterator[Indices]:
        # Sorted by 64 pseudorandom bits each, ties by index.
        words = prf64(key.derive("run", run, "order"), np.arange(self.examples))
        order = np.argsort(words, kind="stable").astype(np.int64)
        for step in range(start_step, self.steps + 1):
            place = (step - 1) % self.steps_per_epoch
            yield order[place * self.batch_size : (place + 1) * self.batch_size]


SAMPLINGS: dict[str, type[Sampling]] = {cls.name: cls for cls in (BallsInBins, Poisson, Cyclic)}


def sampling_from_dict(data: dict[str, Any]) -> Sampling:
    """Make the bound sampling that ``to_dict`` described, or refuse what does not describe one.

    Balls-in-Bins without ``bins`` are fixed ones, as they once all were.
    """
    fixed = {"bins": "fixed"} if data.get("name") == BallsInBins.name else {}
    sampling: Sampling = from_dict("sampling", SAMPLINGS, fixed | data)
    sampling._check_bound()
    return sampling
