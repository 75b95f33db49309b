"""What the training experiments share: how a cell is computed, which plans it may need, and rows from stored runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from reproduce.framework import Cell, Experiment, Row, Settings
from reproduce.methods import method
from reproduce.plan_book import PlanBook
from reproduce.pool import answer, stored
from reproduce.pretrained import is_pretrained, reviews
from reproduce.runs import Result, RunStore, TrainingRun
from reproduce.search import Search, start

Make = Callable[[Cell], Search]


def compute_with(make: Make) -> Callable[[Cell, Settings], Row]:
    """``Experiment.compute`` for a kind of search: runs in this process, one after another, each kept when it ends.

    They are kept beside the cells, so that an interrupted search goes on, and another folder begins from scratch.
    """

    def compute(cell: Cell, settings: Settings) -> Row:
        import torch

        from reproduce.problems import Data, problem
        from reproduce.trainer import outcome

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
    """Every plan that the search of a cell may ask for, on both splits."""
    from reproduce.problems import TRAINING_EXAMPLES, sizes

    first = start(cell)
    known = method(first.method)
    lams = [first.lam] if "lam" in cell else [known.first(first.epsilon), known.second(first.epsilon)]
    for lam in dict.fromkeys(lams if known.lam and lams[-1] is not None else lams[:1]):
        run = replace(first, lam=lam)
        for split in ("validation", "test") if "test" in cell["splits"] else ("validation",):
            one = replace(run, split=split)
            yield one.plan_request(sizes(TRAINING_EXAMPLES[run.task], one)[0])


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
