"""One training run through the library's own calls, and how a cell of an experiment is computed from such runs.

A run is captured on CUDA where the noise allows it; otherwise it is the plain loop.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.accounting.floating_point import cover
from lambdacgd.errors import InvalidInput
from lambdacgd.keys import SecretKey
from lambdacgd.noise import NonFiniteSum
from lambdacgd.planning import Plan
from lambdacgd.training import Private, privatize
from reproduce.augment import Views
from reproduce.framework import Cell, Experiment, Row, Settings, wait
from reproduce.problems import (
    TRAINING_EXAMPLES,
    Data,
    capturable,
    is_pretrained,
    make_model,
    mixes_of,
    physical_batch_size,
    problem,
    reviews,
    sizes,
    views_of,
)
from reproduce.runs import LAST_RATE, PlanBook, Result, RunStore, TrainingRun, method
from reproduce.search import Search, answer, start, stored
from reproduce.uncertified import noise_of_epochs

AVERAGES = (0.99, 0.998)  # decays of the weights' running averages; they cost no privacy and are evaluated too


class TooLate(Exception):
    """The time given to a run is over; nothing of it is kept."""


class Rows(torch.utils.data.Dataset[int]):
    """A dataset of row numbers: a batch is then gathered on the device in one call by ``collate``."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, rows: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.tensor(rows, device=self.tensors[0].device)
        return tuple(tensor.index_select(0, chosen) for tensor in self.tensors)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(
    run: TrainingRun, data: Data, plans: PlanBook, *, until: float | None = None, unfinished: Path | None = None
) -> Result:
    """Train and evaluate a run.

    Args:
        run: What to train.
        data: The examples of the run's task.
        plans: Where the run's plan is.
        until: When to give up, on the clock of ``time.monotonic()``.
        unfinished: A folder of the run's own. A run that gives up leaves its checkpoint and its key there, one that is
            there goes on with its very bits, one that ends takes the folder away.

    Returns:
        The accuracy of the last weights and of their averages, by name; and what the plan and the clock say.

    Raises:
        TooLate: The time was over before the run was.
        MissingPlan: ``plans`` does not hold the run's plan.
    """
    plan = plans.for_run(run, data.examples(run))
    proven = covered(plan, run)
    with ExitStack() as refused:  # by the library; what accuracy such noise gives is asked here all the same
        if plan.certificate.kind != "bound":
            refused.enter_context(patch("lambdacgd.training.privatize.check_plan"))
        for module in () if proven else ("privatize", "step"):
            refused.enter_context(patch(f"lambdacgd.training.{module}.floating_point_of", lambda *_: None))
        return _train(run, data, plan, until, unfinished) | ({} if proven else {"unproven": True})


def covered(plan: Plan, run: TrainingRun) -> bool:
    """Whether what the plan sets aside for floating point is proven to cover the run: not that of many bands that a
    recurrence with buffers makes, over thousands of steps. Other methods are not asked: the library refuses them.
    """
    if run.method != "bandmf":
        return True
    parameters = sum(p.numel() for p in make_model(run).parameters())
    try:
        cover(
            plan.mechanism, steps=plan.steps, restart_every=plan.restart_every, parameters=parameters,
            epsilon=plan.epsilon, delta=plan.delta,
        )  # fmt: skip
    except InvalidInput:
        return False
    return True


def _train(run: TrainingRun, data: Data, plan: Plan, until: float | None, unfinished: Path | None) -> Result:
    (x, y), held_out = data.cut(run)
    began = time.monotonic()
    torch.manual_seed(run.seed)
    model = make_model(run).to(data.device)
    captured = data.device.type == "cuda" and capturable(run)
    captured &= plan.mechanism.regenerates(plan.block.steps)
    rate = torch.tensor(run.learning_rate, device=data.device)  # read on the device: a schedule needs no new capture
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, fused=True)
    views, physical = views_of(run.model), physical_batch_size(run)
    # Views of an example are made of its number, so that they are the same wherever it is read.
    rows = Rows((x, y) if views == 1 else (x, y, torch.arange(len(y), device=data.device)))
    private = privatize(
        model, optimizer, rows, plan, max_grad_norm=run.max_grad_norm, collate_fn=rows.collate,
        max_physical_batch_size=physical, augmentations=views, pad_batches=1 if physical is None else 32,
        key=None if unfinished is None else _key(unfinished),
    )  # fmt: skip
    averages = {f"ema-{decay:g}": private.ema(decay) for decay in AVERAGES}
    if unfinished is not None and private.resume(unfinished / "checkpoint"):
        began -= private.extra["seconds"]
        rate = optimizer.param_groups[0]["lr"]
    loss = loss_of if views == 1 else _with_views(private, mixes_of(run.model))
    if physical is not None and not is_pretrained(run.model):
        loss = _in_bfloat16(loss, data.device)
    if run.schedule == "linear":
        private.after_step.append(lambda: _anneal(rate, run.learning_rate, private))
    with noise_of_epochs(private, plan):
        for _ in _captured(private, loss, rows.tensors) if captured else _loop(private, loss):
            if until is not None and time.monotonic() > until:
                if unfinished is not None:
                    private.save(unfinished / "checkpoint", extra={"seconds": time.monotonic() - began})
                private.detach()
                raise TooLate(str(run))
        wait(data.device)
    seconds = time.monotonic() - began
    scores = {"last": accuracy(model, *held_out)}
    for name, average in averages.items():
        with average.applied():
            scores[name] = accuracy(model, *held_out)
    private.detach()
    if unfinished is not None:
        shutil.rmtree(unfinished)
    result = {"accuracy": scores, "evaluated": len(held_out[1]), "seconds": round(seconds, 2), "captured": captured}
    result["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return result | _facts(plan)


def _key(folder: Path) -> SecretKey:
    """The key of a run that may be interrupted. What is trained on here is public: copies of the file may be read."""
    path = folder / "run.key"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        SecretKey.generate().save(path)
    path.chmod(0o600)
    return SecretKey.load(path)


def outcome(
    run: TrainingRun, data: Data, plans: PlanBook, *, until: float | None = None, unfinished: Path | None = None
) -> Result:
    """``train``, where a learning rate that blows up is an answer too. Every other error is raised."""
    try:
        return train(run, data, plans, until=until, unfinished=unfinished)
    except NonFiniteSum as error:
        if unfinished is not None:
            shutil.rmtree(unfinished)
        return diverged(str(error), plans.for_run(run, data.examples(run)))


def diverged(why: str, plan: Plan) -> Result:
    """The result of a run whose sums stopped being finite: nothing learned."""
    names = ["last", *(f"ema-{decay:g}" for decay in AVERAGES)]
    return {"accuracy": dict.fromkeys(names, 0.0), "diverged": why, "seconds": 0.0} | _facts(plan)


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "sigma": plan.sigma,
        "rmse": plan.rmse,
        "lambda": plan.mechanism.to_dict().get("lam"),
        "plan": plan.digest,
        "certificate": {"method": plan.certificate.method, "kind": plan.certificate.kind},
        "training_examples": plan.examples,
        "steps": plan.steps,
    }


Loss = Callable[..., Tensor]


def _with_views(private: Private, mixed: int) -> Loss:
    """The loss of a random view in each row's place."""
    look = Views(private.run.id, private.clipper.views, private.clipper.anchor.device, mixed=mixed)

    def count() -> None:
        look.step.fill_(private.steps_taken + 1)

    count()
    private.after_step.append(count)
    return lambda model, x, y, examples: loss_of(model, look(x, examples), y)


def _in_bfloat16(loss: Loss, device: torch.device) -> Loss:
    def computed(*given: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return loss(*given)

    return computed


def _captured(private: Private, loss: Loss, data: tuple[Tensor, ...]) -> Iterable[int]:
    step = private.captured_step(loss, data)
    while not private.finished:
        step.run(min(private.plan.steps_per_epoch, private.plan.steps - private.steps_taken))
        yield private.steps_taken


def _loop(private: Private, loss: Loss) -> Iterable[int]:
    for batch in private.loader:
        loss(private.model, *batch).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        yield private.steps_taken


def _anneal(rate: Tensor, begin: float, private: Private) -> None:
    rate.fill_(annealed(begin, private.steps_taken, private.plan.steps))


def annealed(begin: float, taken: int, steps: int) -> float:
    """The rate of a linear schedule after so many of its steps: from ``begin`` to a twentieth."""
    return begin * (LAST_RATE + (1 - LAST_RATE) * (1 - taken / steps))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, *, batch: int = 1000) -> float:
    """The share that the model gets right."""
    model.eval()
    hits = torch.zeros((), dtype=torch.int64, device=y.device)
    for i in range(0, len(y), batch):
        hits += (model(x[i : i + batch]).argmax(1) == y[i : i + batch]).sum()
    model.train()
    return int(hits) / len(y)


Make = Callable[[Cell], Search]


def compute_with(make: Make) -> Callable[[Cell, Settings], Row]:
    """``Experiment.compute`` for a kind of search: runs in this process, one after another, each kept when it ends.

    They are kept beside the cells, so that an interrupted search goes on, and another folder begins from scratch.
    """

    def compute(cell: Cell, settings: Settings) -> Row:
        store = RunStore(None if settings.folder is None else settings.folder / "runs.jsonl")
        plans = PlanBook(make=True)
        held: list[Data] = []

        def train_here(run: TrainingRun, until: float | None) -> Row:
            if not held:
                load = partial(reviews, run.model) if is_pretrained(run.model) else problem(run.task).load
                splits = load(settings.data)
                held.append(Data(run.task, splits, torch.device(settings.torch_device)))
            return outcome(run, held[0], plans, until=until)

        return answer(make(cell), store, train_here)

    return compute


def plan_requests(cell: Cell) -> Iterator[dict[str, Any]]:
    """Every plan that the search of a cell may ask for, on each of its splits."""
    first = start(cell)
    known = method(first.method)
    lams = [first.lam] if "lam" in cell else [known.first(first.epsilon), known.second(first.epsilon)]
    sizes_tried = [(int(size), first.epochs) for size in cell.get("rates", [first.batch_size])]  # rates for each B
    for batch_size, epochs in cell.get("points", sizes_tried):
        for lam in dict.fromkeys(lams if known.lam and lams[-1] is not None else lams[:1]):
            run = replace(first, lam=lam, batch_size=batch_size, epochs=epochs)
            for split in cell["splits"]:
                wanted = replace(run, split=split)
                yield wanted.plan_request(sizes(TRAINING_EXAMPLES[run.task], wanted)[0])


class _Watched:
    """A store that notes which of its records were read."""

    def __init__(self, store: RunStore) -> None:
        self._store, self.read = store, dict[str, dict[str, Any]]()

    def get(self, run: TrainingRun) -> Result | None:
        record = self._store.record(run)
        if record is not None:
            self.read[run.digest] = record
        return self._store.get(run)


def rows_from(
    experiment: Experiment, make: Make, store: RunStore, settings: Settings
) -> Iterator[tuple[Cell, Row, list[dict[str, Any]]]]:
    """The cells whose searches can be answered from the store alone, with the records of the runs behind each."""
    for cell in experiment.cells(settings):
        watched = _Watched(store)
        row = stored(make(cell), watched)
        if row is not None:
            yield cell, row, list(watched.read.values())
