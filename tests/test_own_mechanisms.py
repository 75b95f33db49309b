"""Mechanisms of one's own: accounted for by what they compute, never by what their class or name was before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import lambdacgd as lc
from lambdacgd.accounting import accountant_for
from lambdacgd.mechanisms import error_norms
from lambdacgd.mechanisms.base import BandedInverse
from reproduce.sampled import gram_of

SMALL = {"examples": 20, "batch_size": 5, "epochs": 2, "delta": 1e-3}
SAMPLINGS = [{"sampling": sampling} for sampling in (lc.BallsInBins("fixed"), lc.BallsInBins("fresh"), lc.Cyclic())]


@dataclass(frozen=True)
class Further(lc.LambdaCGD):
    """λCGD that takes something back of the step before the last one, too: a larger C."""

    name: ClassVar[str] = "further"

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse((1.0, -self.lam, -0.3)[:n])


@dataclass(frozen=True)
class Wider(lc.Diagonal):
    """Noise that shrinks over the run: the last steps of an epoch are the most sensitive, not the first."""

    name: ClassVar[str] = "wider"

    def column_scales(self, n: int) -> np.ndarray:
        return np.arange(n, 0, -1, dtype=np.float64) ** 0.5


def mine(*coefficients: float) -> lc.Mechanism:
    """What a class of this name computes today."""

    @dataclass(frozen=True)
    class Mine(lc.Mechanism):
        name: ClassVar[str] = "mine"

        def recurrence(self, n: int) -> BandedInverse:
            return BandedInverse(coefficients[:n])

    return Mine()


def dense(mechanism: lc.Mechanism, n: int) -> np.ndarray:
    """C from the noise that training adds."""
    noise = np.zeros((n, n))
    for j, a in enumerate(mechanism.recurrence(n).coefficients[:n]):
        noise += np.diag(np.full(n - j, a), -j)
    scales = mechanism.column_scales(n)
    return np.linalg.inv(noise if scales is None else scales[:, None] * noise)


def test_a_subclass_is_not_taken_for_its_parent():
    horizon = lc.Horizon(4, 2)
    for mechanism in (Further(0.5), Further(0.5, normalized=True), Wider()):
        c = dense(mechanism, horizon.steps)
        centres = c[:, :4] + c[:, 4:]
        assert lc.sensitivity(mechanism, horizon).value == pytest.approx(np.linalg.norm(centres, axis=0).max())
        gram = gram_of(mechanism, horizon)
        assert float(gram.diagonal().max()) == pytest.approx(float((centres**2).sum(0).max()))
    errors = np.tril(np.ones((8, 8))) @ np.linalg.inv(dense(Further(0.5), 8))
    assert error_norms(Further(0.5), 8)[0] == pytest.approx(np.linalg.norm(errors) / np.sqrt(8))


@pytest.mark.parametrize("how", SAMPLINGS)
def test_a_subclass_gets_the_noise_of_what_it_computes(how, tmp_path, monkeypatch):
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    parent, child, same = (
        lc.plan(**SMALL, **how, epsilon=2.0, mechanism=m)
        for m in (lc.LambdaCGD(0.5), Further(0.5), lc.GammaBIFR(2, 0.5))
    )
    assert child.sigma > 1.1 * parent.sigma
    assert same.sigma == pytest.approx(parent.sigma, rel=1e-3)


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("given", [{"epsilon": 2.0}, {"noise_multiplier": 6.0}])
def test_a_class_that_was_changed_is_not_answered_for_as_it_was(how, given, tmp_path, monkeypatch):
    """Its answers are on disk, under its name: σ of the old one served the new, at two thousand times its δ."""
    monkeypatch.setenv("LAMBDACGD_CACHE", str(tmp_path))
    before = lc.plan(**SMALL, **how, **given, mechanism=mine(1.0, -0.2, -0.1))
    after = lc.plan(**SMALL, **how, **given, mechanism=mine(1.0, -0.8, -0.15))
    monkeypatch.setenv("LAMBDACGD_CACHE", "off")
    anew = lc.plan(**SMALL, **how, **given, mechanism=mine(1.0, -0.8, -0.15))
    assert after.sigma > 1.5 * before.sigma or after.epsilon > 1.5 * before.epsilon
    assert (after.sigma, after.epsilon) == pytest.approx((anew.sigma, anew.epsilon), rel=0.05)


@pytest.mark.parametrize("said", ["strategy", "noising", "strategy_bands"])
def test_a_class_that_tells_accountants_something_else_is_refused(said):
    class Two(Further):
        pass

    setattr(Two, said, lambda self, n: np.eye(1, n)[0])
    with pytest.raises(lc.InvalidInput, match="override recurrence"):
        lc.plan(**SMALL, epsilon=2.0, mechanism=Two(0.5), sampling=lc.Cyclic())


@pytest.mark.parametrize("kind", [list, np.array])
def test_coefficients_may_be_a_list_or_an_array(kind):
    given, known = BandedInverse(kind([1.0, -0.4])), BandedInverse((1.0, -0.4))
    assert given == known
    assert hash(given) == hash(known)


def test_a_recurrence_derived_from_one_of_the_three_is_refused():
    """Its columns, which accountants ask for, need not be those of the noise that training makes of its numbers."""

    class Denied(BandedInverse):
        def strategy(self, n: int) -> np.ndarray:
            return np.eye(1, n)[0]

    class Two(Further):
        def recurrence(self, n: int) -> BandedInverse:
            return Denied((1.0, -0.9))

    with pytest.raises(lc.InvalidInput, match="returned a Denied"):
        lc.plan(**SMALL, epsilon=2.0, mechanism=Two(0.5), sampling=lc.Cyclic())


@pytest.mark.parametrize("scale", [-0.01, 0.0, np.nan, np.inf])
@pytest.mark.parametrize("how", [lc.Cyclic(), lc.Poisson(), lc.BallsInBins("fresh")], ids=lambda how: how.name)
def test_column_scales_that_are_not_positive_numbers_are_refused(scale, how):
    """The largest of ‖C[:, t]‖/d_t did not see columns with a negative d_t: σ was a hundredth of what they need."""

    class Scaled(lc.Mechanism):
        def recurrence(self, n: int) -> BandedInverse:
            return BandedInverse((1.0,))

        def column_scales(self, n: int) -> np.ndarray:
            return np.concatenate([[scale], np.ones(n - 1)])

    with pytest.raises(lc.InvalidInput, match="positive finite numbers"):
        lc.plan(**SMALL, epsilon=2.0, mechanism=Scaled(), sampling=how)
    bound = lc.BallsInBins("fixed", examples=20, steps_per_epoch=4, epochs=2)
    with pytest.raises(lc.InvalidInput, match="positive finite numbers"):
        accountant_for(Scaled(), bound).sigma(2.0, 1e-3)


def test_a_recurrence_of_another_type_is_a_sentence():
    @dataclass(frozen=True)
    class Bare(lc.Mechanism):
        name: ClassVar[str] = "bare"

        def recurrence(self, n: int) -> BandedInverse:
            return (1.0, -0.4)[:n]  # type: ignore[return-value]

    with pytest.raises(lc.InvalidInput, match=r"must return a BandedInverse.*returned a tuple"):
        lc.plan(**SMALL, epsilon=2.0, mechanism=Bare())


def test_a_class_without_name_or_recurrence_is_told_so():
    class Nameless(lc.Mechanism):
        pass

    assert Nameless.name == "Nameless"
    with pytest.raises(NotImplementedError, match=r"Nameless has no recurrence"):
        lc.plan(200, 20, epochs=1, epsilon=2.0, delta=1e-4, mechanism=Nameless())


def test_a_release_of_ones_own_mechanism_is_not_called_broken(tmp_path):
    import json

    from lambdacgd.questions import verify

    card = {
        "format": "lambdacgd-privacy-card-1", "earlier_runs": [], "this_run": {"epsilon": 1, "delta": 1e-5},
        "epsilon": 1, "delta": 1e-5, "sigma": 1, "claim": "none", "mechanism": {"name": "mine"},
    }  # fmt: skip
    (tmp_path / "privacy-card.json").write_text(json.dumps(card))
    with pytest.raises(lc.InvalidInput, match="not in this package"):
        verify(tmp_path)
