"""How long a step's noise takes, and how much memory, beside what others do; all measured in one run.

Of the models only the shapes of their parameters count: noise needs no forward pass.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise import Layout, NoiseField, RegeneratedNoise
from lambdacgd.torch_private import foreach_copy_
from reproduce.bench_models import CASES
from reproduce.framework import measured_on, wait
from reproduce.stored import StoredNoise

Shapes = dict[str, tuple[int, ...]]


FLAT = "flat-20m"
MODELS = ("cnn", "wrn-40-4", "vit-b", "vit-l", "vit-h", "bert-tiny", "bert-base", "bert-large", FLAT)


def shapes_of(model: str) -> Shapes:
    """The shapes of a model's parameters; nothing is allocated."""
    if model == FLAT:
        return {"weight": (20_000_000,)}
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in CASES[model].build().named_parameters()}


Step = Callable[[], None]
HORIZON = 1_000_000


def coefficients(bands: int) -> tuple[float, ...]:
    """(1−x)^0.9, first ``bands`` coefficients: λCGD with λ = 0.9 for two bands."""
    values = [1.0]
    for j in range(bands - 1):
        values.append(values[-1] * (j - 0.9) / (j + 1))
    return tuple(values)


def contenders(
    shapes: Shapes, device: torch.device, bands: Sequence[int], *, buffer_gib: float
) -> dict[str, Callable[[], Step]]:
    """Name -> a function that sets the contender up and returns its step; what it allocates lives with the step."""
    sums = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    layout, key = Layout.of(shapes), SecretKey.generate()
    total = layout.elements * 4 / 2**30

    def copy() -> Step:
        target = [torch.empty_like(value) for value in sums.values()]
        return lambda: foreach_copy_(target, list(sums.values()))

    def randn() -> Step:
        def step() -> None:
            for value in sums.values():
                value.add_(torch.randn_like(value), alpha=1e-3)

        return step

    def opacus() -> Step:
        from opacus.optimizers import DPOptimizer

        parameters = [torch.nn.Parameter(torch.empty_like(value)) for value in sums.values()]
        optimizer = DPOptimizer(
            torch.optim.SGD(parameters, lr=0.1), noise_multiplier=1.0, max_grad_norm=1e-3, expected_batch_size=1
        )

        def step() -> None:
            for parameter, value in zip(parameters, sums.values(), strict=True):
                parameter.summed_grad = value.detach()  # type: ignore[attr-defined]  # a new object: no "processed" mark
            optimizer.add_noise()

        return step

    def rewinding(count: int) -> Step:
        """The paper's way: one stateful generator, set back to the states it had at the last steps."""
        generator = torch.Generator(device=device)
        states: list[torch.Tensor] = []
        weights = coefficients(count)

        def step() -> None:
            states.insert(0, generator.get_state())
            del states[count:]
            for weight, state in reversed(list(zip(weights, states, strict=False))):  # this step's own noise comes last
                generator.set_state(state)
                for value in sums.values():
                    noise = torch.randn(value.shape, generator=generator, device=device)
                    value.add_(noise, alpha=weight * 1e-3)

        return step

    def regenerated(count: int) -> Step:
        field = NoiseField(key, layout, run_id=f"regenerated {count}")
        noise = RegeneratedNoise(field, BandedInverse(coefficients(count)), sigma=1e-3, clip=1.0, horizon=HORIZON)
        return _counting(lambda step: noise.add_(sums, step, check=False))

    def buffered(count: int, where: Any) -> Step:
        field = NoiseField(key, layout, run_id=f"buffered {where} {count}")
        recurrence = BandedInverse(coefficients(count))
        noise = StoredNoise(field, recurrence, sigma=1e-3, clip=1.0, horizon=HORIZON, buffers=where)
        return _counting(lambda step: noise.add_(sums, step, check=False))

    makers: dict[str, Callable[[], Step]] = {"copy": copy, "torch.randn + add": randn, "opacus DP-SGD": opacus}
    for count in bands:
        makers[f"rewinding generator, {count} bands"] = lambda count=count: rewinding(count)  # type: ignore[misc]
    makers["regenerated, DP-SGD"] = lambda: regenerated(1)
    for count in bands:
        makers[f"regenerated, {count} bands"] = lambda count=count: regenerated(count)  # type: ignore[misc]
    places = ["device", "cpu"] if device.type == "cuda" else ["device"]
    for where in places:
        for count in bands:
            if (count - 1) * total <= buffer_gib:
                makers[f"buffers on {where}, {count} bands"] = lambda c=count, w=where: buffered(c, w)  # type: ignore[misc]
    return makers


def _counting(add: Callable[[int], None]) -> Step:
    steps = iter(range(20, HORIZON))  # past the first few steps, so that every band counts

    def step() -> None:
        add(next(steps))

    return step


def measure(make: Callable[[], Step], device: torch.device, *, seconds: float) -> dict[str, float | None]:
    """Milliseconds a step (median of several rounds, host work included) and peak extra memory in MiB (CUDA only)."""
    cuda = device.type == "cuda"

    wait(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    step = make()
    step()
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    once = time.perf_counter() - started
    calls = max(1, min(50, math.ceil(seconds / 8 / max(once, 1e-6))))
    rounds: list[float] = []
    elapsed = 0.0
    while len(rounds) < 3 or (elapsed < seconds and len(rounds) < 15):
        started = time.perf_counter()
        for _ in range(calls):
            step()
        wait(device)
        rounds.append((time.perf_counter() - started) / calls)
        elapsed += rounds[-1] * calls
    extra = (torch.cuda.max_memory_allocated(device) - before) / 2**20 if cuda else None
    return {"ms": 1e3 * statistics.median(rounds), "best_ms": 1e3 * min(rounds), "extra_mib": extra}


def run(
    models: Sequence[str] | None = None,
    device: str | None = None,
    *,
    bands: Sequence[int] = (2, 4, 16),
    seconds: float = 0.5,
    buffer_gib: float = 8.0,
    out: str | Path | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Measure, print a table a model, write JSON to ``out`` after every model, and return it.

    One contender that fails (out of memory, Opacus not installed) is reported as such and does not stop the rest.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = list(models or (MODELS if place.type == "cuda" else ["cnn", "wrn-40-4", "flat-20m"]))
    if unknown := [name for name in chosen if name not in MODELS]:
        raise ValueError(f"there is no model {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    if any(count < 2 for count in bands):
        raise ValueError(f"bands are {list(bands)}; each must be at least 2 (one band is DP-SGD, always measured)")
    result: dict[str, Any] = measured_on() | {"bands": list(bands), "models": {}}
    for name in chosen:
        shapes = shapes_of(name)
        entry: dict[str, Any] = {
            "parameters": sum(math.prod(shape) for shape in shapes.values()),
            "tensors": len(shapes),
            "contenders": {},
        }
        result["models"][name] = entry
        try:
            todo = contenders(shapes, place, bands, buffer_gib=buffer_gib)
        except RuntimeError as error:
            entry["error"] = str(error).splitlines()[0]
            continue
        for label, make in todo.items():
            try:
                entry["contenders"][label] = measure(make, place, seconds=seconds)
            except (RuntimeError, ImportError) as error:
                entry["contenders"][label] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            if place.type == "cuda":
                torch.cuda.empty_cache()
        del todo
        _ratios(entry)
        if show:
            table(name, entry, place)
        if out is not None:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return result


def _ratios(entry: dict[str, Any]) -> None:
    """Each time over Opacus's, the copy's and torch.randn + add's of the same run."""
    times = {label: row["ms"] for label, row in entry["contenders"].items() if "ms" in row}
    for label, row in entry["contenders"].items():
        for against in ("opacus DP-SGD", "copy", "torch.randn + add"):
            if label in times and against in times:
                row[f"over {against}"] = times[label] / times[against]


def table(name: str, entry: dict[str, Any], device: torch.device) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"{name}: {entry['parameters'] / 1e6:.2f}M parameters, {entry['tensors']} tensors, {device}")
    grid.add_column("noise")
    for heading in ("ms", "over opacus", "over copy", "over randn", "extra MiB"):
        grid.add_column(heading, justify="right")
    for label, row in entry["contenders"].items():
        if "error" in row:
            grid.add_row(label, row["error"][:60])
            continue
        ratios = [row.get(f"over {against}") for against in ("opacus DP-SGD", "copy", "torch.randn + add")]
        extra = row["extra_mib"]
        grid.add_row(
            label,
            f"{row['ms']:.3f}",
            *("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
            "–" if extra is None else f"{extra:.2f}",
        )
    Console(width=110).print(grid)
