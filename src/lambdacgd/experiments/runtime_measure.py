"""Times of private training by ``privatize``, one variant of the noise after the other, round after round.

``runtime_variants`` has the variants and says what is made of their times. Opacus is timed after ours, alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lambdacgd.clipping.benchmark_models import CASES, Case, LSTMClassifier
from lambdacgd.clipping.convert import convert
from lambdacgd.experiments.runtime_variants import Times, Variant, summary, variants
from lambdacgd.noise import BufferedNoise, NoiseField
from lambdacgd.training import privatize

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
            private._step._noise = variant.stage
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


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()[:300]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned buffers of the model before
