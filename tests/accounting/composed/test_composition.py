"""The discrete pair lies above what it was made from, and its composition above exact and 50-digit ones."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdacgd.accounting import composed as module
from lambdacgd.accounting.certificate import OneWay
from lambdacgd.accounting.composed import Composition, DiscretePair, FreshBins, _core, composed, dominating_pair
from lambdacgd.accounting.exact.accountant import Evaluation
from lambdacgd.accounting.exact.lattice import Columns
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.errors import AccountingError


def gaussian_pair(shift: float, quantum: float, *, floor: float = 1e-13) -> DiscretePair:
    curve = {i: gaussian_delta(i * quantum, 1 / shift) for i in range(1, int(9 / quantum))}
    curve = {i: value for i, value in curve.items() if value > floor}
    return dominating_pair(quantum, curve, curve)


@given(st.floats(0.2, 1.5), st.integers(1, 12), st.floats(-3, 6))
@settings(max_examples=40, deadline=None)
def test_the_pair_dominates_a_gaussian_between_its_nodes_too(shift: float, coarseness: int, epsilon: float) -> None:
    pair = gaussian_pair(shift, 0.02 * coarseness)
    truth = gaussian_delta(abs(epsilon), 1 / shift)
    if epsilon < 0:  # δ(−ε) = 1 − e^{−ε} + e^{−ε}δ(ε) for the other direction, which here is the same
        truth = -math.expm1(epsilon) + math.exp(epsilon) * truth
    assert pair.side("remove").delta(epsilon) >= truth
    assert pair.side("add").delta(epsilon) >= truth
    assert pair.side("remove").delta(epsilon) <= truth + (0.02 * coarseness) ** 2


@pytest.mark.parametrize("copies", [1, 2, 7, 40])
def test_composed_gaussians_are_met_from_above(copies: int) -> None:
    composition = Composition(gaussian_pair(0.5, 0.01), copies)
    for epsilon in (0.3, 2.0, 5.0, 9.0):
        truth = gaussian_delta(epsilon, 1 / (0.5 * math.sqrt(copies)))
        for found in (composition.tail("remove", epsilon), composition.tail("add", epsilon)):
            assert truth <= found.delta
            if truth > 1e-10:
                assert found.delta <= truth * 1.003
                assert found.rounding < 1e-9 * found.delta


def random_pair(rng: np.random.Generator, cells: int) -> DiscretePair:
    index = np.sort(rng.choice(np.arange(-3 * cells, 3 * cells), cells, replace=False)).astype(np.int64)
    quantum = 0.1
    q = rng.exponential(size=cells) ** 3
    q /= q.sum()
    p = q * np.exp(index * quantum)
    return DiscretePair(quantum, index, p / (1.1 * p.sum()), q, 0.1 / 1.1, 1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_composition_is_above_50_digit_convolution_and_close(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair, copies = random_pair(rng, 9), 6
    for masses, infinite, sign, side in (
        (pair.p, pair.p_infinite, 1, pair.side("remove")),
        (pair.q, pair.q_infinite, -1, pair.side("add")),
    ):
        with mpmath.workdps(50):
            one = {sign * int(i): mpmath.mpf(float(m)) for i, m in zip(pair.index, masses, strict=True)}
            sums = {0: mpmath.mpf(1)}
            for _ in range(copies):
                longer: dict[int, mpmath.mpf] = {}
                for i, left in sums.items():
                    for j, right in one.items():
                        longer[i + j] = longer.get(i + j, mpmath.mpf(0)) + left * right
                sums = longer
            finite = sum(one.values())
            lost = (finite + infinite) ** copies - finite**copies
            for epsilon in (
                -1.0,
                0.7,
                3.0,
                0.9 * copies * sign * pair.quantum * int(pair.index[-1 if sign > 0 else 0]),
            ):
                quantum = mpmath.mpf(pair.quantum)
                truth = lost + sum(
                    m * (1 - mpmath.e ** (epsilon - i * quantum)) for i, m in sums.items() if i * quantum > epsilon
                )
                found = composed(side, copies, epsilon)
                assert found.delta >= truth
                assert found.delta - found.infinite <= (truth - lost) + found.rounding + 3e-9 * found.delta
                assert found.infinite >= lost * (1 - 1e-12)


def test_a_bound_that_is_no_bound_is_refused() -> None:
    good = {1: 0.2, 2: 0.1}
    for bad in ({1: math.nan, 2: 0.1}, {1: 0.2, 2: 0.0}, {1: 1.2, 2: 0.1}, {}, {0: 0.3}):
        with pytest.raises(AccountingError):
            dominating_pair(0.1, bad, good)
        with pytest.raises(AccountingError):
            dominating_pair(0.1, good, bad)


def test_a_node_above_the_chord_of_its_neighbours_is_left_out() -> None:
    curve = {i: gaussian_delta(0.1 * i, 1.0) for i in range(1, 40)}
    spoilt = curve | {7: curve[6], 20: curve[17]}
    pair = dominating_pair(0.1, spoilt, curve)
    assert {7, 20}.isdisjoint(pair.index.tolist())
    assert pair.side("remove").delta(0.7) >= curve[7]


@pytest.mark.parametrize("copies", [1, 1000, 10_000])
def test_the_relative_margin_covers_every_factor(copies: int) -> None:
    """Tilted masses err by up to 1e-12 each, and ``copies`` of them are multiplied: 1e-9 once covered 1000 only."""
    pair = DiscretePair(0.1, np.array([-1, 1]), np.array([0.4, 0.5]), np.array([0.5, 0.4]), 1e-9, 1e-9)
    found = composed(pair.side("remove"), copies, 0.2 * copies)  # beyond every finite loss
    assert found.delta >= found.infinite * (1 + 1e-12 * copies)
    assert found.delta <= found.infinite * (1 + 1e-9 + 2e-12 * copies)


def test_too_long_a_transform_is_refused() -> None:
    pair = gaussian_pair(0.5, 0.001, floor=1e-4)
    with pytest.raises(AccountingError, match="transform"):
        composed(pair.side("remove"), 100_000_000, 1e4)


def chords_of(pair: DiscretePair, copies: int, way: OneWay, epsilon: float) -> float:
    """What is charged for chords: the pair's core, whose bounds have no slack of their own, is lower by them."""
    under_p, under_q = pair.side("remove"), pair.side("add")
    remove = {i: Evaluation(under_p.delta(i * pair.quantum), 1.0) for i in pair.index.tolist() if i > 0}
    add = {-i: Evaluation(under_q.delta(-i * pair.quantum), 1.0) for i in pair.index.tolist() if i < 0}
    core = _core(pair, remove, add)
    return composed(pair.side(way), copies, epsilon).delta - composed(core.side(way), copies, epsilon).delta


@pytest.mark.parametrize("copies", [1, 2, 7, 40])
@pytest.mark.parametrize("gap", [0.05, 0.1])
def test_chords_are_charged_what_they_add(gap: float, copies: int) -> None:
    """Gaussians, whose composition is known: at most what is reported, and not much less.

    The average over a cell is 2/3 of the most, and here ε and all losses are nodes, so that one copy in k adds nothing.
    """
    pair = gaussian_pair(0.5, gap)
    for epsilon in (0.3, 2.0, 3.7):
        truth = gaussian_delta(epsilon, 1 / (0.5 * math.sqrt(copies)))
        ways: tuple[OneWay, ...] = ("remove", "add")
        for way in ways:
            found = composed(pair.side(way), copies, epsilon)
            added = found.delta - found.infinite - found.rounding - truth
            if truth > 1e-9:
                charged = chords_of(pair, copies, way, epsilon)
                assert added <= charged + 1e-8 * truth
                assert added >= 0.3 * charged * (copies - 1) / copies - 1e-12


@pytest.mark.parametrize("way", ["remove", "add"])
def test_slack_of_very_many_copies_is_finite(way: OneWay) -> None:
    pair = gaussian_pair(0.1, 0.02)
    with np.errstate(all="raise", under="ignore"):
        found = chords_of(pair, 3000, way, 30.0)
    added = composed(pair.side(way), 3000, 30.0).delta - gaussian_delta(30.0, 10 / math.sqrt(3000))
    assert 0 < added <= found <= 2 * added


@pytest.mark.parametrize(("deviation", "shared", "epsilon"), [(0.5, 0.3, 2.0), (0.3, 1.0, 1.0), (1.0, 0.05, 4.0)])
def test_gaussian_mechanisms_beside_a_pair_are_one_more_gaussian(
    deviation: float, shared: float, epsilon: float
) -> None:
    pair = module.gaussian_pair(0.01, deviation)
    found = module.Composition(pair, 3, shared=shared**2)
    true = gaussian_delta(epsilon, 1 / math.sqrt(3 * (deviation**2 + shared**2)))
    for way in ("remove", "add"):
        value = found.tail(way, epsilon).delta  # type: ignore[arg-type]
        assert true <= value <= true * 1.02
    with pytest.raises(AccountingError, match="quanta"):
        composed(pair.side("add"), 2, 1.0, module.gaussian_pair(0.02, 1.0).side("add"))


@pytest.mark.parametrize("deviation", [1e-6, 0.3, 29.0])
def test_the_pair_of_a_gaussian_is_never_below_it_at_a_node(deviation: float) -> None:
    """Beside 60 digits. Small deviations cancel 4e-8 of the closed form: less than is added to infinite losses."""
    quantum = deviation / 10
    pair = module.gaussian_pair(quantum, deviation)
    nodes = [int(i) for i in pair.index if i > 0]
    with mpmath.workdps(60):
        for way in ("remove", "add"):
            side, d = pair.side(way), mpmath.mpf(deviation)  # type: ignore[arg-type]
            for i in nodes[: -1 if len(nodes) > 1 else None]:
                epsilon = mpmath.mpf(i * quantum)
                true = mpmath.ncdf(d / 2 - epsilon / d) - mpmath.exp(epsilon) * mpmath.ncdf(-d / 2 - epsilon / d)
                assert side.delta(i * quantum) >= true


def test_a_shared_loss_that_float64_does_not_hold_is_refused() -> None:
    """It was an OverflowError, past everyone who falls back on what needs no amplification."""
    with pytest.raises(AccountingError, match="all bins share"):
        FreshBins(0.5, 4, 1, columns=Columns(0.01, 0.0, 0.0, 1.0)).delta(0.02, 1.0)
