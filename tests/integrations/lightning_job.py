"""Lightning in one process, or in several that train together."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lambdacgd as lc
from lambdacgd.integrations.lightning import LambdaCGDDDPStrategy, LambdaCGDStrategy
from tests.training import oracle


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == self.step


def train(out: Path, *, processes: int = 1, stop: int = 0, ckpt_path: Path | None = None) -> None:
    warnings.simplefilter("ignore")
    make = secrets.token_hex
    path = out.with_name(out.name + ".key")
    if not path.exists() and os.environ.get("RANK", "0") == "0":
        lc.SecretKey.from_bytes(bytes(range(32))).save(path)
    given = {"max_grad_norm": 1.0, "key": path, "max_physical_batch_size": 3}
    plan, data = oracle.plan(), oracle.data()
    if processes > 1:
        strategy = LambdaCGDDDPStrategy(plan, data, process_group_backend="gloo", **given)
    else:
        strategy = LambdaCGDStrategy(plan, data, device="cpu", **given)
    trainer = lightning.Trainer(
        strategy=strategy, devices=processes, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=out,
        callbacks=[Stop(stop), ModelCheckpoint(out, every_n_train_steps=3, save_top_k=-1, filename="{step}")],
    )  # fmt: skip
    module = Module()
    secrets.token_hex = lambda n: "ab" * n if n == 16 else make(n)  # one run id, whatever the number of processes
    try:
        trainer.fit(module, strategy.loader, DataLoader(oracle.data(8), batch_size=4), ckpt_path=ckpt_path)
    finally:
        secrets.token_hex = make
    if trainer.is_global_zero:
        torch.save(module.state_dict(), out / "end.pt")


def as_rank(out: Path, stop: int) -> None:
    """`train` as one of the processes that `launch` has started, which torchrun would tell by the environment."""
    rank, size = str(dist.get_rank()), dist.get_world_size()
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    train(out, processes=size, stop=stop)
