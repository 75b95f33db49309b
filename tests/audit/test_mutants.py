"""The audit bites: every planted bug is caught, by the test that is there for it. Correct code passes everywhere."""

from __future__ import annotations

import functools

import pytest

import lambdacgd as lc
from tests.audit.mutants import MUTANTS

pytestmark = pytest.mark.filterwarnings("ignore:δ = ")  # a large δ, so that few canaries show much


@functools.cache
def plan_of(bins: str) -> lc.Plan:
    sampling = lc.BallsInBins(bins)  # type: ignore[arg-type]
    return lc.plan(4000, 1000, epochs=3, epsilon=2.0, delta=1e-2, mechanism=lc.LambdaCGD(0.9), sampling=sampling)


def test_there_are_sixteen_mutants_and_more() -> None:
    assert len(MUTANTS) >= 16


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_the_test_that_is_there_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    plan = plan_of(mutant.bins)
    mutant.plant(monkeypatch)
    result = lc.audit(plan, runs=2, seed=1)
    assert not result.passed
    assert mutant.caught_by & {check.name for check in result.failed}, str(result)


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_correct_code_passes(bins: str) -> None:
    result = lc.audit(plan_of(bins), runs=2, seed=1)  # false alarms: 1e-4
    assert result.passed, str(result)
