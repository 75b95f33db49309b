"""One training run in a folder: its settings, plan, key, checkpoints and release.

Settings are the defaults of the task, then the command line; they are written out as resolved.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional as F

from lambdacgd.cli.options import plan_arguments
from lambdacgd.errors import CheckpointError, InvalidInput, brief, integer, number
from lambdacgd.files import read_bytes
from lambdacgd.integrations.shared import default_key_path, load_or_make
from lambdacgd.keys import SecretKey
from lambdacgd.ledger import Release
from lambdacgd.planning import Plan
from lambdacgd.planning import plan as make_plan
from lambdacgd.training.export import export
from lambdacgd.training.privatize import Private, privatize
from reproduce.augment import Views
from reproduce.data import Numbered, Splits
from reproduce.framework import check_device
from reproduce.problems import TASKS, Classifier, Task, make_pretrained, register_weights, reviews
from reproduce.runs import Schedule
from reproduce.trainer import accuracy, annealed


@dataclass(frozen=True)
class Config:
    """All that ``python -m reproduce train`` needs to know. Everything here is public."""

    task: str
    epsilon: float
    delta: float
    epochs: int
    batch_size: int
    lr: float
    clip: float
    mechanism: str = "lambda-cgd"
    sampling: str = "balls-in-bins"
    bins: str | None = None
    lam: float | str | None = None
    bands: int | None = None
    optimizer: str = "sgd"
    ema: float = 0.0
    schedule: str = "constant"
    views: int = 1
    normalized: bool | None = None
    physical_batch_size: int | None = None
    workers: int = 0
    device: str = "cpu"
    seed: int = 0
    data: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "lr", "clip"):
            object.__setattr__(self, name, number(name, _float(getattr(self, name)), above=0, include=_infinite(name)))
        number("delta", self.delta, above=0, below=1)
        number("ema", self.ema, above=0, below=1, include=(0,))
        for name in ("epochs", "batch_size", "views"):
            integer(name, getattr(self, name))
        integer("workers", self.workers, minimum=0)
        integer("seed", self.seed, minimum=0)
        if self.physical_batch_size is not None:
            integer("physical_batch_size", self.physical_batch_size)
        for name in ("data", "weights"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise InvalidInput(name, getattr(self, name), "it must be a folder")
        if self.weights is not None and self.task != "imdb":
            raise InvalidInput("weights", self.weights, "a pretrained BERT is fine-tuned on imdb only")
        if self.bins not in (None, "fresh", "fixed"):
            raise InvalidInput("bins", self.bins, "it must be fresh or fixed")
        if self.schedule not in get_args(Schedule):
            raise InvalidInput("schedule", self.schedule, f"it must be {' or '.join(get_args(Schedule))}")
        if self.views > 1 and self.task != "cifar10":
            raise InvalidInput("views", self.views, "crops and mirror images are views of photographs: of cifar10 only")
        if not isinstance(self.normalized, (bool, type(None))):
            raise InvalidInput("normalized", self.normalized, "it must be true or false")
        if self.optimizer not in ("sgd", "adamw"):
            raise InvalidInput("optimizer", self.optimizer, "it must be sgd or adamw")
        if isinstance(self.lam, str) and self.lam != "auto":
            raise InvalidInput("lam", self.lam, "it must be a number in [0, 1) or auto")

    @property
    def described(self) -> Task:
        """The task; with pretrained weights, their model and their word pieces in the place of its own."""
        task = TASKS[self.task]
        if self.weights is None:
            return task
        name = register_weights(Path(self.weights))
        return replace(task, load=partial(reviews, name), model=lambda: Classifier(make_pretrained(name)))


def _infinite(name: str) -> tuple[float, ...]:
    return (math.inf,) if name == "epsilon" else ()


def _float(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    except OverflowError:
        return value  # which is refused as it stands


def resolve(task: str, given: dict[str, Any]) -> Config:
    """The settings of a run: the task's defaults, overridden by what was ``given``."""
    if task not in TASKS:
        raise InvalidInput("task", task, f"it must be one of {', '.join(TASKS)}")
    if "epsilon" not in given:
        raise InvalidInput("epsilon", None, "give the privacy budget: --epsilon 8, say")
    known = TASKS[task]
    defaults = {
        "delta": known.delta,
        "epochs": known.epochs,
        "batch_size": known.batch_size,
        "lr": known.learning_rate,
        "clip": known.max_grad_norm,
    }
    return Config(**(defaults | given | {"task": task}))


def read_config(path: Path) -> Config:
    """The settings that ``write_config`` wrote."""
    try:
        return Config(**json.loads(read_bytes(path)))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInput("resume", str(path), f"it does not hold the settings of a run ({brief(error)})") from None


def write_config(config: Config, path: Path) -> None:
    """Write the resolved settings."""
    path.write_text(json.dumps(asdict(config), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


CONFIG, PLAN, CHECKPOINT = "config.json", "plan.json", "checkpoint"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Progress:
    """Where training stands. Loss and accuracy are of training batches: for the operator's eyes, not private."""

    step: int
    epoch: int
    loss: float
    accuracy: float
    examples_per_second: float


class Interrupted(Exception):
    """Ctrl-C, or SIGTERM from whoever runs the job: a checkpoint was saved. ``signal`` is the signal's number."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.signal = int(number)


def plan_for(config: Config, examples: int) -> Plan:
    """The plan that the settings ask for."""
    asked = ("batch_size", "epochs", "epsilon", "delta", "mechanism", "sampling", "lam", "bands", "bins", "normalized")
    return make_plan(**plan_arguments({"examples": examples} | {name: getattr(config, name) for name in asked}))


class Session:
    """A run in its folder. ``Session.start`` makes one, ``Session.resume`` goes on with one.

    The folder is copied and shared, so the key is not in it: it and its ledger are in ``<folder>.private``.
    """

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
            splits.train if config.views == 1 else Numbered(splits.train),
            plan,
            max_grad_norm=config.clip,
            augmentations=config.views,
            max_physical_batch_size=config.physical_batch_size,
            key=key,
            num_workers=config.workers,
            pin_memory=self.device.type == "cuda",
        )
        self.average = self.private.ema(config.ema) if config.ema else None
        self._stop: int | None = None  # the signal that asked for it

    @classmethod
    def start(cls, folder: Path, config: Config, plan: Plan | None = None) -> Session:
        """A new run in a new folder, which appears whole: a job that dies before can simply be started again.

        Raises:
            InvalidInput: There is a run in the folder, or weights have left a process under the key beside it.
        """
        if folder.exists() and any(folder.iterdir()):
            raise InvalidInput(
                "out", str(folder), f"it is not empty; choose another, or go on with it: --resume {folder}"
            )
        check_device(config.device)
        splits = config.described.load(Path(config.data) if config.data else None)
        if plan is None:
            plan = plan_for(config, len(splits.train))
        config = replace(config, bins=getattr(plan.sampling, "bins", None))  # written down even where it was a default
        key = load_or_make(default_key_path(folder))
        if released := _released(key):
            raise InvalidInput(
                "out",
                str(folder),
                f"the key beside it ({key.path}) belongs to an earlier run, which released step {released[0].step}. "
                "Choose another folder, or put that run back",
            )
        draft = folder.with_name(f".{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write_config(config, draft / CONFIG)
        plan.save(draft / PLAN)
        os.rename(draft, folder)
        return cls(folder, config, plan, splits, key)

    @classmethod
    def resume(cls, folder: Path, changes: dict[str, Any]) -> Session:
        """Go on with a run from its newest checkpoint, or from its beginning if it was killed before the first one.

        Args:
            folder: The run's folder.
            changes: Settings that are others now: only where and how fast it runs may change.

        Raises:
            InvalidInput: There is no whole run in the folder.
            CheckpointError: The checkpoint is damaged, missing, or not the newest release.
        """
        key_file = default_key_path(folder)
        for path in (folder / CONFIG, folder / PLAN, key_file):
            if not path.exists():
                raise InvalidInput("resume", str(folder), f"it holds no run that can be resumed ({path} is missing)")
        config = replace(read_config(folder / CONFIG), **changes)
        splits = config.described.load(Path(config.data) if config.data else None)
        key = SecretKey.load(key_file)
        session = cls(folder, config, Plan.load(folder / PLAN), splits, key)
        if not session.private.resume(folder / CHECKPOINT) and (released := _released(key)):
            raise CheckpointError(
                f"there is no checkpoint in {folder}, and the ledger says that this run released step "
                f"{released[0].step}. Restore the checkpoint from a copy, or start a new run in another folder, which "
                "costs its own (ε, δ)"
            )
        return session

    def train(self, report: Callable[[Progress], None], *, every_s: float = 0.2) -> None:
        """The rest of the run, with a checkpoint after every epoch.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came, and a checkpoint was saved.
        """
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
        look = Views(self.private.run.id, self.config.views, self.device)
        shown = time.monotonic()
        losses, hits, examples = torch.zeros((), device=self.device), torch.zeros((), device=self.device), 0
        for x, y, *numbers in batches:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            if numbers:
                look.step.fill_(self.private.steps_taken + 1)
                x = look(x, numbers[0].to(self.device, non_blocking=True))
            if self.config.schedule == "linear":
                for group in self.optimizer.param_groups:
                    group["lr"] = annealed(self.config.lr, self.private.steps_taken, self.plan.steps)
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
            if self._stop is not None and self.private.between_steps:
                self.private.save(self.folder / CHECKPOINT)
                raise Interrupted(self._stop)
        report(Progress(self.private.steps_taken, number, float("nan"), float("nan"), float("nan")))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after the logical step under way; a second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._stop = number
            put_back()

        def put_back() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        before: dict[int, Any] = {}
        try:
            for number in SIGNALS:
                before[number] = signal.signal(number, stop)
        except ValueError:  # not the main thread: signals do not come here
            yield
            return
        try:
            yield
        finally:
            put_back()

    def test_accuracy(self) -> float:
        """Accuracy on the test examples, of the averaged weights where an average is kept."""
        test = self.splits.test
        inputs, labels = test.numbers(test.inputs).to(self.device), test.labels.to(self.device)
        with self.average.applied() if self.average else nullcontext():
            return accuracy(self.model, inputs, labels)

    def release(self) -> Path:
        """Export the weights (averaged where an average is kept) with their privacy card."""
        with self.average.applied() if self.average else nullcontext():
            return export(self.private, self.folder / "release")


def _released(key: SecretKey) -> list[Release]:
    """The newest release of every run under this key that released anything."""
    ledger = key.ledger()
    newest = [ledger.newest(run) for run in ledger.runs()]
    return [release for release in newest if release is not None]
