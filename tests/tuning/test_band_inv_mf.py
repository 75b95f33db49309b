"""BandInvMF optimised for amplified error beats what it starts from."""

import pytest

from lambdacgd import plan, tuning
from lambdacgd.accounting.fresh_bins.simulation import estimate_sigma
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.mechanisms import BISR, BandInvMF, GammaBIFR, Horizon, Mechanism, error_norms
from lambdacgd.sampling import BallsInBins
from lambdacgd.tuning import amplified_band_inv_mf, choose_gamma
from lambdacgd.validation import InvalidInput

SMALL = Horizon(30, 3)


def error(mechanism: Mechanism) -> float:
    sigma = MonteCarlo(mechanism, SMALL).estimate_sigma(1.0, 1e-4, relative_error=0.03).sigma
    return error_norms(mechanism, SMALL.steps)[0] * sigma


def test_it_is_better_than_every_start() -> None:
    """Estimates of σ are good to about .2%; 1% is allowed for."""
    found = amplified_band_inv_mf(3, SMALL, epsilon=1.0, delta=1e-4)
    assert found.coefficients is not None
    assert all(value < 0 for value in found.coefficients[1:])
    best = error(found)
    assert best < 1.01 * error(BISR(3))
    assert best < 1.01 * error(BandInvMF(3).resolve(SMALL))
    gamma = choose_gamma(3, SMALL, objective="amplified-rmse", epsilon=1.0, delta=1e-4)
    assert best < 1.01 * {c.objective: c.rmse for c in gamma.candidates}["amplified-rmse"]


def test_with_fresh_bins_it_is_better_than_every_start_over_one_epoch() -> None:
    """The noise restarts every epoch: errors, σ and starts are those of one. Estimates are good to about .5%."""
    block, question = Horizon(SMALL.steps_per_epoch, 1), {"epsilon": 1.0, "delta": 1e-4}

    def fresh_error(mechanism: Mechanism) -> float:
        sigma = estimate_sigma(mechanism, SMALL, samples=49_152, **question).sigma
        return error_norms(mechanism, SMALL.steps, restart_every=block.steps)[0] * sigma

    found = amplified_band_inv_mf(3, SMALL, bins="fresh", **question)
    best = fresh_error(found)
    assert best < 1.01 * fresh_error(BISR(3))
    assert best < 1.01 * fresh_error(BandInvMF(3).resolve(block))
    assert best < 1.005 * fresh_error(amplified_band_inv_mf(3, SMALL, **question))
    gamma = choose_gamma(3, SMALL, objective="amplified-rmse", bins="fresh", **question)
    assert best < 1.01 * fresh_error(GammaBIFR(3, gamma.value))


def test_a_plan_asks_for_the_bins_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def found(bands: int, horizon: Horizon, *, bins: str, **question: float) -> BandInvMF:
        asked.append(bins)
        return BandInvMF(bands, coefficients=(1.0, -0.5))

    monkeypatch.setattr(tuning, "amplified_band_inv_mf", found)
    request = {"examples": 160, "batch_size": 20, "epochs": 3, "epsilon": 1.0, "delta": 1e-3}
    made = plan(mechanism=BandInvMF(2, amplified=True), sampling=BallsInBins("fresh"), **request)  # type: ignore[arg-type]
    assert asked == ["fresh"]
    assert made.selection is not None
    assert made.selection["objective"] == "amplified-rmse"
    assert made.restart_every == 8


def test_bad_input() -> None:
    with pytest.raises(InvalidInput, match=r"^bins is 'new'"):
        amplified_band_inv_mf(3, SMALL, epsilon=1.0, delta=1e-4, bins="new")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^bands is 9"):
        amplified_band_inv_mf(9, Horizon(8, 4), epsilon=1.0, delta=1e-4, bins="fresh")
    with pytest.raises(InvalidInput, match=r"^bands is 17"):
        amplified_band_inv_mf(17, SMALL, epsilon=1.0, delta=1e-4)
    with pytest.raises(InvalidInput, match=r"^epsilon is"):
        amplified_band_inv_mf(3, SMALL, epsilon=0.0, delta=1e-4)
