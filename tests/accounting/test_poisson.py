"""Poisson sampling: the paper's row of DP-SGD, closed forms, and banded C with cyclic groups."""

from __future__ import annotations

import dataclasses
import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import linalg

import lambdacgd as lc
from lambdacgd.accounting import accountant_for, poisson
from lambdacgd.accounting.composed import Losses, composed
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.poisson import PoissonSampled
from lambdacgd.errors import AccountingError

TABLE = (1 / 390, 3900)


@pytest.mark.parametrize(
    ("epsilon", "sigma"),
    [(8, 0.4942), (4, 0.5952), (2, 0.7177), (1, 0.9096), (0.5, 1.3407), (0.25, 2.2654)],
)
def test_golden_row(epsilon, sigma):
    result = PoissonSampled(*TABLE).sigma(epsilon, 1e-5)
    assert result.sigma == pytest.approx(sigma, rel=5e-3)
    assert result.method == "pld"
    assert PoissonSampled(*TABLE).epsilon(result.sigma, 1e-5).epsilon == pytest.approx(epsilon, rel=1e-3)


def test_one_step_of_everybody_is_the_gaussian_mechanism():
    """b = 1: each step takes all examples, so k steps are one Gaussian of sensitivity √k."""
    bound = PoissonSampled(1.0, 4).delta(3.0, 2.0).delta
    exact = gaussian_delta(2.0, 3.0 / 2)
    assert exact <= bound <= exact * 1.01


def test_delta_falls_with_noise_and_epsilon():
    def delta(sigma: float, epsilon: float) -> float:
        return PoissonSampled(1 / 20, 60).delta(sigma, epsilon).delta

    assert delta(1.0, 1.0) > delta(1.2, 1.0) > delta(1.2, 1.3)


def amplified(sigma: float, rate: float, epsilon: float) -> tuple[float, float]:
    """(δ_remove, δ_add) of a single step in closed form."""
    up = math.log((math.expm1(epsilon) + rate) / rate)
    down = math.exp(-epsilon) - 1 + rate
    add = math.exp(epsilon) * down * gaussian_delta(-math.log(down / rate), sigma) if down > 0 else 0.0
    return rate * gaussian_delta(up, sigma), add


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("rate", [1e-3, 0.3, 0.99])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0])
def test_one_step_in_closed_form(sigma: float, rate: float, epsilon: float) -> None:
    bound = PoissonSampled(rate, 1).delta(sigma, epsilon)
    remove, add = amplified(sigma, rate, epsilon)
    assert remove * (1 - 1e-9) <= bound.delta_remove <= remove * 1.01 + 1e-22
    assert add * (1 - 1e-9) <= bound.delta_add <= add * 1.01 + 1e-22


def test_masses_that_outgrow_all_floats_are_a_failure_of_the_search_only() -> None:
    step = Losses(0.1, np.array([-1, 1]), np.array([0.51, 0.51]), 1e-23)
    with np.errstate(all="ignore"):
        assert not composed(step, 100_000, 1.0).delta < 1


@pytest.mark.parametrize(("rate", "steps", "sigma", "epsilon"), [(1e-8, 1, 0.2, 0.1), (1e-7, 100, 0.2, 1.0)])
def test_losses_so_rare_that_cells_widen(rate: float, steps: int, sigma: float, epsilon: float) -> None:
    """They were refused: two of them in one run are so rare that the steps' δ add up."""
    remove, _ = amplified(sigma, rate, epsilon)
    assert remove * steps * (1 - 10 * rate * steps) <= PoissonSampled(rate, steps).delta(sigma, epsilon).delta_remove
    assert PoissonSampled(rate, steps).delta(sigma, epsilon).delta_remove <= 1.001 * remove * steps


def test_almost_everybody_takes_part() -> None:
    """W = 1 − q + q·y must keep its digits near 1 − q, at a node, where splitting adds nothing; 40 digits."""
    rate, sigma = 0.9999999999482867, 0.15153667164480755
    losses = poisson._step(sigma, rate, poisson.CELL)[1]
    epsilon = next(float(i * losses.quantum) for i in losses.index[::-1] if i * losses.quantum < 23.67)
    with mpmath.workdps(40):
        down = (mpmath.exp(-epsilon) - 1 + mpmath.mpf(rate)) / rate
        z = sigma * mpmath.log(down) + 1 / (2 * mpmath.mpf(sigma))
        truth = mpmath.exp(epsilon) * rate * (down * mpmath.ncdf(z) - mpmath.ncdf(z - 1 / mpmath.mpf(sigma)))
    assert truth < PoissonSampled(rate, 1).delta(sigma, epsilon).delta_add < truth * (1 + 1e-6)


@pytest.mark.parametrize("way", ["remove", "add"])
def test_two_steps_by_quadrature(way: str) -> None:
    """The trapezoidal rule over both steps' z; the kink costs it about 1e-5."""
    sigma, rate, epsilon = 0.8, 0.2, 0.7
    z = np.linspace(-9, 10, 3001)
    mass = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    w = 1 - rate + rate * np.exp(z / sigma - 0.5 / sigma**2)
    products = np.outer(w, w)
    k = math.exp(epsilon)
    excess = np.maximum(products - k, 0.0) if way == "remove" else np.maximum(1 - k * products, 0.0)
    truth = float(mass @ excess @ mass)
    bound = PoissonSampled(rate, 2).delta(sigma, epsilon)
    value = bound.delta_remove if way == "remove" else bound.delta_add
    assert truth * (1 - 1e-4) <= value <= truth * 1.002 + 1e-22


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "delta"),
    [(1 / 390, 3900, 2.0, 1e-5), (1 / 390, 3900, 0.25, 1e-5), (0.05, 50, 2.67, 1e-5), (0.9, 3, 4.0, 1e-6),
     (0.01, 10, 8.0, 1e-6)],
)  # fmt: skip
def test_as_tight_as_dp_accounting(rate: float, steps: int, epsilon: float, delta: float) -> None:
    """Both are upper bounds: ours at most 1e-3 of σ above theirs, and theirs not far above ours."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    def theirs(sigma: float) -> float:
        step = pld.from_gaussian_mechanism(
            standard_deviation=sigma, sampling_prob=rate, use_connect_dots=True,
            value_discretization_interval=1e-4 * min(epsilon, 8.0),
        )  # fmt: skip
        return float(step.self_compose(steps).get_delta_for_epsilon(epsilon))

    sigma = PoissonSampled(rate, steps).sigma(epsilon, delta).sigma
    assert theirs(sigma * (1 - 1e-3)) > delta
    assert theirs(sigma) < 1.005 * delta


def test_composition_never_lies_below_convolution_by_hand() -> None:
    """Three steps of the very same masses, without tilt, transform or window."""
    step = poisson._step(0.9, 0.1, 0.2)
    for losses in step:
        masses = np.zeros(int(np.ptp(losses.index)) + 1)
        masses[losses.index - losses.index[0]] = losses.masses
        three = np.convolve(np.convolve(masses, masses), masses)
        values = (3 * losses.index[0] + np.arange(len(three))) * losses.quantum
        for epsilon in (0.1, 0.6, 1.5):
            plain = float(np.maximum(-np.expm1(np.minimum(epsilon - values, 0.0)), 0.0) @ three) + 3 * losses.infinite
            assert plain * (1 - 1e-10) <= composed(losses, 3, epsilon).delta <= plain * (1 + 1e-6) + 1e-15


def test_small_deltas_are_not_lost_in_rounding() -> None:
    bound = PoissonSampled(*TABLE).sigma(1.0, 1e-12)
    assert 0.99e-12 <= bound.delta <= 1e-12
    assert bound.sigma > PoissonSampled(*TABLE).sigma(1.0, 1e-11).sigma
    with pytest.raises(AccountingError, match="too little noise"):
        PoissonSampled(*TABLE).delta(0.01, 1.0)


# --- banded C with cyclic groups -------------------------------------------------------------------------------------

SETTING = {"examples": 50_000, "batch_size": 128, "epochs": 10, "delta": 1e-5}
SMALL = {"examples": 120, "batch_size": 20, "epochs": 4, "epsilon": 2.0, "delta": 1e-4}


@pytest.mark.parametrize(("epsilon", "bands", "rmse"), [(8.0, 64, 7.16), (2.0, 32, 17.8), (0.5, 8, 53.4)])
def test_the_best_bands_of_the_papers_setting(epsilon: float, bands: int, rmse: float) -> None:
    """Computed outside of this library: BandMF with its best power of two."""
    plan = lc.plan(**SETTING, epsilon=epsilon, mechanism=lc.BandMF("auto"), sampling=lc.Poisson())  # type: ignore[arg-type]
    assert (plan.mechanism.bands, plan.sampling.groups) == (bands, bands)  # type: ignore[attr-defined]
    assert plan.rmse == pytest.approx(rmse, abs=0.051 if rmse > 10 else 0.0075)
    assert plan.certificate.kind == "bound"
    assert plan.selection is not None
    assert plan.selection["tried"][str(bands)] == pytest.approx(plan.rmse, rel=5e-3)


def test_it_is_the_mixture_over_all_that_an_example_can_do() -> None:
    """The slow twin: all 2³ patterns of an example of group 0 as means in R⁶, sampled (false alarms: 1e-4 each way)."""
    sigma, epsilon = 1.3, 1.0
    sampling = lc.Poisson(2, examples=60, steps_per_epoch=3, epochs=2)
    mechanism = lc.BandMF(2, coefficients=(1.0, -0.6))  # of either sign
    matrix = linalg.toeplitz(mechanism.strategy(6), np.zeros(6))
    patterns = np.array(list(itertools.product((0, 1), repeat=3)))
    chances = (2 / 3) ** patterns.sum(1) * (1 / 3) ** (3 - patterns.sum(1))
    means = patterns @ matrix[:, ::2].T / sigma
    rng = np.random.default_rng(0)
    deltas = []
    for present in (True, False):
        drawn = means[rng.choice(8, size=400_000, p=chances)] if present else 0.0
        x = drawn + rng.standard_normal((400_000, 6))
        loss = np.log(np.exp(x @ means.T - 0.5 * (means**2).sum(1)) @ chances) * (1 if present else -1)
        excess = np.maximum(0.0, -np.expm1(epsilon - loss))
        deltas.append((excess.mean(), excess.std() / np.sqrt(len(excess))))
    bound = accountant_for(mechanism, sampling).delta(sigma, epsilon).delta
    worst, error = max(deltas)
    assert worst - 3.8 * error <= bound <= worst + 3.8 * error + 1e-3 * worst


def test_one_participation_is_the_amplified_gaussian_mechanism() -> None:
    """As many groups as steps: one coin that always falls, and a Gaussian of sensitivity ‖c‖."""
    mechanism = lc.BSR(6)
    sampling = lc.Poisson(6, examples=60, steps_per_epoch=6, epochs=1)
    norm = float(np.linalg.norm(mechanism.strategy(6)))
    exact = gaussian_delta(1.5, 2.0 / norm)
    assert exact <= accountant_for(mechanism, sampling).delta(2.0, 1.5).delta <= exact * 1.01


def test_groups_of_one_are_dp_sgd() -> None:
    sampling = lc.Poisson(examples=100, steps_per_epoch=5, epochs=2)
    one = accountant_for(lc.Identity(), sampling).sigma(2.0, 1e-5)
    assert accountant_for(lc.BandMF(1, coefficients=(1.0,)), sampling).sigma(2.0, 1e-5).sigma == one.sigma
    assert accountant_for(lc.Identity(), dataclasses.replace(sampling, groups=1)).sigma(2.0, 1e-5) == one
    assert lc.plan(**SMALL, mechanism=lc.Identity(), sampling=lc.Poisson()).sampling.kind == "poisson"  # type: ignore[arg-type]


def test_more_bands_than_groups_have_no_proof() -> None:
    sampling = lc.Poisson(2, examples=100, steps_per_epoch=5, epochs=2)
    for mechanism in (lc.BSR(3), lc.LambdaCGD(1e-4), lc.BISR(2), lc.BLT(1, decays=(0.5,), weights=(0.1,))):
        with pytest.raises(lc.InvalidInput, match=r"C of .* bands.*2 groups"):
            accountant_for(mechanism, sampling).sigma(2.0, 1e-5)
    assert accountant_for(lc.Identity(), sampling).sigma(2.0, 1e-5).certificate.details["steps_of_an_example"] == 5


@pytest.mark.parametrize(
    "given",
    [
        {"mechanism": lc.BandMF("auto"), "sampling": lc.Cyclic()},
        {"mechanism": lc.BandMF("auto"), "sampling": lc.Poisson(), "epsilon": float("inf")},
        {"mechanism": lc.BandMF(7), "sampling": lc.Poisson()},
        {"mechanism": lc.LambdaCGD(0.5), "sampling": lc.Poisson()},
        {"mechanism": lc.Identity(), "sampling": lc.Poisson(2)},
    ],
    ids=str,
)
def test_what_cannot_be_planned(given: dict) -> None:
    with pytest.raises(lc.InvalidInput):
        lc.plan(**(SMALL | given))


def test_a_plan_keeps_its_groups() -> None:
    """Contract 1: neither a file nor a changed plan trains with groups that σ was not computed for."""
    plan = lc.plan(**SMALL, mechanism=lc.BandMF(2), sampling=lc.Poisson())  # type: ignore[arg-type]
    assert plan.sampling.kind == "cyclic poisson, 2 groups"
    assert plan.batch_size == 20
    again = lc.Plan.from_json(plan.to_json())
    assert again == plan
    again.check()
    lc.Noiser(plan, lc.SecretKey.generate())
    for groups in (0, 1, 3):
        changed = dataclasses.replace(plan, sampling=dataclasses.replace(plan.sampling, groups=groups))
        with pytest.raises(lc.InvalidInput, match="do not belong together"):
            lc.Noiser(changed, lc.SecretKey.generate())
    assert lc.plan(**SMALL, mechanism=lc.BandMF("auto"), sampling=lc.Poisson(3)).mechanism.bands == 3  # type: ignore[arg-type,attr-defined]


def test_plan_files_without_groups_are_of_plain_poisson_sampling() -> None:
    plan = lc.plan(**SMALL, mechanism=lc.Identity(), sampling=lc.Poisson())  # type: ignore[arg-type]
    assert "groups" not in plan.to_dict()["sampling"]
    assert lc.Plan.from_json(plan.to_json()) == plan
