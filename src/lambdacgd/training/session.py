"""One training run in a folder: plan, key, checkpoints, release. ``lambdacgd train`` without the printing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lambdacgd.errors import InvalidInput
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.planning import plan as make_plan
from lambdacgd.training import config as settings
from lambdacgd.training.config import Config
from lambdacgd.training.data import Examples, Splits
from lambdacgd.training.export import export
from lambdacgd.training.private import Private
from lambdacgd.training.privatize import privatize

CONFIG, PLAN, CHECKPOINT, KEY = "config.toml", "plan.json", "checkpoint.pt", Path("private") / "run.key"


@dataclass(frozen=True)
class Progress:
    """Where training stands. Loss and accuracy are of training batches: for the operator's eyes, not private."""

    step: int
    epoch: int
    loss: float
    accuracy: float
    examples_per_second: float


class Interrupted(Exception):
    """Ctrl-C: a checkpoint was saved."""


def plan_for(config: Config, examples: int) -> Plan:
    """The plan that the settings ask for."""
    extra: dict[str, Any] = {}
    if config.lam is not None:
        extra["lam"] = config.lam
    if config.bands is not None:
        extra["bands"] = config.bands
    if config.bins is not None:
        extra["bins"] = config.bins
    return make_plan(
        examples,
        config.batch_size,
        epochs=config.epochs,
        epsilon=config.epsilon,
        delta=config.delta,
        mechanism=config.mechanism,
        sampling=config.sampling,
        **extra,
    )


def check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput("device", name, "it must be a torch device such as cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device", name, "this machine has no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput("device", name, f"this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    return device


class Session:
    """A run in its folder. ``Session.start`` makes one, ``Session.resume`` goes on with one."""

    def __init__(self, folder: Path, config: Config, plan: Plan, splits: Splits, key: SecretKey) -> None:
        self.folder, self.config, self.plan, self.splits = folder, config, plan, splits
        self.device = check_device(config.device)
        torch.manual_seed(config.seed)
        self.model: nn.Module = config.described.model().to(self.device)
        kind = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=config.lr)
        self.private: Private = privatize(
            self.model,
            self.optimizer,
            splits.train,
            plan,
            max_grad_norm=config.clip,
            max_physical_batch_size=config.physical_batch_size,
            key=key,
            num_workers=config.workers,
            pin_memory=self.device.type == "cuda",
        )
        self.average = self.private.ema(config.ema) if config.ema else None
        self._stop = False

    @classmethod
    def start(cls, folder: Path, config: Config, plan: Plan | None = None) -> Session:
        """A new run in a new folder."""
        if folder.exists() and any(folder.iterdir()):
            raise InvalidInput(
                "out", str(folder), f"it is not empty; choose another, or go on with it: --resume {folder}"
            )
        check_device(config.device)
        splits = config.described.load(Path(config.data) if config.data else None)
        if plan is None:
            plan = plan_for(config, len(splits.train))
        config = replace(config, bins=getattr(plan.sampling, "bins", None))  # written down even where it was a default
        (folder / KEY).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.write(config, folder / CONFIG)
        plan.save(folder / PLAN)
        key = SecretKey.generate()
        key.save(folder / KEY)
        return cls(folder, config, plan, splits, key)

    @classmethod
    def resume(cls, folder: Path, changes: dict[str, Any]) -> Session:
        """Go on with a run from its newest checkpoint. Only where and how fast it runs may change."""
        for name in (CONFIG, PLAN, CHECKPOINT, KEY):
            if not (folder / name).exists():
                draft = (folder / f".{CHECKPOINT}.draft").exists()
                if name != CHECKPOINT or not draft:
                    raise InvalidInput(
                        "resume", str(folder), f"it holds no run that can be resumed ({name} is missing)"
                    )
        config = replace(settings.resolve(None, folder / CONFIG, {}), **changes)
        splits = config.described.load(Path(config.data) if config.data else None)
        session = cls(folder, config, Plan.load(folder / PLAN), splits, SecretKey.load(folder / KEY))
        session.private.load(folder / CHECKPOINT)
        return session

    def train(self, report: Callable[[Progress], None], *, every_s: float = 0.2) -> None:
        """The rest of the run, with a checkpoint after every epoch. Ctrl-C saves one and raises ``Interrupted``."""
        if self.private.finished:
            return
        if not self.private.run.started:
            self.private.save(self.folder / CHECKPOINT)
        with self._interruptible():
            for epoch in self.private.epochs():
                self._epoch(epoch.number, iter(epoch), report, every_s)
                self.private.save(self.folder / CHECKPOINT)

    def _epoch(self, number: int, batches: Iterator[Any], report: Callable[[Progress], None], every_s: float) -> None:
        self.model.train()
        shown = time.monotonic()
        losses, hits, examples = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for x, y in batches:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            output = self.model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                losses += loss.detach() * len(y)
                hits += (output.detach().argmax(1) == y).sum()
            examples += len(y)
            now = time.monotonic()
            if now - shown >= every_s:
                rate = examples / (now - shown)
                report(
                    Progress(self.private.steps_taken, number, float(losses) / examples, float(hits) / examples, rate)
                )
                shown, examples = now, 0
                losses.zero_()
                hits.zero_()
            if self._stop and self.private.between_steps:
                self.private.save(self.folder / CHECKPOINT)
                raise Interrupted
        report(Progress(self.private.steps_taken, number, float("nan"), float("nan"), float("nan")))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C ends after the logical step under way; a second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stop = True
            signal.signal(signal.SIGINT, before)

        try:
            before = signal.signal(signal.SIGINT, stop)
        except ValueError:  # not the main thread: nobody presses Ctrl-C here
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def test_accuracy(self) -> float:
        """Accuracy on the test examples, of the averaged weights where an average is kept."""
        if self.average is None:
            return accuracy(self.model, self.splits.test, self.device)
        with self.average.applied():
            return accuracy(self.model, self.splits.test, self.device)

    def release(self) -> Path:
        """Export the weights (averaged where an average is kept) with their privacy card."""
        if self.average is None:
            return export(self.private, self.folder / "release")
        with self.average.applied():
            return export(self.private, self.folder / "release")


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples, device: torch.device, *, batch: int = 512) -> float:
    """The share of ``examples`` that the model gets right."""
    training = model.training
    model.eval()
    hits = 0
    for start in range(0, len(examples), batch):
        part = examples.part(slice(start, start + batch))
        x, y = zip(*part.__getitems__(list(range(len(part)))), strict=True)
        hits += int((model(torch.stack(x).to(device)).argmax(1).cpu() == torch.stack(y)).sum())
    model.train(training)
    return hits / len(examples)
