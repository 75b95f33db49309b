"""Times of private training by ``privatize``, one variant of the noise after the other, round after round.

A logical batch is gathered in physical ones and then acted on once (noise and optimizer), so an epoch of b logical
batches of m physical ones takes b·(first + (m−1)·later + act): ``first`` begins the sums, ``later`` adds to them. The
three are timed on logical batches of two physical ones, by medians. Gathering is the same code whatever the noise, so
its times are pooled over our variants; what a variant's own times give is reported beside.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lambdacgd.clipping.benchmark_models import CASES, Case, LSTMClassifier
from lambdacgd.clipping.convert import convert
from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms import BISR, Identity, LambdaCGD, Mechanism
from lambdacgd.noise import BufferedNoise, NoiseField
from lambdacgd.planning import Plan, plan
from lambdacgd.training import privatize

_CLIP, _RATE = 1.0, 1e-4
_STEPS_PER_EPOCH, _EPOCHS = 100, 10
_FAR = 20  # steps behind us, so that 16 bands are all in use

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
    stage: BufferedNoise | None = None
    done: int = 0
    times: Times = field(default_factory=Times)


def mechanism(bands: int) -> Mechanism:
    """DP-SGD, λCGD, or for more bands BISR: what a step takes depends on the number of bands alone."""
    return {1: Identity(), 2: LambdaCGD(0.9)}.get(bands) or BISR(bands)


def variants(bands: list[int], physical: int) -> list[Variant]:
    def made(title: str, count: int, on_cpu: bool) -> Variant:
        found = plan(
            2 * physical * _STEPS_PER_EPOCH,
            2 * physical,
            epochs=_EPOCHS,
            epsilon=8.0,
            delta=1e-7,
            mechanism=mechanism(count),
            sampling="cyclic",
        )
        return Variant(title, count, on_cpu, found, done=0 if on_cpu else _FAR)

    return [
        made("DP-SGD", 1, False),
        *(made(f"regenerated, {count} bands", count, False) for count in bands),
        *(made(f"CPU buffer, {count} bands", count, True) for count in bands),
    ]


def build(case: Case, device: torch.device, **how: Any) -> nn.Module:
    """On the device at once: initialising 632 million weights on a CPU takes longer than the measurement."""
    torch.manual_seed(1)
    try:
        with torch.device(device):
            model: nn.Module = case.build(**how)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a constructor that insists on the CPU
        model = case.build(**how)
    return model.to(device)


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
            _free(place)
            if size == 1:
                return {"error": "out of memory with a physical batch of one example"}
            size //= 2
    _free(place)
    found: dict[str, Any] = {"parameters": parameters, "physical_used": size, "steps_per_epoch": steps_per_epoch}
    found["variants"] = summary(ours, batch // size, steps_per_epoch, parameters)
    found["variants"]["Opacus"] = _opacus_row(case, place, size, batch, steps_per_epoch, steps)
    _free(place)
    return found


def measure_memory(name: str, *, physical: int, device: str) -> dict[str, Any]:
    """Peak device memory of DP-SGD and of λCGD, each with a model of its own and alone on the device."""
    place = torch.device(device)
    peaks: dict[str, float] = {}
    first = variants([], physical)[0]  # DP-SGD twice: libraries take their workspaces once a process
    for variant in (first, *variants([2], physical)[:2]):
        _free(place)
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        model = convert(build(MODELS[name], place))
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        _round(variant, model, optimizer, MODELS[name].data(place, physical), place, physical, 2)
        if variant.times.error is not None:
            return {"error": variant.times.error}
        peaks[variant.title] = (torch.cuda.max_memory_allocated(place) - before) / 2**20
        del model, optimizer
    _free(place)
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
    try:
        if variant.on_cpu:  # the peer: what privatize would never choose for a banded C⁻¹
            if variant.stage is None:
                noise = NoiseField(variant.key, private.layout, run_id="runtime")
                variant.stage = BufferedNoise.of(
                    noise, variant.plan.mechanism, sigma=variant.plan.sigma, clip=_CLIP, horizon=variant.plan.steps,
                    buffers="cpu",
                )  # fmt: skip
            private._stage = variant.stage
        loader = iter(private.loader)
        _step(loader, model, optimizer, device)
        parts = [_step(loader, model, optimizer, device) for _ in range(steps)]
        for name, times in zip(("first", "later", "act"), zip(*parts, strict=True), strict=True):
            getattr(variant.times, name).append(list(times))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # one failing variant must not lose the rest
        variant.times, variant.stage = Times(error=_said(error)), None
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
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(todo: list[Variant], m: int, b: int, parameters: int) -> dict[str, dict[str, Any]]:
    """Seconds an epoch of b logical batches of m physical ones, and each over DP-SGD."""
    good = [variant for variant in todo if variant.times.error is None]
    if not good:
        return {variant.title: {"error": variant.times.error} for variant in todo}
    first = _median([part for variant in good for part in variant.times.first])
    later = _median([part for variant in good for part in variant.times.later])
    found: dict[str, dict[str, Any]] = {}
    for variant in todo:
        if variant.times.error is not None:
            found[variant.title] = {"error": variant.times.error}
            continue
        own_first, own_later, act = variant.times.medians()
        each = zip(variant.times.first, variant.times.later, variant.times.act, strict=True)
        own = [b * (_median([f]) + (m - 1) * _median([l]) + _median([a])) for f, l, a in each]
        found[variant.title] = {
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
    base = found["DP-SGD"]
    for row in found.values():
        if "error" not in row and "error" not in base:
            row["over_dp_sgd"] = row["epoch_s"] / base["epoch_s"]
            row["own_over_dp_sgd"] = row["own_epoch_s"] / base["own_epoch_s"]
    return found


def _opacus_row(
    case: Case, device: torch.device, physical: int, batch: int, steps_per_epoch: int, steps: int
) -> dict[str, Any]:
    """The paper's own baseline, after ours and alone; its per-example gradients may need smaller physical batches."""
    size = physical
    while True:
        try:
            return _opacus(case, device, size, batch // size, steps_per_epoch, max(3, steps))
        except torch.OutOfMemoryError:
            _free(device)
            if size == 1:
                return {"error": "out of memory with a physical batch of one example"}
            size //= 2
        except Exception as error:
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


def _median(parts: list[list[float]]) -> float:
    flat = [value for part in parts for value in part]
    return statistics.median(flat) if flat else math.nan


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()[:300]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned buffers of the model before
