"""Handwritten digits with differential privacy in Lightning: ``python examples/lightning_digits.py --out /tmp/digits``.

Needs the extra ``lightning``; the digits come with the package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lambdacgd as lc
from lambdacgd import digits
from lambdacgd.integrations.lightning import LambdaCGDStrategy


class Digits(lightning.LightningModule):
    """An ordinary module: nothing in it knows of privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss_not_private", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--resume", type=Path, help="a checkpoint of this run")
    given = parser.parse_args()
    if (given.out / "release").exists():
        parser.error(f"{given.out} holds a release: choose another folder for another run, which costs its own (ε, δ)")
    # Whoever has the key can subtract the noise: keep it outside of the folder that you copy and publish.
    key = given.out.with_name(given.out.name + ".private") / "run.key"
    train, test = digits.load()

    torch.manual_seed(0)
    plan = lc.plan(train, 64, epochs=given.epochs, epsilon=given.epsilon, delta=1e-4)
    strategy = LambdaCGDStrategy(
        plan, train, max_grad_norm=0.5, key=key, max_physical_batch_size=64, loss=Digits.loss, earlier=[]
    )
    trainer = lightning.Trainer(
        strategy=strategy,
        default_root_dir=given.out,
        logger=False,
        callbacks=[ModelCheckpoint(given.out / "checkpoints", save_last=True)],
        enable_progress_bar=False,
    )
    module = Digits()
    trainer.fit(module, strategy.loader, DataLoader(test, batch_size=512), ckpt_path=given.resume)
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}, {strategy.private.spent()}")
    lc.export(strategy.private, given.out / "release")


if __name__ == "__main__":
    main()
