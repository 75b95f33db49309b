"""Attacks that read the lowest bits of released numbers, without the key (`attacks`).

Each guesses whether a gradient was in the sums, in trials where it was and in as many where it was not. A test fails if
Fisher's exact test says, with a p-value below 10⁻⁶, that the true and the false positive rate of an attack differ. If
they are equal this happens with probability 10⁻⁶ at most for each attack of each test, below 2·10⁻⁴ for the whole file.
The keys are new in every trial. That the attacks work is shown on the same releases, with the lattice taken away, and
with the noise of format 1.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

import lambdacgd as lc
from lambdacgd.noise import field
from lambdacgd.noise.layout import Combination, Job
from lambdacgd.training.step import PrivateStep

from . import attacks

Array = np.ndarray
ATTACKS = ("granularity", "angles", "angles of format 1", "shared bits")
SHARPEST = {"granularity", "angles", "shared bits"}  # win wherever nothing is rounded
MANTISSA = {torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


class Release(NamedTuple):
    """What an attacker sees of the first steps, and the sums if the gradient was in them. The other candidate is 0."""

    numbers: list[Array]
    candidates: list[Array]
    exact: int  # in so many steps the numbers are those released: later ones of weights are differences, rounded again


class Setting(NamedTuple):
    """The public terms of a run, how its numbers are shown, and what lies between its first step and the others.

    At a *restart* the noise forgets its past. After *resume* another process goes on with the run.
    """

    dtype: torch.dtype
    lam: float
    sigma: float
    between: Literal["nothing", "restart", "resume"] = "nothing"


def guesses(seen: Release, to: Setting) -> tuple[bool, ...]:
    """Whether each attack says "present". The noise z of each step is computed under both hypotheses."""
    scores = np.zeros((len(ATTACKS), 2))
    before = [np.zeros_like(seen.candidates[0])] * 2
    for t, (out, g) in enumerate(zip(seen.numbers, seen.candidates, strict=True)):
        if t < seen.exact:
            scores[0, 1] += attacks.granularity(out, g, mantissa=MANTISSA[to.dtype])
        for h in (0, 1):
            z = before[h] = (out - h * g) / to.sigma + (0.0 if to.between == "restart" else to.lam) * before[h]
            scores[1:, h] += attacks.angles(z), attacks.angles(z, bits=32), attacks.shared_bits(z)
    return tuple(bool(a) for a in (scores[0, 1] > -math.inf, *(scores[1:, 1] > scores[1:, 0])))


def rates(release: Callable[[int, bool], Release], to: Setting, trials: int) -> dict[str, tuple[float, float, float]]:
    """For each attack the true and false positive rate and Fisher's p-value."""
    said = np.array([[guesses(release(trial, here), to) for here in (True, False)] for trial in range(trials)])
    found = {}
    for name, (right, wrong) in zip(ATTACKS, said.sum(axis=0).T.tolist(), strict=True):
        p = stats.fisher_exact([[right, wrong], [trials - right, trials - wrong]]).pvalue
        found[name] = (right / trials, wrong / trials, float(p))
    return found


@functools.cache
def plan(lam: float, sigma: float, fresh: bool, steps: int) -> lc.Plan:
    """Epochs of one step, so all examples take part in all steps. With fresh bins each of them restarts the noise."""
    return lc.plan(
        8, 8, epochs=steps, noise_multiplier=sigma, delta=1e-3, mechanism=lc.LambdaCGD(lam),
        sampling=lc.BallsInBins("fresh" if fresh else "fixed"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of runs have a ledger and need not survive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def new_key(to: Setting, folder: str) -> lc.SecretKey:
    """A run that is resumed has a ledger, so its key has a file."""
    key = lc.SecretKey.generate()
    if to.between == "resume":
        key.save(Path(folder) / "run.key")
    return key


def sums(to: Setting, *, d: int = 20_000, steps: int = 3, device: str = "cpu") -> Callable[[int, bool], Release]:
    """Releases of a ``Noiser``. bfloat16 numbers are made of float32 ones, as gradients of bfloat16 weights are."""
    p = plan(to.lam, to.sigma, to.between == "restart", steps)
    kind = torch.float64 if to.dtype == torch.float64 else torch.float32

    def release(trial: int, present: bool) -> Release:
        g = np.random.default_rng(trial).standard_normal(d)
        g = (g / np.linalg.norm(g)).astype(np.float32).astype(np.float64)
        with tempfile.TemporaryDirectory() as folder:
            noiser, numbers = lc.Noiser(p, new_key(to, folder), max_grad_norm=1.0), []
            for step in range(steps):
                if step == 1 and to.between == "resume":
                    state, path = noiser.state_dict(), noiser.run.key.path
                    del noiser  # and its lock
                    noiser = lc.Noiser(p, lc.SecretKey.load(path), max_grad_norm=1.0)
                    noiser.load_state_dict(state)
                noiser.batch()
                total = torch.tensor(g * present, dtype=kind, device=device)
                numbers.append(noiser.add({"w": total})["w"].to(to.dtype).cpu().double().numpy())
        return Release(numbers, [g] * steps, steps)

    return release


class LoRA(torch.nn.Module):
    """A frozen layer and a low-rank change of it, whose second factor B begins at zero."""

    def __init__(self, d: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = torch.nn.Linear(64, d // 4, bias=False, dtype=dtype).requires_grad_(False)
        self.A = torch.nn.Linear(64, 4, bias=False, dtype=dtype)
        self.B = torch.nn.Linear(4, d // 4, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.B(self.A(x))  # type: ignore[no-any-return]


def weights(to: Setting, patch: pytest.MonkeyPatch, *, lora: bool) -> Callable[[int, bool], Release]:
    """What weights that begin at zero show of a real loop: B/η = 1 times their change is the released sum itself.

    With LoRA one step is attacked: later the sums depend on the weights.
    """
    d, steps, name = 4 * 384, 1 if lora else 2, "B.weight" if lora else "weight"
    p = plan(to.lam, to.sigma, to.between == "restart", steps)
    adds = PrivateStep.add_noise_
    gathered: list[Array] = []
    candidates: dict[int, list[Array]] = {}

    def add_noise_(self: PrivateStep, totals: dict[str, torch.Tensor], *rest: object, **more: object) -> None:
        gathered.append(totals[name].double().numpy().ravel().copy())
        adds(self, totals, *rest, **more)  # type: ignore[arg-type]

    patch.setattr(PrivateStep, "add_noise_", add_noise_)

    def release(trial: int, present: bool) -> Release:
        torch.manual_seed(trial)
        model = LoRA(d, to.dtype) if lora else torch.nn.Linear(d, 1, bias=False, dtype=to.dtype)
        shown = model.B.weight if isinstance(model, LoRA) else model.weight
        torch.nn.init.zeros_(shown)
        # All examples are zero but one, whose gradient is far longer than ζ at any weights, and so clipped to it.
        x = torch.zeros(8, 64 if lora else d, dtype=to.dtype)
        x[0] = present * torch.randn(x.shape[1], dtype=to.dtype)
        data = torch.utils.data.TensorDataset(x, torch.full((8, d // 4 if lora else 1), -1e6, dtype=to.dtype))

        def begin(key: lc.SecretKey) -> tuple[torch.optim.Optimizer, lc.Private]:
            optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=8.0)
            return optimizer, lc.privatize(model, optimizer, data, p, max_grad_norm=1.0, key=key)

        gathered.clear()
        seen = [np.zeros(d)]
        with tempfile.TemporaryDirectory() as folder:
            optimizer, private = begin(new_key(to, folder))
            while private.steps_taken < steps:
                for a, b in private.loader:
                    torch.nn.functional.mse_loss(model(a), b).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(shown.detach().double().numpy().ravel().copy())
                    if to.between == "resume" and private.steps_taken == 1:
                        break
                if private.steps_taken < steps:
                    private.save(Path(folder) / "checkpoint")
                    private.detach()
                    torch.nn.init.zeros_(shown)
                    optimizer, private = begin(lc.SecretKey.load(Path(folder) / "run.key"))
                    private.resume(Path(folder) / "checkpoint")
            private.detach()
        assert all(total.any() == present for total in gathered)
        if present:
            candidates[trial] = list(gathered)
        return Release([before - now for before, now in itertools.pairwise(seen)], candidates[trial], 1)

    return release


def alike(found: dict[str, tuple[float, float, float]]) -> bool:
    return all(p > 1e-6 for *_, p in found.values())


def wins(found: dict[str, tuple[float, float, float]]) -> set[str]:
    """The attacks that were right in (almost) all trials."""
    return {name for name, (right, wrong, p) in found.items() if right > 0.9 and wrong < 0.1 and p < 1e-6}


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SETTINGS = [
    setting
    for dtype in DTYPES
    for setting in (
        Setting(dtype, 0.0, 4.0),
        Setting(dtype, 0.9, 4.0),
        Setting(dtype, 0.9, 100.0, "restart"),
        Setting(dtype, 0.9, 4.0, "resume"),
    )
]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("to", SETTINGS, ids=str)
def test_released_sums(to: Setting, device: str) -> None:
    """First steps of a run, steps after the noise forgot its past, and steps of a run that another process began."""
    found = rates(sums(to, device=device), to, 40)
    assert alike(found), found


@pytest.mark.slow
@pytest.mark.parametrize("to", SETTINGS, ids=str)
def test_released_sums_in_many_trials(to: Setting) -> None:
    """400 trials and twice the numbers: rates that differ by 0.25 would be seen in nine of ten runs of this test."""
    found = rates(sums(to, d=40_000), to, 400)
    assert alike(found), found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("between", ["nothing", "restart", "resume"])
def test_weights_of_a_real_loop(
    dtype: torch.dtype, between: Literal["nothing", "restart", "resume"], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = Setting(dtype, 0.9, 1.0, between)
    found = rates(weights(to, monkeypatch, lora=False), to, 20)
    assert alike(found), found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_lora(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Setting(dtype, 0.9, 1.0)
    found = rates(weights(to, monkeypatch, lora=True), to, 20)
    assert alike(found), found


# --- The same attacks where the library is broken: they win -----------------------------------------------------------


def without_lattice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Combination, "lattice_at", lambda self, step: 0.0)


def as_format_1(patch: pytest.MonkeyPatch) -> None:
    """Words of 32 bits for radius and angle, and noise added to the sum in the sum's own dtype, without a lattice."""
    patch.setattr(field, "_OWN", torch.zeros_like(field._OWN))
    patch.setattr(field, "_COMMON", torch.zeros_like(field._COMMON))
    halves = torch.tensor([0.5 + 2.0**-33, 2.0**-33], dtype=torch.float64)
    patch.setattr(field, "_STARTS", halves.view(field._STARTS.shape))
    added_in_its_own_dtype(patch)


def added_in_its_own_dtype(patch: pytest.MonkeyPatch, narrow: torch.dtype | None = None) -> None:
    real = field.add_on_cpu

    def add_on_cpu(jobs: list[Job], *numbers: object, read: bool = True) -> bool:
        for job in jobs:
            kind = narrow or job.tensor.dtype
            noise = torch.empty_like(job.tensor)
            real([Job(job.entry, noise, job.offset)], *numbers, read=False)  # type: ignore[arg-type]
            job.tensor.copy_(job.tensor.to(kind) + noise.to(kind))
        return True

    patch.setattr(field, "add_on_cpu", add_on_cpu)


def added_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    added_in_its_own_dtype(patch, torch.bfloat16)


def fineness(bits: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = Combination.lattice_at
        patch.setattr(Combination, "lattice_at", lambda self, step: math.ldexp(real(self, step), self.fineness - bits))

    return plant


@pytest.mark.parametrize(
    ("plant", "to", "winners"),
    [
        (without_lattice, Setting(torch.float64, 0.0, 4.0), SHARPEST),
        (without_lattice, Setting(torch.float64, 0.9, 4.0), SHARPEST),
        (without_lattice, Setting(torch.float64, 0.9, 4.0, "restart"), SHARPEST),
        (without_lattice, Setting(torch.float64, 0.9, 4.0, "resume"), SHARPEST),
        (fineness(40), Setting(torch.float64, 0.0, 4.0), {"shared bits"}),
        (fineness(30), Setting(torch.float64, 0.0, 4.0), set()),  # a million times finer than ours would still do
        (as_format_1, Setting(torch.float64, 0.9, 4.0), {"angles of format 1"}),
        (as_format_1, Setting(torch.float32, 0.9, 4.0), {"granularity"}),
        (as_format_1, Setting(torch.float32, 0.9, 4.0, "restart"), {"granularity"}),
        (as_format_1, Setting(torch.float32, 0.9, 4.0, "resume"), {"granularity"}),
        (added_in_bfloat16, Setting(torch.bfloat16, 0.9, 4.0), {"granularity"}),
    ],
)
def test_the_attacks_win_without_a_lattice(
    plant: Callable[[pytest.MonkeyPatch], None], to: Setting, winners: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = rates(sums(to), to, 12)
    assert wins(found) >= winners, found
    assert alike(found) == (not winners)


@pytest.mark.parametrize("lora", [False, True], ids=["zero layer", "LoRA"])
@pytest.mark.parametrize(
    ("plant", "dtype", "winners"),
    [
        (without_lattice, torch.float64, SHARPEST),
        (as_format_1, torch.float64, {"angles of format 1"}),
        (as_format_1, torch.float32, {"granularity"}),
        (added_in_bfloat16, torch.bfloat16, {"granularity"}),
    ],
)
def test_the_attacks_win_on_weights_without_a_lattice(
    plant: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
    winners: set[str],
    lora: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    to = Setting(dtype, 0.9, 1.0)
    found = rates(weights(to, monkeypatch, lora=lora), to, 12)
    assert wins(found) >= winners, found


@pytest.mark.parametrize("plant", [None, without_lattice, as_format_1, added_in_bfloat16, fineness(11)])
def test_an_audit_sees_whether_releases_lie_on_the_lattice(
    plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = lc.plan(1000, 250, epochs=2, epsilon=2.0, delta=1e-2, mechanism=lc.LambdaCGD(0.9, normalized=True))
    if plant:
        plant(monkeypatch)
    result = lc.audit(p, runs=1, seed=0)
    assert ("lattice" in {check.name for check in result.failed}) == bool(plant), str(result)
