"""Lightning's automatic optimisation, truly private: equal to the loop by hand, exact in resuming, strict."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.training import oracle
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lambdacgd as lc
from lambdacgd.clipping import ClippingError
from lambdacgd.training import privatize
from lambdacgd.validation import InvalidInput

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from lambdacgd.integrations.lightning import LambdaCGDStrategy  # noqa: E402

KEY, SEED = bytes(range(32)), 4
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


class Module(lightning.LightningModule):
    def __init__(self, dropout=0.0, whole=True):
        super().__init__()
        torch.manual_seed(SEED)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))
        self.whole, self.seen = whole, []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(len(x))
        loss = F.cross_entropy(self(x) if self.whole else self.net(x), y)
        self.log("train_loss_not_private", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make(folder, *, key=None, plan=None, module=None, strategy=None, **settings):
    """A module, its strategy and a quiet trainer."""
    strategy = LambdaCGDStrategy(
        plan or oracle.plan(), oracle.data(), max_grad_norm=1.0, key=key or folder / "private" / "run.key",
        **({"max_physical_batch_size": 5, "device": "cpu"} | (strategy or {})),
    )  # fmt: skip
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
        "default_root_dir": folder, "enable_checkpointing": "callbacks" in settings,
    }  # fmt: skip
    return module or Module(), strategy, lightning.Trainer(strategy=strategy, **(quiet | settings))


def fit(folder, run=None, ckpt_path=None, **given):
    module, strategy, trainer = make(folder, **given)
    if run is not None:
        start = strategy.setup

        def with_id(trainer):
            start(trainer)
            strategy.private.run._id = run

        strategy.setup = with_id
    trainer.fit(module, strategy.loader, val_dataloaders=DataLoader(oracle.data(10), batch_size=4), ckpt_path=ckpt_path)
    return module, strategy, trainer


def by_hand(run):
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    private = privatize(
        module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, key=lc.SecretKey.from_bytes(KEY)
    )
    private.run._id = run
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for x, y in private.loader:
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return oracle.weights(module)


@pytest.mark.parametrize(
    "given", [{}, {"strategy": {"submodule": "net"}, "module": "parts"}], ids=["whole", "submodule"]
)
def test_lightning_equals_the_loop_by_hand(given, tmp_path):
    if given:
        given = given | {"module": Module(whole=False)}
    module, strategy, trainer = fit(tmp_path, run="one", key=lc.SecretKey.from_bytes(KEY), **given)
    plan = strategy.plan
    assert trainer.global_step == strategy.private.steps_taken == plan.steps
    assert trainer.current_epoch == plan.epochs
    assert max(module.seen) <= 5
    assert len(module.seen) > plan.steps
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.05 * 0.9**plan.steps)
    lc.export(module, tmp_path / "release")
    assert (tmp_path / "release" / "PRIVACY.md").exists()
    if not given:  # a submodule's parameters have other names, so other noise
        for name, value in by_hand("one").items():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_without_noise_it_is_plain_lightning(tmp_path):
    plan = oracle.plan(batch_size=48, epochs=3, epsilon=float("inf"))
    module, _, _ = fit(tmp_path, plan=plan)
    plain = Module()
    trainer = lightning.Trainer(
        max_epochs=3, logger=False, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(plain, DataLoader(oracle.data(), batch_size=48))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_noise_is_truly_added(tmp_path):
    """Two runs from the same weights, with the same data in the same order, differ by their noise."""
    ends = [fit(tmp_path / str(i), key=lc.SecretKey.from_bytes(bytes([i] * 32)))[0].state_dict() for i in (1, 2)]
    assert not torch.allclose(ends[0]["net.0.weight"], ends[1]["net.0.weight"])


def test_what_is_logged_is_the_plans_claim(tmp_path):
    logger = CSVLogger(tmp_path, name="log")
    _, strategy, trainer = fit(tmp_path, logger=logger, log_every_n_steps=1)
    rows = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("privacy_epsilon")
    values = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert values == [strategy.plan.epsilon] * strategy.plan.steps
    assert trainer.callback_metrics["val_loss"] > 0
    assert strategy.private.spent().epsilon == strategy.plan.epsilon


def test_validation_within_an_epoch_changes_nothing(tmp_path):
    key = lc.SecretKey.from_bytes(KEY)
    ends = [
        fit(tmp_path / name, run="one", key=key, module=Module(dropout=0.3), **given)[0].state_dict()
        for name, given in (("once", {}), ("often", {"val_check_interval": 1}))
    ]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


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
        ("limit_train_batches", 2),
        ("fast_dev_run", True),
        ("overfit_batches", 1),
        ("reload_dataloaders_every_n_epochs", 1),
    ],
)
def test_settings_that_cannot_hold_are_refused_with_advice(name, value, tmp_path):
    module, strategy, trainer = make(tmp_path, **{name: value})
    with pytest.raises(InvalidInput) as caught:
        trainer.fit(module, strategy.loader)
    assert len(str(caught.value)) > 50
    assert strategy.private is None


def test_modules_that_cannot_hold_are_refused(tmp_path):
    class Clips(Module):
        def configure_gradient_clipping(self, *args, **kwargs):
            pass

    manual = Module()
    manual.automatic_optimization = False
    for module, says in ((manual, "privatize"), (Clips(), "max_grad_norm")):
        module, strategy, trainer = make(tmp_path, module=module)
        with pytest.raises(InvalidInput, match=says):
            trainer.fit(module, strategy.loader)
    with pytest.raises(InvalidInput, match="the accelerator that fits"):
        fit(tmp_path, strategy={"device": "cuda:0"})
    with pytest.raises(InvalidInput, match="no such part"):
        fit(tmp_path, strategy={"submodule": "nothing"})
    with pytest.raises(InvalidInput, match="Plan"):
        LambdaCGDStrategy("plan", oracle.data(), max_grad_norm=1.0, key=tmp_path / "k")


def test_a_module_called_by_its_parts_says_what_to_do(tmp_path):
    with pytest.raises(ClippingError, match="before the model itself"):
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


class Die(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            raise RuntimeError("died")


def saver(folder, every=3):
    return ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=-1, filename="{step}")


@pytest.mark.parametrize("died", [5, 7], ids=["within the first epoch", "within the second"])
def test_resuming_ends_with_the_same_bits(died, tmp_path, monkeypatch):
    """Dropout, AdamW, a schedule, and validation between the checkpoint and the next step."""
    monkeypatch.setattr("secrets.token_hex", lambda n: "ab" * n)
    ends = []
    for name in ("whole", "broken"):
        lc.SecretKey.from_bytes(KEY).save(tmp_path / f"{name}.key")
    common = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    module, _, _ = fit(
        tmp_path / "whole",
        key=tmp_path / "whole.key",
        module=Module(0.3),
        callbacks=[saver(tmp_path / "whole")],
        **common,
    )
    ends.append(module.state_dict())
    folder = tmp_path / "broken"
    with pytest.raises(RuntimeError, match="died"):
        fit(folder, key=tmp_path / "broken.key", module=Module(0.3), callbacks=[saver(folder), Die(died)], **common)
    newest = max((folder / "saved").glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    module, strategy, trainer = fit(
        folder, key=tmp_path / "broken.key", module=Module(0.3), callbacks=[saver(folder)], ckpt_path=newest, **common
    )
    assert trainer.global_step == strategy.private.steps_taken == strategy.plan.steps
    ends.append(module.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_an_older_checkpoint_is_refused_before_weights_are_loaded(tmp_path):
    fit(tmp_path, callbacks=[saver(tmp_path)])
    module, strategy, trainer = make(tmp_path)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(lc.CheckpointError, match="released weights after step 6"):
        trainer.fit(module, strategy.loader, ckpt_path=tmp_path / "saved" / "step=3.ckpt")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert strategy.private.steps_taken == 0


def test_saving_by_hand_after_training_is_a_release(tmp_path):
    module, strategy, trainer = fit(tmp_path, callbacks=[saver(tmp_path)])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    newest = strategy.private.run.key.ledger().newest(strategy.private.run.id)
    assert (newest.step, newest.kind) == (strategy.plan.steps, "checkpoint")
    again, other, trainer = make(tmp_path)
    trainer.fit(again, other.loader, ckpt_path=tmp_path / "last.ckpt")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items())


def test_checkpoints_hold_no_key_and_foreign_ones_are_refused(tmp_path):
    _, strategy, trainer = fit(tmp_path, callbacks=[saver(tmp_path)])
    secret = strategy.private.run.key.path.read_text().split()[-1]
    for path in (tmp_path / "saved").iterdir():
        assert secret.encode() not in path.read_bytes()
        assert bytes.fromhex(secret) not in path.read_bytes()
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    other, strategy, trainer = make(tmp_path)
    with pytest.raises(lc.CheckpointError, match="save_weights_only"):
        trainer.fit(other, strategy.loader, ckpt_path=tmp_path / "weights.ckpt")
    elsewhere, strategy, trainer = make(tmp_path / "elsewhere")
    with pytest.raises(lc.CheckpointError, match="the key"):
        trainer.fit(elsewhere, strategy.loader, ckpt_path=tmp_path / "saved" / "step=6.ckpt")


def test_a_checkpoint_killed_before_it_had_its_name_is_completed(tmp_path, monkeypatch):
    replace, count = __import__("os").replace, []

    def dies(source, target):
        if str(target).endswith("step=6.ckpt"):
            count.append(True)
            raise KeyboardInterrupt
        return replace(source, target)

    monkeypatch.setattr("lambdacgd.integrations.lightning.checkpoints.os.replace", dies)
    with warnings.catch_warnings(), pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, callbacks=[saver(tmp_path)])
    monkeypatch.undo()
    assert count
    assert (tmp_path / "saved" / ".step=6.ckpt.draft").exists()
    with pytest.raises(lc.CheckpointError, match="released weights after step 6"):
        fit(tmp_path, ckpt_path=tmp_path / "saved" / "step=3.ckpt")
    _, strategy, _ = fit(tmp_path, ckpt_path=tmp_path / "saved" / "step=6.ckpt")
    assert strategy.private.finished


def test_a_second_fit_is_refused_and_the_module_is_plain_after_the_first(tmp_path):
    module, strategy, trainer = fit(tmp_path)
    assert "forward" not in module.net[0].__dict__
    with pytest.raises(lc.TrainingError, match="has taken 8 of 8 steps"):
        trainer.fit(module, strategy.loader)
    found = trainer.validate(module, DataLoader(oracle.data(10), batch_size=4), verbose=False)
    assert found[0]["val_loss"] > 0


def test_bfloat16(tmp_path):
    module, strategy, _ = fit(tmp_path, precision="bf16-mixed")
    assert strategy.private.finished
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in module.parameters())


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
