"""What errors say, and that they survive the way out of a worker process."""

from __future__ import annotations

import pickle

import pytest

import lambdacgd as lc
from lambdacgd import errors


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lc.InvalidInput("lam", 2, "it must be below 1"), "lam is 2; it must be below 1"),
        (lc.InvalidInput("epsilon", "Give either epsilon or noise_multiplier."), "Give either epsilon or noise_mul"),
        (lc.InvalidInput("loss", lambda: None, "it must be a loss"), "loss is <function"),
    ],
)
def test_invalid_input_names_the_parameter_and_says_a_sentence(error, said):
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert isinstance(each, ValueError)
        assert str(each).startswith(said)
    assert (again.parameter, str(again)) == (error.parameter, str(error))


def test_every_error_of_the_package_is_described():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 9
    assert all(kind.__doc__ for kind in kinds)


@pytest.mark.parametrize("value", [True, 0, 11, 1.0, "3", None])
def test_an_integer_is_within_its_limits(value):
    assert errors.integer("count", 10, maximum=10) == 10
    with pytest.raises(lc.InvalidInput, match="from 1 to 10"):
        errors.integer("count", value, maximum=10)


@pytest.mark.parametrize("value", [True, 1.0, -0.1, float("nan"), 10**400, "0.5", None])
def test_a_number_is_within_its_limits(value):
    assert errors.number("rate", 0, above=0, below=1, include=(0,)) == 0.0
    with pytest.raises(lc.InvalidInput, match="at least 0 and below 1"):
        errors.number("rate", value, above=0, below=1, include=(0,))
