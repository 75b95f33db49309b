"""The walk to a root, and the interval that points leave for it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd.accounting.fresh_bins.search import _Secant
from lambdacgd.accounting.search import Bracket, walk_to
from lambdacgd.accounting.transfer_matrix.calibration import _Search
from lambdacgd.accounting.transfer_matrix.measure import Scale


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(-4, 4), st.floats(-6, 6))
def test_a_falling_function_is_bracketed(xs: list[float], root: float, guess: float) -> None:
    bracket = Bracket(-1.0)
    bracket.points = [(x, root - x) for x in xs]
    assert bracket.failed < root <= bracket.passed
    assert (bracket.width < math.inf) == (min(xs) < root <= max(xs))
    moved = bracket.inside(guess, 0.1)
    if math.isfinite(bracket.width):
        assert bracket.failed <= moved <= bracket.passed
    else:
        assert moved == guess
    bracket.restart()
    assert (bracket.failed, bracket.passed, bracket.slope) == (-math.inf, math.inf, -1.0)


def test_the_walk_ends_near_the_root_or_where_it_no_longer_moves_or_after_so_many_steps() -> None:
    seen: list[float] = []

    def f(x: float) -> float:
        seen.append(x)
        return 8.0 - x

    assert walk_to(0.0, f, lambda: seen[-1] + 3.0, lambda value: abs(value) <= 2, most=40) == (6.0, 2.0)
    assert seen == [0.0, 3.0, 6.0]
    assert walk_to(0.0, f, lambda: min(seen[-1] + 3.0, 5.0), lambda value: abs(value) <= 2, most=40) == (5.0, 3.0)
    seen.clear()
    assert walk_to(0.0, f, lambda: seen[-1] + 1.0, lambda value: False, most=4) == (3.0, 5.0)
    assert len(seen) == 4


def test_where_all_points_look_alike_the_search_goes_on() -> None:
    """δ is cut off at 1 where there is too little noise, and infinite losses stay where there is too much."""
    scale = Scale(1.0, 1e-5, 2.0)
    for value, ahead in ((11.5, 1), (-4.6, -1)):
        secant = _Secant(-12.0)
        search = _Search(lambda *_: pytest.fail("not asked"), 1e-5, scale, slope=-10.0, limits=(-9.0, 9.0))
        for bracket, more in ((secant, (0.0,)), (search, (0.0, 0.35))):
            x = 0.0
            for _ in range(4):
                bracket.points.append((x, value))
                x, before = bracket.next(*more), x
                assert ahead * (x - before) > 0.2
