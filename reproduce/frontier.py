"""Accuracy against compute: ``frontier``, each method at its own best batch size, rate, schedule and clipping norm.

A cell is a method at an ε for a number of epochs k. At k = 10 its search climbs from a middle batch size: rates a
factor of two apart, then the neighbouring batch sizes, then the other schedule and two other clipping norms, all by
the same rule for every method (``search.climb``). Other k begin where k = 10 ended. Five new seeds then see the test
set.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from reproduce.framework import MORE, Cell, Experiment, Row, Settings, panels, table
from reproduce.runs import PlanBook, Result, Schedule, TrainingRun, method
from reproduce.search import (
    CLIP,
    HIGHEST,
    NEAR,
    REACH,
    Point,
    Search,
    at_edge,
    centre,
    climb,
    climbed,
    possibly_short,
    run_at,
)  # fmt: skip
from reproduce.trainer import compute_with

PLANS = Path(__file__).resolve().parents[1] / "results" / "training" / "frontier-plans.jsonl"
CLIPS = (CLIP, 0.1, 1.0)
DP_SGD, OURS, PLAIN, PAPER, BISR, BANDMF = (
    "dp-sgd", "lambda-cgd-fresh-normalized", "lambda-cgd-fresh", "lambda-cgd", "bisr-16", "bandmf",
)  # fmt: skip
BATCH_SIZES = {DP_SGD: (256, 512, 1024), OURS: (64, 128, 256), PLAIN: (64, 128, 256)}
OTHER_BATCH_SIZES = (128, 256, 512)
FIRST_EPOCHS = 10  # the k that the searches of others begin from
FULL = ("rate", "batch", "rate", "variants")  # moves of a search at k = 10
SHORT = ("further",)  # and of one that begins where that ended
# (methods, ε, k) in the order of worth: a pool trains them in this order.
ORDER: tuple[tuple[tuple[str, ...], float, int], ...] = (
    *(((OURS, DP_SGD), epsilon, 10) for epsilon in (8.0, 2.0, 1.0)),
    *(((OURS, DP_SGD), epsilon, 40) for epsilon in (8.0, 2.0)),
    ((PAPER, BISR, PLAIN), 8.0, 10),
    ((PAPER, BISR), 2.0, 10),
    ((PAPER,), 1.0, 10),
    *(((OURS, DP_SGD), epsilon, 20) for epsilon in (8.0, 2.0)),
    ((BANDMF,), 8.0, 10),
    *(((OURS, DP_SGD), epsilon, 5) for epsilon in (8.0, 2.0)),
    ((PLAIN, BANDMF), 2.0, 10),
    ((OURS, DP_SGD), 1.0, 40),
    ((DP_SGD,), 8.0, 80),
    ((OURS, DP_SGD), 1.0, 5),
    ((OURS, DP_SGD), 1.0, 20),
    ((BANDMF, BISR, PLAIN), 1.0, 10),
    ((OURS,), 8.0, 80),
)
# Searches that ended at the smallest or largest B of their grid, and the next one, which they try last.
NEXT = {
    (DP_SGD, 2.0, 10): 128, (DP_SGD, 1.0, 10): 128, (BISR, 2.0, 10): 64, (PAPER, 2.0, 10): 1024, (OURS, 8.0, 20): 512,
    (OURS, 1.0, 20): 512, (DP_SGD, 1.0, 40): 128, (DP_SGD, 8.0, 80): 2048,
}  # fmt: skip
COLUMNS = (
    "method", "epsilon", "epochs", "test", "standard_error", "batch_size", "learning_rate", "max_grad_norm",
    "schedule", "weights", "lambda", "sigma", "rmse", "validation", "gpu_seconds",
)  # fmt: skip


def frontier_cells(settings: Settings) -> list[Cell]:
    """In the order of worth."""
    common: Cell = {"task": "cifar10", "model": "cnn", "max_grad_norm": CLIPS[0], "splits": ["validation", "test"]}
    if settings.quick:
        small = common | {"examples": 320, "seeds": 2}
        return [_cell(small, name, 8.0, epochs, (32, 64)) for name, epochs in ((OURS, 1), (DP_SGD, 1), (OURS, 2))]
    return [
        _with_next(_cell(common | {"seeds": 5}, name, epsilon, epochs, BATCH_SIZES.get(name, OTHER_BATCH_SIZES)))
        for names, epsilon, epochs in ORDER
        for name in names
    ]


def _cell(common: Cell, name: str, epsilon: float, epochs: int, batch_sizes: Sequence[int]) -> Cell:
    first = 1 if "examples" in common else FIRST_EPOCHS
    cell = {"method": name, "epsilon": epsilon, "epochs": epochs} | common
    cell |= {"batch_size": batch_sizes[len(batch_sizes) // 2], "lam": "auto" if method(name).lam else None}
    plans = _plans("examples" in common)
    cell |= {"rates": {str(size): centre(cell, Point(size, epochs), plans) for size in batch_sizes}}
    return cell if epochs == first else cell | {"after": _cell(common, name, epsilon, first, batch_sizes)}


def _with_next(cell: Cell) -> Cell:
    size = NEXT.get((cell["method"], cell["epsilon"], cell["epochs"]))
    if size is None:
        return cell
    rate = centre(cell, Point(size, cell["epochs"]), _plans(quick=False))
    return cell | {"rates": cell["rates"] | {str(size): rate}, "next": size}


@cache
def _plans(quick: bool) -> PlanBook:
    return PlanBook(None if quick else PLANS, make=True)


def climb_cell(cell: Cell, *more: str) -> Generator[list[TrainingRun], list[Result], dict[str, Any]]:
    """Search on the validation split: at k = 10 in full, at another k from where that ended; then ``more`` moves."""
    grid = [size for size in map(int, cell["rates"]) if size != cell.get("next")]
    top = Point(cell["batch_size"], cell["epochs"])
    moves: tuple[str, ...] = FULL
    if "after" in cell:
        ended: Point = (yield from climb_cell(cell["after"]))["point"]
        top, moves = replace(ended, epochs=cell["epochs"]), SHORT

    def moved(move: str, top: Point, tried: Sequence[Point]) -> list[Point]:
        if move == "next":
            return [replace(top, batch_size=cell["next"])]
        place = grid.index(top.batch_size)
        if move == "rate":  # outwards, or to both sides where this B was tried at one rate only
            return [replace(top, factor=top.factor * near) for near in NEAR]
        if move == "batch":
            return [replace(top, batch_size=size) for size in grid[max(0, place - 1) : place + 2]]
        if move == "further":  # both at once: the runs of many epochs are few rounds then
            larger = [replace(top, batch_size=size) for size in grid[place + 1 : place + 2]]
            return moved("rate", top, tried) + larger
        other: Schedule = "constant" if top.schedule == "linear" else "linear"
        return [replace(top, schedule=other), *(replace(top, clip=clip) for clip in CLIPS)]

    first = [top, *(replace(top, factor=top.factor * near) for near in NEAR)]
    rates = cell["rates"]
    return (yield from climb(first, (*moves, *more), moved, lambda p: run_at(cell, p, rates[str(p.batch_size)])))


def frontier_search(cell: Cell) -> Search:
    """Climb on the validation split, then train on everything with ``cell["seeds"]`` seeds, and test."""
    tuned = yield from climb_cell(cell, *(("next",) if "next" in cell else ()))
    row, _ = yield from climbed(cell, tuned)
    return row


def welch(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The mean of ``a`` less that of ``b``, and its interval for unequal variances; at least two values each."""
    from scipy.stats import t

    parts = [statistics.variance(x) / len(x) for x in (a, b)]
    difference, variance = statistics.mean(a) - statistics.mean(b), sum(parts)
    if variance == 0:
        return difference, difference, difference
    freedom = variance**2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    reach = float(t.ppf((1 + level) / 2, freedom)) * math.sqrt(variance)
    return difference, difference - reach, difference + reach


def epochs_for(accuracy: float, rows: Sequence[Row]) -> float | None:
    """After how many epochs ``rows``, of one method at one ε, reach an accuracy: straight lines over log k between
    what was measured, and None outside it.
    """
    points = sorted((row["epochs"], row["test"]) for row in rows)
    for (k, low), (later, high) in itertools.pairwise(points):
        if low <= accuracy <= high and high > low:
            return float(k * (later / k) ** ((accuracy - low) / (high - low)))
    return None


def _named(name: str) -> str:
    return method(name).title + (", as in the paper" if name == PAPER else "")


def _order(rows: Sequence[Row]) -> list[str]:
    return [name for name in (OURS, DP_SGD, PLAIN, BANDMF, BISR, PAPER) if any(r["method"] == name for r in rows)]


def _epsilons(rows: Sequence[Row]) -> list[float]:
    return sorted({row["epsilon"] for row in rows}, reverse=True)


def accuracies(rows: list[Row]) -> str:
    lines = []
    for e in _epsilons(rows):
        for name in _order(rows):
            mine = {row["epochs"]: row for row in rows if (row["method"], row["epsilon"]) == (name, e)}
            if mine:
                texts = [
                    f"{100 * mine[k]['test']:.1f} ± {100 * (mine[k]['standard_error'] or 0):.1f} "
                    f"(B = {mine[k]['batch_size']})"
                    if k in mine
                    else None
                    for k in sorted({row["epochs"] for row in rows})
                ]
                lines.append([f"{e:g}", _named(name), *texts])
    return table(["ε", "method", *(f"k = {k}" for k in sorted({row["epochs"] for row in rows}))], lines)


def comparisons(rows: list[Row]) -> str:
    """Ours less DP-SGD's at equal epochs and at a quarter of them, and less the others'; Welch intervals."""
    by = {(row["method"], row["epsilon"], row["epochs"]): row for row in rows}
    lines = []
    for e in _epsilons(rows):
        for (name, epsilon, k), other in sorted(by.items(), key=lambda item: (item[0][0] != DP_SGD, item[0][2])):
            for ours in dict.fromkeys((k, k // 4)):
                mine = by.get((OURS, epsilon, ours))
                if (
                    epsilon == e
                    and name != OURS
                    and mine is not None
                    and min(map(len, (mine["scores"], other["scores"]))) > 1
                ):
                    middle, low, high = (100 * value for value in welch(mine["scores"], other["scores"]))
                    text = [f"{e:g}", f"{ours}", f"{_named(name)}, {k}", f"{middle:+.1f}", f"{low:+.1f} to {high:+.1f}"]
                    lines.append(text)
    header = ["ε", "epochs of normalised DP-λCGD, fresh bins", "compared with, its epochs", "points", "95% interval"]
    return "" if not lines else f"Differences of test accuracy:\n\n{table(header, lines)}"


def _epoch_ratios(rows: list[Row]) -> str:
    lines = []
    for e in _epsilons(rows):
        theirs = [row for row in rows if (row["method"], row["epsilon"]) == (DP_SGD, e)]
        for row in sorted((r for r in rows if (r["method"], r["epsilon"]) == (OURS, e)), key=lambda r: r["epochs"]):
            k = epochs_for(row["test"], theirs)
            if k is not None:
                lines.append(f"{row['epochs']} epochs for {k:.0f} at ε = {e:g}")
            elif theirs and row["test"] > max(r["test"] for r in theirs):
                most = max(r["epochs"] for r in theirs)
                if row["epochs"] < most:
                    lines.append(f"{row['epochs']} epochs for more than {most} at ε = {e:g}")
    return (
        ""
        if not lines
        else f"Epochs for DP-SGD's accuracy (straight lines over log k between its rows): {'; '.join(lines)}."
    )


def settings_found(rows: list[Row]) -> str:
    header = ["method", "ε", "k", "B", "rate", "ζ", "schedule", "weights", "λ", "σ", "RMSE", "validation %", "runs"]
    lines = [
        [
            method(row["method"]).title, f"{row['epsilon']:g}", row["epochs"], row["batch_size"],
            f"{row['learning_rate']:.3g}", f"{row['max_grad_norm']:g}", row["schedule"], row["weights"],
            None if row["lambda"] is None else f"{row['lambda']:.3f}", f"{row['sigma']:.4g}", f"{row['rmse']:.3g}",
            f"{100 * row['validation']:.1f}", len(row["tried"]),
        ]
        for row in rows
    ]  # fmt: skip
    return table(header, lines)


def _missing(rows: list[Row]) -> str:
    """The cells that have not been run: methods, with ε and k."""
    if "examples" in rows[0]:
        return ""
    done = {(row["method"], row["epsilon"], row["epochs"]) for row in rows}
    left: dict[str, list[str]] = {}
    for names, epsilon, epochs in ORDER:
        for name in names:
            if (name, epsilon, epochs) not in done:
                left.setdefault(method(name).title, []).append(f"({epsilon:g}, {epochs})")
    alike: dict[str, list[str]] = {}
    for title, places in left.items():
        alike.setdefault(", ".join(places), []).append(title)
    texts = [f"{' and '.join(titles)} at {places}" for places, titles in alike.items()]
    return f"Not run yet, at (ε, k): {'; '.join(texts)}." if texts else ""


def against_us(rows: list[Row]) -> str:
    """What in these rows speaks against normalised λCGD with fresh bins."""
    by = {(row["method"], row["epsilon"], row["epochs"]): row for row in rows}
    said = []
    if (PLAIN, 8.0, 10) in by and (OURS, 8.0, 10) in by:
        gap, low, high = (100 * x for x in welch(by[PLAIN, 8.0, 10]["scores"], by[OURS, 8.0, 10]["scores"]))
        said.append(
            f"**Plain λCGD with fresh bins is ahead of the normalised one** at ε = 8, k = 10, by {gap:.1f} points (95% "
            f"{low:.1f} to {high:.1f}); `methods-cifar` had it the other way round. One search with one validation "
            "seed decides, so a point between methods this close says little."
        )
    late, latest, paper = (_gains_over_dp_sgd(by, name, k) for name, k in ((OURS, 40), (OURS, 80), (PAPER, 10)))
    if late and paper:
        said.append(
            f"**The gain is smaller at small ε and after many epochs**: after 40 epochs it is {late}"
            f"{f', after 80 {latest}' if latest else ''}. "
            f"**Fixed bins, as in the paper, gain less**: after 10 epochs {paper}."
        )
    falls = [
        f"{100 * row['test']:.1f}% after {k} epochs and {100 * more['test']:.1f}% after {2 * k} at ε = {e:g}"
        for (name, e, k), row in sorted(by.items())
        if name == DP_SGD and (more := by.get((DP_SGD, e, 2 * k))) and more["test"] < row["test"]
    ]
    if falls:
        said.append(
            f"**DP-SGD loses by training longer** where it has {'; '.join(falls)}. Its best over all epochs is the "
            "fair rival there, or its search was too short."
        )
    times = []
    for e in _epsilons(rows):
        mine, theirs = by.get((OURS, e, 10)), by.get((DP_SGD, e, 40))
        if mine and theirs and mine["gpu_seconds"] and theirs["gpu_seconds"]:
            times.append(f"{mine['gpu_seconds']:.1f} against {theirs['gpu_seconds']:.1f} s at ε = {e:g}")
    if times:
        said.append(
            "**A quarter of the epochs is not a quarter of the time**, because smaller batches make an epoch longer: "
            f"ten epochs of ours took {', '.join(times)} for DP-SGD's forty (GPU seconds of one run)."
        )
    if edge := at_the_edge(rows):
        said.append(f"**Some searches may be short of their best.** {edge}")
    return "\n".join(["What speaks against us:", "", *(f"- {text}" for text in said)]) if said else ""


def _gains_over_dp_sgd(by: dict[tuple[str, float, int], Row], name: str, epochs: int) -> str:
    shared = [e for m, e, k in by if (m, k) == (name, epochs) and (DP_SGD, e, k) in by]
    gains = {e: 100 * (by[name, e, epochs]["test"] - by[DP_SGD, e, epochs]["test"]) for e in shared}
    return ", ".join(f"{gain:+.1f} at ε = {e:g}".replace("-", "−") for e, gain in gains.items())


def at_the_edge(rows: list[Row]) -> str:
    """Which searches ended at the smallest or largest B or rate · ζ that they could try."""
    ends = []
    for row in rows:
        alike = ("batch_size", "schedule")
        beside = [run for run in row["tried"] if all(run[name] == row[name] for name in alike)]
        sizes_tried = [int(size) for size in row["rates"]]
        what = [f"B = {row['batch_size']}"] if row["batch_size"] in (min(sizes_tried), max(sizes_tried)) else []
        what += ["the rate"] if at_edge(row, beside) else []
        if what:
            name = method(row["method"]).title
            ends.append(f"{name} at ε = {row['epsilon']:g}, k = {row['epochs']} ({', '.join(what)})")
    return possibly_short(ends)


def _unproven(rows: list[Row]) -> str:
    """Of which rows nothing may be claimed."""
    places: dict[str, list[str]] = {}
    for row in rows:
        if row.get("unproven"):
            places.setdefault(method(row["method"]).title, []).append(f"ε = {row['epsilon']:g}")
    named = "; ".join(f"{title} at {' and '.join(each)}" for title, each in places.items())
    return (
        f"The library refuses to train {named} with this B: what a plan sets aside for floating point is not proven to "
        "cover its buffers over so many steps. These runs were made without that proof, for their accuracy alone."
        if named
        else ""
    )


def page(rows: list[Row]) -> str:
    """Accuracies, differences with their intervals, what speaks against us, and what the searches chose."""
    seeds = len(rows[0]["scores"])
    parts = [
        "CIFAR-10, the CNN of 0.3M parameters with GroupNorm(8), plain SGD, one view of each image, no augmentation, "
        f"δ = 1e-5. Test accuracy in percent, mean ± standard error of {seeds} seeds; B is each method's own best.",
        _missing(rows),
        accuracies(rows),
        _unproven(rows),
        comparisons(rows),
        _epoch_ratios(rows),
        against_us(rows),
        MORE,
        "How each method was searched, by the same rule for all: on four fifths of the training set, under a plan for "
        "those, one seed a run. At k = 10 from a middle B (512 for DP-SGD, 128 with fresh bins, 256 else), a falling "
        f"rate with rate · RMSE / B = {REACH:g} (at most {HIGHEST:g}) and ζ = {CLIPS[0]:g}: rates a factor of two "
        "beside the best, neighbouring B, rates again, then a constant schedule and ζ = .1 and 1. Other k begin where "
        "k = 10 ended, and try rates beside it and the next larger B. Some that had ended at the smallest or largest "
        "of these B tried one further, last. The best run's settings, and whether its last "
        f"weights or an average, then train on all of the training set with {seeds} new seeds, which alone see the "
        "test set. (ε, δ) does not cover the search.",
        settings_found(rows),
    ]
    return "\n\n".join(part for part in parts if part)


_COLOURS = ("#3f51b5", "#757575", "#26a69a", "#8d6e63", "#ab47bc", "#ef6c00", "#d81b60", "#558b2f")


def plot(rows: list[Row]) -> Any:
    """Accuracy over epochs, one line for each method with the band of its standard error, one panel for each ε at
    which one has several k; the dashed line shows after how many epochs DP-SGD is where ours is after few.
    """
    several = [e for e in _epsilons(rows) if len({row["epochs"] for row in rows if row["epsilon"] == e}) > 1]
    epsilons = several or _epsilons(rows)
    figure, axes = panels(len(epsilons), size=(2.8, 3.8), sharey=True)
    ticks = sorted({row["epochs"] for row in rows})
    named: dict[str, Any] = {}
    for axis, e in zip(axes, epsilons, strict=True):
        lines = {
            name: sorted((r for r in rows if (r["method"], r["epsilon"]) == (name, e)), key=lambda r: r["epochs"])
            for name in _order(rows)
        }
        for color, (name, mine) in zip(_COLOURS, lines.items(), strict=False):
            if mine:
                k = [row["epochs"] for row in mine]
                mean, error = ([100 * (row[x] or 0) for row in mine] for x in ("test", "standard_error"))
                style = "o-" if name in (OURS, DP_SGD) else "s"
                named[_named(name)] = axis.errorbar(k, mean, error, fmt=style, color=color, capsize=2, markersize=4)
                low, high = ([m + sign * x for m, x in zip(mean, error, strict=True)] for sign in (-1, 1))
                axis.fill_between(k, low, high, color=color, alpha=0.2, lw=0)
        first = next(iter(lines[OURS]), None) if OURS in lines else None
        reached = epochs_for(first["test"], lines[DP_SGD]) if first and DP_SGD in lines else None
        if first and reached:
            at = 100 * first["test"]
            axis.annotate("", (reached, at), (first["epochs"], at), arrowprops={"arrowstyle": "->", "ls": "--"})
            # Right of its head and below DP-SGD's line, where nothing else is drawn.
            axis.text(1.1 * reached, at - 0.3, f"× {reached / first['epochs']:.1f} epochs", ha="left", va="top")
        axis.set_xscale("log")
        axis.set_xticks(ticks, [str(k) for k in ticks])
        axis.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set(title=f"ε = {e:g}", xlabel="epochs")
    axes[0].set_ylabel("test accuracy, %")
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


EXPERIMENT = Experiment(
    "frontier",
    "test accuracy on CIFAR-10 over epochs, each method at its own best batch size",
    frontier_cells,
    compute_with(frontier_search),
    COLUMNS,
    page,
    plot,
    lambda cell: f"{cell['method']} ε={cell['epsilon']:g} k={cell['epochs']}",
    depends=("training",),
)
