"""Attacks that read the lowest bits of released numbers, without the key (`lambdacgd.auditing.floating`).

Each guesses whether a gradient was in the sums, in trials where it was and in as many where it was not. A test fails if
Fisher's exact test says, with a p-value below 10⁻⁶, that the true and the false positive rate of an attack differ. If
they are equal this happens with probability 10⁻⁶ at most for each attack of each test, below 10⁻⁴ for the whole file.
The keys are new in every trial. That the attacks work is shown on the same releases, with the lattice taken away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

import lambdacgd as lc
from lambdacgd.auditing import floating
from lambdacgd.noise import cpu
from lambdacgd.noise.layout import Combination, Job
from lambdacgd.training.step import PrivateStep

Array = np.ndarray
ATTACKS = ("granularity", "angles", "shared bits")
MANTISSA = {torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


class Release(NamedTuple):
    """What an attacker sees of the first steps, and the sums if the gradient was in them. The other candidate is 0."""

    numbers: list[Array]
    candidates: list[Array]
    exact: int  # in so many steps the numbers are those released: later ones of weights are differences, rounded again


class Setting(NamedTuple):
    """The public terms of a run, and how its numbers are shown."""

    dtype: torch.dtype
    lam: float
    sigma: float
    restart: bool


def guesses(seen: Release, to: Setting) -> tuple[bool, ...]:
    """Whether each attack says "present". The noise z of each step is computed under both hypotheses."""
    scores = np.zeros((3, 2))
    before = [np.zeros_like(seen.candidates[0])] * 2
    for t, (out, g) in enumerate(zip(seen.numbers, seen.candidates, strict=True)):
        if t < seen.exact:
            scores[0, 1] += floating.granularity(out, g, mantissa=MANTISSA[to.dtype])
        for h in (0, 1):
            before[h] = (out - h * g) / to.sigma + (0.0 if to.restart else to.lam) * before[h]
            scores[1:, h] += floating.angles(before[h]), floating.shared_bits(before[h])
    return tuple(bool(a) for a in (scores[0, 1] > -math.inf, *(scores[1:, 1] > scores[1:, 0])))


def rates(release: Callable[[int, bool], Release], to: Setting, trials: int) -> dict[str, tuple[float, float, float]]:
    """For each attack the true and false positive rate and Fisher's p-value."""
    said = np.array([[guesses(release(trial, here), to) for here in (True, False)] for trial in range(trials)])
    found = {}
    for name, (right, wrong) in zip(ATTACKS, said.sum(axis=0).T.tolist(), strict=True):
        p = stats.fisher_exact([[right, wrong], [trials - right, trials - wrong]]).pvalue
        found[name] = (right / trials, wrong / trials, float(p))
    return found


def plan(to: Setting, steps: int) -> lc.Plan:
    """Epochs of one step, so all examples take part in all steps. With fresh bins each of them restarts the noise."""
    return lc.plan(
        8, 8, epochs=steps, noise_multiplier=to.sigma, delta=1e-3, mechanism=lc.LambdaCGD(to.lam),
        sampling=lc.BallsInBins("fresh" if to.restart else "fixed"),
    )  # fmt: skip


def sums(to: Setting, *, d: int = 20_000, steps: int = 3, device: str = "cpu") -> Callable[[int, bool], Release]:
    """Releases of a ``Noiser``. bfloat16 numbers are made of float32 ones, as gradients of bfloat16 weights are."""
    p = plan(to, steps)
    kind = torch.float64 if to.dtype == torch.float64 else torch.float32

    def release(trial: int, present: bool) -> Release:
        g = np.random.default_rng(trial).standard_normal(d)
        g = (g / np.linalg.norm(g)).astype(np.float32).astype(np.float64)
        noiser, numbers = lc.Noiser(p, lc.SecretKey.generate(), max_grad_norm=1.0), []
        for _ in range(steps):
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
    p = plan(to, steps)
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
        optimizer = torch.optim.SGD([w for w in model.parameters() if w.requires_grad], lr=8.0)
        private = lc.privatize(model, optimizer, data, p, max_grad_norm=1.0)
        gathered.clear()
        seen = [np.zeros(d)]
        for a, b in private.loader:
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(shown.detach().double().numpy().ravel().copy())
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


SETTINGS = [
    Setting(torch.float32, 0.0, 4.0, restart=False),
    Setting(torch.float32, 0.9, 4.0, restart=False),
    Setting(torch.float32, 0.9, 100.0, restart=True),
    Setting(torch.float64, 0.0, 4.0, restart=False),
    Setting(torch.float64, 0.9, 4.0, restart=False),
    Setting(torch.float64, 0.9, 100.0, restart=True),
    Setting(torch.bfloat16, 0.9, 4.0, restart=False),
]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("to", SETTINGS, ids=str)
def test_released_sums(to: Setting, device: str) -> None:
    """First steps of a run, and steps after a restart."""
    found = rates(sums(to, device=device), to, 40)
    assert alike(found), found


@pytest.mark.slow
@pytest.mark.parametrize("to", SETTINGS, ids=str)
def test_released_sums_in_many_trials(to: Setting) -> None:
    """400 trials and twice the numbers: rates that differ by 0.25 would be seen in nine of ten runs of this test."""
    found = rates(sums(to, d=40_000), to, 400)
    assert alike(found), found


@pytest.mark.parametrize(("lora", "restart"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights_of_a_real_loop(dtype: torch.dtype, lora: bool, restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Setting(dtype, 0.9, 1.0, restart)
    found = rates(weights(to, monkeypatch, lora=lora), to, 20)
    assert alike(found), found


# --- The same attacks where the library is broken: they win -----------------------------------------------------------


def without_lattice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Combination, "lattice_at", lambda self, step: 0.0)


def added_in_float32(patch: pytest.MonkeyPatch) -> None:
    """As format 1 did: noise in float32, added to sums in float32."""
    real = cpu.apply

    def apply(jobs: list[Job], *numbers: object, read: bool = True) -> bool:
        for job in jobs:
            noise = torch.empty(job.source.shape)
            real([Job(job.entry, noise, noise, job.offset)], *numbers, read=False)  # type: ignore[arg-type]
            job.target.copy_(job.source.float() + noise)
        return True

    patch.setattr(cpu, "apply", apply)


def fineness(bits: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = Combination.lattice_at
        patch.setattr(Combination, "lattice_at", lambda self, step: math.ldexp(real(self, step), self.fineness - bits))

    return plant


@pytest.mark.parametrize(
    ("plant", "dtype", "lam", "winners"),
    [
        (without_lattice, torch.float64, 0.0, set(ATTACKS)),
        (without_lattice, torch.float64, 0.9, set(ATTACKS)),
        (fineness(40), torch.float64, 0.0, {"shared bits"}),
        (fineness(30), torch.float64, 0.0, set()),  # a lattice a million times finer than ours would still do
        (added_in_float32, torch.float32, 0.9, {"granularity"}),
    ],
)
def test_the_attacks_win_without_a_lattice(
    plant: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
    lam: float,
    winners: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    to = Setting(dtype, lam, 4.0, restart=False)
    found = rates(sums(to), to, 20)
    assert wins(found) == winners, found
    assert alike(found) == (not winners)


@pytest.mark.parametrize("lora", [False, True], ids=["zero layer", "LoRA"])
@pytest.mark.parametrize(
    ("plant", "dtype", "winners"),
    [(without_lattice, torch.float64, set(ATTACKS)), (added_in_float32, torch.float32, {"granularity"})],
)
def test_the_attacks_win_on_weights_without_a_lattice(
    plant: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
    winners: set[str],
    lora: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    to = Setting(dtype, 0.9, 1.0, restart=False)
    found = rates(weights(to, monkeypatch, lora=lora), to, 20)
    assert wins(found) == winners, found


def test_an_audit_runs_the_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass on what is shipped (false alarms: 10⁻⁶ each) and catch a lattice that is missing."""
    monkeypatch.setattr(floating, "HALF", 15)
    monkeypatch.setattr(floating, "ELEMENTS", 50 * 384)
    p = lc.plan(1000, 250, epochs=2, epsilon=2.0, delta=1e-2, mechanism=lc.LambdaCGD(0.9, normalized=True))
    shipped = floating.floating_point(p, np.random.default_rng(0))
    assert shipped["covered"]
    assert set(shipped["attacks"]) == set(ATTACKS)
    assert all(attack["p_value"] > 1e-6 for attack in shipped["attacks"].values())
    without_lattice(monkeypatch)
    broken = floating.floating_point(p, np.random.default_rng(0))["attacks"]
    assert all(broken[name]["tpr"] == 1 and broken[name]["fpr"] == 0 for name in ("angles", "shared bits"))
