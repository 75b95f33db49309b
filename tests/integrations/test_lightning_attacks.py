"""Settings, modules and callbacks of Lightning that would break a contract: each is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lambdacgd as lc
from lambdacgd.clipping import ClippingError
from lambdacgd.errors import InvalidInput
from tests.training import oracle

pytest.importorskip("lightning")
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lambdacgd.integrations.lightning import LambdaCGDStrategy
from tests.integrations.lit import Module, fit, make

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_a_loader_from_the_module_works_and_another_is_refused(tmp_path):
    module, strategy, trainer = make(tmp_path)
    module.train_dataloader = lambda: strategy.loader
    trainer.fit(module)
    assert strategy.private.finished
    other, strategy, trainer = make(tmp_path / "other")
    with pytest.raises(lc.TrainingError, match=r"strategy\.loader"):
        trainer.fit(other, DataLoader(oracle.data(), batch_size=12))
    assert strategy.private.steps_taken == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulate_grad_batches", 2),
        ("gradient_clip_val", 1.0),
        ("max_epochs", 7),
        ("max_steps", 3),
        ("fast_dev_run", True),
    ],
)
def test_settings_that_cannot_hold_are_refused_with_advice(name, value, tmp_path):
    module, strategy, trainer = make(tmp_path, **{name: value})
    with pytest.raises(InvalidInput) as caught:
        trainer.fit(module, strategy.loader)
    assert len(str(caught.value)) > 50
    assert strategy.private is None


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"limit_train_batches": 2}, 4), ({"overfit_batches": 1}, 2), ({"reload_dataloaders_every_n_epochs": 1}, 8)],
    ids=str,
)
def test_fewer_batches_are_the_plans_first_steps(settings, steps, tmp_path):
    """They stop the run early, which costs nothing: the logical batches are the plan's, in their order."""

    class Remembers(Module):
        def training_step(self, batch, batch_idx):
            rows.append(batch[0].tolist())
            return super().training_step(batch, batch_idx)

    seen = []
    for given in ({}, settings):
        rows = []
        module, strategy, trainer = make(tmp_path, key=lc.SecretKey.for_tests(1), module=Remembers(), **given)
        trainer.fit(module, strategy.loader)
        seen.append(rows)
    assert strategy.private.steps_taken == steps
    assert seen[1] == seen[0][: 3 * steps]


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (LearningRateFinder(num_training_steps=3), "public data"),
        (BatchSizeFinder(), "max_physical_batch_size"),
        (GradientAccumulationScheduler({1: 2}), "leave it at 1"),
    ],
    ids=["learning rate", "batch size", "accumulation"],
)
def test_callbacks_that_search_or_accumulate_are_refused(callback, says, tmp_path):
    module, strategy, trainer = make(tmp_path, callbacks=[callback])
    module.batch_size, module.train_dataloader = 4, lambda: strategy.loader  # where the batch size finder looks
    with pytest.raises(InvalidInput, match=says):
        trainer.fit(module)
    assert strategy.private is None


class Steered(Module):
    """Its learning rate, or whatever the callbacks decide, follows the training loss."""

    def __init__(self, interval=None, late=False):
        super().__init__()
        self.interval, self.late = interval, late

    def on_train_epoch_end(self):
        if self.late:
            self.log("late", torch.ones(()))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.interval is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        name = "late" if self.late else "train_loss_not_private"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": name, "interval": self.interval},
        }


@pytest.mark.parametrize(
    ("given", "callback", "steps"),
    [
        ({"interval": "step"}, None, 0),
        ({"interval": "epoch"}, None, 0),
        ({"interval": "epoch", "late": True}, None, 4),
        ({}, lambda folder: EarlyStopping("train_loss_not_private_epoch", check_on_train_epoch_end=True), 0),
        ({"late": True}, lambda folder: EarlyStopping("late", stopping_threshold=2.0), 4),
        ({}, lambda folder: ModelCheckpoint(folder, monitor="train_loss_not_private"), 0),
    ],
    ids=["step", "epoch", "at its end", "stopping", "stopping at its end", "choosing"],
)
def test_steering_by_what_training_logs_is_refused(given, callback, steps, tmp_path):
    """The losses are not noised: weights must not depend on them in any other way than through their gradients."""
    callbacks = {} if callback is None else {"callbacks": [callback(tmp_path / "saved")]}
    module, strategy, trainer = make(tmp_path, module=Steered(**given), **callbacks)
    with pytest.raises(InvalidInput, match="without noise"):
        trainer.fit(module, strategy.loader)
    assert strategy.private.steps_taken == steps
    assert not (tmp_path / "saved").exists()


def test_steering_by_validation_works(tmp_path):
    """Whether its data is public, nobody but the user knows."""
    _, strategy, _ = fit(tmp_path, callbacks=[EarlyStopping("val_loss", patience=9)])
    assert strategy.private.finished


class Elsewhere(TorchCheckpointIO):
    """Writes later, or to a place of its own."""

    def save_checkpoint(self, *args, **kwargs):
        pass


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, Elsewhere])
def test_checkpoints_that_are_written_later_are_refused(plugin, tmp_path):
    """The ledger would know a release that nobody can go on from."""
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    module, strategy, trainer = make(tmp_path, callbacks=[saves], plugins=[plugin()])
    with pytest.raises(InvalidInput, match="whole before the ledger knows it"):
        trainer.fit(module, strategy.loader)
    assert strategy.private is None


def test_a_tuner_is_refused(tmp_path):
    """It would train, look at the losses, and go back to the first weights under the same noise."""
    module, strategy, trainer = make(tmp_path)
    with pytest.raises(InvalidInput, match="public data"):
        Tuner(trainer).lr_find(module, strategy.loader, num_training=3)
    assert module.seen == []


def test_modules_that_cannot_hold_are_refused(tmp_path):
    manual = Module()
    manual.automatic_optimization = False
    module, strategy, trainer = make(tmp_path, module=manual)
    with pytest.raises(InvalidInput, match="privatize"):
        trainer.fit(module, strategy.loader)
    with pytest.raises(MisconfigurationException, match="Device should be CPU"):  # Lightning's own
        fit(tmp_path, strategy={"device": "cuda:0"})
    with pytest.raises(AttributeError, match="nothing"):
        fit(tmp_path, strategy={"submodule": "nothing"})
    with pytest.raises(InvalidInput, match="Plan"):
        LambdaCGDStrategy("plan", oracle.data(), max_grad_norm=1.0, key=tmp_path / "k")


def test_a_module_called_by_its_parts_says_what_to_do(tmp_path):
    with pytest.raises(ClippingError, match="outside the model"):
        fit(tmp_path, module=Module(whole=False))


def test_a_step_without_a_loss_is_refused(tmp_path):
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(lc.TrainingError):
        fit(tmp_path, module=Skips())


class Steps(Callback):
    def on_train_batch_end(self, trainer, module, *args):
        trainer.optimizers[0].step()


class Backward(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        F.cross_entropy(module(torch.zeros(2, 5)), torch.zeros(2, dtype=torch.long)).backward()


@pytest.mark.parametrize("meddler", [Steps(), Backward()], ids=["steps", "backward"])
def test_callbacks_that_step_are_refused(meddler, tmp_path):
    with pytest.raises(lc.TrainingError):
        fit(tmp_path, callbacks=[meddler])


def test_a_checkpoint_within_a_logical_step_is_refused(tmp_path):
    class Saves(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    with pytest.raises(lc.CheckpointError, match="between logical steps"):
        fit(tmp_path, callbacks=[Saves()])
    assert not (tmp_path / "within.ckpt").exists()


def test_a_step_without_its_closure_is_refused(tmp_path):
    class Eager(Module):
        def optimizer_step(self, epoch, index, optimizer, closure):
            optimizer.step()

    with pytest.raises(lc.TrainingError, match="no batch was taken"):
        fit(tmp_path, module=Eager())


def test_unfreezing_during_training_is_refused(tmp_path):
    class Thaw(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            module.extra = nn.Parameter(torch.ones(3))
            trainer.optimizers[0].add_param_group({"params": [module.extra]})

    with pytest.raises(lc.TrainingError, match="added or unfrozen"):
        fit(tmp_path, callbacks=[Thaw()])


def test_weights_exchanged_while_a_checkpoint_is_loaded_are_refused(tmp_path):
    class Exchanges(Module):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {name: value + 1 for name, value in checkpoint["state_dict"].items()}

    module, strategy, trainer = make(tmp_path)
    trainer.fit(module, strategy.loader)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    module, strategy, trainer = make(tmp_path, module=Exchanges())
    with pytest.raises(lc.TrainingError, match="on_load_checkpoint"):
        trainer.fit(module, strategy.loader, ckpt_path=tmp_path / "checkpoint")
    module, strategy, trainer = make(tmp_path)
    trainer.fit(module, strategy.loader, ckpt_path=tmp_path / "checkpoint")
