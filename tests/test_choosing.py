"""Choosing λ and γ: closed-form cases, orderings the paper proves or reports, and the guideline's arithmetic."""

from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest

from lambdacgd import cache, choosing, plan
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.choosing import SHRINKAGE, Choice, Setting, choose, choose_lambda, normalizing_pays, shrink
from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms import BISR, BandInvMF, GammaBIFR, Horizon, LambdaCGD, Mechanism, error_norms, rmse
from lambdacgd.sampling import BallsInBins, Bins
from reproduce.sampled import Sampled
from reproduce.simulated import estimate_sigma

SMALL = Horizon(40, 4)


def setting(horizon: Horizon, bins: str = "fixed", **budget: float) -> Setting:
    b, k = horizon.steps_per_epoch, horizon.epochs
    return Setting(BallsInBins(bins, examples=b, steps_per_epoch=b, epochs=k), **budget)  # type: ignore[arg-type]


def gamma_for(bands: int, objective: str, where: Setting) -> tuple[float, dict[str, dict[str, float]]]:
    """The chosen γ, and all candidates by objective."""
    chosen, selection = choose(GammaBIFR(bands, objective=objective), where)  # type: ignore[arg-type]
    assert selection is not None
    return chosen.gamma, {c["objective"]: c for c in selection["candidates"]}  # type: ignore[attr-defined]


def amplified_bands(bands: int, where: Setting) -> BandInvMF:
    chosen, _ = choose(BandInvMF(bands, amplified=True), where)
    assert isinstance(chosen, BandInvMF)
    return chosen


@pytest.fixture(scope="module")
def choice() -> Choice:
    with cache.disabled():
        return choose_lambda(SMALL, objective="amplified-rmse", epsilon=2.0, delta=1e-4)


def test_the_papers_optimum_without_amplification() -> None:
    found = choose_lambda(Horizon(390, 10), objective="rmse")
    assert found.value == pytest.approx(0.9776, abs=2e-4)
    assert choose_lambda(Horizon(390, 10), objective="maxse").value >= found.value


def test_full_batch_wants_no_correlation() -> None:
    assert choose_lambda(Horizon(1, 50), objective="rmse").value == 0.0


def test_amplification_wants_less_correlation(choice: Choice) -> None:
    values = {c.objective: c.value for c in choice.candidates}
    assert 0 <= values["guideline"] <= values["amplified-rmse"] <= values["rmse"] <= values["maxse"] < 1
    assert choice.value == values["amplified-rmse"]


def test_the_amplified_minimiser_is_one(choice: Choice) -> None:
    """RMSE at the minimiser against a grid, by the accountant's own estimates: never more than 2% above the best."""

    def error(lam: float) -> float:
        sigma = Sampled(LambdaCGD(lam), SMALL).sigma(2.0, 1e-4, relative_error=0.05).value
        return error_norms(LambdaCGD(lam), SMALL.steps)[0] * sigma

    chosen = error(choice.value)
    assert chosen < 1.02 * min(error(lam) for lam in (0.3, 0.6, 0.7, 0.8, 0.9))
    by_name = {c.objective: c for c in choice.candidates}
    assert by_name["amplified-rmse"].rmse == pytest.approx(chosen, rel=0.02)
    assert by_name["amplified-rmse"].rmse <= by_name["guideline"].rmse * 1.01


@pytest.fixture(scope="module")
def fresh() -> Choice:
    with cache.disabled():
        return choose_lambda(SMALL, objective="amplified-rmse", epsilon=2.0, delta=1e-4, bins="fresh")


def test_fresh_bins_want_less_correlation_still(choice: Choice, fresh: Choice) -> None:
    by_name = {c.objective: c for c in fresh.candidates}
    assert by_name["rmse"].value < {c.objective: c.value for c in choice.candidates}["rmse"]
    assert fresh.value < choice.value
    best = {c.objective: c.rmse for c in choice.candidates}["amplified-rmse"]
    assert by_name["amplified-rmse"].rmse < best


def test_the_minimiser_with_fresh_bins_is_one(fresh: Choice) -> None:
    """Certified σ on both sides: never more than 1% above the best, and the candidate's own σ is within 1%."""

    def error(lam: float) -> float:
        sigma = FreshBins(lam, SMALL.steps_per_epoch, SMALL.epochs).sigma(2.0, 1e-4).sigma
        return error_norms(LambdaCGD(lam), SMALL.steps, restart_every=SMALL.steps_per_epoch)[0] * sigma

    found = error(fresh.value)
    assert found < 1.01 * min(error(lam) for lam in (0.4, 0.6, 0.75))
    candidate = {c.objective: c for c in fresh.candidates}["amplified-rmse"]
    assert candidate.rmse == pytest.approx(found, rel=0.01)


def test_one_epoch_is_the_same_with_both_kinds_of_bins() -> None:
    once = Horizon(40, 1)
    both = [
        choose_lambda(once, objective="amplified-rmse", epsilon=2.0, delta=1e-4, bins=bins)
        for bins in ("fixed", "fresh")
    ]
    assert both[0].value == pytest.approx(both[1].value, rel=1e-6)


def test_gamma_with_fresh_bins() -> None:
    gamma, _ = gamma_for(3, "amplified-rmse", setting(Horizon(20, 3), "fresh", epsilon=2.0, delta=1e-4))
    assert 0 < gamma < 1


def test_the_guideline_divides_the_memory_by_three() -> None:
    assert 1 / (1 - shrink(0.97)) == pytest.approx(1 / (1 - 0.97) / SHRINKAGE)
    assert shrink(0.5) == 0.0


def test_gamma_with_two_bands_is_lambda() -> None:
    gamma, _ = gamma_for(2, "rmse", setting(SMALL))
    assert gamma == pytest.approx(choose_lambda(SMALL, objective="rmse").value, abs=1e-4)


def test_gamma_meets_the_published_values() -> None:
    """Bands 4: γ = .94 and RMSE 12.40 at ε = 8 without amplification (σ = .60023)."""
    gamma, candidates = gamma_for(4, "rmse", setting(Horizon(390, 10)))
    assert gamma == pytest.approx(0.94, abs=0.006)
    assert candidates["rmse"]["rmse"] * 0.60023 == pytest.approx(12.40, abs=0.01)


def test_the_normalised_variant_is_searched_too() -> None:
    found = choose_lambda(SMALL, objective="rmse", normalized=True)
    for lam in (0.5, 0.7, 0.8, 0.9, 0.95):
        assert rmse(LambdaCGD(found.value, True), SMALL) <= rmse(LambdaCGD(lam, True), SMALL) * (1 + 1e-9)


def test_choices_are_serialisable(choice: Choice) -> None:
    data = asdict(choice)
    assert [c["objective"] for c in data["candidates"]] == ["rmse", "maxse", "amplified-rmse", "guideline"]


def test_numbers_of_any_kind_are_taken() -> None:
    plain = choose_lambda(Horizon(3, 2), objective="rmse", epsilon=2.0, delta=0.125)
    assert choose_lambda(Horizon(3, 2), objective="rmse", epsilon=np.float32(2), delta=Fraction(1, 8)) == plain  # type: ignore[arg-type]


def test_bad_input() -> None:
    with pytest.raises(InvalidInput, match=r"^objective is"):
        choose_lambda(SMALL, objective="best")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^epsilon is None"):
        choose_lambda(SMALL, objective="guideline")
    with pytest.raises(InvalidInput, match=r"^delta is 2"):
        choose_lambda(SMALL, epsilon=1.0, delta=2.0)
    with pytest.raises(InvalidInput, match=r"^bins is"):
        choose_lambda(SMALL, objective="rmse", bins="new")  # type: ignore[arg-type]


# BandInvMF optimised for amplified error

BANDED = Horizon(30, 3)


def banded_error(mechanism: Mechanism) -> float:
    sigma = Sampled(mechanism, BANDED).sigma(1.0, 1e-4, relative_error=0.03).value
    return error_norms(mechanism, BANDED.steps)[0] * sigma


def test_it_is_better_than_every_start() -> None:
    """Estimates of σ are good to about .2%; 1% is allowed for."""
    where = setting(BANDED, epsilon=1.0, delta=1e-4)
    found = amplified_bands(3, where)
    assert found.coefficients is not None
    assert all(value < 0 for value in found.coefficients[1:])
    best = banded_error(found)
    assert best < 1.01 * banded_error(BISR(3))
    assert best < 1.01 * banded_error(BandInvMF(3).resolve(BANDED))
    assert best < 1.01 * gamma_for(3, "amplified-rmse", where)[1]["amplified-rmse"]["rmse"]


def test_with_fresh_bins_it_is_better_than_every_start_over_one_epoch() -> None:
    """The noise restarts every epoch: errors, σ and starts are those of one. Estimates are good to about .5%."""
    block, question = Horizon(BANDED.steps_per_epoch, 1), {"epsilon": 1.0, "delta": 1e-4}

    def fresh_error(mechanism: Mechanism) -> float:
        sigma = estimate_sigma(mechanism, BANDED, samples=49_152, **question).sigma
        return error_norms(mechanism, BANDED.steps, restart_every=block.steps)[0] * sigma

    where = setting(BANDED, "fresh", **question)
    best = fresh_error(amplified_bands(3, where))
    assert best < 1.01 * fresh_error(BISR(3))
    assert best < 1.01 * fresh_error(BandInvMF(3).resolve(block))
    assert best < 1.005 * fresh_error(amplified_bands(3, setting(BANDED, **question)))
    assert best < 1.01 * fresh_error(GammaBIFR(3, gamma_for(3, "amplified-rmse", where)[0]))


def test_a_plan_asks_for_the_bins_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Setting] = []

    def found(mechanism: BandInvMF, where: Setting) -> BandInvMF:
        asked.append(where)
        return BandInvMF(mechanism.bands, (1.0, -0.5))

    monkeypatch.setattr(choosing, "_amplified_bands", found)
    request = {"examples": 160, "batch_size": 20, "epochs": 3, "epsilon": 1.0, "delta": 1e-3}
    made = plan(mechanism=BandInvMF(2, amplified=True), sampling=BallsInBins("fresh"), **request)  # type: ignore[arg-type]
    assert [where.sampling for where in asked] == [made.sampling]
    assert made.selection is not None
    assert made.selection["objective"] == "amplified-rmse"
    assert made.restart_every == 8


@pytest.mark.parametrize("bins", ["fresh", "fixed"])
def test_normalised_bands_are_chosen_for_what_is_certified(bins: Bins) -> None:
    """Better than plain ones and than two with fresh bins; with fixed ones the chain that dominates takes that back."""
    request = {"examples": 2000, "batch_size": 40, "epochs": 4, "epsilon": 4.0, "delta": 1e-5}
    request |= {"sampling": BallsInBins(bins)}
    plans = [plan(mechanism=mechanism, **request) for mechanism in (  # type: ignore[arg-type]
        BandInvMF(3, normalized=True, amplified=True), BandInvMF(3, amplified=True),
        LambdaCGD(normalized=True, objective="amplified-rmse"),
    )]  # fmt: skip
    best = plans[0]
    assert best.rmse < min(other.rmse for other in plans[1:]) * (1.0 if bins == "fresh" else 1.02)
    assert best.mechanism.resolved
    assert str(best.mechanism) == "BandInvMF p=3 normalised"
    assert best.selection is not None
    assert best.selection["parameter"] == "coefficients"
    assert best.certificate.details["dominated_by"]["sigma_loss"] < (0.01 if bins == "fresh" else 0.04)
    assert type(best).from_json(best.to_json()).mechanism == best.mechanism


def test_bad_input_of_amplified_bands() -> None:
    with pytest.raises(InvalidInput, match=r"^bands is 9"):
        amplified_bands(9, setting(Horizon(8, 4), "fresh", epsilon=1.0, delta=1e-4))
    with pytest.raises(InvalidInput, match=r"^bands is 17"):
        amplified_bands(17, setting(BANDED, epsilon=1.0, delta=1e-4))


def test_normalising_is_chosen_where_it_pays() -> None:
    """Long epochs gain from it; with two steps an epoch the chain that stands in for it costs more than it gains."""
    assert normalizing_pays(setting(Horizon(390, 10), "fresh", epsilon=8.0, delta=1e-5))
    assert not normalizing_pays(setting(Horizon(2, 3), "fresh", epsilon=1.0, delta=1e-5))
