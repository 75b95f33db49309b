"""How an experiment is run: cells computed one by one and kept, then CSV, JSON, plots and a page written from them.

An ``Experiment`` is data. ``cells(settings)`` lists configurations, plain JSON dictionaries; ``compute(cell,
settings)`` answers one with another dictionary; ``page(rows)`` and ``plot(rows)`` show the merged dictionaries. A cell
is kept in ``cells.jsonl`` under the digest of its configuration, the experiment's revision and the package's version,
so an interrupted run goes on where it stopped, and files ``cells-….jsonl`` brought from another machine count too.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lambdacgd.errors import InvalidInput
from lambdacgd.version import __version__
from reproduce import EXPERIMENTS

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
Cell = dict[str, Any]  # a configuration
Row = dict[str, Any]  # a configuration with its result, ``seconds`` included
MORE = "<!-- more -->"


@dataclass(frozen=True)
class Settings:
    """What the command line says to every experiment."""

    quick: bool = False
    data: Path | None = None
    weights: Path | None = None  # pretrained weights, where the experiment fine-tunes them
    device: str | None = None  # None: CUDA where there is one
    folder: Path | None = None  # for what an experiment keeps to go on within a cell; ``reproduce`` sets it

    @property
    def torch_device(self) -> str:
        """The device by name, chosen now."""
        import torch

        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


DEFAULT = Settings()


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Everything that changes the result of a cell belongs into the cell; after any other change of how it is computed,
    raise ``revision``. ``compute`` may return ``{"error": "…"}``, which is shown, and computed again next time.
    ``columns`` are those of the CSV, in order. ``depends`` names the probes of ``made_with`` that decide its values.
    What ``page`` writes after ``MORE`` is for the folder of results, not for the docs.
    """

    name: str
    what: str
    cells: Callable[[Settings], Sequence[Cell]]
    compute: Callable[[Cell, Settings], Row]
    columns: tuple[str, ...]
    page: Callable[[list[Row]], str]
    plot: Callable[[list[Row]], Any] | None = None  # a matplotlib Figure
    title: Callable[[Cell], str] = lambda cell: ", ".join(f"{name}={value}" for name, value in cell.items())
    revision: int = 1
    table: Callable[[list[Row]], list[Row]] | None = None  # rows of the CSV, where they are not the cells
    depends: tuple[str, ...] = ()

    def key(self, cell: Cell) -> str:
        """What a finished cell is found by."""
        named = {"experiment": self.name, "revision": self.revision, "version": __version__, "cell": cell}
        text = json.dumps(named, sort_keys=True, ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def load(name: str | None) -> Experiment:
    """The experiment of that name.

    Raises:
        InvalidInput: There is none.
    """
    if name not in EXPERIMENTS:
        raise InvalidInput("name", name, f"it must be one of {', '.join(EXPERIMENTS)} (see python -m reproduce --list)")
    module, attribute = EXPERIMENTS[name][0].split(":")
    experiment: Experiment = getattr(importlib.import_module(module), attribute)
    return experiment


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    settings: Settings = DEFAULT,
    stop_after: float | None = None,
    collect: bool = False,
) -> list[Row]:
    """Compute the cells that are missing in ``folder``, then write CSV, JSON, plots and a page there.

    Args:
        experiment: What to compute.
        folder: Where cells are kept and results are written; it is made if it is not there.
        settings: What the command line says.
        stop_after: Begin no new cell after this many seconds. The page then says how many cells are missing.
        collect: Begin no cell at all.

    Returns:
        The rows of all finished cells, in the order of the experiment's cells.

    Raises:
        InvalidInput: ``collect`` was asked for, and no cell of these settings is finished.
    """
    cells = list(experiment.cells(settings))
    folder.mkdir(parents=True, exist_ok=True)
    known = stored(folder)
    if not collect:
        _compute(experiment, cells, folder, known, replace(settings, folder=folder), stop_after)
    finished = [known[key] for key in map(experiment.key, cells) if key in known]
    if not finished and not collect:
        return []  # no time for a single one
    if not finished:
        raise InvalidInput(
            "out",
            str(folder),
            f"it holds no finished cell of {experiment.name} with these settings; leave out --collect, or give --quick "
            "and --device as they were",
        )
    _write(experiment, folder, finished, quick=settings.quick, missing=len(cells) - len(finished))
    return [_row(record) for record in finished]


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """Finished cells by key; a line cut off by an interruption is passed over."""
    finished: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("cells*.jsonl")):
        for record in records(path):
            try:
                if record["key"] not in finished or "error" not in record["result"]:  # the last one counts
                    finished[record["key"]] = record
            except (KeyError, TypeError):
                continue
    return finished


def _compute(
    experiment: Experiment,
    cells: list[Cell],
    folder: Path,
    known: dict[str, dict[str, Any]],
    settings: Settings,
    stop_after: float | None,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from reproduce.made_with import changes, made_with

    def done(old: dict[str, Any] | None) -> bool:
        return old is not None and "error" not in old["result"] and not changes(old.get("made_with", {}))

    began = time.monotonic()
    todo = [cell for cell in cells if not done(known.get(experiment.key(cell)))]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(experiment.name, total=len(cells), completed=len(cells) - len(todo))
        for cell in todo:
            if stop_after is not None and time.monotonic() - began >= stop_after:
                break
            bar.update(task, description=f"{experiment.name}: {experiment.title(cell)}")
            started = time.monotonic()
            result = experiment.compute(cell, settings)
            key = experiment.key(cell)
            record: dict[str, Any] = {"key": key, "cell": cell, "result": result}
            record |= {"seconds": round(time.monotonic() - started, 2), "machine": machine(), "date": _now()}
            record["made_with"] = made_with(experiment.depends)
            append(folder / "cells.jsonl", record)
            known[key] = record
            bar.advance(task)
            if not bar.console.is_terminal:  # a log wants lines, not a bar
                print(f"{experiment.title(cell)}: {record['seconds']} s", flush=True, file=sys.stderr)


def _row(record: dict[str, Any]) -> Row:
    return record["cell"] | record["result"] | {"seconds": record["seconds"]}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())


def _write(experiment: Experiment, folder: Path, finished: list[dict[str, Any]], *, quick: bool, missing: int) -> None:
    rows = [_row(record) for record in finished]
    name = experiment.name
    made: dict[str, dict[str, Any]] = {}  # machines, each once, with the dates of their cells
    for record in finished:
        at = made.setdefault(json.dumps(record["machine"], sort_keys=True), record["machine"] | {"dates": []})
        at["dates"] = [min([record["date"], *at["dates"]]), max([record["date"], *at["dates"]])]
    head = {"experiment": name, "what": experiment.what, "quick": quick, "missing_cells": missing}
    head |= {"version": __version__, "revision": experiment.revision, "machines": list(made.values())}
    if all("made_with" in record for record in finished):
        head["made_with"] = oldest([record["made_with"] for record in finished])
    text = json.dumps(head | {"rows": rows}, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n")
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(experiment.columns), extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(experiment.table(rows) if experiment.table else rows)
    drawn = experiment.plot is not None and _draw(experiment.plot, folder / name, rows)
    (folder / f"{name}.md").write_text(_page(experiment, rows, list(made.values()), quick, missing, drawn))


def oldest(kept: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """One answer for each probe: of cells that were made by different code, the first, which is not today's."""
    from reproduce.made_with import changes

    answers = {probe: [each[probe] for each in kept if probe in each] for each in kept for probe in each}
    return {
        probe: next((answer for answer in given if changes({probe: answer})), given[-1])
        for probe, given in answers.items()
    }


def _draw(plot: Callable[[list[Row]], Any], stem: Path, rows: list[Row]) -> bool:
    try:
        import matplotlib
    except ImportError:  # a bare GPU machine: bring the cells home and --collect them there
        return False
    figure = plot(rows)
    with matplotlib.rc_context({"svg.hashsalt": stem.name}):  # the same rows make the same file
        figure.savefig(stem.with_suffix(".png"), dpi=130)
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    return True


def _page(
    experiment: Experiment, rows: list[Row], machines: list[dict[str, Any]], quick: bool, missing: int, drawn: bool
) -> str:
    name = experiment.name
    lines = [f"# {name}: {experiment.what}", ""]
    if quick:
        lines += [f"A quick version; `python -m reproduce {name}` computes the whole.", ""]
    if missing:
        lines += [f"{missing} of {missing + len(rows)} cells are missing; the same command goes on with them.", ""]
    shown, more, rest = experiment.page(rows).strip().partition(MORE)
    lines += [shown.strip(), ""]
    if drawn:
        lines += [f"![{experiment.what}]({name}.svg)", ""]
    lines += [more, "", rest.strip(), ""] if more else []
    command = f"python -m reproduce {name}" + (" --quick" if quick else "")
    dates = [date[:10] for machine in machines for date in machine["dates"]]
    devices = " and ".join(dict.fromkeys(machine["device"] for machine in machines))
    days = " to ".join(dict.fromkeys((min(dates), max(dates))))
    lines += [f"Written by `{command}`, revision {experiment.revision}, computed on {devices}, {days}; versions are in "
              f"`results/{name}/{name}.json`."]  # fmt: skip
    return "\n".join(lines) + "\n"


def check_device(name: str) -> torch.device:
    """The torch device of that name.

    Raises:
        InvalidInput: There is no such device here.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInput("device", name, "it must be a torch device such as cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device", name, "this machine has no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput("device", name, f"this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0 on")
    return device


def usable_device(name: str | None) -> str:
    """The device called so, if it is here; CUDA where there is one if none is named."""
    import torch

    return str(check_device(name)) if name else ("cuda" if torch.cuda.is_available() else "cpu")


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what no tensor uses, pinned host memory included."""
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()


PACKAGES = ("lambdacgd", "torch", "numpy", "scipy", "dp-accounting", "triton", "transformers", "opacus", "cryptography")


@cache
def machine() -> dict[str, Any]:
    """Device, system and versions; a CUDA device is named only where torch is in use, since asking takes seconds."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions["lambdacgd"] = __version__
    return {"device": _device_name(), "cores": os.cpu_count(), "system": platform.platform(), "versions": versions}


def measured_on(*probes: str) -> dict[str, Any]:
    """``machine()`` with torch's threads, load, the date, and what ``probes`` of ``made_with`` say.

    Without probes it is the format of the noise, which times of a step depend on.
    """
    import torch

    from reproduce.made_with import made_with

    now = {"threads": torch.get_num_threads(), "load": list(os.getloadavg()), "date": _now()}
    return machine() | now | {"made_with": made_with(probes or ("format of the noise",))}


def _device_name() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def records(path: Path) -> Iterator[Any]:
    """What the lines of a file of JSON lines hold; a line that an interruption cut off is passed over."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            yield json.loads(line.decode())  # line by line: a cut may fall within a letter
        except ValueError:
            continue


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a file of JSON lines, on disk before this returns; nothing is glued to a line that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None becomes a dash."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join("—" if value is None else str(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def value_range(values: Iterable[float], form: str) -> str:
    """The least and the most, or the one where they read the same."""
    texts = [format(value, form) for value in sorted(values)]
    low, high = texts[0], texts[-1]
    return low if low == high else f"{low} to {high}"


def panels(wide: int, tall: int = 1, *, size: tuple[float, float] = (4.0, 3.4), **how: Any) -> tuple[Any, list[Any]]:
    """A figure and its axes in reading order; ``how`` goes to ``Figure.subplots``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * wide, size[1] * tall), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(tall, wide, squeeze=False, **how).reshape(-1))
