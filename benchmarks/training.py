"""The training experiments in bulk: many searches at once, worker processes sharing one GPU, a limit in minutes.

``lambdacgd reproduce methods-cifar --data DIR`` trains run after run. This script trains the same runs several at a
time, stops in time, and goes on where it stopped. Three commands:

    python benchmarks/training.py plans   --experiment methods-cifar     # where the accountants are installed
    python benchmarks/training.py train   --experiment methods-cifar --data DIR --minutes 8 --parallel 8 --stage tune
    python benchmarks/training.py collect --experiment methods-cifar     # tables, plots and pages from the runs

On CUDA start NVIDIA's MPS first (``nvidia-cuda-mps-control -d``): without it processes take turns on the GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from reproduce import framework
from reproduce.plan_book import PlanBook
from reproduce.pool import Worker, solve
from reproduce.runs import RunStore
from reproduce.search import method_search, sweep_search
from reproduce.training import plan_requests, rows_from

FOLDER = Path("results/training")
SEARCHES = dict.fromkeys(("methods-cifar", "methods-imdb", "lstm-imdb", "bert-path"), method_search)
SWEEPS = ("lambda-sweep", "amplified-sweep", "epochs-sweep")
NAMES = [*SEARCHES, *SWEEPS]


def chosen_cells(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The experiment's cells that the command line asks for, in their order."""
    cells = framework.load(name).cells(framework.Settings(quick=options.quick))
    return [
        cell
        for cell in cells
        if (options.methods is None or cell["method"] in options.methods.split(","))
        and (options.epsilons is None or cell["epsilon"] in [float(e) for e in options.epsilons.split(",")])
        and (options.tasks is None or cell["task"] in options.tasks.split(","))
    ]


def make_plans(options: argparse.Namespace) -> None:
    book = PlanBook(options.plans, make=True)
    for name in options.experiment:
        for cell in chosen_cells(options, name):
            for request in plan_requests(cell):
                began, known = time.monotonic(), request in book
                try:
                    plan = book.get(request)
                except Exception as error:
                    print(f"FAILED {request}: {error}", flush=True)
                    continue
                if not known:
                    print(
                        f"{request['examples']} {cell['method']} {plan.mechanism} ε={plan.epsilon:g} "
                        f"σ={plan.sigma:.5g} {plan.certificate.method} {time.monotonic() - began:.1f} s",
                        flush=True,
                    )


def stored_runs(options: argparse.Namespace) -> list[Path]:
    """Files of runs that were brought together beside the plans."""
    return sorted(options.plans.parent.glob("runs*.jsonl"))


def train(options: argparse.Namespace) -> None:
    import torch

    from reproduce.problems import packed, problem

    until = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    store = RunStore(options.out / "runs.jsonl", read=stored_runs(options))
    print(f"{len(store)} runs known", flush=True)
    searches, tasks = [], set()
    for name in options.experiment:
        for cell in chosen_cells(options, name):
            label = f"{name}: {json.dumps(cell)}"
            searches.append((label, SEARCHES.get(name, sweep_search)(cell)))
            tasks.add(cell["task"])
    splits = {"tune": ("validation",), "test": ("test",), "all": ("validation", "test")}[options.stage]
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for task in sorted(tasks):
            files[task] = Path(folder) / f"{task}.pt"
            torch.save(packed(problem(task).load(options.data)), files[task])
        print(f"data ready, {until - time.monotonic():.0f} s left", flush=True)
        rows = solve(
            searches,
            store,
            Worker(files, options.plans, device, threads=options.threads),
            parallel=options.parallel,
            until=until,
            allow=lambda run: run.split in splits,
            say=lambda text: print(text, flush=True),
        )
    print(f"{len(rows)} of {len(searches)} cells complete, {len(store)} runs known", flush=True)


def collect(options: argparse.Namespace) -> None:
    """Write what the stored runs answer: results/NAME/ with CSV, JSON, plots and page."""
    store = RunStore(None, read=stored_runs(options))
    if not len(store):
        raise SystemExit(f"no runs in {options.plans.parent}/runs*.jsonl")
    for name in options.experiment:
        experiment = framework.load(name)
        folder = options.out / name
        settings = framework.Settings(quick=options.quick)
        folder.mkdir(parents=True, exist_ok=True)
        found = list(rows_from(experiment, SEARCHES.get(name, sweep_search), store, settings))
        with (folder / "cells.jsonl").open("w") as file:
            for cell, row, runs in found:
                newest = max(runs, key=lambda run: run["date"])
                record = {"key": experiment.key(cell), "cell": cell, "result": row, "seconds": row["training_seconds"]}
                record |= {"machine": newest["machine"], "date": newest["date"]}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{name}: {len(found)} cells")
        if found:
            framework.reproduce(experiment, folder, settings=settings, collect=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["plans", "train", "collect"])
    parser.add_argument("--experiment", nargs="+", choices=NAMES, default=["methods-cifar"])
    parser.add_argument("--plans", type=Path, default=FOLDER / "plans.jsonl")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="train: where runs.jsonl goes; collect: results")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stage", choices=["tune", "test", "all"], default="all")
    parser.add_argument("--methods", help="comma-separated; all by default")
    parser.add_argument("--epsilons", help="comma-separated; all by default")
    parser.add_argument("--tasks", help="comma-separated; all by default")
    parser.add_argument("--device")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.out is None:
        options.out = Path("results") if options.command == "collect" else FOLDER
    {"plans": make_plans, "train": train, "collect": collect}[options.command](options)


if __name__ == "__main__":
    main()
