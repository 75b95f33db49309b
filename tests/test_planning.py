"""Plans: golden values, and what is refused at the door."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import lambdacgd as lc
from lambdacgd import cache
from lambdacgd.accounting.accountants import Accountant, exact_numbers
from lambdacgd.accounting.certificate import tell
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.mechanisms.base import BandedInverse
from reproduce.debiased_adam import _adds_independent_noise
from reproduce.sampled import Sampled

PAPER = {"examples": 50_000, "batch_size": 128, "epochs": 10, "epsilon": 8.0, "delta": 1e-5}


def cyclic(mechanism=None, **changes):
    return lc.plan(**({**PAPER, "mechanism": mechanism, "sampling": lc.Cyclic()} | changes))


def test_the_papers_setting():
    plan = cyclic(lc.LambdaCGD(0.95))
    assert (plan.steps, plan.steps_per_epoch, plan.epochs, plan.batch_size) == (3900, 390, 10, 128)
    assert plan.rmse == pytest.approx(14.732, rel=1e-3)
    aside = {"epsilon": 2.0**-10 + 8.0 * 2.0**-11, "delta": 1e-5 * 2.0**-8}  # for floating point
    real = gaussian_sigma(8.0 - aside["epsilon"], 1e-5 - aside["delta"])
    assert plan.sigma == pytest.approx(plan.sensitivity * real, rel=1e-9)
    assert plan.sigma == pytest.approx(plan.sensitivity * 0.6002290722, rel=1e-3)
    assert plan.certificate.details["floating_point"] == aside
    assert plan.maxse > plan.rmse
    assert plan.certificate.method == "analytic"
    assert plan.mechanism == lc.LambdaCGD(0.95)


def test_poisson_plan():
    plan = lc.plan(**PAPER, mechanism=lc.Identity(), sampling=lc.Poisson())
    assert plan.sigma == pytest.approx(0.4942, rel=5e-3)
    assert plan.rmse == pytest.approx(21.82, rel=5e-3)


def test_automatic_lambda_without_amplification_is_rmse_optimal():
    plan = cyclic()
    assert plan.mechanism.lam == pytest.approx(0.9776, abs=1e-4)
    assert plan.rmse == pytest.approx(12.686, rel=1e-3)
    assert (plan.selection["parameter"], plan.selection["objective"]) == ("lambda", "rmse")


def test_fixed_bins_are_certified_exactly():
    plan = lc.plan(**(PAPER | {"epsilon": 2.0}), mechanism=lc.LambdaCGD(0.9), sampling=lc.BallsInBins("fixed"))
    assert plan.sampling == lc.BallsInBins("fixed", examples=50_000, steps_per_epoch=390, epochs=10)
    assert (plan.restart_every, plan.block) == (None, plan.horizon)
    assert plan.sigma == pytest.approx(5.4996, rel=1e-3)
    assert (plan.certificate.method, plan.certificate.confidence) == ("transfer-matrix", 1.0)
    assert plan.rmse < cyclic(lc.LambdaCGD(0.9), epsilon=2.0).rmse


def test_fresh_bins_are_the_default_and_need_less_noise():
    small = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-5}
    for mechanism in (lc.LambdaCGD(0.5), lc.Identity()):
        plan = lc.plan(**small, mechanism=mechanism)
        assert plan.sampling == lc.BallsInBins("fresh", examples=400, steps_per_epoch=20, epochs=2)
        assert (plan.certificate.kind, plan.certificate.confidence) == ("bound", 1.0)
        assert plan.sigma < lc.plan(**small, mechanism=mechanism, sampling=lc.BallsInBins("fixed")).sigma
    infinite = small | {"epsilon": math.inf}
    for mechanism in (None, lc.BISR(), lc.BLT(1)):
        assert lc.plan(**infinite, mechanism=mechanism).sampling.bins == "fresh"


def test_dp_sgd_under_balls_in_bins_is_lambda_zero():
    small = {
        "examples": 1000,
        "batch_size": 50,
        "epochs": 3,
        "epsilon": 2.0,
        "delta": 1e-5,
        "sampling": lc.BallsInBins("fixed"),
    }
    independent = lc.plan(**small, mechanism=lc.Identity())
    assert independent.certificate.method == "transfer-matrix"
    assert independent.sigma == pytest.approx(lc.plan(**small, mechanism=lc.LambdaCGD(0.0)).sigma, rel=1e-6)
    assert independent.sigma == pytest.approx(lc.plan(**small, mechanism=lc.BISR(1)).sigma, rel=1e-6)


def test_automatic_lambda_under_amplification_follows_the_guideline():
    small = {"examples": 400, "batch_size": 20, "epochs": 2, "epsilon": 2.0, "delta": 1e-5}
    plan = lc.plan(**small, sampling=lc.BallsInBins("fixed"))
    found = {candidate["objective"]: candidate["value"] for candidate in plan.selection["candidates"]}
    assert set(found) == {"rmse", "maxse", "amplified-rmse", "guideline"}
    assert plan.mechanism.lam == found["guideline"] <= found["amplified-rmse"] <= found["rmse"] <= found["maxse"]


@pytest.mark.parametrize("mechanism", [lc.BISR(3), lc.BLT(2)], ids=str)
def test_other_mechanisms_are_certified_near_their_estimate(mechanism):
    small = {
        "examples": 400,
        "batch_size": 20,
        "epochs": 2,
        "epsilon": 4.0,
        "delta": 1e-4,
        "sampling": lc.BallsInBins("fixed"),
    }
    certified = lc.plan(**small, mechanism=mechanism)
    drawn = Sampled(certified.mechanism, certified.horizon).sigma(*lc.planning.real_budget(4.0, 1e-4)).value
    assert (certified.certificate.kind, certified.certificate.confidence) == ("bound", 1)
    assert drawn * 0.995 < certified.sigma < drawn * 1.04


def test_a_strategy_with_negative_entries_counts_by_their_sizes():
    request = {"epochs": 2, "epsilon": 4.0, "delta": 1e-4, "sampling": lc.BallsInBins("fixed")}
    signed = lc.plan(400, 20, mechanism=lc.BandInvMF(2, (1.0, 0.5)), **request)
    sizes = lc.plan(400, 20, mechanism=lc.LambdaCGD(0.5), **request)
    assert sizes.sigma * 0.999 < signed.sigma < sizes.sigma * 1.02


def test_the_objective_can_be_chosen():
    most = cyclic(lc.LambdaCGD(objective="maxse"))
    assert most.mechanism.lam > cyclic(lc.LambdaCGD(objective="rmse")).mechanism.lam
    assert most.mechanism == lc.LambdaCGD(most.mechanism.lam)


def test_automatic_gamma_without_amplification_is_rmse_optimal():
    plan = cyclic(lc.GammaBIFR(4))
    assert plan.mechanism.gamma == pytest.approx(0.94, abs=0.02)
    assert plan.rmse <= 12.411 * 1.0001


def test_a_dataset_fills_in_the_number_of_examples():
    assert cyclic(lc.LambdaCGD(0.5), examples=range(1000), batch_size=10).examples == 1000


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            torch.utils.data.DataLoader(range(1000), batch_size=10),
            "a DataLoader is a number of batches: pass its dataset",
        ),
        ({"train": range(1000), "test": range(100)}, "a mapping of train, test.*data\\['train'\\]"),
    ],
    ids=["loader", "splits"],
)
def test_what_has_a_length_of_another_kind_is_refused(given, what):
    """100 batches, or two splits, are not as many examples."""
    with pytest.raises(lc.InvalidInput, match=what):
        cyclic(lc.LambdaCGD(0.5), examples=given, batch_size=1)


def test_a_mapping_of_indices_is_a_dataset():
    assert cyclic(lc.LambdaCGD(0.5), examples=dict(enumerate(range(1000))), batch_size=10).examples == 1000


def test_infinite_epsilon_means_no_noise():
    plan = cyclic(lc.LambdaCGD(0.9), epsilon=math.inf)
    assert (plan.sigma, plan.rmse, plan.certificate.method) == (0.0, 0.0, "none")


def test_steps_per_epoch_can_be_given():
    assert cyclic(lc.LambdaCGD(0.5), steps_per_epoch=100).steps == 1000


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"examples": 0}, "examples"),
        ({"examples": 10.5}, "examples"),
        ({"examples": "many"}, "examples"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 50_001}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.inf}, "delta"),
        ({"mechanism": "bisr"}, "mechanism"),
        ({"mechanism": lc.BISR}, "mechanism"),
        ({"mechanism": lc.BISR(3901)}, "bands"),
        ({"mechanism": lc.BISR(391), "sampling": lc.BallsInBins("fresh")}, "bands"),
        ({"mechanism": lc.BandInvMF(amplified=True)}, "amplified"),
        ({"mechanism": lc.LambdaCGD(objective="guideline")}, "objective"),
        ({"mechanism": lc.LambdaCGD(0.5), "sampling": lc.BallsInBins(), "epsilon": 1e-9}, "epsilon"),
        ({"sampling": "cyclic"}, "sampling"),
        ({"sampling": lc.Poisson, "mechanism": lc.Identity()}, "sampling"),
        ({"mechanism": lc.LambdaCGD(0.9), "sampling": lc.Poisson()}, "sampling"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"steps_per_epoch": 391}, "batch_size"),
    ],
)
def test_bad_input_names_the_parameter(changes, parameter):
    with pytest.raises(lc.InvalidInput) as error:
        cyclic(**changes)
    assert error.value.parameter == parameter


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"epsilon": 10**400}, "epsilon"),
        ({"epochs": 10**400}, "epochs"),
        ({"examples": 10**12, "batch_size": 1, "mechanism": lc.BISR()}, "epochs"),
        ({"mechanism": lc.BandInvMF(2, (1.0, -5.0))}, "mechanism"),
    ],
)
def test_what_is_too_large_is_refused_at_once(changes, parameter):
    with pytest.raises(lc.InvalidInput) as refusal:
        cyclic(**changes)
    assert refusal.value.parameter == parameter


@dataclass(frozen=True)
class _Scaled(lc.Mechanism):
    """A mechanism of one's own whose a_0 is not 1: C is 1/a_0 times that of another."""

    coefficients: tuple[float, ...]
    name: ClassVar[str] = "scaled"

    def recurrence(self, n):
        return BandedInverse(self.coefficients)


def test_less_noise_of_ones_own_is_not_mistaken_for_dp_sgd_or_lambda_cgd():
    horizon = lc.Horizon(5, 2)
    assert _adds_independent_noise(_Scaled((1.0,)), horizon)
    assert not _adds_independent_noise(_Scaled((0.1,)), horizon)
    assert exact_numbers(_Scaled((1.0, -0.5)), horizon.steps) == {"lam": 0.5}
    assert exact_numbers(_Scaled((0.5, -0.25)), horizon.steps) is None
    poisson = {"examples": 100, "batch_size": 20, "epochs": 2, "epsilon": 4.0, "delta": 1e-5, "sampling": lc.Poisson()}
    less, plain = (lc.plan(**poisson, mechanism=mechanism).sigma for mechanism in (_Scaled((0.1,)), lc.Identity()))
    assert less == pytest.approx(10 * plain, rel=1e-9)
    small = {"examples": 100, "batch_size": 20, "epochs": 2, "epsilon": 4.0, "delta": 1e-4}
    for sampling in (lc.BallsInBins("fixed"), lc.BallsInBins("fresh")):
        scaled = lc.plan(**small, mechanism=_Scaled((0.5, -0.25)), sampling=sampling)
        exact = lc.plan(**small, mechanism=lc.LambdaCGD(0.5), sampling=sampling)
        assert scaled.sigma == pytest.approx(2 * exact.sigma, rel=0.02)


@pytest.mark.parametrize(
    "mechanism",
    [
        lc.LambdaCGD(0.9), lc.LambdaCGD(0.9, normalized=True), lc.Identity(), lc.BISR(), lc.GammaBIFR(gamma=0.6),
        lc.BandInvMF(), lc.BLT(2), lc.BSR(), lc.BandMF(), lc.Diagonal(),
    ],
    ids=repr,
)  # fmt: skip
def test_fresh_bins_are_planned_over_one_epoch(mechanism, tmp_path):
    """Mechanisms are those of n = b, k = 1; errors and sensitivity are those of restarted noise. ε = inf: no noise."""
    request = {"mechanism": mechanism, "examples": 400, "batch_size": 20, "delta": 1e-4, "epsilon": math.inf}
    plan = lc.plan(**request, epochs=3, sampling=lc.BallsInBins("fresh"))
    assert (plan.steps, plan.block, plan.restart_every) == (60, lc.Horizon(20, 1), 20)
    one = lc.plan(**request, epochs=1, sampling=lc.BallsInBins("fixed"))
    assert plan.mechanism == one.mechanism
    assert plan.sensitivity == pytest.approx(math.sqrt(3) * one.sensitivity, rel=1e-9)
    plan.check()
    plan.save(tmp_path / "plan.json")
    assert lc.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("request_", "drawn", "described"),
    [
        ({"examples": 2000, "batch_size": 1100}, 2000, "2000 (1100 asked for)"),
        ({"examples": 2000, "batch_size": 300}, 2000 / 6, "333.3 (300 asked for)"),
        ({"examples": 2000, "batch_size": 50, "steps_per_epoch": 4}, 500, "500 (50 asked for)"),
        ({"examples": 2000, "batch_size": 50}, 50, "50"),
        ({"examples": 2000, "batch_size": 300, "sampling": lc.Cyclic()}, 300, "300"),
        ({"examples": 2000, "batch_size": 300, "sampling": lc.Poisson(), "mechanism": lc.Identity()}, 2000 / 6, "333."),
    ],
)
def test_the_batch_size_of_a_plan_is_what_it_draws_on_average(request_, drawn, described):
    """Contract 3: sums are divided by N/b. A plan of 2000 examples in batches of 1100 has one step, of all 2000."""
    plan = lc.plan(**request_, epochs=2, epsilon=math.inf, delta=1e-5)
    assert plan.batch_size == drawn
    assert plan.requested_batch_size == request_["batch_size"]
    assert f"about {described}" in str(plan)
    sizes = [len(batch) for batch in plan.sampling.batches(lc.SecretKey.from_bytes(bytes(32)))]
    assert sum(sizes) / len(sizes) == pytest.approx(drawn, rel=0.1)


def test_a_bound_sampling_is_taken_where_it_is_the_plans():
    request = {"examples": 100, "batch_size": 10, "epochs": 2, "epsilon": math.inf, "delta": 1e-5}
    bound = lc.BallsInBins("fixed").bind(examples=100, steps_per_epoch=10, epochs=2)
    assert lc.plan(**request, sampling=bound).sampling == bound
    for other in (bound.bind, lc.Cyclic(batch_size=20).bind):
        with pytest.raises(lc.InvalidInput, match="made for"):
            other(examples=100, steps_per_epoch=5, epochs=2, batch_size=10)
    with pytest.raises(lc.InvalidInput, match="The sampling is made for batch_size = 20 and the plan has 10"):
        lc.plan(**request, sampling=lc.Cyclic(batch_size=20))


@pytest.mark.parametrize("mechanism", [lc.LambdaCGD(), lc.GammaBIFR(), lc.BandInvMF(amplified=True)], ids=str)
def test_what_a_plan_must_choose_is_not_known_before(mechanism):
    assert not mechanism.resolved
    with pytest.raises(ValueError, match="chooses its parameters"):
        mechanism.resolve(lc.Horizon(10, 2))
    with pytest.raises(ValueError, match="not resolved"):
        mechanism.noising(10)


@pytest.mark.parametrize(("bins", "epsilon"), [("fresh", 500.0), ("fresh", 1e-5), ("fixed", 1e-5)])
def test_an_epsilon_that_no_accountant_takes_is_refused_before_lambda_is_searched(bins, epsilon):
    with pytest.raises(lc.InvalidInput, match="is accounted for from"):
        lc.plan(1000, 50, epochs=2, epsilon=epsilon, delta=1e-5, sampling=lc.BallsInBins(bins))


@pytest.mark.parametrize("made", [lambda: lc.LambdaCGD("best"), lambda: lc.GammaBIFR(gamma="best")])
def test_refusals_name_every_alternative(made):
    with pytest.raises(lc.InvalidInput, match="or 'auto'"):
        made()


SIGMA = {"examples": 50_000, "batch_size": 128, "epochs": 10, "delta": 1e-5}


def test_a_plan_from_a_noise_multiplier(tmp_path):
    plan = lc.plan(**SIGMA, noise_multiplier=2.9289, mechanism=lc.LambdaCGD(0.9), sampling=lc.BallsInBins("fixed"))
    assert plan.sigma == 2.9289
    assert plan.epsilon == pytest.approx(8.0, rel=2e-3)
    assert (plan.certificate.epsilon, plan.certificate.delta) == (plan.epsilon, 1e-5)
    assert plan.certificate.method == "transfer-matrix"
    plan.check()
    plan.save(tmp_path / "plan.json")
    assert lc.Plan.load(tmp_path / "plan.json").digest == plan.digest


def test_lambda_may_be_chosen_by_what_needs_no_epsilon():
    assert lc.plan(**SIGMA, noise_multiplier=5.0, sampling=lc.Cyclic()).mechanism == cyclic().mechanism
    chosen = lc.plan(1000, 100, epochs=2, noise_multiplier=5.0, delta=1e-3, mechanism=lc.LambdaCGD(objective="rmse"))
    assert chosen.selection["objective"] == "rmse"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({}, "Give either epsilon or noise_multiplier"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "Give either epsilon or noise_multiplier"),
        ({"noise_multiplier": 0.0}, "noise_multiplier is 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": 1.0}, "automatic λ is chosen for an ε"),
        ({"noise_multiplier": 1.0, "mechanism": lc.GammaBIFR()}, "automatic γ is chosen for an ε"),
        ({"noise_multiplier": 1.0, "mechanism": lc.BandInvMF(amplified=True)}, "optimised for an ε"),
    ],
)
def test_noise_multipliers_refused(changes, match):
    with pytest.raises(lc.InvalidInput, match=match):
        lc.plan(**SIGMA, **changes)


@pytest.mark.parametrize("kind", [lc.BallsInBins, lc.Poisson, lc.Cyclic])
def test_a_sampling_of_ones_own_is_refused(kind):
    """It would be accounted for as the class that it derives from, whatever it draws."""

    class Everybody(kind):
        def _batches(self, key, run, start_step):
            yield from ([range(self.examples)] * (self.steps - start_step + 1))

    with pytest.raises(lc.InvalidInput, match="No accountant knows which batches Everybody draws"):
        lc.plan(100, 10, epochs=1, epsilon=2.0, delta=1e-5, mechanism=lc.Identity(), sampling=Everybody())
    made = lc.plan(100, 10, epochs=1, epsilon=2.0, delta=1e-5, mechanism=lc.Identity(), sampling=lc.Cyclic())
    drawn = Everybody().bind(examples=100, steps_per_epoch=10, epochs=1, batch_size=10)
    with pytest.raises(lc.InvalidInput, match="No accountant knows"):
        replace(made, sampling=drawn).check()


def test_a_claim_without_noise_is_refused():
    made = lc.plan(100, 10, epochs=1, epsilon=2.0, delta=1e-5, mechanism=lc.Identity(), sampling=lc.Cyclic())
    with pytest.raises(lc.InvalidInput, match="do not belong together"):
        replace(made, sigma=0.0, rmse=0.0, maxse=0.0).check()


def test_the_short_call_takes_the_best_that_needs_no_memory() -> None:
    small = {"examples": 4000, "batch_size": 40, "epochs": 4, "epsilon": 4.0, "delta": 1e-5}
    short, plain = lc.plan(**small), lc.plan(**small, mechanism=lc.LambdaCGD("auto"))
    assert short == lc.plan(**small, mechanism=lc.LambdaCGD("auto", normalized="auto"))
    assert short.mechanism.normalized is True
    assert plain.mechanism.normalized is False
    assert short.rmse < plain.rmse
    assert (short.certificate.kind, short.sampling.bins) == ("bound", "fresh")
    assert lc.plan(**small, sampling=lc.Cyclic()).mechanism.normalized is False


def test_normalising_is_chosen_with_lambda_or_said() -> None:
    with pytest.raises(lc.InvalidInput, match="chosen together with λ"):
        lc.LambdaCGD(0.9, normalized="auto")
    with pytest.raises(lc.InvalidInput, match="True, False or 'auto'"):
        lc.LambdaCGD("auto", normalized="yes")
    with pytest.raises(ValueError, match="not resolved"):
        lc.LambdaCGD("auto", normalized="auto").column_scales(3)


def test_the_answer_is_told_before_it_is_certified() -> None:
    told: list[lc.planning.Progress] = []
    with cache.disabled():
        plan = lc.plan(600, 20, epochs=3, epsilon=3.0, delta=1e-5, progress=told.append)
    assert len(told) == 1
    assert told[0].mechanism == plan.mechanism
    assert told[0].sigma == pytest.approx(plan.sigma, rel=0.01)
    assert told[0].rmse == pytest.approx(plan.rmse, rel=0.01)
    assert told[0].seconds > 0


def test_a_terminal_counts_down_until_the_answer_is_certified(monkeypatch) -> None:
    """What takes two seconds or more says what the answer will be about, and how long it takes."""
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    certify = Accountant.sigma

    def sigma(self: Accountant, epsilon: float, delta: float) -> lc.Calibration:
        tell(1.0, 0.5)
        assert not shown.getvalue()
        tell(2.0, 30.0)
        tell(1.234, 60.0)
        return certify(self, epsilon, delta)

    monkeypatch.setattr(Accountant, "sigma", sigma)
    plan = cyclic(mechanism=lc.LambdaCGD(0.9, normalized=True))
    error = 1.234 * plan.rmse / plan.sigma
    assert f"λCGD λ=0.9 normalised: σ ≈ 1.23, RMSE ≈ {error:.3g}, certified in about 60 s" in shown.getvalue()


def test_a_schedule_moves_lambda_and_errors_but_not_the_noise_of_a_given_lambda():
    linear = lc.Workload(schedule="linear")
    strong = lc.LambdaCGD(0.95)
    plain, scheduled = (cyclic(mechanism=strong, workload=workload) for workload in (lc.Workload(), linear))
    assert scheduled.sigma == plain.sigma
    horizon = scheduled.horizon
    at_unit_noise = scheduled.sensitivity * scheduled.rmse / scheduled.sigma
    assert at_unit_noise == pytest.approx(lc.rmse(scheduled.mechanism, horizon, workload=linear), rel=1e-9)
    again = lc.Plan.from_json(scheduled.to_json())
    assert again == scheduled
    again.check()
    assert "workload" not in plain.to_dict()
    with pytest.raises(lc.InvalidInput, match="do not belong together"):
        replace(scheduled, workload=lc.Workload()).check()
    chosen = [cyclic(mechanism=lc.LambdaCGD("auto"), workload=workload) for workload in (lc.Workload(), linear)]
    assert chosen[0].mechanism.lam != chosen[1].mechanism.lam
    assert chosen[1].rmse < cyclic(mechanism=chosen[0].mechanism, workload=linear).rmse
    with pytest.raises(lc.InvalidInput, match=r"^workload"):
        cyclic(workload="linear")


@pytest.mark.parametrize(
    "given",
    [{"schedule": "step"}, {"warmup": 1.0}, {"final_rate": 0.5}, {"schedule": "linear", "final_rate": 1.5}],
    ids=str,
)
def test_schedules_that_cannot_be_used(given):
    with pytest.raises(lc.InvalidInput):
        lc.Workload(**given)


def test_a_plan_whose_sampling_amplifies_nothing_says_so():
    """One epoch of λCGD: C has as many bands as there are steps, so every group is drawn whole."""
    run = {"examples": 40, "batch_size": 10, "epochs": 1, "delta": 1e-3, "sampling": lc.Poisson()}
    p = lc.plan(**run, epsilon=2.0, mechanism=lc.LambdaCGD(0.5))
    assert p.sampling.rate == 1
    assert "cyclic poisson, 4 groups, all drawn: no amplification" in repr(p)
    plain = lc.plan(**run | {"sampling": lc.Cyclic()}, epsilon=2.0, mechanism=lc.LambdaCGD(0.5))
    assert plain.sigma <= p.sigma
    assert "no amplification" not in repr(lc.plan(**run, epsilon=2.0, mechanism=lc.Identity()))


def test_coefficients_that_need_a_budget_say_where_to_take_them_from():
    with pytest.raises(lc.InvalidInput, match=r"optimised for an ε.*give its mechanism=plan\.mechanism"):
        lc.plan(40, 10, epochs=2, noise_multiplier=1.0, delta=1e-3, mechanism=lc.BandInvMF(2, amplified=True))


def test_a_missing_plan_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no plan file"):
        lc.Plan.load(tmp_path / "plan.json")
