"""The training experiments in bulk: many searches at once, worker processes that share one GPU, a limit in minutes.

``python -m reproduce methods-cifar --data DIR`` trains run after run. These commands train the same runs several at a
time, stop in time, and go on where they stopped:

    python -m reproduce bulk plans   --experiment methods-cifar     # where the accountants are installed
    python -m reproduce bulk train   --experiment methods-cifar --data DIR --minutes 8 --parallel 8 --split validation
    python -m reproduce bulk collect --experiment methods-cifar     # tables, plots and pages from the runs

The runs that the most important search waits for are trained first. Workers are processes of their own, since CUDA
graphs must not be captured in several threads at once. On CUDA start NVIDIA's MPS first (``nvidia-cuda-mps-control
-d``): without it processes take turns on the GPU. Results go to the store as they come, so that nothing finished is
lost, and a run that two searches ask for is trained once.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import queue
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lambdacgd.cli.options import flag
from lambdacgd.errors import InvalidInput
from reproduce import framework, lower_noise
from reproduce.framework import machine
from reproduce.frontier import frontier_search
from reproduce.made_with import made_with
from reproduce.problems import (
    TRAINING_EXAMPLES,
    Data,
    packed,
    problem,
    register_weights,
    reviews,
    sizes,
    unpacked,
    views_of,
)
from reproduce.record import record_search
from reproduce.runs import PlanBook, Result, RunStore, TrainingRun
from reproduce.search import Asked, Row, Search, advance, given_search, method_search, stored, sweep_search
from reproduce.trainer import AVERAGES, TooLate, outcome, plan_requests, rows_from

Say = Callable[[str], None]
FOLDER = Path("results/training")
SEARCHES = dict.fromkeys(("methods-cifar", "methods-imdb", "lstm-imdb"), method_search) | dict.fromkeys(
    ("lambda-sweep", "amplified-sweep", "epochs-sweep"), sweep_search
)
SEARCHES |= {
    "frontier": frontier_search,
    "lower-noise": lower_noise.search,
    "fine-tuning": frontier_search,
    "record": record_search,
    "paper-setting": given_search,
}


@dataclass(frozen=True)
class Worker:
    """What a worker process needs: all of it picklable. ``data`` maps tasks to files of ``problems.packed`` splits."""

    data: dict[str, Path]
    plans: Path
    device: str
    threads: int = 1
    weights: Path | None = None
    unfinished: Path | None = None  #: where runs that time cuts off are kept, each in a folder of its own


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
    """Drive searches with worker processes. A run that fails ends its search; the others go on.

    Args:
        searches: Searches by name, the most important first.
        store: Where results are looked up and kept.
        worker: What each worker process needs.
        parallel: How many workers.
        until: When to stop, on the clock of ``time.monotonic()``.
        allow: Which runs may be trained.
        say: Is told of every run that ends.

    Returns:
        Rows, by name, of the searches that ended in time.
    """
    asked = [Asked(name, search) for name, search in searches]
    for search in asked:
        advance(search, store, first=True)
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
            for run in _to_hand_out(asked, store, fits, under_way, parallel - len(under_way)):
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
                for search in asked:
                    if run in search.waiting:
                        search.waiting, search.over = [], result["failed"]
                continue
            store.add(run, result | {"sharing": parallel}, where=where)
            pace.saw(run, result)
            shown = ", ".join(f"{name} {100 * value:.1f}%" for name, value in result["accuracy"].items())
            say(f"{max(0, until - time.monotonic()):5.0f} s left  {run}: {shown}  ({result['seconds']} s)")
            for search in asked:
                if search.row is None and run in search.waiting:
                    advance(search, store)
    finally:
        for _ in workers:
            tasks.put(None)
        for process in workers:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
    return {search.name: search.row for search in asked if search.row is not None}


def _to_hand_out(
    asked: Sequence[Asked],
    store: RunStore,
    allowed: Callable[[TrainingRun], bool],
    under_way: dict[str, TrainingRun],
    free: int,
) -> list[TrainingRun]:
    """The runs to hand out now."""
    chosen: list[TrainingRun] = []
    for search in asked:
        for run in search.waiting:
            if len(chosen) >= free:
                return chosen
            if run.digest not in under_way and run not in chosen and store.get(run) is None and allowed(run):
                chosen.append(run)
    return chosen


class Pretended:
    """A store that knows every result: those that are missing have an accuracy made up from the run's digest.

    ``asked`` keeps what was missing, once: about what a search will ask for.
    """

    def __init__(self, store: RunStore) -> None:
        self._store, self.asked = store, dict[str, TrainingRun]()

    def get(self, run: TrainingRun) -> Result:
        known = self._store.get(run)
        if known is not None:
            return known
        self.asked[run.digest] = run
        made_up = int(hashlib.sha256(run.digest.encode()).hexdigest()[:8], 16) / 16**8
        facts = {"seconds": 0.0, "sharing": 1, "sigma": 0.0, "certificate": {}, "training_examples": 1}
        return facts | {"accuracy": dict.fromkeys(("last", *(f"ema-{decay:g}" for decay in AVERAGES)), made_up)}


def pool_seconds(run: TrainingRun) -> float:
    """What a run takes on an H200 whose pool is full: a captured step of the CNN .8 ms and 1.6 µs for each example in
    it (as most of ``frontier`` took, within a third), 3.6 µs for each view where there are several (the mean of nine
    runs; six shared the GPU by steps, so those of small batches took 5.6), and four times as much where the noise is
    kept in buffers, which no captured step does; a WideResNet 100 µs a view (a guess: one had not ended after 79).
    Linear heads over fixed features take less than is said here, the CNN over scattering from half of it to half as
    much again.
    """
    examples = sizes(TRAINING_EXAMPLES[run.task], run)[0]
    views = views_of(run.model)
    if run.model.partition("/")[0].endswith("wrn"):
        return 100e-6 * views * run.epochs * examples
    each = 1.6e-6 if views == 1 else 3.6e-6 * views
    seconds = 0.8e-3 * run.epochs * examples / run.batch_size + each * run.epochs * examples
    return seconds * (4.0 if run.method.startswith(("blt", "bandmf")) else 1.0)


def estimate(
    searches: Sequence[tuple[str, Search]], store: RunStore, say: Say = print, *, plans: PlanBook | None = None
) -> float:
    """Say about how many runs each search will still ask for, the seconds on an H200 until it ends, and how many of
    these runs have no plan in ``plans`` under which they may be trained.
    """
    pretended, total = Pretended(store), 0.0
    for name, search in searches:
        before = set(pretended.asked)
        stored(search, pretended)
        new = [run for digest, run in pretended.asked.items() if digest not in before]
        total += sum(map(pool_seconds, new))
        say(f"{total:6.0f} s  {len(new):3d} runs  {name}")
    if plans is not None:
        requests = [run.plan_request(sizes(TRAINING_EXAMPLES[run.task], run)[0]) for run in pretended.asked.values()]
        without = sum(request not in plans for request in requests)
        if without:
            say(f"{without} of these runs have no plan that covers floating point: `bulk plans` makes them first")
    return total


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
        alike = [each for kind, last in self._last.items() if kind[:2] == (run.task, run.model) for each in last]
        each = max(self._last.get((run.task, run.model, run.method), alike), default=0.0)
        return each * sizes(TRAINING_EXAMPLES[run.task], run)[0] * run.epochs


def _work(worker: Worker, tasks: Any, done: Any, until: float) -> None:
    """A worker process: trains what it is given until it is given None."""
    torch.set_num_threads(worker.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plans = PlanBook(worker.plans)
    if worker.weights is not None:
        register_weights(worker.weights)
    held: dict[str, Data] = {}
    while (run := tasks.get()) is not None:
        try:
            if run.task not in held:
                splits = unpacked(torch.load(worker.data[run.task], mmap=True, weights_only=True))
                held[run.task] = Data(run.task, splits, torch.device(worker.device))
            kept = None if worker.unfinished is None else worker.unfinished / run.digest
            result = outcome(run, held[run.task], plans, until=until, unfinished=kept)
        except TooLate:
            return
        except Exception as error:  # the parent is told, ends that search, and goes on with the others
            result = {"failed": f"{type(error).__name__}: {error}"}
        done.put((run.digest, result, machine()))
        framework.free(torch.device(worker.device))  # a run of large batches must not keep its memory from others


bulk = typer.Typer(no_args_is_help=True, help="Training experiments in bulk: many runs at once on one GPU.")
Names = Annotated[list[str], typer.Option("--experiment", help="Which experiment; may be given more than once.")]
Plans = Annotated[Path, typer.Option("--plans", help="File of plans; runs*.jsonl are looked for beside it.")]
Methods = Annotated[str | None, typer.Option("--methods", help="Comma-separated; all by default.")]
Epsilons = Annotated[str | None, typer.Option("--epsilons", help="Comma-separated; all by default.")]
Tasks = Annotated[str | None, typer.Option("--tasks", help="Comma-separated; all by default.")]
Epochs = Annotated[str | None, typer.Option("--epochs", help="Comma-separated; all by default.")]
Weights = Annotated[Path | None, typer.Option("--weights", help="Folder with a BERT, for fine-tuning.")]
Quick = Annotated[bool, flag("--quick", help="The experiments' quick versions.")]


@dataclass(frozen=True)
class Chosen:
    """The cells that the command line asks for."""

    experiments: list[str]
    methods: str | None
    epsilons: str | None
    tasks: str | None
    quick: bool
    epochs: str | None = None
    weights: Path | None = None

    def __post_init__(self) -> None:
        for name in self.experiments:
            if name not in SEARCHES:
                raise InvalidInput("experiment", name, f"it must be one of {', '.join(SEARCHES)}")

    def cells(self, name: str) -> list[dict[str, Any]]:
        """Those of one experiment, in their order."""

        def wanted(given: str | None, value: Any) -> bool:
            return given is None or value in [type(value)(text) for text in given.split(",")]

        return [
            cell
            for cell in framework.load(name).cells(framework.Settings(quick=self.quick, weights=self.weights))
            if wanted(self.methods, cell["method"])
            and wanted(self.epsilons, cell["epsilon"])
            and wanted(self.tasks, cell["task"])
            and wanted(self.epochs, cell["epochs"])
        ]


def stored_runs(plans: Path) -> list[Path]:
    """Files of runs that were brought together beside the plans."""
    return sorted(plans.parent.glob("runs*.jsonl"))


@bulk.command("plans")
def make_plans(
    experiment: Names,
    plans: Plans = FOLDER / "plans.jsonl",
    methods: Methods = None,
    epsilons: Epsilons = None,
    tasks: Tasks = None,
    weights: Weights = None,
    quick: Quick = False,
) -> None:
    """Make every plan that the searches may ask for."""
    chosen = Chosen(experiment, methods, epsilons, tasks, quick, weights=weights)
    cells = {name: chosen.cells(name) for name in experiment}
    book = PlanBook(plans, make=True)  # after the cells, some of which need plans for themselves
    for name in experiment:
        for cell in cells[name]:
            for request in plan_requests(cell):
                began, known = time.monotonic(), request in book
                try:
                    made = book.get(request)
                except Exception as error:  # one plan that cannot be made must not stop hours of others
                    print(f"FAILED {request}: {error}", flush=True)
                    continue
                if not known:
                    print(
                        f"{request['examples']} {cell['method']} {made.mechanism} ε={made.epsilon:g} "
                        f"σ={made.sigma:.5g} {made.certificate.method} {time.monotonic() - began:.1f} s",
                        flush=True,
                    )


@bulk.command("train")
def train_runs(
    experiment: Names,
    plans: Plans = FOLDER / "plans.jsonl",
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the data set's files.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for runs.jsonl and unfinished runs.")] = FOLDER,
    minutes: Annotated[float, typer.Option("--minutes", help="Stop in time.")] = 10.0,
    parallel: Annotated[int, typer.Option("--parallel", help="Worker processes.")] = 4,
    threads: Annotated[int, typer.Option("--threads", help="Threads of each.")] = 2,
    split: Annotated[str | None, typer.Option("--split", help="validation or test; both by default.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="CUDA where there is one.")] = None,
    methods: Methods = None,
    epsilons: Epsilons = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    weights: Weights = None,
    quick: Quick = False,
    dry_run: Annotated[
        bool, flag("--dry-run", help="Train nothing: say about how long it will take on an H200.")
    ] = False,
) -> None:
    """Train what the searches ask for, as far as the time allows."""
    until = time.monotonic() + 60 * minutes
    chosen = Chosen(experiment, methods, epsilons, tasks, quick, epochs, weights)
    if split not in (None, "validation", "test"):
        raise InvalidInput("split", split, "it must be validation or test")
    out.mkdir(parents=True, exist_ok=True)
    store = RunStore(out / "runs.jsonl", read=stored_runs(plans))
    print(f"{len(store)} runs known", flush=True)
    cells = [(name, cell) for name in experiment for cell in chosen.cells(name)]
    searches = [(f"{name}: {framework.load(name).title(cell)}", SEARCHES[name](cell)) for name, cell in cells]
    if dry_run:
        estimate(searches, store, plans=PlanBook(plans))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for task in sorted({cell["task"] for _, cell in cells}):
            files[task] = Path(folder) / f"{task}.pt"
            load = problem(task).load if weights is None else partial(reviews, register_weights(weights))
            torch.save(packed(load(data)), files[task])
        print(f"data ready, {until - time.monotonic():.0f} s left", flush=True)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        rows = solve(
            searches,
            store,
            Worker(files, plans, device, threads, weights, out / "unfinished"),
            parallel=parallel,
            until=until,
            allow=lambda run: split in (None, run.split),
            say=lambda text: print(text, flush=True),
        )
    print(f"{len(rows)} of {len(searches)} cells complete, {len(store)} runs known", flush=True)


@bulk.command("collect")
def collect(
    experiment: Names,
    plans: Plans = FOLDER / "plans.jsonl",
    out: Annotated[Path, typer.Option("--out", help="Each experiment goes to a folder in this.")] = Path("results"),
    weights: Weights = None,
    quick: Quick = False,
) -> None:
    """Write what the stored runs answer: CSV, JSON, plots and a page for each experiment."""
    Chosen(experiment, None, None, None, quick)
    store = RunStore(None, read=stored_runs(plans))
    if not len(store):
        raise InvalidInput("plans", str(plans), "there are no files runs*.jsonl with runs beside it")
    settings = framework.Settings(quick=quick, weights=weights)
    for name in experiment:
        known, folder = framework.load(name), out / name
        folder.mkdir(parents=True, exist_ok=True)
        answered = list(rows_from(known, SEARCHES[name], store, settings))
        cells = framework.stored(folder)  # those of an earlier search, whose runs no longer answer today's, stay
        for cell, row, runs in answered:
            newest = max(runs, key=lambda run: run["date"])
            record = {"key": known.key(cell), "cell": cell, "result": row, "seconds": row["training_seconds"]}
            record |= {"machine": newest["machine"], "date": newest["date"], "made_with": made_with(known.depends)}
            cells[record["key"]] = record
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in cells.values()]
        (folder / "cells.jsonl").write_text("".join(lines))
        print(f"{name}: {len(answered)} cells")
        if answered:
            framework.reproduce(known, folder, settings=settings, collect=True)
