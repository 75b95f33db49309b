"""The walk to a root, and the interval that points leave for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lambdacgd.accounting.certificate import Bound
from lambdacgd.accounting.root import (
    Secant,
    bisect,
    find_root,
    round_step,
    rounded_up,
    smallest,
    smallest_certified,
)
from lambdacgd.errors import AccountingError


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(-4, 4))
def test_points_leave_an_interval_for_the_root(xs: list[float], root: float) -> None:
    strategy = Secant(-1.0)
    strategy.points = [(x, root - x) for x in xs]
    assert strategy.failed < root <= strategy.passed
    assert (strategy.passed - strategy.failed < math.inf) == (min(xs) < root <= max(xs))
    assert strategy.failed <= strategy.next() <= strategy.passed
    strategy.restart()
    assert (strategy.failed, strategy.passed, strategy.slope) == (-math.inf, math.inf, -1.0)


class Forward(Secant):
    """Always so much further."""

    def __init__(self, step: float, last: float = math.inf) -> None:
        super().__init__(-1.0)
        self.step, self.last = step, last

    def next(self) -> float:
        return min(self.points[-1][0] + self.step, self.last)


def test_the_walk_ends_near_the_root_or_where_it_no_longer_moves_or_after_so_many_steps() -> None:
    def f(x: float) -> float:
        return 8.0 - x

    strategy = Forward(3.0)
    assert find_root(f, 0.0, strategy, lambda value: abs(value) <= 2) == (6.0, 2.0)
    assert strategy.points == [(0.0, 8.0), (3.0, 5.0), (6.0, 2.0)]
    assert find_root(f, 0.0, Forward(3.0, 5.0), lambda value: abs(value) <= 2) == (5.0, 3.0)
    strategy = Forward(1.0)
    assert find_root(f, 0.0, strategy, lambda value: False, most=4) == (3.0, 5.0)
    assert len(strategy.points) == 4


def test_where_all_points_look_alike_the_search_goes_on() -> None:
    """δ is cut off at 1 where there is too little noise, and infinite losses stay where there is too much."""
    for value, ahead in ((11.5, 1), (-4.6, -1)):
        for strategy in (Secant(-12.0), Secant(-10.0, largest=0.35, limits=(-9.0, 9.0))):
            x = 0.0
            for _ in range(4):
                strategy.add(x, value)
                x, before = strategy.next(), x
                assert ahead * (x - before) > 0.2


@given(st.floats(-3, 3), st.floats(-4, 4), st.floats(2, 40))
def test_every_strategy_finds_the_root_of_a_smooth_function(root: float, start: float, slope: float) -> None:
    def f(x: float) -> float:
        return slope * (root - x) + math.tanh(root - x)

    stepped = Secant(-10.0, largest=0.35, limits=(-9.0, 9.0))
    for strategy in (Secant(-12.0), stepped):
        x, value = find_root(f, start, strategy, lambda value: abs(value) < 1e-6, most=100)
        assert abs(value) < 1e-6
        assert x == pytest.approx(root, abs=1e-6)


@given(st.floats(-2, 2), st.floats(5, 30), st.sampled_from([2e-4, 3e-3]))
def test_the_certified_point_passes_and_is_close(root: float, slope: float, rtol: float) -> None:
    step = round_step(math.exp(root), rtol)
    assume(abs(math.remainder(math.exp(root), step)) > 1e-6 * step)  # at a round number the last bit of δ decides

    def evaluate(value: float) -> Bound:
        delta = 1e-5 * math.exp(slope * (root - math.log(value)))
        return Bound(value, 1.0, delta, delta / 2, "test")

    bound, _ = smallest_certified(evaluate, 1e-5, 1.0, Secant(-12.0), rtol=rtol)
    assert bound is not None
    assert bound.delta <= 1e-5
    assert root <= math.log(bound.sigma) + 1e-12 <= root + 1.01 * rtol
    # The answer is the first round number that passes, wherever the search began and whatever slope it believed.
    again, _ = smallest_certified(evaluate, 1e-5, math.exp(root + 0.3), Secant(-20.0), rtol=rtol)
    assert again is not None
    assert again.sigma == pytest.approx(bound.sigma, rel=1.01 * rtol if slope < 6 else 1e-12)
    assert bound.sigma == pytest.approx(rounded_up(math.exp(root), rtol), rel=1e-12)
    flat = Bound(1.0, 1.0, 1.0, 1.0, "test")
    assert smallest_certified(lambda x: flat, 1e-5, 1.0, Secant(-12.0), rtol=rtol)[0] is None


def test_bisection_returns_what_passed() -> None:
    assert bisect(lambda x: x >= 0.3, 0.0, 1.0, width=1e-3) == pytest.approx(0.3, abs=1e-3)
    assert bisect(lambda x: x >= 0.3, 0.0, 1.0) >= 0.3
    assert bisect(lambda x: False, 0.0, 1.0, most=5) == 1.0


@given(st.floats(-6, 6), st.floats(1, 40), st.floats(-9, 9))
def test_smallest_returns_a_passing_point_within_tolerance(log_root, slope, log_start):
    root = math.exp(log_root)
    found = smallest(lambda x: 1e-5 * (root / x) ** slope, 1e-5, start=math.exp(log_start), rtol=1e-8)
    assert 1e-5 * (root / found) ** slope <= 1e-5
    assert found <= root * (1 + 2e-8)


def test_smallest_fails_closed():
    """NaN and negative δ are failures; a function that never passes is an error, not an answer."""
    with pytest.raises(AccountingError, match="larger δ"):
        smallest(lambda x: math.nan, 1e-5)
    with pytest.raises(AccountingError, match="larger δ"):
        smallest(lambda x: -1.0, 1e-5)
    with pytest.raises(AccountingError, match="larger δ"):
        smallest(lambda x: 1.0, 1e-5)
    assert smallest(lambda x: 0.0, 1e-5, limits=(1e-3, 1e3)) == pytest.approx(1e-3)
    steps = smallest(lambda x: 0.0 if x > 3 else 1.0, 1e-5)  # no slope to follow
    assert 3 < steps <= 3 * (1 + 1e-6)


def test_a_bound_in_hand_is_returned_where_the_next_evaluation_refuses() -> None:
    asked: list[float] = []

    def evaluate(value: float) -> Bound:
        asked.append(value)
        if len(asked) > 1:
            raise AccountingError("no more")
        return Bound(value, 1.0, 1e-6, 0.0, "test")

    bound, _ = smallest_certified(evaluate, 1e-5, 2.0, Secant(-10.0), rtol=1e-4)
    assert bound is not None
    assert (bound.sigma, len(asked)) == (asked[0], 2)
    with pytest.raises(AccountingError, match="no more"):
        smallest_certified(evaluate, 1e-5, 2.0, Secant(-10.0), rtol=1e-4)


def test_a_search_may_end_near_enough() -> None:
    def evaluate(value: float) -> Bound:
        asked.append(value)
        return Bound(value, 1.0, 1e-5 * (2.0 / value) ** 10, 0.0, "test")

    for enough, most in ((0.0, 2e-4), (5e-3, 5e-3)):
        asked: list[float] = []
        bound, _ = smallest_certified(evaluate, 1e-5, 2.008, Secant(-10.0), rtol=1e-4, enough=enough)
        assert bound is not None
        assert 2.0 <= bound.sigma <= 2.0 * (1 + most)
        assert (len(asked) == 1) is (enough > 0)
