"""``runtime-cifar`` and ``runtime-imdb``: what an epoch of private training takes, by how the noise is made.

A cell is a model, measured with all variants taking turns, or its peak memory, measured for each variant alone
(``runtime_measure``). Weights and data are random: time does not depend on them. Reading data is left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from reproduce.framework import Cell, Experiment, Row, Settings
from reproduce.paper_runtime import BANDS, DP_SGD, TABLES, VARIANTS, Model, Table
from reproduce.show import panels, table

OPACUS = "Opacus"
_QUICK = ("cnn", "bert-tiny")


def cells(paper: Table, settings: Settings) -> list[Cell]:
    """Times, one a model, then memories. Quick: the smallest, in tiny batches, for a look at a CPU."""
    device = settings.torch_device.split(":")[0]
    common: Cell = {"table": paper.name, "device": device, "precision": "tf32", "bands": list(BANDS)}
    if settings.quick:
        common |= {"batch": 16, "physical": 4, "rounds": 2, "steps": 2, "seconds": 20.0}
        return [common | {"model": model.case} for model in paper.models if model.case in _QUICK]
    common |= {"batch": paper.batch, "rounds": 10, "steps": 6, "seconds": 15.0}
    memory: Cell = {"what": "memory", "table": paper.name, "device": device, "precision": "tf32"}
    kinds = (common, memory) if device == "cuda" else (common,)
    return [kind | {"model": model.case, "physical": model.physical} for kind in kinds for model in paper.models]


def compute(paper: Table, cell: Cell, settings: Settings) -> Row:
    """Measure one model; whatever fails is an error of that model alone."""
    import torch

    from reproduce.runtime_measure import measure_memory, measure_model

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        if "what" in cell:
            return measure_memory(cell["model"], physical=cell["physical"], device=settings.torch_device)
        return measure_model(
            cell["model"], batch=cell["batch"], physical=cell["physical"], bands=cell["bands"],
            steps_per_epoch=paper.examples // cell["batch"], device=settings.torch_device, rounds=cell["rounds"],
            steps=cell["steps"], seconds=cell["seconds"],
        )  # fmt: skip
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def flat(paper: Table, rows: list[Row]) -> list[Row]:
    """A line a model and variant, the paper's value with it."""
    lines = []
    for row in timed(rows):
        model, peaks = _model(paper, row), _peaks(rows, row["model"])
        for title, found in row.get("variants", {"": row}).items():
            line = {"model": model.title, "variant": title, "parameters": row.get("parameters")} | found
            line |= {"peak_mib": peaks[title]} if title in peaks else {}
            printed, base = model.value(title), model.value(DP_SGD)
            if printed is not None and base is not None:
                line |= {"paper_s": printed, "paper_over_dp_sgd": printed / base}
            lines.append(line | {"physical_used": found.get("physical_used", row.get("physical_used"))})
    return lines


def _model(paper: Table, row: Row) -> Model:
    return next(model for model in paper.models if model.case == row["model"])


def timed(rows: list[Row]) -> list[Row]:
    """The rows of times; the others are of memory."""
    return [row for row in rows if "what" not in row]


def _peaks(rows: list[Row], model: str) -> dict[str, float]:
    return next((row["peaks_mib"] for row in rows if row["model"] == model and "peaks_mib" in row), {})


def page(paper: Table, everything: list[Row]) -> str:
    rows = timed(everything)
    if not rows:
        return "No model has been timed yet."
    parts = [
        f"Seconds an epoch ({rows[0]['batch']} examples a logical batch, {_steps(paper, rows)} steps), ours and "
        f"beneath it the paper's, measured on an A100 or H100 with logical batches of {paper.batch}.",
        table(["model", *VARIANTS, OPACUS], [line for row in rows for line in _pair(paper, row)]),
        "Over our own DP-SGD of the same run (the paper's over its own), and peak device memory:",
        table(
            ["model", *VARIANTS[1:], "memory, DP-SGD", "memory, λCGD", "host memory, 16 in a buffer"],
            [_ratios(paper, row, _peaks(everything, row["model"])) for row in rows],
        ),
    ]
    return "\n\n".join([*parts, _verdict(rows, everything), _HOW, _WHY])


_HOW = (
    "How it was measured: an epoch is extrapolated from timed steps. The variants take turns on one model, a few steps "
    "each, round after round; medians count. Forward and backward passes are the same code for all of them, so their "
    "times are pooled, and only noise and optimizer differ; `own_epoch_s` and `own_over_dp_sgd` in the CSV use each "
    "variant's own passes, with ± over rounds. Weights and inputs are random, reading data is left out, matrix "
    "products are in TF32. Two bands are λCGD, more are BISR (in the paper BandInvMF, the same work). The peer “CPU "
    "buffer” is our own `BufferedNoise` with pinned host memory. Opacus (hooks, physical batches halved until they "
    "fit) was measured alone, after ours; a ViT's class token and positions are frozen for it. Peak memory was "
    "measured apart, with a fresh model for each variant."
)
_WHY = (
    "Why our seconds and the paper's differ: another GPU; our clipping, which does not store per-example gradients; no "
    "data loading; and sequence lengths, which the paper does not give (ours: 256 tokens). The paper's DP-SGD column "
    "is Opacus."
)


def _steps(paper: Table, rows: list[Row]) -> int:
    return paper.examples // int(rows[0]["batch"])


def _seconds(found: Row | None) -> str | None:
    if found is None or "epoch_s" not in found:
        return None
    return f"{found['epoch_s']:.3g}" if found["epoch_s"] < 100 else f"{found['epoch_s']:.0f}"


def _pair(paper: Table, row: Row) -> list[list[Any]]:
    model = _model(paper, row)
    if "error" in row:
        return [[model.title, row["error"]]]
    found = row["variants"]
    ours = [model.title, *(_seconds(found.get(name)) for name in (*VARIANTS, OPACUS))]
    return [ours, ["the paper", *(model.text(name) for name in VARIANTS), ""]]


def _ratios(paper: Table, row: Row, peaks: dict[str, float]) -> list[Any]:
    model = _model(paper, row)
    if "error" in row:
        return [model.title]
    found = row["variants"]
    base = model.value(DP_SGD) or 1.0
    cells: list[Any] = [model.title]
    for name in VARIANTS[1:]:
        ours = found.get(name, {}).get("over_dp_sgd")
        cells.append(f"{ours:.3f} ({(model.value(name) or 0) / base:.3f})" if ours else None)
    for name in (DP_SGD, "regenerated, 2 bands"):
        peak = peaks.get(name)
        cells.append(f"{peak:.0f} MiB" if peak else None)
    return [*cells, f"{found['CPU buffer, 16 bands'].get('host_buffer_mib', 0) / 1024:.1f} GiB"]


def _verdict(rows: list[Row], everything: list[Row]) -> str:
    """The largest overhead of λCGD, measured."""
    known = [row["variants"] for row in rows if "variants" in row]
    ours = [found["regenerated, 2 bands"]["over_dp_sgd"] for found in known if "over_dp_sgd" in found.get(DP_SGD, {})]
    if not ours:
        return ""
    text = f"Regenerated λCGD takes {min(ours):.4f} to {max(ours):.4f} of DP-SGD's time an epoch"
    own = [found["regenerated, 2 bands"].get("own_over_dp_sgd") for found in known]
    apart = [value for value in own if value is not None]
    text += f" ({min(apart):.2f} to {max(apart):.2f} with passes of its own: a noisy host)." if apart else "."
    peaks = [row["peaks_mib"] for row in everything if "peaks_mib" in row]
    more = [found["regenerated, 2 bands"] - found[DP_SGD] for found in peaks]
    return text + (f" Its peak memory is {min(more):+.2f} to {max(more):+.2f} MiB against DP-SGD's." if more else "")


def plot(paper: Table, rows: list[Row]) -> Any:
    """Time over DP-SGD's: bars ours, circles the paper's."""
    shown = [row for row in timed(rows) if "variants" in row]
    figure, (axes,) = panels(1, size=(2.2 + 1.7 * len(shown), 3.8))
    shades = dict(zip(VARIANTS[1:], ("#9ecae1", "#4292c6", "#084594", "#fdae6b", "#e6550d", "#8c2d04"), strict=True))
    for i, (name, color) in enumerate(shades.items()):
        at = [j + (i - 2.5) * 0.14 for j in range(len(shown))]
        ours = [row["variants"].get(name, {}).get("over_dp_sgd", float("nan")) for row in shown]
        axes.bar(at, [value - 1 for value in ours], 0.13, bottom=1, color=color, label=name)
        printed = [(_model(paper, row).value(name) or 0) / (_model(paper, row).value(DP_SGD) or 1) for row in shown]
        axes.plot(at, printed, "o", mfc="none", color="black", ms=4, label="the paper's" if i == 5 else None)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(shown)), [_model(paper, row).title for row in shown])
    axes.set(ylabel="time an epoch / DP-SGD's", title=f"{paper.what}: what the noise costs")
    axes.legend(fontsize=7)
    return figure


def _experiment(paper: Table) -> Experiment:
    return Experiment(
        name=f"runtime-{paper.name}",
        what=f"the paper's runtime table for {paper.what}: seconds an epoch and memory, by how the noise is made",
        cells=partial(cells, paper),
        compute=partial(compute, paper),
        columns=(
            "model", "variant", "parameters", "physical_used", "epoch_s", "own_epoch_s", "own_epoch_s_sd",
            "over_dp_sgd", "own_over_dp_sgd", "first_ms", "later_ms", "act_ms", "last_ms", "peak_mib",
            "host_buffer_mib", "rounds", "steps", "paper_s", "paper_over_dp_sgd", "error",
        ),
        page=partial(page, paper),
        plot=partial(plot, paper),
        title=lambda cell: f"{cell['model']} {cell.get('what', '')}".strip(),
        table=partial(flat, paper),
    )  # fmt: skip


CIFAR, IMDB = (_experiment(TABLES[name]) for name in ("cifar", "imdb"))
