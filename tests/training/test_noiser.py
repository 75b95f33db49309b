"""The noise alone, for people with their own gradients."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch

import lambdacgd as lc
from lambdacgd.noise import LayoutError, NonFiniteSum
from lambdacgd.training import CheckpointError, Noiser, TrainingError
from tests.faults import fault
from tests.training import oracle

SHAPES = {"b.weight": (3, 4), "a": (7,)}


def zeros():
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def add(noiser, sums):
    """A step of the plan: whose examples the sums are of is asked first."""
    noiser.batch()
    return noiser.add(sums)


def file_key(tmp_path):
    path = tmp_path / "run.key"
    if path.exists():
        return lc.SecretKey.load(path)
    key = oracle.key()
    key.save(path)
    return key


@pytest.mark.parametrize(
    "p",
    [
        oracle.plan(mechanism=lc.LambdaCGD(0.5, normalized=True)),
        oracle.binned_plan(48, 12, 3, mechanism=lc.LambdaCGD(0.5, normalized=True), bins="fresh"),
        oracle.binned_plan(48, 12, 3, mechanism=lc.BLT(2), bins="fresh"),
    ],
    ids=["cyclic", "fresh", "fresh, buffered"],
)
def test_adds_the_mechanisms_noise_in_place(p):
    noiser = Noiser(p, oracle.key(), max_grad_norm=2.0)
    module = torch.nn.ParameterDict({"a": torch.zeros(7), "b": torch.nn.ParameterDict({"weight": torch.zeros(3, 4)})})
    expected = oracle.correlated_noise(p, oracle.key(), noiser.run.id, module, 2.0)
    for t in range(p.steps):
        sums = {name: torch.full(shape, 1.5) for name, shape in SHAPES.items()}
        kept = dict(sums)
        assert add(noiser, sums) is sums
        for name, value in sums.items():
            assert value is kept[name]
            lattice = 2.0 * p.sigma * 2.0**-10  # half of the largest Δ
            torch.testing.assert_close(value.double(), 1.5 + expected[t][name], rtol=0, atol=1.001 * lattice)
    assert noiser.finished
    with pytest.raises(TrainingError, match="to train longer, make a plan with more epochs"):
        noiser.add(zeros())
    with pytest.raises(TrainingError, match="horizon is fixed"):
        noiser.batch()


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_batches_are_the_plans(bins):
    p = oracle.binned_plan(48, 12, 2, bins=bins)
    noiser = Noiser(p, oracle.key())
    expected = list(p.sampling.batches(oracle.key(), run=noiser.run.id))
    for t in range(p.steps):
        assert np.array_equal(noiser.batch(), expected[t])
        assert np.array_equal(noiser.batch(), expected[t])
        noiser.add(zeros())


def test_sums_of_nobodys_batch_get_no_noise(tmp_path):
    """Before the first batch, twice for one, and after a resume, whoever took the batch before."""
    noiser = Noiser(oracle.plan(), file_key(tmp_path))
    for _ in range(2):
        sums = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        with pytest.raises(TrainingError, match=r"call batch\(\) before add"):
            noiser.add(sums)
        assert all((value == 1).all() for value in sums.values())
        add(noiser, sums)
    ahead, state = noiser.batch().tolist(), noiser.state_dict()
    noiser.run.close()
    again = Noiser(oracle.plan(), file_key(tmp_path))
    again.load_state_dict(state)
    with pytest.raises(TrainingError, match="in step 3 too"):
        again.add(zeros())
    assert again.batch().tolist() == ahead
    again.add(zeros())


def test_what_is_noised_already_is_no_sum():
    noiser = Noiser(oracle.plan(), oracle.key())
    sums = add(noiser, zeros())
    kept = {name: value.clone() for name, value in sums.items()}
    with pytest.raises(TrainingError, match="still hold what the last add returned"):
        add(noiser, sums)
    assert all(torch.equal(value, kept[name]) for name, value in sums.items())
    sums["a"].zero_()  # half of them
    with pytest.raises(TrainingError, match="these tensors still hold"):
        add(noiser, sums)
    sums["b.weight"].zero_()
    add(noiser, sums)  # the same buffers, filled again
    assert noiser.steps_taken == 2


PLANS = {
    "cyclic": oracle.plan(),
    "fresh": oracle.binned_plan(48, 12, 2, bins="fresh"),
    "fresh, buffered": oracle.binned_plan(48, 12, 2, mechanism=lc.BSR(3), bins="fresh"),
    "cyclic Poisson": lc.plan(48, 12, epochs=2, epsilon=4.0, delta=1e-5, mechanism=lc.BandMF(3), sampling=lc.Poisson()),
}


@pytest.mark.parametrize("p", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("at", [3, 4, 5])
def test_resumes(tmp_path, p, at):
    """Before, at and after the boundary of epochs, which are 4 steps long."""
    begun, whole = Noiser(p, file_key(tmp_path)), Noiser(p, oracle.key())
    whole.run._id = begun.run.id
    for _ in range(at):
        add(begun, zeros()), add(whole, zeros())
    state = begun.state_dict()
    begun.run.close()
    again = Noiser(p, file_key(tmp_path))
    again.load_state_dict(state)
    assert again.steps_taken == at
    for _ in range(8 - at):
        assert again.batch().tolist() == whole.batch().tolist()
        expected = add(whole, zeros())
        for name, value in add(again, zeros()).items():
            assert torch.equal(value, expected[name])
    again.run.close()
    with pytest.raises(CheckpointError, match="released weights after step 8"):
        Noiser(p, file_key(tmp_path)).load_state_dict(state)


@fault(
    "Killed processes",
    "A process with a `Noiser` is killed after `add`, before its state was saved.",
    says="released weights after step 2; resuming from step 1 would use the same noise for other sums",
    loses="The run, unless nobody saw what `add` returned: then it is declared destroyed, and the run goes on.",
)
def test_what_was_added_is_in_the_ledger_before_anybody_sees_it(tmp_path, sentence):
    """Killed after ``add``, before the next ``state_dict``: the same noise must not serve another sum."""
    noiser = Noiser(oracle.plan(), file_key(tmp_path))
    add(noiser, zeros())
    state = noiser.state_dict()
    add(noiser, zeros())
    noiser.run.close()
    ledger = file_key(tmp_path).ledger()
    assert ledger.newest(state["run"]).step == 2
    again = Noiser(oracle.plan(), file_key(tmp_path))
    with pytest.raises(CheckpointError, match=sentence):
        again.load_state_dict(state)
    ledger.declare_destroyed(state["run"], 1)  # nobody saw the second sum
    again.load_state_dict(state)
    assert again.steps_taken == 1


@fault(
    "Full disks",
    "The disk is full when `Noiser.add` enters its step in the ledger.",
    shows="The error of the disk. The sums are zeroed, so nothing noised is left in them.",
    loses="Nothing: the step can be done again.",
)
def test_a_ledger_that_cannot_be_written_lets_nothing_out(tmp_path):
    noiser = Noiser(oracle.plan(), file_key(tmp_path))
    add(noiser, zeros())
    sums = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    with mock.patch.object(noiser.run, "release", side_effect=OSError("no space")), pytest.raises(OSError, match="no"):
        add(noiser, sums)
    assert not any(value.any() for value in sums.values())
    assert noiser.steps_taken == 1
    add(noiser, zeros())


def test_float64_sums_show_no_more_digits_than_float32():
    p = oracle.plan()
    wide, narrow = Noiser(p, oracle.key()), Noiser(p, oracle.key())
    narrow.run._id = wide.run.id
    sums = {name: value.double() for name, value in zeros().items()}
    same = add(narrow, zeros())
    assert all(torch.equal(value, same[name].double()) for name, value in add(wide, sums).items())
    quantum = 2.0 ** (math.frexp(p.sigma)[1] - 10)
    assert all(torch.equal((value / quantum).round() * quantum, value) for value in sums.values())


@pytest.mark.parametrize("p", [PLANS["fresh"], PLANS["fresh, buffered"]], ids=["regenerated", "buffered"])
def test_noise_of_an_interrupted_step_serves_that_step_alone(p):
    noiser, twin = Noiser(p, oracle.key()), Noiser(p, oracle.key())
    twin.run._id = noiser.run.id
    add(noiser, zeros()), add(twin, zeros())
    finish, sums = noiser._step.noise.add_, zeros()

    def interrupted(*args, **kwargs):
        finish(*args, **kwargs)
        raise KeyboardInterrupt

    with mock.patch.object(noiser._step.noise, "add_", interrupted), pytest.raises(KeyboardInterrupt):
        add(noiser, sums)
    assert not any(value.any() for value in sums.values())
    assert noiser.steps_taken == 1
    again, expected = add(noiser, zeros()), add(twin, zeros())
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["plan", "max_grad_norm", "steps_taken"])
def test_nothing_that_noise_rests_on_changes_mid_run(name):
    noiser = Noiser(oracle.plan(), oracle.key())
    with pytest.raises(AttributeError, match=name):
        setattr(noiser, name, getattr(noiser, name))


def test_a_resumed_layout_is_still_fixed(tmp_path):
    noiser = Noiser(oracle.plan(), file_key(tmp_path))
    add(noiser, zeros())
    state = noiser.state_dict()
    noiser.run.close()
    again = Noiser(oracle.plan(), file_key(tmp_path))
    again.load_state_dict(state)
    with pytest.raises(LayoutError, match="shape"):
        add(again, {"a": torch.zeros(8), "b.weight": torch.zeros(3, 4)})


def test_bad_input(tmp_path):
    with pytest.raises(lc.InvalidInput, match="plan"):
        Noiser("plan")
    with pytest.raises(lc.InvalidInput, match="max_grad_norm"):
        Noiser(oracle.plan(), max_grad_norm=0.0)
    noiser = Noiser(oracle.plan(), oracle.key())
    with pytest.raises(lc.InvalidInput, match=r"sums must be a dict of name -> float32 "):
        add(noiser, {"a": [1.0]})
    with pytest.raises(lc.InvalidInput, match="sums is an empty dict"):
        add(noiser, {})
    with pytest.raises(CheckpointError, match=r"key file.*then give key=key"):
        noiser.state_dict()
    add(noiser, zeros())
    before = {"a": torch.ones(7)}
    with pytest.raises(LayoutError, match="lack"):
        add(noiser, before)
    assert torch.equal(before["a"], torch.ones(7))
    with pytest.raises(TypeError, match="dtype"):
        add(noiser, {name: value.half() for name, value in zeros().items()})
    assert noiser.steps_taken == 1


@fault(
    "Numbers that are not finite",
    "A sum that is not finite is given to `Noiser.add`.",
    shows="`NonFiniteSum`. The sums are zeroed, so nothing noised is left in them.",
    loses="Nothing: the step can be done again.",
)
def test_a_sum_that_is_not_finite_leaves_no_noise_behind():
    noiser = Noiser(oracle.plan(), oracle.key())
    sums = zeros()
    sums["a"][2] = float("nan")
    with pytest.raises(NonFiniteSum):
        add(noiser, sums)
    assert noiser.steps_taken == 0
    assert all(not value.any() for value in sums.values())
    add(noiser, zeros())


def test_a_state_of_something_else(tmp_path):
    noiser = Noiser(oracle.plan(), file_key(tmp_path))
    add(noiser, zeros())
    state = noiser.state_dict()
    noiser.run.close()
    with pytest.raises(CheckpointError, match="the plan"):
        Noiser(oracle.plan(epsilon=1.0), file_key(tmp_path)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="clipping norm"):
        Noiser(oracle.plan(), file_key(tmp_path), max_grad_norm=2.0).load_state_dict(state)
    with pytest.raises(CheckpointError, match="format"):
        Noiser(oracle.plan(), file_key(tmp_path)).load_state_dict({"step": 1})
    begun = Noiser(oracle.plan(), file_key(tmp_path))
    add(begun, zeros())
    with pytest.raises(CheckpointError, match="already begun"):
        begun.load_state_dict(state)


@pytest.mark.parametrize("earlier", [None, 2])
def test_a_run_begun_under_another_noise_format_is_refused(tmp_path, earlier):
    """Format 1 wrote none; 2 was the first form of format 2, with other numbers."""
    noiser = Noiser(oracle.plan(), file_key(tmp_path))
    add(noiser, zeros())
    state = noiser.state_dict()
    state["identity"]["noise"] = earlier
    with pytest.raises(CheckpointError, match="format of the noise: the run was begun under another one"):
        Noiser(oracle.plan(), noiser.run.key).load_state_dict(state)


def test_an_interrupt_while_it_resumes_does_not_begin_the_run_again(tmp_path):
    """Ctrl-C between the run and the position: step 1 under the run's noise would be a second sum."""
    p = oracle.plan()
    first = Noiser(p, file_key(tmp_path))
    add(first, zeros())
    add(first, zeros())
    state = first.state_dict()
    first.run.close()
    again = Noiser(p, file_key(tmp_path))
    resume = again.run.resume

    def interrupted(*args):
        resume(*args)
        raise KeyboardInterrupt

    with mock.patch.object(again.run, "resume", interrupted), pytest.raises(KeyboardInterrupt):
        again.load_state_dict(state)
    assert again.run.id == first.run.id
    assert again.steps_taken == 2
    again.run.close()
    refused = Noiser(p, file_key(tmp_path))
    with pytest.raises(CheckpointError):
        refused.load_state_dict(state | {"step": 1})
    assert refused.steps_taken == 0
