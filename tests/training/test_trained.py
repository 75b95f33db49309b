"""What a card says of weights that went through more than one run, or through ordinary training afterwards."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import TrainingError, export, privatize
from lambdacgd.training.card import card
from lambdacgd.training.trained import trained_by
from tests.training import oracle
from tests.training.saved import start, steps


def run(module, p=None, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p or oracle.plan(), max_grad_norm=1.0, **options)
    oracle.loop(private, module, optimizer)
    private.detach()
    return private


def ordinary(module, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = oracle.data().tensors
    F.cross_entropy(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_runs_on_one_model_add_up(tmp_path):
    module, first, second = oracle.model(), oracle.plan(epsilon=2.0), oracle.plan(epsilon=3.0)
    run(module, first)
    private = run(module, second)
    facts = json.loads((export(module, tmp_path / "release") / "privacy-card.json").read_text())
    assert facts["epsilon"] == 5.0
    assert facts["delta"] == pytest.approx(first.delta + second.delta)
    assert facts["earlier_runs"] == [{"epsilon": 2.0, "delta": first.delta}]
    assert facts["replace_one"]["epsilon"] == 10.0
    assert facts["claim"].startswith("(5, ")
    assert "1 earlier run on these weights" in (tmp_path / "release" / "PRIVACY.md").read_text()
    assert "earlier" not in card(run(oracle.model(), second).trained)["claim"]
    assert private.trained.plan is second


def test_a_run_for_debugging_leaves_no_claim_to_the_next(tmp_path):
    """Trained without noise first, and then privately from these weights on."""
    module = oracle.model()
    with pytest.warns(lc.NotPrivateWarning):
        run(module, oracle.plan(epsilon=math.inf))
    facts = card(run(module).trained)
    assert facts["claim"].startswith("none: an earlier run")
    assert facts["epsilon"] == "inf"


def test_a_run_without_steps_and_a_refused_one_cost_nothing():
    module = oracle.model()
    run(module, oracle.plan(epsilon=2.0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    privatize(module, optimizer, oracle.data(), oracle.plan(epsilon=7.0), max_grad_norm=1.0).detach()
    with pytest.raises(lc.InvalidInput):
        privatize(module, optimizer, oracle.data(30), oracle.plan(), max_grad_norm=1.0)
    assert card(run(module, oracle.plan(epsilon=3.0)).trained)["epsilon"] == 5.0


def test_a_resumed_run_is_one_run(tmp_path):
    """Also in the same process; and what the weights went through before goes along with the checkpoint."""
    module = oracle.model()
    first = run(module, oracle.plan(epsilon=2.0))
    private = start(tmp_path, module=module)
    steps(private, 2)
    private.save(tmp_path / "c.pt")
    private.detach()
    for again in (module, oracle.model()):
        resumed = start(tmp_path, module=again)
        resumed.load(tmp_path / "c.pt")
        assert card(resumed.trained)["earlier_runs"] == [{"epsilon": 2.0, "delta": first.plan.delta}]
        resumed.detach()


@pytest.mark.parametrize("how", ["another optimizer", "the run's own"])
def test_ordinary_training_afterwards_takes_the_card_away(how, tmp_path):
    module = oracle.model()
    private = run(module)
    export(module, tmp_path / "before")
    ordinary(module, private.optimizer if how == "the run's own" else None)
    with pytest.raises(TrainingError, match="by an optimizer outside of it"):
        export(module, tmp_path / "after")
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("steps_after", [0, 2])
def test_ordinary_training_is_not_forgotten_by_the_next_run(steps_after, tmp_path):
    """Neither by a run that takes no step, nor by a checkpoint of it in a new model."""
    module = oracle.model()
    run(module)
    ordinary(module)
    private = start(tmp_path, module=module)
    steps(private, steps_after)
    assert card(private.trained)["claim"].startswith("none: an earlier run")
    assert card(private.trained)["epsilon"] == "inf"
    assert reloaded_card(private, tmp_path)["epsilon"] == "inf"


def reloaded_card(private, tmp_path):
    """The card of a new model that the run's checkpoint was loaded into."""
    private.save(tmp_path / "c.pt")
    private.detach()
    resumed = start(tmp_path, module=oracle.model())
    resumed.load(tmp_path / "c.pt")
    resumed.detach()
    return card(resumed.trained)


def test_ordinary_training_within_a_run_goes_along_with_its_checkpoint(tmp_path):
    private = start(tmp_path)
    steps(private, 1)
    ordinary_step = torch.optim.SGD(private.model.parameters(), lr=0.1)
    for p in private.model.parameters():
        p.grad = torch.ones_like(p)
    ordinary_step.step()
    ordinary_step.zero_grad()
    assert reloaded_card(private, tmp_path)["epsilon"] == "inf"


def test_what_is_no_training_changes_nothing(tmp_path):
    module, other = oracle.model(), oracle.model()
    run(module)
    ordinary(other)
    x, y = oracle.data().tensors
    F.cross_entropy(module(x), y).backward()  # to look at gradients
    module.zero_grad()
    torch.optim.SGD(module.parameters(), lr=0.1).step()  # without any
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)  # pruning, merging, averaging
    head = nn.Linear(3, 3)  # on frozen features
    optimizer = torch.optim.SGD([*head.parameters(), *module.parameters()], lr=0.1)
    head(module(x).detach()).sum().backward()
    optimizer.step()
    export(module, tmp_path / "release")


def test_a_checkpoint_loaded_afterwards_is_itself_again(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "c.pt")
    private.detach()
    ordinary(private.model)
    resumed = start(tmp_path, module=private.model)
    resumed.load(tmp_path / "c.pt")
    export(resumed.model, tmp_path / "release")


def wrapped(inner):
    torch.manual_seed(8)
    return nn.Sequential(inner, nn.Linear(3, 3))


@pytest.mark.parametrize("how", ["wrapper", "copy", "state_dict", "frozen part", "frozen copy"])
def test_weights_bring_their_runs_into_other_models(how, tmp_path):
    """A new head on a private backbone, a copy that is trained further: the card knew the last run only."""
    first = oracle.model()
    outer = wrapped(first) if how == "wrapper" else None
    run(first, oracle.plan(epsilon=2.0))
    if how == "copy":
        outer = copy.deepcopy(first)
    elif how == "state_dict":
        outer = oracle.model()
        outer.load_state_dict(first.state_dict())
    elif how == "frozen copy":
        outer = wrapped(copy.deepcopy(first).requires_grad_(False))
        first.requires_grad_(False)
    elif how == "frozen part":
        outer = wrapped(first.requires_grad_(False))
    parameters = [p for p in outer.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    private = privatize(outer, optimizer, oracle.data(), oracle.plan(epsilon=3.0), max_grad_norm=1.0)
    oracle.loop(private, outer, optimizer)
    facts = json.loads((export(outer, tmp_path / "release") / "privacy-card.json").read_text())
    assert facts["epsilon"] == 5.0
    assert [one["epsilon"] for one in facts["earlier_runs"]] == [2.0]


def test_a_run_on_a_part_counts_for_the_whole_and_once():
    inner = oracle.model()
    outer = wrapped(inner)
    run(outer, oracle.plan(epsilon=2.0))
    run(inner, oracle.plan(epsilon=3.0))
    assert card(trained_by(inner))["epsilon"] == 5.0
    assert card(trained_by(outer))["epsilon"] == 5.0  # its own run, and the one that changed a part of it since
    run(outer, oracle.plan(epsilon=4.0))
    assert card(trained_by(outer))["epsilon"] == 9.0
    assert card(trained_by(inner))["epsilon"] == 9.0


def test_ordinary_training_of_a_part_is_not_forgotten_by_a_wrapper():
    inner = oracle.model()
    run(inner)
    ordinary(inner)
    outer = wrapped(inner)
    run(outer)
    assert card(trained_by(outer))["claim"].startswith("none: an earlier run")


def test_models_that_only_begin_alike_share_no_run():
    """The same initial weights, the same frozen part: what was not trained brings nothing along."""
    first, second = oracle.model(), oracle.model()
    for module in (first, second):
        next(module.parameters()).requires_grad_(False)
    for module in (first, second):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0)
        oracle.loop(private, module, optimizer)
        private.detach()
    assert card(trained_by(second))["earlier_runs"] == []


def test_weights_that_a_run_has_not_moved_are_nobodys():
    """A schedule that begins at zero: a second model from the same seed is not a copy of the first."""
    first, second = oracle.model(), oracle.model()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.0)
    private = privatize(first, optimizer, oracle.data(), oracle.plan(epsilon=2.0), max_grad_norm=1.0)
    oracle.loop(private, first, optimizer)
    assert card(run(second, oracle.plan(epsilon=3.0)).trained)["epsilon"] == 3.0


def test_a_copy_of_a_copy_that_its_own_run_has_not_moved():
    first, second, third = oracle.model(), oracle.model(), oracle.model()
    run(first, oracle.plan(epsilon=2.0))
    second.load_state_dict(first.state_dict())
    del first
    optimizer = torch.optim.SGD(second.parameters(), lr=0.0)
    private = privatize(second, optimizer, oracle.data(), oracle.plan(epsilon=3.0), max_grad_norm=1.0)
    oracle.loop(private, second, optimizer)
    private.detach()
    third.load_state_dict(second.state_dict())
    assert card(run(third, oracle.plan(epsilon=1.0)).trained)["epsilon"] == 6.0
