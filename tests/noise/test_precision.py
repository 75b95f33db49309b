"""How accurate the normals are: what lemma 2 of docs/noise-proof.md assumes, against 200-bit arithmetic."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from lambdacgd.accounting import floating_point
from lambdacgd.keys import scattered_blocks
from lambdacgd.mechanisms import BLT, BSR, Horizon, LambdaCGD
from lambdacgd.noise import cpu, layout

from .helpers import SUBKEY

flint = pytest.importorskip("flint")
arb = flint.arb


@pytest.fixture(autouse=True)
def precise() -> object:
    before, flint.ctx.prec = flint.ctx.prec, 200
    yield
    flint.ctx.prec = before


def exact(words: np.ndarray, second: np.ndarray, pair: int) -> tuple[float, object, object]:
    """The radius, x and y of a pair, as the format's text says."""
    w, s = [int(v) for v in words], [int(v) for v in second]
    m = w[10 + pair] >> 12 << 32 | w[pair]
    u = (arb(m) + arb(0.5)) / 2**52
    if min(m, 2**52 - 1 - m) < 2**37:
        more = ((s[10 + pair] >> 12 << 32 | s[pair]) + (arb(s[5 + pair]) + arb(0.5)) / 2**32) / 2**52
        u = (m + more) / 2**52 if m < 2**51 else 1 - (2**52 - 1 - m + more) / 2**52
    k = (w[15] >> 6 * pair & 63) << 44 | (w[10 + pair] & 0xFFF) << 32 | w[5 + pair]
    turn = 2 * arb.pi() * (arb(k) + arb(0.5)) / 2**50
    radius = (-2 * u.log()).sqrt()
    return float(radius), radius * turn.cos(), radius * turn.sin()


def edges(rng: np.random.Generator) -> np.ndarray:
    """Blocks whose words are extreme: radii next to 0, in the tail, and on either side of where more bits are taken."""
    words = rng.integers(0, 1 << 32, (400, 16), dtype=np.uint32)
    tops = [0, 1, 31, 32, 33, 63, 2**19 - 1, 2**19, 2**20 - 33, 2**20 - 32, 2**20 - 31, 2**20 - 1]
    for row, block in enumerate(words[:300]):
        block[10:15] = (tops[row % len(tops)] << 12) | (block[10:15] & 0xFFF)
        if row % 3 == 0:
            block[:5] = rng.choice(np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint32), 5)
        if row % 5 == 0:
            block[5:10] = rng.choice(np.array([0, 2**32 - 1], dtype=np.uint32), 5)
            block[15] = rng.choice(np.array([0, 2**32 - 1, 0x15555555, 0x2AAAAAAA], dtype=np.uint32))
    return words


def test_the_cpu_is_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """|z̃ − z| ≤ 2⁻⁴⁹r + 2⁻⁵⁰/r, and 2⁻⁴⁹r where u has more bits: for extreme words and for random ones."""
    rng = np.random.default_rng(0)
    words = np.concatenate([edges(rng), rng.integers(0, 1 << 32, (368, 16), dtype=np.uint32)])
    groups = len(words) // 32
    tails = np.array([[block, layout.SECOND, 7, 0] for block in range(len(words))], dtype=np.uint32)
    second = scattered_blocks(SUBKEY, tails)

    def fill(subkey: bytes, block: int, count: int, step: int) -> None:
        memoryview(cpu._scratch.bytes)[: 64 * count] = words[block : block + count].astype("<u4").tobytes()

    monkeypatch.setattr(cpu, "_fill_words", fill)
    ours = cpu.combined(SUBKEY, 0, groups, [(7, 1.0)], 1.0).numpy().reshape(groups, 10, 32)
    for block, row in enumerate(words):
        group, lane = divmod(block, 32)
        for pair in range(5):
            radius, x, y = exact(row, second[block], pair)
            top = int(row[10 + pair]) >> 12
            rare = top < 32 or top >= 2**20 - 32
            bound = 2.0**-49 * radius + (0 if rare else 2.0**-50 / radius)
            for got, want in ((ours[group, pair, lane], x), (ours[group, 5 + pair, lane], y)):
                assert abs(float(arb(float(got)) - want)) <= bound, (block, pair)


def coefficients(function: str, letter: str) -> list[float]:
    """A polynomial of the CUDA kernel, the highest power first, read from its source: Triton is not needed."""
    text = Path(cpu.__file__).with_name("kernel.py").read_text()
    body = text[text.index(f"def {function}(") :]
    body = body[: body.index("\n    return") + 1]
    number = r"([+-]?) ?(-?\d[\d.]*(?:e[+-]\d+)?)"
    first = re.search(rf"\n    {letter} = \w \* (\S+) {number}\n", body)
    assert first is not None
    found = [float(first[1]), float(first[2] + first[3])]
    for sign, value in re.findall(rf"\n    {letter} = {letter} \* \w {number}(?=\n)", body):
        found.append(float(sign + value))
    return found


def largest_error(polynomial: list[float], function: object, low: float, high: float, pieces: int = 20_000) -> float:
    """A proven bound on |polynomial − function| over the interval: the middle of each piece, and the derivative."""
    worst = 0.0
    for k in range(pieces):
        a, b = low + (high - low) * k / pieces, low + (high - low) * (k + 1) / pieces
        series = flint.arb_series([arb((a + b) / 2), 1], 8)
        value = flint.arb_series([0], 8)
        for c in polynomial:
            value = value * series + arb(c)
        error = value - function(series)  # type: ignore[operator]
        half, total = (b - a) / 2, 0.0
        for j in range(8):
            total += float(abs(error[j]).upper()) * half**j
        worst = max(worst, total)
    return worst


def test_the_kernels_polynomials_are_within_the_bound() -> None:
    """Over the whole interval, up to the eighth derivative, which adds less than 10⁻³⁰ at this width of a piece."""
    logarithm = coefficients("_minus_two_log", "p")
    sine, cosine = coefficients("_pair", "s"), coefficients("_pair", "c")
    assert (len(logarithm), len(sine), len(cosine)) == (20, 9, 9)
    assert largest_error(logarithm, lambda x: -2 * (x + arb(1.5)).log(), -0.5, 0.5, 2000) < 2.0**-52
    quarter = arb.pi() / 2
    assert largest_error(cosine, lambda q: (quarter * q.sqrt()).cos(), 2.0**-30, 1.0, 2000) < 2.0**-53
    assert largest_error(sine, lambda q: (quarter * q.sqrt()).sin() / q.sqrt(), 2.0**-30, 1.0, 2000) < 2.0**-53


def test_displacements_are_those_of_the_words() -> None:
    """The shells' table is above what moving a word by half its cell does to the radius and the angle, everywhere."""
    probability, largest = floating_point._displacements(2.0**-9)
    assert abs(probability.sum() - 1) < 1e-12
    u = np.concatenate([np.geomspace(2.0**-15, 0.5, 4000), 1 - np.geomspace(2.0**-15, 0.5, 4000)[::-1]])
    radius = np.sqrt(-2 * np.log(u))
    step = 2.0**-53 / (u * radius)  # dr
    below = np.cumsum(probability)
    shell = np.minimum(np.searchsorted(below, -np.expm1(-(radius**2) / 2)), len(below) - 1)
    moved = step + radius * math.pi * 2.0**-50 + 2.0**-49 * radius + 2.0**-50 / radius
    assert (largest[shell] >= moved).all()
    assert math.sqrt((probability * largest**2).sum()) < 1.6 * 2.0**-47  # their root mean square


def test_what_a_run_costs() -> None:
    """Figures that docs/noise-proof.md shows."""
    run = {"steps": 4000, "parameters": 300_000, "fineness": 10, "delta": 1e-12}
    fresh = floating_point.floating_point_cost(LambdaCGD(0.9), restart_every=400, **run)
    assert 5e-6 < fresh.epsilon < 2e-5
    assert fresh.delta < 1.01e-12
    longer = floating_point.floating_point_cost(LambdaCGD(0.9), restart_every=None, **run)
    independent = floating_point.floating_point_cost(LambdaCGD(0.0), restart_every=None, **run)
    assert independent.epsilon < fresh.epsilon < longer.epsilon
    for mechanism in (BLT(3), BSR(16)):
        cost = floating_point.floating_point_cost(mechanism.resolve(Horizon(400, 10)), restart_every=None, **run)
        assert cost.epsilon < 5e-4


def test_a_run_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="Train fewer parameters or steps"):
        floating_point.cover(
            LambdaCGD(0.95), steps=40_000, restart_every=None, parameters=10**9, epsilon=0.1, delta=1e-6
        )


def test_the_share_covers_what_the_run_costs() -> None:
    for epsilon in (0.1, 1.0, 8.0, 30.0):
        cost = floating_point.cover(
            LambdaCGD(0.9), steps=4000, restart_every=400, parameters=300_000, epsilon=epsilon, delta=1e-5
        )
        real = epsilon - floating_point.set_aside(epsilon, 1e-5)["epsilon"]
        assert real + 2 * cost.epsilon <= epsilon
        assert floating_point.claimed_epsilon(real) == pytest.approx(epsilon, rel=1e-12)
        delta = math.exp(cost.epsilon) * 1e-5 * (1 - floating_point.DELTA_SHARE)
        assert delta + (1 + math.exp(real + cost.epsilon)) * cost.delta <= 1e-5
