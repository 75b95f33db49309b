"""Runs that claim nothing say so, and a forked run gets no second copy of its noise."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings

import pytest
import torch

import lambdacgd as lc
from lambdacgd.training.card import History
from lambdacgd.training.run import Run
from tests.training import oracle

SMALL = {"examples": 60, "batch_size": 10, "epochs": 1, "epsilon": 8.0, "delta": 1e-3}


def test_a_plan_of_an_earlier_release_that_claims_nothing_is_refused():
    plan = lc.plan(**SMALL, mechanism=lc.BISR(3), sampling=lc.Cyclic())
    plan = dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, kind="estimate"))
    model = torch.nn.Linear(2, 2)
    data = torch.utils.data.TensorDataset(torch.randn(60, 2), torch.zeros(60, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(lc.InvalidInput, match="of an earlier release: its σ is an estimate"):
        lc.privatize(model, optimizer, data, plan, max_grad_norm=1.0)
    with pytest.raises(lc.InvalidInput, match="of an earlier release: its σ is an estimate"):
        lc.Noiser(plan, lc.SecretKey.generate())


def test_a_delta_above_one_over_n_is_said_to_protect_nobody_once():
    settings = SMALL | {"sampling": lc.Cyclic(), "mechanism": lc.LambdaCGD(0.5)}
    with pytest.warns(UserWarning, match="above 1/N = 0.017"):
        plan = lc.plan(**settings | {"delta": 0.02})
    with pytest.warns(UserWarning, match="above 1/N = 0.017"):
        lc.Plan.from_json(plan.to_json())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lc.Noiser(plan, lc.SecretKey.generate())
        lc.plan(**settings | {"delta": 1 / 60})


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


def test_a_key_for_tests_repeats_a_run_and_claims_nothing(tmp_path):
    """The same seed gives the same weights in every process; the card, and cards of runs after it, claim nothing."""

    def trained(seed):
        module = oracle.model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        with pytest.warns(lc.NotPrivateWarning, match=r"SecretKey\.for_tests"):
            private = lc.privatize(
                module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, key=lc.SecretKey.for_tests(seed)
            )
        oracle.loop(private, module, optimizer)
        return private, oracle.weights(module)

    (one, first), (_, again), (_, other) = trained(3), trained(3), trained(4)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items())
    card = one.card()
    assert card["claim"].startswith("none: trained with a key for tests")
    assert card["epsilon"] == card["this_run"]["epsilon"] == card["replace_one"]["epsilon"] == "inf"
    assert not one.spent().private
    assert "not a claim" in str(one.spent())
    lc.export(one, tmp_path / "export")
    assert History.of([tmp_path / "export"]).runs == ((math.inf, 1e-5),)
    with pytest.raises(lc.CheckpointError, match="memory only"):
        one.save(tmp_path / "checkpoint")


def test_a_key_for_tests_gets_no_file(tmp_path):
    key = lc.SecretKey.for_tests(0)
    with pytest.raises(lc.KeyFileError, match="is no secret"):
        key.save(tmp_path / "run.key")
    assert not list(tmp_path.iterdir())
    assert key.is_for_tests
    assert not lc.SecretKey.generate().is_for_tests
    for seed in (True, 1.5, "1"):
        with pytest.raises(ValueError, match="it must be an integer"):
            lc.SecretKey.for_tests(seed)


def test_a_noiser_with_a_key_for_tests_repeats_itself():
    def noise():
        with pytest.warns(lc.NotPrivateWarning, match=r"SecretKey\.for_tests"):
            noiser = lc.Noiser(oracle.plan(), lc.SecretKey.for_tests(1))
        return noiser.batch().tolist(), noiser.add({"w": torch.zeros(4)})["w"].tolist()

    assert noise() == noise()
