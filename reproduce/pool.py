"""Many searches, a few worker processes: what the most important search waits for is trained first.

Workers are processes of their own, since CUDA graphs must not be captured in several threads at once; on one GPU they
run side by side under NVIDIA's MPS. Results go to the store as they come, so that nothing finished is lost, and a run
that two searches ask for is trained once.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reproduce.runs import Result, RunStore, TrainingRun
from reproduce.search import Row, Search

Train = Callable[[TrainingRun, float | None], Result]
Say = Callable[[str], None]


@dataclass
class _Asked:
    """A search, and the runs it waits for."""

    name: str
    search: Search
    waiting: list[TrainingRun] = field(default_factory=list)
    row: Row | None = None
    over: str = ""  # why it will not go on


class Known(Protocol):
    """Where results are looked up."""

    def get(self, run: TrainingRun) -> Result | None: ...


def stored(search: Search, known: Known) -> Row | None:
    """What a search ends with if every result is known; None where one is missing."""
    asked = _Asked("", search)
    _advance(asked, known, first=True)
    return asked.row


def answer(search: Search, store: RunStore, train: Train, *, until: float | None = None) -> Row:
    """Drive one search here, training what the store lacks."""
    asked = _Asked("", search)
    _advance(asked, store, first=True)
    while asked.row is None:
        for run in asked.waiting:
            if store.get(run) is None:
                store.add(run, train(run, until))
        _advance(asked, store)
    return asked.row


def _advance(asked: _Asked, store: Known, *, first: bool = False) -> None:
    """Hand a search all the results that are there, until it waits for a missing one or ends."""
    try:
        if first:
            asked.waiting = next(asked.search)
        while True:
            results = [store.get(run) for run in asked.waiting]
            if any(result is None for result in results):
                return
            asked.waiting = asked.search.send([result for result in results if result is not None])
    except StopIteration as end:
        asked.waiting, asked.row = [], end.value


@dataclass(frozen=True)
class Worker:
    """What a worker process needs: all of it picklable. ``data`` maps tasks to files of ``problems.packed`` splits."""

    data: dict[str, Path]
    plans: Path
    device: str
    threads: int = 1


def solve(
    searches: Sequence[tuple[str, Search]],
    store: RunStore,
    worker: Worker,
    *,
    parallel: int,
    until: float,
    allow: Callable[[TrainingRun], bool] = lambda run: True,
    say: Say = print,
) -> dict[str, Row]:
    """Rows of the searches that end before ``until`` (``time.monotonic()``), the most important first.

    Only runs that ``allow`` accepts are trained. A run that fails ends its search; the others go on.
    """
    asked = [_Asked(name, search) for name, search in searches]
    for one in asked:
        _advance(one, store, first=True)
    context = multiprocessing.get_context("spawn")
    tasks: Any = context.Queue()
    done: Any = context.Queue()
    workers = [context.Process(target=_work, args=(worker, tasks, done, until), daemon=True) for _ in range(parallel)]
    for process in workers:
        process.start()
    under_way: dict[str, TrainingRun] = {}
    pace = _Pace()

    def fits(run: TrainingRun) -> bool:
        return allow(run) and time.monotonic() + pace.expected(run) <= until

    try:
        while True:
            for run in _next(asked, store, fits, under_way, parallel - len(under_way)):
                under_way[run.digest] = run
                tasks.put(run)
            if not under_way:
                break
            try:
                digest, result, where = done.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > until + 5 or not any(process.is_alive() for process in workers):
                    break
                continue
            run = under_way.pop(digest)
            if "failed" in result:
                say(f"FAILED {run}: {result['failed']}")
                for one in asked:
                    if run in one.waiting:
                        one.waiting, one.over = [], result["failed"]
                continue
            store.add(run, result, where=where)
            pace.saw(run, result)
            shown = ", ".join(f"{name} {100 * value:.1f}%" for name, value in result["accuracy"].items())
            say(f"{max(0, until - time.monotonic()):5.0f} s left  {run}: {shown}  ({result['seconds']} s)")
            for one in asked:
                if one.row is None and run in one.waiting:
                    _advance(one, store)
    finally:
        for _ in workers:
            tasks.put(None)
        for process in workers:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
    return {one.name: one.row for one in asked if one.row is not None}


def _next(
    asked: Sequence[_Asked],
    store: RunStore,
    allowed: Callable[[TrainingRun], bool],
    under_way: dict[str, TrainingRun],
    free: int,
) -> list[TrainingRun]:
    """The runs to hand out now."""
    chosen: list[TrainingRun] = []
    for one in asked:
        for run in one.waiting:
            if len(chosen) >= free:
                return chosen
            if run.digest not in under_way and run not in chosen and store.get(run) is None and allowed(run):
                chosen.append(run)
    return chosen


class _Pace:
    """How long a run will take, from those that ended: seconds an example read, the slowest of its kind's last few.

    Few, because a run that shared the GPU with larger ones can take five times as long as the same run a minute later.
    """

    FEW = 8

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, str], deque[float]] = {}

    def saw(self, run: TrainingRun, result: Result) -> None:
        last = self._last.setdefault((run.task, run.model, run.method), deque(maxlen=self.FEW))
        last.append(result["seconds"] / (result["training_examples"] * run.epochs))

    def expected(self, run: TrainingRun) -> float:
        from reproduce.problems import TRAINING_EXAMPLES, sizes

        alike = [each for kind, last in self._last.items() if kind[:2] == (run.task, run.model) for each in last]
        each = max(self._last.get((run.task, run.model, run.method), alike), default=0.0)
        return each * sizes(TRAINING_EXAMPLES[run.task], run)[0] * run.epochs


def _work(worker: Worker, tasks: Any, done: Any, until: float) -> None:
    """A worker process: trains what it is given until it is given None."""
    import torch

    from reproduce.machine import machine
    from reproduce.plan_book import PlanBook
    from reproduce.problems import Data, unpacked
    from reproduce.trainer import TooLate, outcome

    torch.set_num_threads(worker.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plans = PlanBook(worker.plans)
    held: dict[str, Data] = {}
    while (run := tasks.get()) is not None:
        try:
            if run.task not in held:
                splits = unpacked(torch.load(worker.data[run.task], mmap=True, weights_only=True))
                held[run.task] = Data(run.task, splits, torch.device(worker.device))
            result = outcome(run, held[run.task], plans, until=until)
        except TooLate:
            return
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        done.put((run.digest, result, machine()))
