"""One training step, private and not: time and peak memory, in one run on one machine, as JSON.

``run``: every mode does forward, backward, noise (where private) and an SGD step on the same model and batch. The modes
of a model take turns, so that a slow moment of the machine strikes them all. Opacus is measured where it is installed;
parameters it has no rule for (a ViT's class token and positions) are frozen for it, in its favour. The modes "loop" and
"padded-loop" are a user's loop over `privatize`'s loader with sampled batches, "plain-loop" is the loop without privacy
over the same batches. "views-loop" takes the batches in four parts, of which every example comes as four views. A loop
is timed behind a step that is probed, whose time stands apart, since a run has few of them; the next are 34, 55, 89.

``run_pair``: λCGD's step over DP-SGD's, to a fraction of a percent. Whole steps differ by far less than a machine's
speed varies, so both noises act on the same model, in turns A B B A, which cancels what drifts. Each round gives one
ratio, and the median of many comes with an interval that assumes nothing about their distribution.

``run_captured``: ten epochs of the sweeps' CNN on CUDA as a user would run them, by captured steps and by the plain
loop.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd.clipping.clipper import attach
from lambdacgd.clipping.convert import convert
from lambdacgd.errors import InvalidInput, integer
from lambdacgd.torch_private import foreach_mul_
from reproduce.bench_models import CASES, Case, build
from reproduce.framework import free, measured_on, wait
from reproduce.problems import problem

PRECISIONS = ("fp32", "tf32", "bf16")
MODES = ("non-private", "opacus-hooks", "opacus-ghost", "clip-only", "dp-sgd", "lambda-cgd")
LOOPS = ("plain-loop", "loop", "padded-loop", "views-loop")
_OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {  # of `privatize`, for a loop over batches of this size
    "loop": lambda batch: {},
    "padded-loop": lambda batch: {"pad_batches": max(1, batch // 8)},
    "views-loop": lambda batch: {"augmentations": 4, "max_physical_batch_size": max(1, batch // 4)},
}
_RATE, _CLIP, _SIGMA = 1e-4, 1.0, 1.0
_TURN = 3  # steps in a row of one mode, before the next has its turn
_LOOP_WARM_UP = 21  # steps of a loop before the clock, at least: behind few, two turns in five would hold a probed one
_PROFILED = 2  # steps whose kernels are counted
Step = Callable[[], None]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, precision: str) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        output = model(x)
    return output.mean() if output.dim() == 1 else F.cross_entropy(output.float(), y)  # language models give losses


def plain_step(case: Case, device: torch.device, precision: str, batch: int) -> Step:
    model = build(case, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    x, y = case.data(device, batch)

    def step() -> None:
        loss_of(model, x, y, precision).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class OurStep:
    """Our step with the noise named by ``kind``, one of those given; all of them act on the same model."""

    def __init__(self, case: Case, device: torch.device, precision: str, batch: int, *kinds: str) -> None:
        model = convert(build(case, device))
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        x, y = case.data(device, batch)
        self._clipper = attach(model, _CLIP)
        self._clipper.allow_probe(False)  # a few steps of a run are probed: what one takes is measured on loops
        self._loss = lambda: loss_of(model, x, y, precision)
        self._noises = {kind: _noise(model, kind) for kind in kinds}
        self.kind, self._batch, self._steps = kinds[0], batch, 0

    def __call__(self) -> None:
        self._steps += 1
        self._loss().backward()
        sums = self._clipper.take()
        self._noises[self.kind](sums, self._steps)
        foreach_mul_(list(sums.values()), 1 / self._batch)
        for name, p in self._clipper.parameters.items():
            p.grad = sums[name]
        self._optimizer.step()
        self._optimizer.zero_grad()


def _noise(model: nn.Module, kind: str) -> Callable[[dict[str, Tensor], int], None]:
    if kind == "clip-only":
        return lambda sums, step: None
    from lambdacgd.keys import SecretKey
    from lambdacgd.mechanisms import Identity, LambdaCGD
    from lambdacgd.noise import Layout, NoiseField, RegeneratedNoise

    layout = Layout.of({name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad})
    field = NoiseField(SecretKey.generate(), layout, run_id="benchmark")
    mechanism = LambdaCGD(0.9) if kind == "lambda-cgd" else Identity()
    maker = RegeneratedNoise.of(field, mechanism, sigma=_SIGMA, clip=_CLIP, horizon=10_000)
    return lambda sums, step: maker.add_(sums, step, check=False)


def opacus_step(case: Case, device: torch.device, precision: str, batch: int, *, ghost: bool) -> Step:
    import opacus
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    lstm = case is CASES["lstm"]
    model = build(case, device, **({"lstm": opacus.layers.DPLSTM} if lstm else {}))
    for p in model.parameters(recurse=False):
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    x, y = case.data(device, batch)
    settings: dict[str, Any] = {
        "noise_multiplier": _SIGMA, "max_grad_norm": _CLIP, "expected_batch_size": batch, "loss_reduction": "mean",
    }  # fmt: skip
    if ghost:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=_CLIP, use_ghost_clipping=True)
        private: Any = DPOptimizerFastGradientClipping(optimizer, **settings)
        criterion: Any = DPLossFastGradientClipping(wrapped, private, nn.CrossEntropyLoss())
    else:
        wrapped = opacus.GradSampleModule(model)
        private, criterion = DPOptimizer(optimizer, **settings), nn.CrossEntropyLoss()

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = wrapped(x)
        criterion(logits.float(), y).backward()
        private.step()
        private.zero_grad()

    return step


def loop_step(case: Case, device: torch.device, precision: str, batch: int, mode: str) -> Step:
    """A step of a loop over sampled batches, of eight bins; a padded one fills them up to multiples of an eighth."""
    model = convert(build(case, device))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    (x, y), key = case.data(device, 8 * batch), lc.SecretKey.for_tests(1)
    sampling, mechanism = lc.BallsInBins("fixed"), lc.LambdaCGD(0.5)
    plan = lc.plan(8 * batch, batch, epochs=50, epsilon=8.0, delta=1e-3, mechanism=mechanism, sampling=sampling)
    if mode == "plain-loop":
        drawn = (torch.as_tensor(rows, device=device) for rows in plan.sampling.batches(key, run="1"))
        batches: Iterator[Any] = ((x[rows], y[rows]) for rows in drawn)
    else:
        options = {"max_grad_norm": _CLIP, "key": key, **_OPTIONS[mode](batch)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the key is for tests
            batches = iter(lc.privatize(model, optimizer, TensorDataset(x, y), plan, **options).loader)

    def step() -> None:
        inputs, targets = next(batches)
        loss_of(model, inputs, targets, precision).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_step(mode: str, case: Case, device: torch.device, precision: str, batch: int) -> Step:
    if mode == "non-private":
        return plain_step(case, device, precision, batch)
    if mode.startswith("opacus"):
        return opacus_step(case, device, precision, batch, ghost=mode == "opacus-ghost")
    if mode in LOOPS:
        return loop_step(case, device, precision, batch, mode)
    return OurStep(case, device, precision, batch, mode)


def prepare(step: Step, device: torch.device, *, warm_up: int, loop: bool = False) -> dict[str, Any]:
    """Warm up; on a GPU, the memory that this takes beyond what other modes hold: its peak, and what torch reserves.

    A ``loop`` goes on until a step that is probed, whose time is taken.
    """
    cuda = device.type == "cuda"
    held = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(probed_from(max(warm_up, _LOOP_WARM_UP)) - 1 if loop else warm_up):
        step()
    wait(device)
    found: dict[str, Any] = {"probed_ms": turn(step, device, steps=1)} if loop else {}
    if cuda:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        found |= {"peak_mib": (peak - held[0]) / 2**20, "reserved_mib": (reserved - held[1]) / 2**20}
    return found


def probed_from(step: int) -> int:
    """The first step from this one on that a private loop probes (`clipper.Watch`)."""
    probed, following = 1, 2
    while probed < step:
        probed, following = following, probed + following
    return probed


def turn(step: Step, device: torch.device, *, steps: int = _TURN) -> float:
    """Milliseconds a step, over a few in a row as in training, where the host runs ahead of the device."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return 1e3 * (time.perf_counter() - began) / steps


def on_the_device(step: Step, device: torch.device) -> dict[str, Any]:
    """What a step has the GPU do: how many kernels, their milliseconds, and the longest by name. Where that is far less
    than the step takes, the host is the bound.
    """
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        turn(step, device, steps=_PROFILED)
    events = (e for e in profiler.key_averages() if not e.key.startswith("Activity Buffer"))  # the profiler's own
    kernels = [e for e in events if e.self_device_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    each = 1e3 * _PROFILED
    return {
        "kernels": sum(event.count for event in kernels) / _PROFILED,
        "device_ms": sum(event.self_device_time_total for event in kernels) / each,
        "longest": {event.key[:90]: round(event.self_device_time_total / each, 4) for event in kernels[:12]},
    }


def measure(steps: dict[str, Step], device: torch.device, *, rounds: int) -> dict[str, dict[str, Any]]:
    """Time of a step of each mode, the modes taking turns: what slows the machine for a while slows them all."""
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(rounds):
        for mode, step in steps.items():
            times[mode].append(turn(step, device))
    return {
        mode: {"median_ms": statistics.median(measured), "least_ms": min(measured), "repeats": rounds * _TURN}
        for mode, measured in times.items()
    }


@contextlib.contextmanager
def set_precision(precision: str) -> Iterator[None]:
    """float32 products as asked for: exact in "fp32", TF32 in "tf32" and beside bfloat16."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def check_names(**given: tuple[Sequence[str], Sequence[str]]) -> None:
    """Each kind of name with those given and those allowed."""
    for kind, (names, allowed) in given.items():
        for name in names:
            if name not in allowed:
                raise ValueError(f"unknown {kind} {name!r}; allowed: {', '.join(allowed)}")


def run(
    models: list[str],
    *,
    precisions: list[str],
    modes: list[str],
    device: str,
    warm_up: int = 5,
    repeats: int = 20,
    batch: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure every combination of model, precision and mode, and print a line for each.

    A combination that fails is recorded as an error, and the rest goes on. JSON goes to ``out`` after every model.

    Returns:
        The machine and a cell for every combination.

    Raises:
        ValueError: A name is not known.
    """
    check_names(model=(models, tuple(CASES)), mode=(modes, MODES + LOOPS), precision=(precisions, PRECISIONS))
    place = torch.device(device)
    result: dict[str, Any] = {"machine": measured_on(), "cells": []}
    for precision in precisions:
        for model in models:
            with set_precision(precision):
                cells = _cells(model, modes, precision, place, batch, warm_up, repeats)
            result["cells"] += cells
            for cell in cells:
                print(_line(cell, cells), flush=True)
            write(result, out)
    return result


def _cells(
    model: str, modes: list[str], precision: str, device: torch.device, batch: int | None, warm_up: int, repeats: int
) -> list[dict[str, Any]]:
    """All modes of one model side by side; one that fails is recorded and left out."""
    case = CASES[model]
    cells: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    step: Step | None = None
    for mode in modes:
        cells[mode] = {"model": model, "mode": mode, "precision": precision, "batch": batch or case.batch}
        try:
            step = make_step(mode, case, device, precision, batch or case.batch)
            cells[mode] |= prepare(step, device, warm_up=warm_up, loop=mode in LOOPS)
            steps[mode] = step
        except Exception as error:  # whatever a peer raises must not lose the other modes
            cells[mode]["error"] = f"{type(error).__name__}: {error}"[:500]
        free(device)
    for mode, measured in measure(steps, device, rounds=-(-repeats // _TURN)).items():
        cells[mode] |= measured
    for mode in steps.keys() & LOOPS:
        try:
            cells[mode] |= on_the_device(steps[mode], device)
        except Exception as error:  # no profiler on this machine
            cells[mode]["longest"] = {f"{type(error).__name__}: {error}"[:500]: 0.0}
    steps.clear()
    step = None
    free(device)
    return list(cells.values())


def write(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def _line(cell: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    head = f"{cell['precision']:5} {cell['model']:18} {cell['mode']:13}"
    if "error" in cell:
        return f"{head} {cell['error'][:120]}"
    alike = [c for c in cells if all(c[k] == cell[k] for k in ("model", "precision")) and "median_ms" in c]
    base = next((c for c in alike if c["mode"] == ("plain-loop" if cell["mode"] in LOOPS else "non-private")), None)
    text = f"{head} {cell['median_ms']:9.2f} ms"
    if "device_ms" in cell:
        text += f" {cell['device_ms']:7.2f} on the device, {cell['kernels']:.0f} kernels"
    if "peak_mib" in cell:
        text += f" {cell['peak_mib']:9.0f} MiB"
    if base is not None:
        text += f"  x{cell['median_ms'] / base['median_ms']:.2f}"
        text += f"  memory x{cell['peak_mib'] / base['peak_mib']:.2f}" if "peak_mib" in cell else ""
    return text


PAIR = ("dp-sgd", "lambda-cgd")


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and two order statistics around it that hold the true one in 95 of 100 cases (n ≥ 6)."""
    ordered = sorted(values)
    n = len(ordered)
    below, chance = 0, 2.0**-n  # P(Binomial(n, 1/2) ≤ 0)
    total = chance
    while total <= 0.025 and below < n:
        below += 1
        chance *= (n - below + 1) / below
        total += chance
    low = max(0, below - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def ratios(turn: Callable[[str], float], rounds: int) -> tuple[list[float], list[float]]:
    """Per round, in turns A B B A: B's time over A's, and A's time. ``turn`` runs one of ``PAIR`` and times it."""
    a, b = PAIR
    over_base, base = [], []
    for _ in range(rounds):
        first, second, third, fourth = (turn(kind) for kind in (a, b, b, a))
        over_base.append((second + third) / (first + fourth))
        base.append((first + fourth) / 2)
    return over_base, base


def compare_pair(
    model: str, precision: str, device: torch.device, *, batch: int, warm_up: int, rounds: int
) -> dict[str, Any]:
    """One cell: the ratio of the two steps with its interval."""
    step = OurStep(CASES[model], device, precision, batch, *PAIR)

    def time_of(kind: str) -> float:
        step.kind = kind
        return turn(step, device)

    ratios(time_of, warm_up)
    over_base, base = ratios(time_of, rounds)
    ratio, low, high = median_interval(over_base)
    return {
        "model": model, "precision": precision, "batch": batch, "ratio": ratio, "low": low, "high": high,
        "dp_sgd_ms": statistics.median(base), "rounds": rounds,
    }  # fmt: skip


def run_pair(
    models: Sequence[str],
    *,
    precisions: Sequence[str],
    device: str,
    warm_up: int = 2,
    rounds: int = 40,
    batch: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Compare λCGD's step with DP-SGD's for every model and precision, and print a line for each.

    A comparison that fails is recorded as an error, and the rest goes on. JSON goes to ``out`` after every model.

    Returns:
        The machine and a cell for every comparison: the ratio with its interval.

    Raises:
        ValueError: A name is not known.
        InvalidInput: There are fewer than 6 rounds.
    """
    check_names(model=(models, tuple(CASES)), precision=(precisions, PRECISIONS))
    integer("rounds", rounds, minimum=6)
    place = torch.device(device)
    result: dict[str, Any] = {"machine": measured_on(), "cells": []}
    for precision in precisions:
        for model in models:
            size = batch or CASES[model].batch
            try:
                with set_precision(precision):
                    cell = compare_pair(model, precision, place, batch=size, warm_up=warm_up, rounds=rounds)
                text = f"{cell['ratio']:.4f} ({cell['low']:.4f} to {cell['high']:.4f}) of {cell['dp_sgd_ms']:.2f} ms"
            except Exception as error:  # one model that fails must not lose the rest
                cell = {"model": model, "precision": precision, "batch": size, "error": f"{error}"[:500]}
                text = cell["error"][:120]
            free(place)
            result["cells"].append(cell)
            print(f"{precision:5} {model:18} λCGD over DP-SGD {text}", flush=True)
            write(result, out)
    return result


_EXAMPLES, _BATCH, _EPOCHS = 50_000, 128, 10


def _captured_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _private_cnn(plan: Any, x: Tensor, y: Tensor) -> Any:
    model = problem("cifar10").models["cnn"]().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    key = lc.SecretKey.generate()
    return lc.privatize(model, optimizer, TensorDataset(x, y), plan, max_grad_norm=0.3, key=key)


def _by_captured_steps(plan: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    began = time.perf_counter()
    run = _private_cnn(plan, x, y)
    step = run.captured_step(_captured_loss, (x, y))
    step.run(1)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    step.run(plan.steps - 1)
    torch.cuda.synchronize()
    end = time.perf_counter()
    finite = all(bool(torch.isfinite(p).all()) for p in run.model.parameters())
    return {"steps": run.steps_taken, "seconds": end - began, "until_first_step": ready - began, "finite": finite}


def _by_plain_loop(plan: Any, x: Tensor, y: Tensor, *, warm_up: int = 20) -> dict[str, Any]:
    run = _private_cnn(plan, x, y)
    batches, epoch, began = iter(run.loader), plan.steps // _EPOCHS, 0.0
    for i in range(warm_up + epoch):
        if i == warm_up:
            torch.cuda.synchronize()
            began = time.perf_counter()
        inputs, targets = next(batches)
        _captured_loss(run.model, inputs, targets).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / epoch
    return {"steps_timed": epoch, "seconds_of_all_steps": each * plan.steps}


def run_captured(*, out: Path | None = None) -> dict[str, Any]:
    """Ten epochs of the sweeps' CNN on CUDA: by captured steps, cold and warm, and by the plain loop.

    Images are random; time does not depend on them. "cold" is all that the first run in a process takes, from
    ``lc.privatize`` to the last of 3 900 steps, kernels compiled and graphs captured; "warm" is the second run's. The
    plain loop (``private.loader``) is timed over one epoch after a few steps and counted ten times.

    Args:
        out: Write JSON here.
    """
    if not torch.cuda.is_available():
        raise InvalidInput("device", "cpu", "captured steps are CUDA graphs: this benchmark needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plan = lc.plan(_EXAMPLES, _BATCH, epochs=_EPOCHS, epsilon=8.0, delta=1e-5, mechanism=lc.LambdaCGD(0.95))
    x = torch.randn(_EXAMPLES, 3, 32, 32, device="cuda")
    y = torch.randint(0, 10, (_EXAMPLES,), device="cuda")
    result = {
        "cold": _by_captured_steps(plan, x, y), "warm": _by_captured_steps(plan, x, y),
        "plain": _by_plain_loop(plan, x, y), "mechanism": str(plan.mechanism), "batch": _BATCH, "precision": "tf32",
        "machine": measured_on(),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    write(result, out)
    return result
