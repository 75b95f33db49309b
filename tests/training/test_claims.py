"""Runs that claim nothing say so, and a forked run gets no second copy of its noise."""

from __future__ import annotations

import dataclasses
import os
import warnings

import pytest
import torch

import lambdacgd as lc
from lambdacgd.training import NotPrivateWarning
from lambdacgd.training.run import Run

SMALL = {"examples": 60, "batch_size": 10, "epochs": 1, "epsilon": 8.0, "delta": 1e-3}


def test_an_estimated_plan_is_said_to_claim_nothing():
    plan = lc.plan(**SMALL, mechanism=lc.BISR(3), estimate=True)
    model = torch.nn.Linear(2, 2)
    data = torch.utils.data.TensorDataset(torch.randn(60, 2), torch.zeros(60, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NotPrivateWarning, match="NOT CERTIFIED"):
        lc.privatize(model, optimizer, data, plan, max_grad_norm=1.0).detach()
    with pytest.warns(NotPrivateWarning, match="NOT CERTIFIED"):
        lc.Noiser(plan, lc.SecretKey.generate())


def test_a_delta_above_one_over_n_is_said_to_protect_nobody():
    settings = SMALL | {"sampling": lc.Cyclic(), "mechanism": lc.LambdaCGD(0.5)}
    with pytest.warns(UserWarning, match="above 1/N = 0.017"):
        lc.Noiser(lc.plan(**settings | {"delta": 0.02}), lc.SecretKey.generate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lc.Noiser(lc.plan(**settings | {"delta": 1 / 60}), lc.SecretKey.generate())


@pytest.mark.parametrize(
    "change", [{"sigma": 0.01}, {"epsilon": 1.0}, {"delta": 1e-6}, {"mechanism": lc.LambdaCGD(0.1)}]
)
def test_a_plan_changed_after_it_was_made_does_not_train(change):
    """Contract 1: nobody trains with a σ computed for something else."""
    plan = lc.plan(**SMALL, mechanism=lc.LambdaCGD(0.5), sampling=lc.Cyclic())
    lc.Noiser(plan, lc.SecretKey.generate())
    with pytest.raises(lc.InvalidInput, match="do not belong together"):
        lc.Noiser(dataclasses.replace(plan, **change), lc.SecretKey.generate())


@pytest.mark.parametrize("mechanism", [lc.LambdaCGD(0.5), lc.Identity()], ids=str)
@pytest.mark.parametrize("made", ["cyclic", "poisson", "fixed", "fresh"])
def test_a_plan_does_not_train_with_another_sampling(mechanism, made):
    """Independent noise has the same errors and sensitivity over all of them: the certificate says which it is of."""
    kinds = {
        "cyclic": lc.Cyclic(examples=60, steps_per_epoch=6, epochs=2, batch_size=10),
        "poisson": lc.Poisson(examples=60, steps_per_epoch=6, epochs=2),
        "fixed": lc.BallsInBins("fixed", examples=60, steps_per_epoch=6, epochs=2),
        "fresh": lc.BallsInBins("fresh", examples=60, steps_per_epoch=6, epochs=2),
    }
    if made == "poisson" and mechanism != lc.Identity():
        pytest.skip("no accountant")
    plan = lc.plan(**(SMALL | {"epochs": 2}), mechanism=mechanism, sampling=kinds[made])
    assert plan.sampling == kinds.pop(made)
    lc.Noiser(plan, lc.SecretKey.generate())
    for other in kinds.values():
        with pytest.raises(lc.InvalidInput, match="do not belong together"):
            lc.Noiser(dataclasses.replace(plan, sampling=other), lc.SecretKey.generate())
    details = {name: value for name, value in plan.certificate.details.items() if name != "sampling"}
    earlier = dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, details=details))
    if made == "fresh":
        with pytest.raises(lc.InvalidInput, match="do not belong together"):
            lc.Noiser(earlier, lc.SecretKey.generate())
    else:
        lc.Noiser(earlier, lc.SecretKey.generate())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_run_is_refused():
    """Parent and child would add the same z to different sums."""
    run = Run(lc.SecretKey.generate())
    assert run.id
    child = os.fork()
    if child == 0:
        try:
            _ = run.id
        except lc.TrainingError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
