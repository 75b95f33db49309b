"""The paper's RMSE table, recomputed cell by cell: every mechanism at ε = 8 without and 8 … 1/4 with amplification.

Every finished cell is a JSON file, so an interrupted run goes on where it stopped. The amplified σ comes from the
exact accountant for λCGD, from Poisson's own for DP-SGD, and from Monte Carlo estimates (with their standard error)
for the rest; each cell says which. An estimate is right for comparing mechanisms; a plan would certify it.
"""

from __future__ import annotations

import csv
import json
import os
import time
from pathlib import Path
from typing import Any

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.calibration import calibrate_noise
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.experiments.paper_rmse import COLUMNS, DELTA, HORIZON, ROWS, Column, Row, known_slip
from lambdacgd.mechanisms import Identity, LambdaCGD, Mechanism, error_norms
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson
from lambdacgd.version import __version__

_EXAMPLES, _BATCH_SIZE = 50_000, 128
_QUICK_ROWS = ("BandInvMF (p=2)", "BandInvMF (p=4)", "DP-λCGD (λ=0.9)", "BISR (p=4)", "BSR (p=4)", "DP-SGD")
_QUICK_COLUMNS = (Column(8.0, False), Column(8.0, True), Column(2.0, True))

Cell = dict[str, Any]


def run(out: Path, quick: bool = False) -> None:
    """Write ``rmse-table.csv``, ``.md`` and ``.png`` into ``out``; ``quick`` takes a few rows and fewer samples."""
    from rich.console import Console
    from rich.progress import Progress

    rows = [row for row in ROWS if not quick or row.title in _QUICK_ROWS]
    columns = [column for column in COLUMNS if not quick or column in _QUICK_COLUMNS]
    folder = out / ("cells-quick" if quick else "cells")
    folder.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, Column], Cell] = {}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("RMSE table", total=len(rows) * len(columns))
        for column in columns:
            for row in rows:
                bar.update(task, description=f"{row.title}, {column.title}")
                cells[row.title, column] = _stored(folder, row, column, quick)
                bar.advance(task)
    write_csv(out / "rmse-table.csv", rows, columns, cells)
    (out / "rmse-table.md").write_text(markdown(rows, columns, cells))
    plot(out / "rmse-table.png", rows, columns, cells)


def _stored(folder: Path, row: Row, column: Column, quick: bool) -> Cell:
    name = f"{row.title} {column.title}".replace(" ", "_").replace("(", "").replace(")", "")
    path = folder / f"{name}.json"
    if path.exists():
        try:
            found: Cell = json.loads(path.read_text())
            if found["version"] == __version__:
                return found
        except (ValueError, KeyError):
            pass  # cut off by an interruption: compute it again
    found = compute(row, column, quick=quick)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    os.replace(draft, path)
    return found


def compute(row: Row, column: Column, *, quick: bool = False) -> Cell:
    """One cell: our σ and RMSE beside the printed value."""
    started = time.monotonic()
    mechanism = row.mechanism.resolve(HORIZON)
    printed = row.values[COLUMNS.index(column)]
    cell: Cell = {"row": row.title, "column": column.title, "epsilon": column.epsilon, "delta": DELTA}
    cell |= {"amplified": column.amplified, "mechanism": mechanism.to_dict(), "paper": printed}
    cell |= {"known_slip": known_slip(row, column), "version": __version__}
    try:
        cell |= _sigma(mechanism, column, quick)
        cell["rmse"] = error_norms(mechanism, HORIZON.steps)[0] * cell["sigma"]
        cell["ratio"] = cell["rmse"] / printed
    except AccountingError as refusal:
        cell |= {"sigma": None, "rmse": None, "ratio": None, "method": "refused", "because": str(refusal)}
    return cell | {"seconds": round(time.monotonic() - started, 2)}


def _sigma(mechanism: Mechanism, column: Column, quick: bool) -> Cell:
    b, k = HORIZON.steps_per_epoch, HORIZON.epochs
    if not column.amplified:
        sampling: Cyclic | Poisson | BallsInBins = Cyclic(_EXAMPLES, b, k, _BATCH_SIZE)
    elif isinstance(mechanism, Identity):
        sampling = Poisson(_EXAMPLES, b, k)
    elif isinstance(mechanism, LambdaCGD):
        sampling = BallsInBins(_EXAMPLES, b, k)
    else:
        estimate = MonteCarlo(mechanism, HORIZON).estimate_sigma(
            column.epsilon, DELTA, relative_error=0.05 if quick else 0.03
        )
        relative = estimate.standard_error / estimate.sigma
        return {"sigma": estimate.sigma, "method": "monte-carlo estimate", "relative_standard_error": relative}
    found = calibrate_noise(mechanism, sampling, epsilon=column.epsilon, delta=DELTA)
    return {"sigma": found.sigma, "method": found.certificate.method, "relative_standard_error": 0.0}


def write_csv(path: Path, rows: list[Row], columns: list[Column], cells: dict[tuple[str, Column], Cell]) -> None:
    names = ["row", "epsilon", "amplified", "sigma", "rmse", "paper", "ratio", "method", "relative_standard_error"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, "known_slip"], extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            for column in columns:
                writer.writerow(cells[row.title, column])


def markdown(rows: list[Row], columns: list[Column], cells: dict[tuple[str, Column], Cell]) -> str:
    """Ours / the paper's (ratio) in each cell; † marks a known slip of the paper, — what we refuse to account for."""
    lines = ["| method | " + " | ".join(column.title for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        texts = []
        for column in columns:
            cell = cells[row.title, column]
            mark = "†" if cell["known_slip"] else ""
            ours = "—" if cell["rmse"] is None else f"{cell['rmse']:.2f}"
            ratio = "" if cell["ratio"] is None else f" ({cell['ratio']:.3f})"
            texts.append(f"{ours} / {cell['paper']:.2f}{mark}{ratio}")
        lines.append(f"| {row.title} | " + " | ".join(texts) + " |")
    notes = {cell["known_slip"] for cell in cells.values() if cell["known_slip"]}
    refused = {(cell["row"], cell["because"]) for cell in cells.values() if cell["method"] == "refused"}
    lines += ["", "Ours / the paper's (ratio). δ = 1e-5, b = 390, k = 10."]
    lines += [f"† A slip in the paper's table: {note}." for note in sorted(notes)]
    lines += [f"— {title}: {because}." for title, because in sorted(refused)]
    return "\n".join(lines) + "\n"


def plot(path: Path, rows: list[Row], columns: list[Column], cells: dict[tuple[str, Column], Cell]) -> None:
    """One panel a family: our values as lines, the paper's as circles, over the amplified ε."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(row.family for row in rows))
    amplified = [column for column in columns if column.amplified]
    wide = min(4, len(families))
    tall = -(-len(families) // wide)
    figure = Figure(figsize=(4 * wide, 3.6 * tall), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(tall, wide, sharey=True, squeeze=False).reshape(-1)
    for unused in panels[len(families) :]:
        unused.set_axis_off()
    for axes, family in zip(panels, families, strict=False):
        for row in (row for row in rows if row.family == family):
            points = [(column.epsilon, cells[row.title, column]) for column in amplified]
            ours = [(epsilon, cell["rmse"]) for epsilon, cell in points if cell["rmse"] is not None]
            (line,) = axes.plot([e for e, _ in ours], [r for _, r in ours], label=row.title)
            printed = [cell["paper"] for _, cell in points]
            axes.plot([e for e, _ in points], printed, "o", mfc="none", color=line.get_color())
        axes.set(xscale="log", yscale="log", xlabel="ε", title=family)
        axes.set_xticks([column.epsilon for column in amplified], [f"{column.epsilon:g}" for column in amplified])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.supylabel("RMSE (lines: ours, circles: the paper's)")
    figure.savefig(path, dpi=130)
