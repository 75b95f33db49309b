"""Variants of the default: their plans claim nothing, their noise is what they say, and they are searched alike."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import lambdacgd as lc
from lambdacgd.mechanisms import Horizon, LambdaCGD, error_norms
from reproduce.framework import Settings
from reproduce.frontier import OURS, PLANS
from reproduce.lower_noise import TRAINED, cells, page, search
from reproduce.runs import FALLING, VARIANTS, PlanBook, Result, TrainingRun
from reproduce.search import stored
from reproduce.trainer import plan_requests
from reproduce.uncertified import (
    BANDS,
    ScaledEpochs,
    found,
    noise_of_epochs,
    plan_of,
    rmse,
    simulated_sigma,
    weights_of_epochs,
)


class RatesOnly:
    """Accuracy falls with the distance, in factors of two, of a rate from the best, which is four times as large for
    variants; ``asked`` keeps the runs.
    """

    def __init__(self, best: float) -> None:
        self.best, self.asked = best, list[TrainingRun]()

    def get(self, run: TrainingRun) -> Result:
        self.asked.append(run)
        best = self.best * (4 if run.method in VARIANTS else 1)
        score = 0.8 - 0.05 * abs(math.log2(run.learning_rate / best)) + 0.001 * run.seed
        facts = {"sigma": 1.0, "rmse": 1.0, "lambda": None, "certificate": {}, "seconds": 2.0, "sharing": 2}
        return facts | {"accuracy": {"last": score}}


ASKED = {"examples": 400, "batch_size": 20, "epochs": 3, "epsilon": 4.0, "delta": 1e-5}


def test_two_bands_are_the_default() -> None:
    bands, ours = ScaledEpochs.of((-0.9,)), LambdaCGD(0.9, normalized=True)
    np.testing.assert_allclose(bands.column_scales(30), ours.column_scales(30), rtol=1e-12)
    horizon = Horizon(20, 3)
    assert rmse(bands, horizon, 2.0) == pytest.approx(2 * error_norms(ours, 60, restart_every=20)[0], rel=1e-12)


def test_noise_of_an_epoch_weighs_as_much_as_it_adds_to_the_error() -> None:
    """Straight from the matrix A·C⁻¹ of all steps."""
    mechanism, b, k = ScaledEpochs.of((-0.5, -0.3)), 7, 3
    column, scales = mechanism.noising(b), mechanism.column_scales(b)
    block = sum(np.diag(np.full(b - j, a), -j) for j, a in enumerate(column))
    inverse = np.kron(np.eye(k), scales[:, None] * block)
    errors = (np.cumsum(inverse, axis=0) ** 2).sum(axis=0) / (b * k)
    expected = errors.reshape(k, b).sum(axis=1) * k
    np.testing.assert_allclose(weights_of_epochs(mechanism, Horizon(b, k)), expected, rtol=1e-10)


def test_equal_epochs_are_simulated_as_the_accountant_says() -> None:
    plan = lc.plan(400, 20, epochs=3, epsilon=4.0, delta=1e-4, mechanism=LambdaCGD(0.8, normalized=True))
    kept = plan.certificate.details["floating_point"]
    real = (4.0 - kept["epsilon"], 1e-4 - kept["delta"])
    mechanism = ScaledEpochs.of((-0.8,), (1.0,) * 3)
    sigma, error = simulated_sigma(mechanism, plan.horizon, *real, start=plan.sigma * 1.05)
    assert error < 0.01
    assert sigma == pytest.approx(plan.sigma, rel=max(4 * error, 0.005))


@pytest.mark.parametrize("variant", BANDS)
def test_a_plan_of_a_variant_claims_nothing(variant: str) -> None:
    numbers = found(variant, **ASKED)
    plan = plan_of(ASKED, numbers)
    assert plan.certificate.kind == "estimate"
    assert len(plan.mechanism.coefficients) == BANDS[variant]
    assert numbers["by"].startswith("simulated")
    assert plan.mechanism.epoch_scales
    assert plan.rmse == pytest.approx(rmse(plan.mechanism, plan.horizon, plan.sigma))
    assert list(plan.mechanism.epoch_scales) == sorted(plan.mechanism.epoch_scales)  # early epochs get less noise
    default = lc.plan(400, 20, epochs=3, epsilon=4.0, delta=1e-5)
    assert plan.rmse < 1.01 * default.rmse


def test_each_epoch_has_its_own_noise() -> None:
    scales = (0.5, 1.0, 3.0)
    numbers = {"coefficients": (-0.5, -0.2), "epoch_scales": scales, "sigma": 2.0, "by": "simulated"}
    plan = plan_of(ASKED, numbers)
    model = torch.nn.Linear(60, 60, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(lc.InvalidInput, match="an estimate that claims nothing"):
        lc.privatize(model, optimizer, torch.zeros(400, 60), plan, max_grad_norm=0.3)
    with patch("lambdacgd.training.privatize.check_plan"):  # as `trainer.train` does
        private = lc.privatize(model, optimizer, torch.zeros(400, 60), plan, max_grad_norm=0.3)
    spreads = []
    with noise_of_epochs(private, plan):
        for batch in private.loader:
            private.model(batch).square().sum().backward()  # of zero inputs: what is left is noise
            private.optimizer.step()
            spreads.append(float(model.weight.grad.std()) * plan.batch_size)
            private.optimizer.zero_grad()
    d, coefficients = plan.mechanism.column_scales(20), np.array([1.0, -0.5, -0.2])
    within = [math.sqrt(float((coefficients[: t + 1] ** 2).sum())) for t in range(20)]
    expected = 0.3 * 2.0 * np.concatenate([scale * d * within for scale in scales])
    np.testing.assert_allclose(spreads, expected, rtol=0.08)


def test_plans_of_all_runs_are_in_the_repository() -> None:
    book, made = PlanBook(PLANS), cells(Settings())
    assert [(cell["method"], cell["epsilon"]) for cell in made] == list(TRAINED)
    for cell in made:
        for request in plan_requests(cell):
            assert book.get(request).certificate.kind == ("estimate" if cell["method"] in BANDS else "bound")


def test_a_variant_begins_where_the_default_ended_and_is_compared_with_it() -> None:
    cell = cells(Settings())[0]
    (rate,) = cell["rates"].values()
    known = RatesOnly(rate)
    row = stored(search(cell), known)
    assert row is not None
    assert len(row["tried"]) == 4  # the rates, and one further out
    mine = [run for run in known.asked if run.method == cell["method"]]
    assert {(run.batch_size, run.split) for run in mine} == {(128, "validation"), (128, "test")}
    text = page([row | {"method": cell["method"], "epsilon": 8.0, "epochs": 10}])
    assert "four normalised bands with a σ for each epoch" in text
    assert "nothing may be claimed" in text


def test_a_falling_rate_has_the_same_rate_under_both_lambdas() -> None:
    cell = next(cell for cell in cells(Settings()) if cell["method"] == FALLING.name)
    known = RatesOnly(next(iter(cell["after"]["rates"].values())))
    row = stored(search(cell), known)
    assert row is not None
    tests = {(run.method, run.schedule, run.learning_rate) for run in known.asked if run.split == "test"}
    assert tests == {(name, "linear", row["learning_rate"]) for name in (OURS, FALLING.name)}
    assert len(row["scores"]) == len(row["default"]["scores"]) == 5
    plan = PlanBook(PLANS).get(next(request for request in plan_requests(cell) if request["examples"] == 50_000))
    assert 1 < row["default"]["rmse"] / plan.rmse < 1.01  # its λ is the best for such a rate
    text = page([row | {"method": FALLING.name, "epsilon": 8.0, "epochs": 10}])
    assert "the best for the default in the search" in text


def test_a_plan_is_read_back_from_its_numbers(tmp_path: Path) -> None:
    cell = next(iter(cells(Settings(quick=True))))
    request = next(iter(plan_requests(cell)))
    made = PlanBook(tmp_path / "plans.jsonl", make=True).get(request)
    assert PlanBook(tmp_path / "plans.jsonl").get(request) == made
