"""What a card says of weights that went through more than this run, and of weights that something else has changed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import CheckpointError, TrainingError, export, privatize
from lambdacgd.training.card import NOT_DECLARED
from tests.training import oracle
from tests.training.saved import saved, start, steps

EMPTY = {"format": "lambdacgd-privacy-card-1", "claim": "", "earlier_runs": []}


def run(module, p=None, *, detach=True, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p or oracle.plan(), max_grad_norm=1.0, **options)
    oracle.loop(private, module, optimizer)
    if detach:
        private.detach()
    return private


def ordinary(module, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("given", ["card", "file", "folder"])
def test_declared_runs_add_up(given, tmp_path):
    module, first, second = oracle.model(), oracle.plan(epsilon=2.0), oracle.plan(epsilon=3.0)
    before = run(module, first, earlier=[])
    folder = export(before, tmp_path / "first")
    earlier = {"card": before.card(), "file": folder / "privacy-card.json", "folder": str(folder)}[given]
    private = run(module, second, earlier=[earlier])
    facts = json.loads((export(private, tmp_path / "release") / "privacy-card.json").read_text())
    assert facts["epsilon"] == 5.0
    assert facts["delta"] == pytest.approx(first.delta + second.delta)
    assert facts["earlier_runs"] == [{"epsilon": 2.0, "delta": first.delta}]
    assert facts["replace_one"]["epsilon"] == 10.0
    assert facts["claim"].startswith("(5, ")
    assert facts["history_declared"] is True
    assert "1 earlier run on these weights" in (tmp_path / "release" / "PRIVACY.md").read_text()
    third = run(module, oracle.plan(epsilon=4.0), earlier=[private.card()])
    assert [entry["epsilon"] for entry in third.card()["earlier_runs"]] == [2.0, 3.0]
    assert third.card()["epsilon"] == 9.0


def test_what_was_not_declared_is_unknown(tmp_path):
    module = oracle.model()
    private = run(module)
    assert private.card()["history"] == NOT_DECLARED
    assert NOT_DECLARED in (export(private, tmp_path / "release") / "PRIVACY.md").read_text()
    assert run(oracle.model(), earlier=[]).card()["history"] == "declared: no private data"
    after = run(module, earlier=[private.card()]).card()  # what its own earlier run did not declare stays unknown
    assert NOT_DECLARED in after["history"]
    assert after["epsilon"] == 8.0


def test_an_earlier_run_that_claims_nothing_leaves_no_claim():
    module = oracle.model()
    with pytest.warns(lc.NotPrivateWarning):
        before = run(module, oracle.plan(epsilon=math.inf)).card()
    facts = run(module, earlier=[before]).card()
    assert facts["claim"].startswith("none: an earlier run")
    assert facts["epsilon"] == "inf"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"epsilon": 2.0}], "a dict is none of them"),
        (["nowhere"], "no privacy card to be read"),
        ({"format": "lambdacgd-privacy-card-1"}, "earlier must be a list of cards, .*a dict was given"),
        ([EMPTY], "damaged"),
        ([EMPTY | {"this_run": {"epsilon": -1, "delta": 0}}], "damaged"),
    ],
)
def test_what_is_no_card_is_refused(given, words):
    module = oracle.model()
    with pytest.raises(lc.InvalidInput, match=words):
        run(module, earlier=given)
    run(module)  # nothing is left behind


def test_a_resumed_run_knows_its_history(tmp_path):
    first = run(oracle.model(), oracle.plan(epsilon=2.0), earlier=[]).card()
    saved(tmp_path, 2, "c.pt", earlier=[first])
    for declared in (None, [first]):
        resumed = start(tmp_path, earlier=declared)
        resumed.load(tmp_path / "c.pt")
        assert resumed.card()["earlier_runs"] == [{"epsilon": 2.0, "delta": first["delta"]}]
        resumed.detach()
    with pytest.raises(CheckpointError, match="1 earlier run declared"):
        start(tmp_path, earlier=[]).load(tmp_path / "c.pt")


def test_a_history_may_be_declared_later(tmp_path):
    saved(tmp_path, 2, "c.pt")
    resumed = start(tmp_path, earlier=[])
    resumed.load(tmp_path / "c.pt")
    assert resumed.card()["history_declared"] is True


@pytest.mark.parametrize("how", ["another optimizer", "the run's own", "by hand", "a fused optimizer", "p.data"])
@pytest.mark.parametrize("detached", [True, False])
def test_weights_changed_since_are_not_exported(how, detached, tmp_path):
    module = oracle.model()
    private = run(module, detach=detached)
    export(private, tmp_path / "before")
    if how == "by hand":
        with torch.no_grad():
            next(module.parameters()).mul_(0.5)
    elif how in ("a fused optimizer", "p.data"):  # no counter tells of these: they are seen once the run has ended
        private.detach()
        if how == "p.data":
            next(module.parameters()).data.mul_(0.5)
        else:
            ordinary(module, torch.optim.AdamW(module.parameters(), fused=True))
    elif how == "the run's own" and not detached:
        with pytest.raises(TrainingError):
            ordinary(module, private.optimizer)
        return
    else:
        ordinary(module, private.optimizer if how == "the run's own" else None)
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_a_frozen_part_changed_since_is_not_exported(tmp_path):
    module = oracle.model()
    frozen = next(module.parameters()).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0)
    oracle.loop(private, module, optimizer)
    private.detach()
    export(private, tmp_path / "before")
    frozen.add_(1)
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "after")


def test_what_changes_no_weight_changes_nothing(tmp_path):
    module, other = oracle.model(), oracle.model()
    private = run(module)
    ordinary(other)
    x, y = oracle.data().tensors
    F.cross_entropy(module(x), y).backward()  # to look at gradients
    module.zero_grad()
    torch.optim.SGD(module.parameters(), lr=0.1).step()  # without any
    module.requires_grad_(False).eval()
    export(private, tmp_path / "release")


def test_training_by_others_within_a_run_goes_along_with_its_checkpoint(tmp_path):
    """It may have been a projection, or training on private data: the claim holds on condition, and says so."""
    private = start(tmp_path)
    steps(private, 1)
    assert "provided" not in private.card()["claim"]
    ordinary(private.model)
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        private.card()
    steps(private, 1)
    assert "provided that what changed the weights between its steps" in private.card()["claim"]
    private.save(tmp_path / "c.pt")
    private.detach()
    resumed = start(tmp_path)
    resumed.load(tmp_path / "c.pt")
    assert "provided" in resumed.card()["claim"]
    resumed.detach()
    assert "provided" in run(oracle.model(), earlier=[resumed.card()]).card()["claim"]


def test_averages_come_and_go(tmp_path):
    private = start(tmp_path)
    average = private.ema(0.5)
    steps(private, 1)
    with average.applied():
        export(private, tmp_path / "average")
    steps(private, 1)
    assert "provided" not in private.card()["claim"]
    private.detach()
    with average.applied():
        export(private, tmp_path / "again")
    export(private, tmp_path / "plain")


def test_a_checkpoint_loaded_afterwards_is_itself_again(tmp_path):
    private = saved(tmp_path, 2, "c.pt")
    ordinary(private.model)
    resumed = start(tmp_path, module=private.model)
    resumed.load(tmp_path / "c.pt")
    assert "provided" not in resumed.card()["claim"]
    ordinary(resumed.model)  # before its first step
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(resumed, tmp_path / "release")


def test_importing_and_training_register_nothing_in_the_process():
    """No hook on all optimizers, no class of a scheduler exchanged."""
    from torch.optim import optimizer as torch_optimizers

    module = oracle.model()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1)
    private = privatize(module, sgd, oracle.data(), oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=5)
    next(iter(private.loader))
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert not torch_optimizers._global_optimizer_pre_hooks
    assert not torch_optimizers._global_optimizer_post_hooks


@pytest.mark.parametrize("taken", [0, 1])
def test_weights_changed_just_before_detaching_are_not_exported(taken, tmp_path):
    private = start(tmp_path)
    if taken:
        steps(private, 1)
    ordinary(private.model)
    for _ in range(2):
        with pytest.raises(TrainingError, match="not those of the run's last step"):
            export(private, tmp_path / "release")
        private.detach()


def test_a_run_that_took_no_step_lends_no_card_to_other_training(tmp_path):
    private = start(tmp_path)
    private.detach()
    export(private, tmp_path / "before")
    ordinary(private.model)
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "after")


def test_what_was_declared_of_other_weights_is_not_said_of_these(tmp_path):
    """Weights that are loaded between privatize and the first step are not those that earlier=[] was about."""
    private = start(tmp_path, earlier=[])
    ordinary(private.model)
    steps(private, 1)
    assert "provided" in private.card()["claim"]


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("how", ["a layer", "assign", "a new layer"])
def test_other_parameters_in_the_model_are_not_exported(how, detached, tmp_path):
    """Counters of the old ones would not tell."""
    module = torch.nn.Sequential(oracle.model(), torch.nn.Linear(3, 3))
    private = run(module, detach=detached)
    if how == "assign":
        module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()}, assign=True)
    elif how == "a layer":
        module[1] = torch.nn.Linear(3, 3)
    else:
        module.append(torch.nn.Linear(3, 3))
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "release")
    with pytest.raises(AttributeError):
        private.model = oracle.model()


@pytest.mark.parametrize(("detached", "fused"), [(True, True), (True, False), (False, False)])
def test_an_average_is_watched_while_it_is_in_the_model(detached, fused, tmp_path):
    def ordinarily(module):
        ordinary(module, torch.optim.SGD(module.parameters(), lr=0.1, fused=fused))

    private = start(tmp_path)
    average = private.ema(0.5)
    steps(private, 1)
    if detached:
        private.detach()
    with average.applied():
        export(private, tmp_path / "average")
        ordinarily(private.model)
        with pytest.raises(TrainingError, match="not those of the run's last step"):
            export(private, tmp_path / "changed")
    export(private, tmp_path / "own")
    ordinarily(private.model)
    with average.applied():
        export(private, tmp_path / "average again")  # the change is not in it
        assert "provided" not in private.card()["claim"]
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "own again")
    average.update()
    with average.applied():
        assert "provided" in private.card()["claim"]


@pytest.mark.parametrize("detached", [True, False])
def test_a_checkpoint_of_changed_weights_says_so(detached, tmp_path):
    private = start(tmp_path)
    steps(private, 1)
    if detached:
        private.detach()
    ordinary(private.model)
    private.save(tmp_path / "checkpoint")
    private.detach()
    resumed = start(tmp_path)
    resumed.load(tmp_path / "checkpoint")
    assert "provided" in resumed.card()["claim"]


def test_no_earlier_run_is_lost_where_a_resumed_run_names_others(tmp_path):
    """Also where they were named without a whole declaration: the longer list may be the smaller sum."""
    cards = [run(oracle.model(), oracle.plan(epsilon=epsilon)).card() for epsilon in (1.0, 3.0)]
    saved(tmp_path, 1, "checkpoint", earlier=[cards[0], cards[0]])
    for other in ([cards[1]], []):
        again = start(tmp_path, earlier=other)
        with pytest.raises(CheckpointError, match="2 earlier runs declared"):
            again.load(tmp_path / "checkpoint")
        again.detach()
