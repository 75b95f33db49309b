"""What every sampling promises, and what each one adds to it."""

import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from lambdacgd.errors import InvalidInput
from lambdacgd.keys import SecretKey, prf64
from lambdacgd.mechanisms import BSR, Horizon, LambdaCGD
from lambdacgd.sampling import (
    BINS,
    BallsInBins,
    Bins,
    Cyclic,
    Poisson,
    Sampling,
    _fallen,
    _sorted_by,
    _survival,
    sampling_from_dict,
)

KEY = SecretKey.from_bytes(bytes(range(32)))
OTHER = SecretKey.from_bytes(bytes(range(1, 33)))
ALL = [
    BallsInBins("fixed", examples=200, steps_per_epoch=7, epochs=3),
    BallsInBins("fresh", examples=200, steps_per_epoch=7, epochs=3),
    Poisson(examples=200, steps_per_epoch=7, epochs=3),
    Poisson(3, examples=200, steps_per_epoch=7, epochs=3),
    Cyclic(examples=200, steps_per_epoch=7, epochs=3, batch_size=28),
]

# prf64(derive("run", "0", "bins", epoch), id) mod 50 for ids 0 … 5 of epochs 1 and 2
GOLDEN = [[16, 25, 25, 42, 43, 19], [2, 5, 42, 13, 13, 36]]


def named(sampling: Sampling) -> str:
    return sampling.kind


@pytest.mark.parametrize("sampling", ALL, ids=named)
def test_batches_are_a_function_of_key_run_and_step(sampling: Sampling) -> None:
    batches = list(sampling.batches(KEY))
    assert len(batches) == sampling.steps == sampling.horizon.steps == 21
    for start in (1, 2, 8, 21, 22):
        rest = list(sampling.batches(KEY, start_step=start))
        assert len(rest) == 22 - start
        assert all((a == b).all() for a, b in zip(rest, batches[start - 1 :], strict=True))
    for other in (sampling.batches(OTHER), sampling.batches(KEY, run="1")):
        assert any(len(a) != len(b) or (a != b).any() for a, b in zip(other, batches, strict=True))
    for batch in batches:
        assert batch.dtype == np.int64
        assert len(np.unique(batch)) == len(batch)
        assert len(batch) == 0 or (batch.min() >= 0 and batch.max() < 200)


@pytest.mark.parametrize("sampling", ALL, ids=named)
def test_samplings_are_public_and_serialisable(sampling: Sampling) -> None:
    assert sampling_from_dict(json.loads(json.dumps(sampling.to_dict()))) == sampling
    with pytest.raises(InvalidInput, match="has no parameter key"):
        sampling_from_dict(sampling.to_dict() | {"key": 1})
    with pytest.raises(InvalidInput, match="one of balls-in-bins, poisson, cyclic"):
        sampling_from_dict({"name": "shuffle"})


@pytest.mark.parametrize("sampling", ALL, ids=named)
@pytest.mark.parametrize("step", [0, 23, 1.5])
def test_steps_outside_the_horizon_are_refused_at_once(sampling: Sampling, step: int) -> None:
    with pytest.raises(InvalidInput, match=r"^start_step is"):
        sampling.batches(KEY, start_step=step)


@pytest.mark.parametrize("sampling", ALL, ids=named)
def test_a_block_is_what_noise_is_correlated_over(sampling: Sampling) -> None:
    if getattr(sampling, "bins", None) == "fresh":
        assert (sampling.restart_every, sampling.block) == (7, Horizon(7, 1))
    else:
        assert (sampling.restart_every, sampling.block) == (None, Horizon(7, 3))


def test_a_description_without_bins_means_fixed_ones() -> None:
    """Plans made before there was a choice have fixed bins, and their noise is far too small a guess for others."""
    old = BallsInBins("fixed", examples=200, steps_per_epoch=7, epochs=3).to_dict()
    assert old.pop("bins") == "fixed"
    assert (
        sampling_from_dict(old)
        == BallsInBins("fixed", examples=200, steps_per_epoch=7, epochs=3)
        != BallsInBins("fresh", examples=200, steps_per_epoch=7, epochs=3)
    )
    assert BallsInBins("fresh", examples=200, steps_per_epoch=7, epochs=3).to_dict()["bins"] == "fresh"
    for unknown in (None, "", "Fresh", "new", True):
        with pytest.raises(InvalidInput, match=r"^bins is"):
            sampling_from_dict(old | {"bins": unknown})


def test_fresh_bins_use_every_example_once_an_epoch() -> None:
    sampling = BallsInBins("fresh", examples=500, steps_per_epoch=9, epochs=4)
    batches = list(sampling.batches(KEY, run="mine"))
    for epoch in range(1, 5):
        bins = sampling.bin_of(KEY, range(500), run="mine", epoch=epoch)
        mine = batches[9 * (epoch - 1) : 9 * epoch]
        for place, batch in enumerate(mine):
            assert (np.flatnonzero(bins == place) == batch).all()
        assert sorted(np.concatenate(mine).tolist()) == list(range(500))


def test_fresh_bins_of_an_epoch_are_nobody_elses() -> None:
    """Other epochs, other runs, fixed bins, and runs whose ids look like epochs: all pairs differ nearly everywhere."""
    everyone = range(1000)
    fresh, fixed = (
        BallsInBins("fresh", examples=1000, steps_per_epoch=50, epochs=3),
        BallsInBins("fixed", examples=1000, steps_per_epoch=50, epochs=3),
    )
    all_bins = [
        fresh.bin_of(KEY, everyone, run=run, epoch=epoch) for run in ("0", "1", "2", "bins") for epoch in (1, 2, 3)
    ]
    all_bins += [fixed.bin_of(KEY, everyone, run=run) for run in ("0", "1", "2", "bins")]
    for i, one in enumerate(all_bins):
        for other in all_bins[:i]:
            assert (one != other).mean() > 0.9  # 0.98 expected; below 0.9 with probability < 1e-30
    golden = [fresh.bin_of(KEY, range(6), epoch=epoch).tolist() for epoch in (1, 2)]
    assert golden == GOLDEN, "bins of running jobs must not change between versions"


def test_the_epoch_of_bins() -> None:
    fresh, fixed = (
        BallsInBins("fresh", examples=10, steps_per_epoch=5, epochs=3),
        BallsInBins("fixed", examples=10, steps_per_epoch=5, epochs=3),
    )
    with pytest.raises(InvalidInput, match=r"say which epoch, 1 to 3"):
        fresh.bin_of(KEY, [1])
    for sampling in (fresh, fixed):
        for bad in (0, 4, 1.5):
            with pytest.raises(InvalidInput, match=r"^epoch is"):
                sampling.bin_of(KEY, [1], epoch=bad)  # type: ignore[arg-type]
    assert (fixed.bin_of(KEY, range(10), epoch=2) == fixed.bin_of(KEY, range(10))).all()
    assert (fresh.bin_of(KEY, range(10), epoch=np.int64(2)) == fresh.bin_of(KEY, range(10), epoch=2)).all()  # type: ignore[arg-type]


def test_balls_in_bins_uses_every_example_once_an_epoch_in_the_same_place() -> None:
    sampling = BallsInBins("fixed", examples=500, steps_per_epoch=9, epochs=4)
    batches = list(sampling.batches(KEY))
    bins = sampling.bin_of(KEY, range(500))
    for step, batch in enumerate(batches):
        assert (np.flatnonzero(bins == step % 9) == batch).all()
    assert sorted(np.concatenate(batches[:9]).tolist()) == list(range(500))


@given(ids=st.lists(st.integers(0, 999), max_size=50))
def test_bins_do_not_depend_on_order_or_company(ids: list[int]) -> None:
    sampling = BallsInBins("fixed", examples=1000, steps_per_epoch=13, epochs=1)
    whole = sampling.bin_of(KEY, range(1000))
    assert sampling.bin_of(KEY, np.array(ids, dtype=np.int64)).tolist() == [whole[i] for i in ids]


def test_bins_are_uniform_and_independent() -> None:
    """Five χ² tests at N = 10⁶, each with a false-alarm rate of 1e-6 (fixed key: it either always passes or never)."""
    sampling = BallsInBins("fixed", examples=1_000_000, steps_per_epoch=37, epochs=1)
    fresh, everyone = BallsInBins("fresh", examples=1_000_000, steps_per_epoch=37, epochs=2), np.arange(1_000_000)
    bins = sampling.bin_of(KEY, everyone)
    tables = [
        np.bincount(bins, minlength=37),  # uniform
        np.bincount(37 * bins[:-1] + bins[1:], minlength=37**2),  # neighbours, with overlap: conservative enough
        np.bincount(37 * bins[:-8:2] + bins[8::2], minlength=37**2),  # one cipher block apart
        np.bincount(37 * bins + sampling.bin_of(KEY, np.arange(1_000_000), run="1"), minlength=37**2),  # two runs
        np.bincount(37 * fresh.bin_of(KEY, everyone, epoch=1) + fresh.bin_of(KEY, everyone, epoch=2), minlength=37**2),
    ]
    for table in tables:
        expected = table.sum() / len(table)
        statistic = float(((table - expected) ** 2 / expected).sum())
        assert chi2.sf(statistic, len(table) - 1) > 1e-6


@pytest.mark.parametrize("bins", BINS)
def test_empty_bins_are_yielded_and_nothing_is_rebalanced(bins: Bins) -> None:
    sizes = [len(batch) for batch in BallsInBins(bins, examples=20, steps_per_epoch=20, epochs=1).batches(KEY)]
    assert len(sizes) == 20
    assert sum(sizes) == 20
    assert 0 in sizes
    assert max(sizes) > 1


@pytest.mark.parametrize("count", [1, 2, 65_536, 65_537, 2**31, 2**40])
def test_sorting_by_bin_is_a_stable_sort(count: int) -> None:
    bins = np.random.default_rng(5).integers(0, count, size=3000)
    bins[::7] = count - 1
    assert (_sorted_by(bins, count) == np.argsort(bins, kind="stable")).all()


@pytest.mark.parametrize("steps", [9, 70_000])
def test_bins_are_laid_out_in_parts_as_in_one(steps: int) -> None:
    """More examples than one part holds; 2²⁰ of them at least."""
    sampling = BallsInBins("fresh", examples=(1 << 21) + 5, steps_per_epoch=steps, epochs=1)
    bins = sampling.bin_of(KEY, np.arange(sampling.examples), epoch=1)
    order, edges = sampling._laid_out(KEY, "0", 1)
    assert (order == np.argsort(bins, kind="stable")).all()
    assert (edges == np.searchsorted(bins[order], np.arange(steps + 1))).all()


def test_more_bins_than_examples_is_an_error() -> None:
    with pytest.raises(InvalidInput, match=r"only 10 examples.*at most 10"):
        BallsInBins("fixed", examples=10, steps_per_epoch=11, epochs=1)


@pytest.mark.parametrize("ids", [[-1], [10], [0.5]])
def test_ids_outside_the_data_set_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInput, match="from 0 to 9"):
        BallsInBins("fixed", examples=10, steps_per_epoch=2, epochs=1).bin_of(KEY, ids)
    assert BallsInBins("fixed", examples=10, steps_per_epoch=2, epochs=1).bin_of(KEY, []).shape == (0,)


@pytest.mark.parametrize("groups", [1, 4])
def test_poisson_sizes_are_binomial_and_steps_independent(groups: int) -> None:
    """Total count within the central 1 − 1e-6; repeats between steps as independence says (5 standard errors)."""
    sampling = Poisson(groups, examples=20_000, steps_per_epoch=16, epochs=3)
    batches = list(sampling.batches(KEY))
    total, rate = sum(len(batch) for batch in batches), groups / 16
    coins = 20_000 * 48 // groups
    assert binom.ppf(5e-7, coins, rate) <= total <= binom.ppf(1 - 5e-7, coins, rate)
    times = np.bincount(np.concatenate(batches), minlength=20_000)
    variance = 48 / groups * rate * (1 - rate)
    assert abs(times.var() - variance) < 5 * math.sqrt(2 / 20_000) * variance * 1.1
    assert sampling.rate == rate
    assert sampling.batch_size == 20_000 / 16
    for start in (7, np.int64(7)):
        assert (next(sampling.batches(KEY, start_step=start)) == batches[6]).all()


@pytest.mark.parametrize(("groups", "steps"), [(1, 3), (2, 3), (3, 4)])
def test_every_set_of_examples_is_as_likely_as_independent_coins_make_it(groups: int, steps: int) -> None:
    """χ² over the 64 subsets of six examples in 20 000 steps, with a false-alarm rate of 1e-6 (fixed key)."""
    sampling = Poisson(groups, examples=6 * groups, steps_per_epoch=steps, epochs=20_000 // steps)
    counts = np.zeros(64)
    for step, batch in enumerate(sampling.batches(KEY)):
        assert (batch % groups == step % groups).all()  # of the step's group
        counts[(1 << batch // groups).sum()] += 1
    sizes = np.array([bin(subset).count("1") for subset in range(64)])
    expected = counts.sum() * sampling.rate**sizes * (1 - sampling.rate) ** (6 - sizes)
    assert chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 63) > 1e-6


@given(size=st.integers(0, 400), steps=st.integers(2, 300), data=st.data())
def test_coins_are_those_of_a_walk_from_gap_to_gap(size: int, steps: int, data: st.DataObject) -> None:
    """The slow twin: one word after the other, compared with thresholds in exact arithmetic."""
    groups = data.draw(st.integers(1, steps - 1))
    rate = Fraction(groups, steps) * (1 - Fraction(1, 1 << 20))
    words, subkey = 0, KEY.derive("test", size)
    fallen: list[int] = []
    at = 0
    while at < size:
        word, gap, survives = int(prf64(subkey, np.array([words]))[0]), 0, 1 << 64
        words += 1
        while survives >= 1 << 62:
            survives -= math.floor(survives * rate)
            if word >= survives:
                fallen.append(at + gap)
                break
            gap += 1
        at = fallen[-1] + 1 if word >= survives else at + gap
    assert _fallen(subkey, size, groups, steps).tolist() == [place for place in fallen if place < size]


@pytest.mark.parametrize(("groups", "steps"), [(1, 2), (1, 390), (64, 390), (389, 390), (1, 10**5), (3, 10**9)])
def test_a_coin_never_falls_too_often_and_hardly_too_seldom(groups: int, steps: int) -> None:
    thresholds = [1 << 64, *map(int, _survival(groups, steps)[::-1])]
    wanted = Fraction(groups, steps) * (1 - Fraction(1, 1 << 20))
    for above, below in itertools.pairwise(thresholds):
        assert wanted - Fraction(1, 1 << 62) < Fraction(above - below, above) <= wanted
    assert len(thresholds) == 2 or 1 - wanted > Fraction(1, 5)  # what the proof in _survival takes for granted


@pytest.mark.parametrize(("groups", "steps"), [(1, 2), (1, 3), (2, 3), (5, 6), (1, 50)])
def test_given_all_other_coins_one_falls_with_at_most_its_chance(groups: int, steps: int) -> None:
    """The Guarantee, in exact arithmetic over all sets of seven examples."""
    thresholds = [1 << 64, *map(int, _survival(groups, steps)[::-1])]
    falls = [Fraction(above - below, above) for above, below in itertools.pairwise(thresholds)]
    chances = {}
    for drawn in itertools.product((0, 1), repeat=7):
        chance, gap = Fraction(1), 0
        for coin in drawn:
            chance *= falls[gap] if coin else 1 - falls[gap]
            gap = 0 if coin else (gap + 1) % len(falls)
        chances[drawn] = chance
    rate = Fraction(groups, steps)
    assert sum(chances.values()) == 1
    for drawn, chance in chances.items():
        for i in (i for i in range(7) if drawn[i]):
            without = chances[(*drawn[:i], 0, *drawn[i + 1 :])]
            assert rate * (1 - Fraction(1, 1 << 19)) <= chance / (chance + without) <= rate


def test_groups_that_cannot_be_used_are_refused() -> None:
    for bad in (-1, 8, 1.5, True):
        with pytest.raises(InvalidInput, match=r"^groups is"):
            Poisson(bad, examples=70, steps_per_epoch=7, epochs=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="groups = 3 and the plan has 2"):
        Poisson(3, examples=70, steps_per_epoch=7, epochs=1).fitted(BSR(2))
    with pytest.raises(InvalidInput, match=r"14 bands.*at most as many as an epoch has steps, 7"):
        Poisson(examples=70, steps_per_epoch=7, epochs=2).fitted(LambdaCGD(0.5))
    assert Poisson(examples=70, steps_per_epoch=7, epochs=1).fitted(BSR(2)).groups == 2


def test_poisson_with_one_step_an_epoch_takes_everyone() -> None:
    assert [len(batch) for batch in Poisson(examples=9, steps_per_epoch=1, epochs=2).batches(KEY)] == [9, 9]


def test_cyclic_repeats_one_permutation_and_drops_the_rest() -> None:
    sampling = Cyclic(examples=103, steps_per_epoch=10, epochs=3, batch_size=10)
    batches = list(sampling.batches(KEY))
    order = np.concatenate(batches[:10])
    words = prf64(KEY.derive("run", "0", "order"), np.arange(103))
    assert (order == np.argsort(words, kind="stable")[:100]).all()
    for step, batch in enumerate(batches):
        place = step % 10
        assert (batch == order[10 * place : 10 * place + 10]).all()
    seen = Counter(np.concatenate(batches).tolist())
    assert set(seen.values()) == {3}
    assert len(seen) == 100


def test_cyclic_needs_enough_examples() -> None:
    with pytest.raises(InvalidInput, match=r"need 110.*there are 103; use at most 10"):
        Cyclic(examples=103, steps_per_epoch=10, epochs=1, batch_size=11)


@pytest.mark.parametrize("bad", [0, -3, 2.5, True, None])
def test_counts_must_be_positive_integers(bad: object) -> None:
    with pytest.raises(InvalidInput):
        BallsInBins("fixed", examples=bad, steps_per_epoch=1, epochs=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        Poisson(examples=10, steps_per_epoch=bad, epochs=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        Cyclic(examples=10, steps_per_epoch=1, epochs=1, batch_size=bad)  # type: ignore[arg-type]
