"""A small LightningModule, its strategy and a quiet trainer."""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lambdacgd.integrations.lightning import LambdaCGDStrategy
from tests.training import oracle

KEY, SEED = bytes(range(32)), 4


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
