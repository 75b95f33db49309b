"""``runtime-cifar`` and ``runtime-imdb``: what an epoch of private training takes, by how the noise is made.

A cell is a model, measured with all variants of the noise taking turns, or its peak memory, measured for each variant
alone. Weights and data are random: time does not depend on them. Reading data is left out. Opacus is timed after ours,
alone.

A logical batch is gathered in physical ones and then acted on once (noise and optimizer), so an epoch of b logical
batches of m physical ones takes b·(first + (m−1)·later + act): ``first`` begins the sums, ``later`` adds to them. The
three are timed on logical batches of two physical ones, by medians. Gathering is the same code whatever the noise, so
its times are pooled over our variants; what a variant's own times give is reported beside.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lambdacgd.clipping.convert import convert
from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms import BISR, Identity, LambdaCGD, Mechanism
from lambdacgd.noise import Layout, NoiseField
from lambdacgd.planning import Plan, plan
from lambdacgd.sampling import Cyclic
from lambdacgd.training import privatize
from reproduce.bench_models import CASES, Case, LSTMClassifier, build
from reproduce.bench_step import set_precision
from reproduce.framework import MORE, Cell, Experiment, Row, Settings, free, panels, table, value_range, wait
from reproduce.paper import BANDS, DP_SGD, TABLES, VARIANTS, Model, Table
from reproduce.stored import StoredNoise

_STEPS_PER_EPOCH, _EPOCHS = 100, 10
_FAR = 20  # steps behind us, so that 16 bands are all in use


@dataclass
class Times:
    """Seconds of each part, a list a round."""

    first: list[list[float]] = field(default_factory=list)
    later: list[list[float]] = field(default_factory=list)
    act: list[list[float]] = field(default_factory=list)
    error: str | None = None

    def medians(self) -> tuple[float, float, float]:
        return _median(self.first), _median(self.later), _median(self.act)


@dataclass
class Variant:
    """One way to make the noise, with where its run stands."""

    title: str
    bands: int
    on_cpu: bool
    plan: Plan
    key: SecretKey = field(default_factory=SecretKey.generate)
    buffered: StoredNoise | None = None
    done: int = 0
    times: Times = field(default_factory=Times)


def mechanism(bands: int) -> Mechanism:
    """DP-SGD, λCGD, or for more bands BISR: what a step takes depends on the number of bands alone."""
    return {1: Identity(), 2: LambdaCGD(0.9)}.get(bands) or BISR(bands)


def variants(bands: list[int], physical: int) -> list[Variant]:
    def made(title: str, count: int, on_cpu: bool) -> Variant:
        cyclic = plan(
            2 * physical * _STEPS_PER_EPOCH,
            2 * physical,
            epochs=_EPOCHS,
            epsilon=8.0,
            delta=1e-7,
            mechanism=mechanism(count),
            sampling=Cyclic(),
        )
        return Variant(title, count, on_cpu, cyclic, done=0 if on_cpu else _FAR)

    return [
        made("DP-SGD", 1, False),
        *(made(f"regenerated, {count} bands", count, False) for count in bands),
        *(made(f"CPU buffer, {count} bands", count, True) for count in bands),
    ]


def summary(todo: list[Variant], m: int, b: int, parameters: int) -> dict[str, dict[str, Any]]:
    """Seconds an epoch of b logical batches of m physical ones, and each over DP-SGD."""
    good = [variant for variant in todo if variant.times.error is None]
    if not good:
        return {variant.title: {"error": variant.times.error} for variant in todo}
    first = _median([part for variant in good for part in variant.times.first])
    later = _median([part for variant in good for part in variant.times.later])
    rows: dict[str, dict[str, Any]] = {}
    for variant in todo:
        if variant.times.error is not None:
            rows[variant.title] = {"error": variant.times.error}
            continue
        own_first, own_later, act = variant.times.medians()
        each = zip(variant.times.first, variant.times.later, variant.times.act, strict=True)
        own = [b * (_median([f]) + (m - 1) * _median([l]) + _median([a])) for f, l, a in each]
        rows[variant.title] = {
            "epoch_s": b * (first + (m - 1) * later + act),
            "own_epoch_s": b * (own_first + (m - 1) * own_later + act),
            "own_epoch_s_sd": statistics.stdev(own) if len(own) > 1 else None,
            "first_ms": 1e3 * own_first,
            "later_ms": 1e3 * own_later,
            "act_ms": 1e3 * act,
            "pooled_first_ms": 1e3 * first,
            "pooled_later_ms": 1e3 * later,
            "rounds": len(own),
            "steps": sum(map(len, variant.times.act)),
            "host_buffer_mib": (variant.bands - 1) * 4 * parameters / 2**20 if variant.on_cpu else 0.0,
        }
    base = rows["DP-SGD"]
    for row in rows.values():
        if "error" not in row and "error" not in base:
            row["over_dp_sgd"] = row["epoch_s"] / base["epoch_s"]
            row["own_over_dp_sgd"] = row["own_epoch_s"] / base["own_epoch_s"]
    return rows


def _median(parts: list[list[float]]) -> float:
    flat = [value for part in parts for value in part]
    return statistics.median(flat) if flat else math.nan


_CLIP, _RATE = 1.0, 1e-4

# The paper's LSTM has a million parameters; the step benchmark's has four.
LSTM_1M = Case(lambda **how: LSTMClassifier(10_000, 64, 256, **how), 64, vocabulary=10_000)
MODELS: dict[str, Case] = CASES | {"lstm-1m": LSTM_1M}


class Indices(Dataset[int]):
    """Examples are their own numbers; the batch itself waits on the device, so no time goes into reading."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def measure_model(
    name: str, *, batch: int, physical: int, steps_per_epoch: int, bands: list[int], device: str, rounds: int,
    steps: int, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """All variants of one model, and Opacus; a physical batch that does not fit is halved."""
    place = torch.device(device)
    case = MODELS[name]
    size = physical
    while True:
        try:
            ours, parameters = _ours(case, place, size, bands, rounds=rounds, steps=steps, seconds=seconds)
            break
        except torch.OutOfMemoryError:
            free(place)
            if size == 1:
                return {"error": "out of memory with a physical batch of one example"}
            size //= 2
    free(place)
    measured: dict[str, Any] = {"parameters": parameters, "physical_used": size, "steps_per_epoch": steps_per_epoch}
    measured["variants"] = summary(ours, batch // size, steps_per_epoch, parameters)
    measured["variants"]["Opacus"] = _opacus_row(case, place, size, batch, steps_per_epoch, steps)
    free(place)
    return measured


def measure_memory(name: str, *, physical: int, device: str) -> dict[str, Any]:
    """Peak device memory of DP-SGD and of λCGD, each with a model of its own and alone on the device."""
    place = torch.device(device)
    peaks: dict[str, float] = {}
    first = variants([], physical)[0]  # DP-SGD twice: libraries take their workspaces once a process
    for variant in (first, *variants([2], physical)[:2]):
        free(place)
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        model = convert(build(MODELS[name], place))
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        _round(variant, model, optimizer, MODELS[name].data(place, physical), place, physical, 2)
        if variant.times.error is not None:
            return {"error": variant.times.error}
        peaks[variant.title] = (torch.cuda.max_memory_allocated(place) - before) / 2**20
        del model, optimizer
    free(place)
    return {"peaks_mib": peaks}


def _ours(
    case: Case, device: torch.device, physical: int, bands: list[int], *, rounds: int, steps: int, seconds: float
) -> tuple[list[Variant], int]:
    model = convert(build(case, device))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    batch = case.data(device, physical)
    todo = variants(bands, physical)
    trial = variants([], physical)[0]
    _round(trial, model, optimizer, batch, device, physical, 1)
    if trial.times.error is None:  # at least two rounds should fit into the time
        once = sum(trial.times.medians())
        steps = max(1, min(steps, int(seconds / (2 * len(todo) * once))))
    began = time.monotonic()
    for done in range(rounds):
        if done >= 2 and time.monotonic() - began > seconds:
            break
        for variant in todo:
            if variant.times.error is None:
                _round(variant, model, optimizer, batch, device, physical, steps)
    return todo, sum(p.numel() for p in model.parameters())


def _round(
    variant: Variant, model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], device: torch.device,
    physical: int, steps: int,
) -> None:  # fmt: skip
    """``steps`` logical steps on the clock after one off it, then the plain model again."""
    private = privatize(
        model, optimizer, Indices(variant.plan.examples), variant.plan, max_grad_norm=_CLIP,
        max_physical_batch_size=physical, key=variant.key, collate_fn=lambda indices: batch,
    )  # fmt: skip
    private.stand_at(variant.done)
    private.clipper.allow_probe(False)  # few steps of a run are probed, but many of so short a one would be
    try:
        if variant.on_cpu:  # the peer: what privatize would never choose for a banded C⁻¹
            if variant.buffered is None:
                layout = Layout.of_parameters(model.named_parameters())
                noise = NoiseField(variant.key, layout, run_id="runtime")
                variant.buffered = StoredNoise.of(
                    noise, variant.plan.mechanism, sigma=variant.plan.sigma, clip=_CLIP, horizon=variant.plan.steps,
                    buffers="cpu",
                )  # fmt: skip
            private.private_step._noise = variant.buffered
        loader = iter(private.loader)
        _step(loader, model, optimizer, device)
        parts = [_step(loader, model, optimizer, device) for _ in range(steps)]
        for name, times in zip(("first", "later", "act"), zip(*parts, strict=True), strict=True):
            getattr(variant.times, name).append(list(times))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # one failing variant must not lose the rest
        variant.times, variant.buffered = Times(error=_said(error)), None
    finally:
        variant.done = private.steps_taken
        private.detach()


def _step(loader: Iterator[Any], model: nn.Module, optimizer: Any, device: torch.device) -> tuple[float, float, float]:
    """One logical step, written as a user writes it, with the clock between its parts."""

    def gather() -> None:
        x, y = next(loader)
        F.cross_entropy(model(x), y).backward()

    def act() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def both() -> None:
        gather()
        act()  # does nothing yet: the logical batch is not whole

    return _clock(both, device), _clock(gather, device), _clock(act, device)


def _clock(work: Callable[[], None], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def _opacus_row(
    case: Case, device: torch.device, physical: int, batch: int, steps_per_epoch: int, steps: int
) -> dict[str, Any]:
    """The paper's own baseline, after ours and alone; its per-example gradients may need smaller physical batches."""
    size = physical
    while True:
        try:
            return _opacus(case, device, size, batch // size, steps_per_epoch, max(3, steps))
        except torch.OutOfMemoryError:
            free(device)
            if size == 1:
                return {"error": "out of memory with a physical batch of one example"}
            size //= 2
        except Exception as error:  # the peer's failure is its own
            return {"error": _said(error)}


def _opacus(case: Case, device: torch.device, physical: int, m: int, b: int, steps: int) -> dict[str, Any]:
    import opacus
    from opacus.optimizers import DPOptimizer

    lstm = "lstm" in next(name for name, known in MODELS.items() if known is case)
    model = build(case, device, **({"lstm": opacus.layers.DPLSTM} if lstm else {}))
    for p in model.parameters(recurse=False):
        p.requires_grad_(False)  # a ViT's class token and positions: Opacus has no rule for them
    wrapped = opacus.GradSampleModule(model)
    plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    optimizer = DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=_CLIP, expected_batch_size=2 * physical)
    x, y = case.data(device, physical)

    def gather(last: bool) -> None:
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.signal_skip_step(do_skip=not last)
        optimizer.step()
        optimizer.zero_grad()

    def pair() -> tuple[float, float]:
        return _clock(lambda: gather(False), device), _clock(lambda: gather(True), device)

    pair()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before, last = (statistics.median(part) for part in zip(*(pair() for _ in range(steps)), strict=True))
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "epoch_s": b * ((m - 1) * before + last), "later_ms": 1e3 * before, "last_ms": 1e3 * last, "steps": steps,
        "physical_used": physical, "peak_mib": peak,
    }  # fmt: skip


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()[:300]


OPACUS = "Opacus"
_QUICK = ("cnn", "bert-tiny")


def cells(paper: Table, settings: Settings) -> list[Cell]:
    """Times and memory, model by model. Quick: the smallest, in tiny batches, for a look at a CPU."""
    device = settings.torch_device.split(":")[0]
    common: Cell = {"table": paper.name, "device": device, "precision": "tf32", "bands": list(BANDS)}
    if settings.quick:
        common |= {"batch": 16, "physical": 4, "rounds": 2, "steps": 2, "seconds": 20.0}
        return [common | {"model": model.case} for model in paper.models if model.case in _QUICK]
    common |= {"batch": paper.batch, "rounds": 10, "steps": 6, "seconds": 3.0}
    memory: Cell = {"what": "memory", "table": paper.name, "device": device, "precision": "tf32"}
    kinds = (common, memory) if device == "cuda" else (common,)
    return [kind | {"model": model.case, "physical": model.physical} for model in paper.models for kind in kinds]


def compute(paper: Table, cell: Cell, settings: Settings) -> Row:
    """Measure one model; whatever fails is an error of that model alone."""
    try:
        with set_precision("tf32"):
            if "what" in cell:
                return measure_memory(cell["model"], physical=cell["physical"], device=settings.torch_device)
            return measure_model(
                cell["model"], batch=cell["batch"], physical=cell["physical"], bands=cell["bands"],
                steps_per_epoch=paper.examples // cell["batch"], device=settings.torch_device, rounds=cell["rounds"],
                steps=cell["steps"], seconds=cell["seconds"],
            )  # fmt: skip
    except Exception as error:  # an error of this model alone: it is shown, and measured again next time
        return {"error": _said(error)}


def flat(paper: Table, rows: list[Row]) -> list[Row]:
    """A line a model and variant, the paper's value with it."""
    lines = []
    for row in timed(rows):
        model, peaks = _model(paper, row), _peaks(rows, row["model"])
        for title, times in row.get("variants", {"": row}).items():
            line = {"model": model.title, "variant": title, "parameters": row.get("parameters")} | times
            line |= {"peak_mib": peaks[title]} if title in peaks else {}
            printed, base = model.value(title), model.value(DP_SGD)
            if printed is not None and base is not None:
                line |= {"paper_s": printed, "paper_over_dp_sgd": printed / base}
            lines.append(line | {"physical_used": times.get("physical_used", row.get("physical_used"))})
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
    return "\n\n".join([*parts, _verdict(rows, everything), MORE, _HOW, _WHY])


_HOW = (
    "How it was measured: an epoch is extrapolated from timed steps. The variants take turns on one model, a few steps "
    "each, round after round; medians count. Forward and backward passes are the same code for all of them, so their "
    "times are pooled, and only noise and optimizer differ; `own_epoch_s` and `own_over_dp_sgd` in the CSV use each "
    "variant's own passes, with ± over rounds. Weights and inputs are random, reading data is left out, matrix "
    "products are in TF32. Two bands are λCGD, more are BISR (in the paper BandInvMF, the same work). The peer “CPU "
    "buffer” is our own `StoredNoise` with pinned host memory. Opacus (hooks, physical batches halved until they "
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


def _seconds(times: Row | None) -> str | None:
    if times is None or "epoch_s" not in times:
        return None
    return f"{times['epoch_s']:.3g}" if times["epoch_s"] < 100 else f"{times['epoch_s']:.0f}"


def _pair(paper: Table, row: Row) -> list[list[Any]]:
    model = _model(paper, row)
    if "error" in row:
        return [[model.title, row["error"]]]
    times = row["variants"]
    ours = [model.title, *(_seconds(times.get(name)) for name in (*VARIANTS, OPACUS))]
    return [ours, ["the paper", *(model.text(name) for name in VARIANTS), ""]]


def _ratios(paper: Table, row: Row, peaks: dict[str, float]) -> list[Any]:
    model = _model(paper, row)
    if "error" in row:
        return [model.title]
    times = row["variants"]
    base = model.value(DP_SGD) or 1.0
    cells: list[Any] = [model.title]
    for name in VARIANTS[1:]:
        ours = times.get(name, {}).get("over_dp_sgd")
        cells.append(f"{ours:.2f} ({(model.value(name) or 0) / base:.2f})" if ours else None)
    for name in (DP_SGD, "regenerated, 2 bands"):
        peak = peaks.get(name)
        cells.append(f"{peak:.0f} MiB" if peak else None)
    return [*cells, f"{times['CPU buffer, 16 bands'].get('host_buffer_mib', 0) / 1024:.1f} GiB"]


def _verdict(rows: list[Row], everything: list[Row]) -> str:
    """What λCGD costs, with the digits that this measurement bears."""
    known = [row["variants"] for row in rows if "variants" in row]
    ours = [times["regenerated, 2 bands"] for times in known if "over_dp_sgd" in times.get(DP_SGD, {})]
    if not ours:
        return ""
    text = f"Regenerated λCGD takes {value_range([times['over_dp_sgd'] for times in ours], '.2f')} of DP-SGD's time"
    apart = [times["own_over_dp_sgd"] for times in ours if times.get("own_over_dp_sgd") is not None]
    text += f", {value_range(apart, '.2f')} with passes of its own, which is the noise of this host" if apart else ""
    text += "; `bench pair` alternates steps on one model and gives intervals."
    peaks = [row["peaks_mib"] for row in everything if "peaks_mib" in row]
    more = [times["regenerated, 2 bands"] - times[DP_SGD] for times in peaks]
    return text + (f" Its peak memory is {value_range(more, '+.1f')} MiB against DP-SGD's." if more else "")


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
        depends=("format of the noise",),
    )  # fmt: skip


CIFAR, IMDB = (_experiment(TABLES[name]) for name in ("cifar", "imdb"))
