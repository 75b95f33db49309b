"""Subclasses and callbacks that would break a contract: each is refused, and nothing of it is released."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import lambdacgd as lc
from lambdacgd.clipping import ClippingError
from lambdacgd.errors import InvalidInput
from lambdacgd.integrations.huggingface import LambdaCGDTrainer
from tests.integrations import hf


def refused(trainer, says, error=lc.TrainingError, steps=0):
    with pytest.raises(error, match=says):
        trainer.train()
    assert trainer.private.steps_taken == steps


class OwnLoader(LambdaCGDTrainer):
    """Batches by shuffling, where the plan samples."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=6, shuffle=True, collate_fn=hf.collate)


def test_a_loader_of_ones_own(tmp_path):
    refused(hf.make_trainer("bert", tmp_path / "out", cls=OwnLoader), "a logical batch of the plan")


class OwnBatches(OwnLoader):
    """... and a training step of its own with it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs).mean()
        loss.backward()
        return loss.detach()


def test_a_loader_and_a_step_of_ones_own(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", cls=OwnBatches)
    before = hf.weights(trainer.model)
    refused(trainer, "no batch was taken")
    hf.assert_same(before, hf.weights(trainer.model))


class Twice(LambdaCGDTrainer):
    """The same examples count twice."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        for part, _ in inputs.parts():
            for _ in range(2):
                self.compute_loss(model, part).sum().backward()
        return torch.zeros(())


def test_examples_that_count_twice(tmp_path):
    refused(hf.make_trainer("bert", tmp_path / "out", cls=Twice), "backward")


class HalfABatch(LambdaCGDTrainer):
    """Only the first physical batch of a logical one takes part."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        part, _ = next(inputs.parts())
        self.compute_loss(model, part).sum().backward()
        return torch.zeros(())


def test_half_a_logical_batch_is_not_stepped_on(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out", cls=HalfABatch, per_device_train_batch_size=2)
    before = hf.weights(trainer.model)
    refused(trainer, "left out part of its logical batch")
    hf.assert_same(before, hf.weights(trainer.model))


class AgainLater(LambdaCGDTrainer):
    kept = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.kept is None:
            self.kept = inputs
            return super().training_step(model, inputs)
        return super().training_step(model, self.kept)


def test_a_logical_batch_is_read_once(tmp_path):
    refused(hf.make_trainer("bert", tmp_path / "out", cls=AgainLater), "already read once", steps=1)


class Callback(TrainerCallback):
    def __init__(self, act, moment="on_step_end"):
        def run(args, state, control, **given):
            act(**given)

        setattr(self, moment, run)


def test_a_parameter_unfrozen_during_training(tmp_path):
    model = hf.make_model("bert")
    model.classifier.requires_grad_(False)
    thaw = Callback(lambda model, **_: model.classifier.requires_grad_(True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hf.make_trainer("bert", tmp_path / "out", model=model, optimizers=(optimizer, None), callbacks=[thaw])
    with pytest.raises((lc.TrainingError, ClippingError), match="unfrozen"):
        trainer.train()


def test_a_parameter_frozen_during_training(tmp_path):
    freeze = Callback(lambda model, **_: model.classifier.requires_grad_(False))
    with pytest.raises(Exception, match="frozen"):
        hf.make_trainer("bert", tmp_path / "out", callbacks=[freeze]).train()


def test_an_optimizer_exchanged_during_training_moves_nothing(tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")

    def exchange(**given):
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)

    trainer.add_callback(Callback(exchange))
    refused(trainer, "counts 2 steps and the run has taken 1", steps=1)


def test_evaluation_within_a_logical_batch_changes_nothing_of_it(tmp_path):
    class Looks(LambdaCGDTrainer):
        looked = 0

        def compute_loss(self, model, inputs, *args, **kwargs):
            if model.training and torch.is_grad_enabled():
                self.looked += 1
                self.evaluate()
                model.train()
            return super().compute_loss(model, inputs, *args, **kwargs)

    ends = []
    for name, cls in (("plain", LambdaCGDTrainer), ("looks", Looks)):
        key = lc.SecretKey.from_bytes(bytes(range(32)))
        trainer = hf.make_trainer("bert", tmp_path / name, cls=cls, key=key, eval_dataset=hf.Sentences(True, 4, seed=8))
        hf.fix_id(trainer, "one")
        trainer.train()
        ends.append(hf.weights(trainer.model))
    assert trainer.looked > trainer.plan.steps
    hf.assert_same(*ends)


def test_saving_within_a_logical_batch_releases_the_last_whole_step(tmp_path):
    class Saves(LambdaCGDTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if torch.is_grad_enabled() and self.private.steps_taken == 3:
                self.save_model(str(tmp_path / "taken"))
                raise KeyboardInterrupt
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = hf.make_trainer("bert", tmp_path / "out", cls=Saves, save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    newest = trainer.private.run.key.ledger().newest(trainer.private.run.id)
    assert (newest.step, newest.kind) == (3, "save_model")
    with pytest.raises(lc.CheckpointError, match="released weights after step 3"):
        hf.make_trainer("bert", tmp_path / "out").train(resume_from_checkpoint=True)


def test_a_plan_changed_after_it_was_made(tmp_path):
    from dataclasses import replace

    plan = replace(hf.make_plan(), sigma=0.01)
    with pytest.raises(InvalidInput, match="do not belong together"):
        hf.make_trainer("bert", tmp_path / "out", plan=plan).train()


def test_models_that_answer_in_tuples(tmp_path):
    model = hf.make_model("bert")
    model.config.return_dict = False
    trainer = hf.make_trainer("bert", tmp_path / "out", model=model, eval_dataset=hf.Sentences(True, 6, seed=8))
    trainer.train()
    assert trainer.predict(hf.Sentences(True, 6, seed=8)).predictions.shape == (6, 2)


@pytest.mark.parametrize("how", ["changed", "another"])
def test_weights_that_are_not_the_runs_are_not_saved_under_its_card(how, tmp_path):
    trainer = hf.make_trainer("bert", tmp_path / "out")
    trainer.train()
    trainer.save_model(str(tmp_path / "own"))
    if how == "changed":
        with torch.no_grad():
            next(trainer.model.parameters()).add_(1)
    else:
        trainer.model = hf.make_model("bert")
    with pytest.raises(lc.TrainingError, match=r"not those of the run's last step|not the model that this run"):
        trainer.save_model(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_earlier_runs_can_be_declared(tmp_path):
    first = hf.make_trainer("bert", tmp_path / "first", cls=LambdaCGDTrainer)
    first.train()
    card = first.private.card()
    options = {"plan": hf.make_plan(), "train_dataset": hf.Sentences(True), "data_collator": hf.collate}
    second = LambdaCGDTrainer(first.model, hf.arguments(tmp_path / "second"), earlier=[card], **options)
    second.train()
    assert second.private.card()["earlier_runs"] == [{"epsilon": card["epsilon"], "delta": card["delta"]}]
