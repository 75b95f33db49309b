"""ε of a past run, noise for a budget, and mechanisms side by side."""

from __future__ import annotations

import json

import pytest

import lambdacgd as lc
from lambdacgd.cli import main

RUN = {"sampling_rate": 0.05, "steps": 50}


@pytest.fixture(scope="module")
def plan():
    return lc.plan(400, 50, epochs=2, epsilon=2.0, delta=1e-4, mechanism=lc.LambdaCGD(0.5))


def test_epsilon_of_a_past_run_of_dp_sgd():
    """Golden values by dp-accounting; Opacus's PRV accountant, a little looser, says 2.135 and 2.681.

    At δ = 1e-4, q = 1/50 in place of 1/20 gives 0.837: the steps mistaken for those of an epoch.
    """
    assert lc.epsilon(**RUN, noise_multiplier=1.0, delta=1e-4) == pytest.approx(2.125, abs=1e-3)
    assert lc.epsilon(**RUN, noise_multiplier=1.0, delta=1e-5) == pytest.approx(2.670, abs=1e-3)
    plan = lc.plan(
        1000, 50, steps_per_epoch=20, epochs=2, noise_multiplier=1.0, delta=1e-5,
        mechanism=lc.Identity(), sampling=lc.Poisson(),
    )  # fmt: skip
    past = lc.epsilon(sampling_rate=1 / 20, steps=40, noise_multiplier=1.0, delta=1e-5)
    assert past <= plan.epsilon <= past * 1.01  # a plan also sets a little aside for floating point


def test_everybody_in_every_step_is_the_gaussian_mechanism():
    from lambdacgd.accounting.gaussian import gaussian_epsilon

    exact = gaussian_epsilon(4.0 / 2, 1e-5)
    assert exact <= lc.epsilon(sampling_rate=1, steps=4, noise_multiplier=4.0, delta=1e-5) <= exact * 1.01


def test_noise_for_a_budget_and_its_epsilon_are_inverse(plan):
    sigma = lc.noise_multiplier(**RUN, epsilon=2.0, delta=1e-5)
    assert lc.epsilon(**RUN, noise_multiplier=sigma, delta=1e-5) == pytest.approx(2.0, rel=1e-3)
    assert lc.noise_multiplier(plan, epsilon=plan.epsilon, delta=plan.delta) == plan.sigma
    assert lc.epsilon(plan, delta=plan.delta) == pytest.approx(plan.epsilon, rel=1e-3)
    assert lc.epsilon(plan) == lc.epsilon(plan, delta=plan.delta)
    assert lc.epsilon(plan, delta=1e-6) > plan.epsilon
    assert lc.epsilon(plan, delta=1e-4, noise_multiplier=2 * plan.sigma) < plan.epsilon


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"delta": 1e-5}, "noise multiplier"),
        ({"delta": 1e-5, "noise_multiplier": 1.0}, "both sampling_rate and steps"),
        ({"delta": 1e-5, "noise_multiplier": 1.0, "sampling_rate": 0.1}, "both sampling_rate and steps"),
        ({"delta": 1e-5, "noise_multiplier": 1.0, "sampling_rate": 50, "steps": 5}, "sampling_rate is 50; it must be"),
        ({"delta": 1e-5, "noise_multiplier": 0.0, **RUN}, "noise_multiplier is 0.0; it must be"),
        ({"delta": 2, "noise_multiplier": 1.0, **RUN}, "delta is 2; it must be"),
        ({"plan": "plan.json", "delta": 1e-5}, "what lc.plan returns"),
        (RUN | {"noise_multiplier": 1.0}, "delta is None"),
    ],
)
def test_half_a_question_is_refused(given, told):
    with pytest.raises(lc.InvalidInput, match=told):
        lc.epsilon(**{"plan": None} | given)


def test_a_plan_knows_its_sampling(plan):
    with pytest.raises(lc.InvalidInput, match="leave sampling_rate and steps out"):
        lc.epsilon(plan, delta=1e-5, **RUN)
    assert lc.epsilon(lc.plan(400, 50, epochs=1, epsilon=float("inf"), delta=1e-4), delta=1e-4) == float("inf")


def test_the_command(plan, tmp_path, capsys):
    asked = ["epsilon", "--sampling-rate", "0.05", "--steps", "50", "--noise-multiplier", "1", "--delta", "1e-5"]
    assert main(asked) == 0
    assert "ε = 2.67" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(2.670, abs=1e-3)
    plan.save(tmp_path / "plan.json")
    assert main(["epsilon", "--plan", str(tmp_path / "plan.json")]) == 0
    assert "fresh" in capsys.readouterr().out
    assert main(["epsilon", "--steps", "50"]) == 2
    assert "--delta" in capsys.readouterr().err


def test_compare_from_python():
    plans = lc.compare(200, 50, epochs=1, epsilon=2.0, delta=1e-3, sampling=lc.Cyclic())
    assert len(plans) == 9
    assert {plan.sampling.kind for plan in plans} == {"cyclic"}
    assert min(plans, key=lambda plan: plan.rmse).rmse < plans[0].rmse


def test_a_plan_is_one_screen(plan):
    lines = repr(plan).splitlines()
    assert len(lines) < 15
    assert max(map(len, lines)) < 80
    assert str(plan) == repr(plan)
    assert "ε = 2" in plan._repr_html_()
    assert "<table>" in plan._repr_html_()
