"""Who may go on with a run: nobody else, and never from behind what was released."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

import lambdacgd as lc
from lambdacgd.keys import LedgerError
from lambdacgd.training import CheckpointError, TrainingError, export
from tests.training import oracle
from tests.training.saved import start, steps


def test_going_back_is_refused_until_declared(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "two.pt")
    steps(private, 2)
    private.save(tmp_path / "four.pt")
    run = private.run.id
    private.detach()
    again = start(tmp_path)
    with pytest.raises(CheckpointError, match="released weights after step 4"):
        again.load(tmp_path / "two.pt")
    assert again.steps_taken == 0
    again.run.key.ledger().declare_destroyed(run, 2)
    again.load(tmp_path / "two.pt")
    assert again.steps_taken == 2


def test_an_export_is_a_release_too(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    private.save(tmp_path / "two.pt")
    steps(private, 2)
    export(private, tmp_path / "release")
    private.detach()
    with pytest.raises(CheckpointError, match="released weights after step 4"):
        start(tmp_path).load(tmp_path / "two.pt")


def other_key(folder):
    key = lc.SecretKey.generate()
    key.save(folder / "other.key")
    return {"key": key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: {"p": oracle.plan(epsilon=2.0)}, "the plan"),
        (lambda f: {"max_grad_norm": 1.0}, "clipping norm"),
        (lambda f: {"clipping_mode": "automatic"}, "clipping mode"),
        (lambda f: {"augmentations": 2}, "augmentations"),
        (lambda f: {"loss_reduction": "sum"}, "loss reduction"),
        (lambda f: {"data_fingerprint": "new data"}, "other data"),
        (other_key, "the key"),
    ],
    ids=["plan", "norm", "mode", "augmentations", "reduction", "data", "key"],
)
def test_a_checkpoint_of_something_else(tmp_path, change, message):
    private = start(tmp_path, data_fingerprint="the data")
    steps(private, 1)
    private.save(tmp_path / "c.pt")
    private.detach()
    with pytest.raises(CheckpointError, match=message) as caught:
        start(tmp_path, **({"data_fingerprint": "the data"} | change(tmp_path))).load(tmp_path / "c.pt")
    assert str(caught.value).count("\n- ") == 1


def test_a_checkpoint_of_another_model_or_dataset(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    private.detach()
    frozen = oracle.model()
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(CheckpointError, match="trainable parameters"):
        start(tmp_path, module=frozen).load(tmp_path / "c.pt")
    longer = start(tmp_path, dataset=oracle.data(50), p=oracle.plan(50))
    with pytest.raises(CheckpointError, match=r"(?s)the plan.*length of the dataset"):
        longer.load(tmp_path / "c.pt")


def test_a_key_in_memory_cannot_be_resumed(tmp_path):
    private = start(tmp_path, key=lc.SecretKey.generate())
    with pytest.raises(CheckpointError, match="Make a key file"):
        private.save(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        private.load(tmp_path / "nothing.pt")


def test_a_new_run_with_the_same_key_has_new_noise_and_bins(tmp_path):
    p = oracle.binned_plan(48, 12, 2)
    one, two = start(tmp_path, p=p), start(tmp_path, p=p)
    assert one.run.id != two.run.id
    x, _ = next(iter(one.loader))
    y, _ = next(iter(two.loader))
    assert x.shape != y.shape or not torch.equal(x, y)
    assert one.run.key.ledger().runs() == [one.run.id, two.run.id]


def test_two_processes_cannot_hold_one_run(tmp_path, monkeypatch):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    monkeypatch.setattr("lambdacgd.training.run._ORPHANS_S", 0.2)
    with pytest.raises(CheckpointError, match="in use by another process"):
        start(tmp_path).load(tmp_path / "c.pt")
    private.detach()
    start(tmp_path).load(tmp_path / "c.pt")


def test_a_run_that_began_does_not_become_another(tmp_path):
    private = start(tmp_path)
    private.save(tmp_path / "c.pt")
    private.detach()
    other = start(tmp_path)
    steps(other, 1)
    with pytest.raises(CheckpointError, match="already begun"):
        other.load(tmp_path / "c.pt")


def test_a_load_that_fails_half_way_does_not_begin_the_run_again(tmp_path, monkeypatch):
    """The run is the checkpoint's by then: step 1 under its noise, on other weights, would be a second sum."""
    first = start(tmp_path)
    steps(first, 3)
    first.save(tmp_path / "c.pt")
    first.detach()
    again = start(tmp_path)
    optimizer = again.optimizer
    monkeypatch.setattr(optimizer, "load_state_dict", lambda state: (_ for _ in ()).throw(ValueError("no memory")))
    with pytest.raises(ValueError, match="no memory"):
        again.load(tmp_path / "c.pt")
    assert again.steps_taken == 3
    for go_on in (lambda: steps(again, 1), optimizer.step, lambda: again.save(tmp_path / "d.pt")):
        with pytest.raises(lc.TrainingError, match="failed half-way"):
            go_on()
    again.detach()
    third = start(tmp_path)
    third.load(tmp_path / "c.pt")
    steps(third, 1)


def test_a_prepared_run_does_not_start_again_behind_weights_that_were_handed_back(tmp_path):
    first = start(tmp_path)
    run_id = first.run.key.ledger().new_run()
    first.detach()
    for _ in range(2):  # nothing was trained yet: it may be taken up again
        private = start(tmp_path, run_id=run_id)
        assert private.run.id == run_id
        private.detach()
    private = start(tmp_path, run_id=run_id)
    steps(private, 2)
    private.detach()
    with pytest.raises(LedgerError, match="released weights after step 2"):
        steps(start(tmp_path, run_id=run_id), 1)


def test_an_optimizers_state_loaded_by_hand_is_no_way_to_resume(tmp_path):
    private = start(tmp_path)
    steps(private, 2)
    kept = copy.deepcopy(private.optimizer.state_dict())
    private.optimizer.load_state_dict(private.optimizer.state_dict())  # its own: as accelerate does
    private.detach()
    again = start(tmp_path)
    with pytest.raises(TrainingError, match=r"private\.resume"):
        again.optimizer.load_state_dict(kept)
    assert not again.optimizer.state
    again.detach()
    again.optimizer.load_state_dict(kept)


@pytest.mark.parametrize("how", ["export", "save"])
@pytest.mark.parametrize("other", ["goes on", "has released", "has let go"])
def test_what_was_detached_leaves_only_if_nobody_went_on(how, other, tmp_path, monkeypatch):
    """Both have used the noise of step 2, for two sums."""
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "one")
    steps(private, 2)
    private.detach()
    second = start(tmp_path, module=oracle.model())
    second.load(tmp_path / "one")
    steps(second, 1)
    if other == "has released":
        second.save(tmp_path / "two")
    if other != "goes on":
        second.detach()

    def release(which, name):
        export(which, tmp_path / name) if how == "export" else which.save(tmp_path / name)

    if other == "has let go":  # then the first to release is the one
        release(private, "release")
        release(private, "again")
        with pytest.raises(LedgerError, match="another process went on"):
            release(second, "other")
        return
    monkeypatch.setattr("lambdacgd.training.run._ORPHANS_S", 0.0)
    with pytest.raises(LedgerError, match=r"in use|another process went on"):
        release(private, "release")
    assert not (tmp_path / "release").exists()


def test_a_prepared_run_is_asked_again_once_it_is_held(tmp_path, monkeypatch):
    """Whoever had it may have released between the first question and the lock."""
    key = oracle.key()
    key.save(tmp_path / "run.key")
    prepared = key.ledger().new_run()
    lock = type(key.ledger()).lock

    def late(ledger, run_id):
        ledger.record(run_id, 3, digest="")
        return lock(ledger, run_id)

    monkeypatch.setattr(type(key.ledger()), "lock", late)
    private = start(tmp_path, run_id=prepared)
    with pytest.raises(LedgerError, match="released weights after step 3"):
        steps(private, 1)


def test_a_step_that_failed_half_way_is_not_begun_again_behind_the_operator(tmp_path, monkeypatch):
    key = oracle.key()
    key.save(tmp_path / "run.key")
    prepared = key.ledger().new_run()
    private = start(tmp_path, run_id=prepared)

    def half(parameters, gradients, *args, **options):
        parameters[0].sub_(gradients[0])
        raise RuntimeError("half-way")

    x, y = next(iter(private.loader))
    torch.nn.functional.cross_entropy(private.model(x), y).backward()
    monkeypatch.setattr(sys.modules[torch.optim.SGD.__module__], "sgd", half)
    with pytest.raises(RuntimeError, match="half-way"):
        private.optimizer.step()
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "release")
    private.detach()
    with pytest.raises(TrainingError, match="not those of the run's last step"):
        export(private, tmp_path / "release")
    with pytest.raises(LedgerError, match="released weights after step 1"):
        steps(start(tmp_path, run_id=prepared), 1)


def test_two_processes_that_no_lock_kept_apart_do_not_both_release(tmp_path):
    """As on a file system without locks, or where a cleaner removed the file."""
    private = start(tmp_path)
    steps(private, 1)
    private.save(tmp_path / "one")
    for lock in tmp_path.glob("*.lock"):
        lock.unlink()
    second = start(tmp_path)
    second.load(tmp_path / "one")
    steps(second, 1)
    second.save(tmp_path / "two")
    steps(private, 2)
    with pytest.raises(LedgerError, match="another process released step 2"):
        private.save(tmp_path / "three")
    with pytest.raises(LedgerError, match="another process released step 2"):
        export(private, tmp_path / "release")
    steps(second, 1)
    second.save(tmp_path / "two")
