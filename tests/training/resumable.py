"""A run that is killed: it resumes FOLDER/checkpoint, trains to the end and saves every step.

Everything that could come out differently takes part: dropout, random augmentation in a worker, AdamW, a scheduler, an
EMA, physical batches.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.sampling import Bins
from lambdacgd.training import Private, privatize
from tests.training import oracle


class Jittered(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.x, self.y = oracle.data(60).tensors

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i] + 0.1 * torch.randn(5), self.y[i]


def build(folder: Path, workers: int = 1) -> tuple[Private, nn.Module, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    private = privatize(
        module,
        optimizer,
        Jittered(),
        oracle.binned_plan(60, 15, 3, bins=(folder / "bins").read_text()),  # type: ignore[arg-type]
        max_grad_norm=1.0,
        max_physical_batch_size=7,
        key=lc.SecretKey.load(folder / "run.key"),
        num_workers=workers,
    )
    private.ema(0.9)
    return private, module, scheduler


def prepare(folder: Path, bins: Bins = "fixed", **options: int) -> None:
    """A run of 12 steps, 4 an epoch, that stands at step 0."""
    (folder / "bins").write_text(bins)
    lc.SecretKey.from_bytes(oracle.KEY).save(folder / "run.key")
    private, _, scheduler = build(folder, **options)
    private.save(folder / "checkpoint", extra={"scheduler": scheduler.state_dict()})
    private.detach()


def go_on(
    folder: Path, *, until: int | None = None, on_ready: Callable[[], None] = lambda: None, **options: int
) -> tuple[Private, nn.Module]:
    private, module, scheduler = build(folder, **options)
    scheduler.load_state_dict(private.load(folder / "checkpoint")["scheduler"])
    on_ready()
    if private.finished:
        return private, module
    for x, y in private.loader:
        F.cross_entropy(module(x), y).backward()
        private.optimizer.step()
        if private.between_steps:
            scheduler.step()
        private.optimizer.zero_grad()
        if private.between_steps:
            private.save(folder / "checkpoint", extra={"scheduler": scheduler.state_dict()})
            if private.steps_taken == until:
                break
    return private, module


def main(folder: Path, workers: int, pipe: Connection) -> None:
    """In a process of its own: says "ready" when training begins."""
    torch.set_num_threads(1)
    go_on(folder, workers=workers, on_ready=lambda: pipe.send("ready"))
