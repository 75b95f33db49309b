"""The lemmas of docs/noise-proof.md: the normals against 200-bit arithmetic, the rest against their worst cases."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

import lambdacgd as lc
from lambdacgd.accounting import floating_point
from lambdacgd.accounting.certificate import DELTA_SHARE, claimed_epsilon, set_aside
from lambdacgd.keys import scattered_blocks
from lambdacgd.mechanisms import BLT, BSR, Horizon, LambdaCGD
from lambdacgd.mechanisms.base import BandedInverse
from lambdacgd.noise import field, layout
from lambdacgd.training.step import floating_point_of

from .helpers import SUBKEY

flint = pytest.importorskip("flint")
arb = flint.arb


@pytest.fixture(autouse=True)
def precise() -> object:
    before, flint.ctx.prec = flint.ctx.prec, 200
    yield
    flint.ctx.prec = before


def own_words(words: np.ndarray, pair: int) -> tuple[int, int, int, bool]:
    """A pair's own word, its 52 bits m of u and 50 bits k of v, as the format's text says, and whether u is rare."""
    w = [int(v) for v in words]
    half = w[12 + pair % 3] >> 16 * (pair // 3) & 0xFFFF
    own = w[pair] ^ 1 << 31
    m = own << 20 | half % 2**10 << 10 | w[15] % 2**10
    k = w[6 + pair] << 18 | half >> 10 << 12 | w[15] >> 10 & 0xFFF
    return own, m, k, min(own, 2**32 - 1 - own) < 2**17


def rare_uniform(own: int, more: np.ndarray, place: float) -> object:
    """u where it is near 0 or 1: of the interval of width 2⁻¹⁶⁰ that the words name, the point at this place."""
    far = own >= 2**31
    distance = 2**32 - 1 - own if far else own
    for word in more[:4]:
        distance = distance << 32 | int(word)
    u = (arb(distance) + arb(place)) / arb(2) ** 160
    return 1 - u if far else u


def transform(u: object, v: object) -> tuple[float, object, object]:
    """Radius, x and y by Box and Muller."""
    radius, turn = (-2 * u.log()).sqrt(), 2 * arb.pi() * v  # type: ignore[attr-defined]
    return float(radius), radius * turn.cos(), radius * turn.sin()


def edges(rng: np.random.Generator) -> np.ndarray:
    """Blocks whose words are extreme: radii next to 0, in the tail, and on either side of where more bits are taken."""
    words = rng.integers(0, 1 << 32, (400, 16), dtype=np.uint32)
    tops = np.array([0, 1, 2**17 - 1, 2**17, 2**17 + 1, 2**31 - 1, 2**31, 2**31 + 1])
    tops = np.concatenate([tops, 2**32 - 1 - tops]).astype(np.uint32) ^ np.uint32(1 << 31)
    extremes = np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint32)
    for row, block in enumerate(words[:300]):
        block[:6] = tops[(row + np.arange(6)) % len(tops)]
        if row % 3 == 0:
            block[6:12] = rng.choice(extremes, 6)
        if row % 5 == 0:
            block[12:] = rng.choice(extremes, 4)
    return words


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, bool, np.ndarray, object, object]]:
    """Of extreme and random pairs: ``own_words``, the words of a pair's own second block, and x and y of the CPU."""
    rng = np.random.default_rng(0)
    words = np.concatenate([edges(rng), rng.integers(0, 1 << 32, (368, 16), dtype=np.uint32)])
    groups = len(words) // 32

    def fill(subkey: bytes, block: int, count: int, step: int) -> None:
        memoryview(field._scratch.bytes)[: 64 * count] = words[block : block + count].astype("<u4").tobytes()

    monkeypatch.setattr(field, "_fill_words", fill)
    ours = field.combined(SUBKEY, 0, groups, [(7, 1.0)], 1.0).numpy().reshape(groups, 12, 32)
    rows = []
    for pair in range(6):
        tails = [[block, layout.MORE | pair << 28, 7, 0] for block in range(len(words))]
        more = scattered_blocks(SUBKEY, np.array(tails, dtype=np.uint32))
        for block, row in enumerate(words):
            group, lane = divmod(block, 32)
            x, y = (arb(float(ours[group, number, lane])) for number in (pair, 6 + pair))
            rows.append((*own_words(row, pair), more[block], x, y))
    assert sum(rare for _, _, _, rare, *_ in rows) > 500
    return rows


def test_the_cpu_is_within_the_bound(computed: list) -> None:
    """|z̃ − z| ≤ 2⁻⁴⁹r + 2⁻⁵⁰/r, and 2⁻⁴⁹r where u has more bits: for extreme words and for random ones."""
    for own, m, k, rare, more, x, y in computed:
        u = rare_uniform(own, more, 0.5) if rare else (arb(m) + arb(0.5)) / 2**52
        radius, want_x, want_y = transform(u, (arb(k) + arb(0.5)) / 2**50)
        bound = 2.0**-49 * radius + (0 if rare else 2.0**-50 / radius)
        assert abs(float(x - want_x)) <= bound, (m, k)
        assert abs(float(y - want_y)) <= bound, (m, k)


@pytest.mark.parametrize(("shared_u", "shared_v"), [(0, 0), (10, 12)], ids=["all bits", "given the shared bits"])
def test_a_pair_is_as_close_to_ideal_ones_as_lemma_2_says(computed: list, shared_u: int, shared_v: int) -> None:
    """The computed pair against every corner of the (u', v') with which its words are coupled. The bound is sharp."""
    unit, turn = (2.0**-42, 2.0**-38) if shared_u else (2.0**-53, 2.0**-51)
    nearest = 0.0
    for own, m, k, rare, more, x, y in computed:
        for a, b in itertools.product((0, 1), repeat=2):
            inside = a + (0.5 - a) * 2.0**-50  # the interval is open above
            u = (arb(m >> shared_u) + arb(inside)) * 2**shared_u / 2**52
            v = (arb(k >> shared_v) + arb(b)) * 2**shared_v / 2**50
            r, want_x, want_y = transform(rare_uniform(own, more, inside) if rare else u, v)
            if r > floating_point._LONGEST:
                continue
            if rare:
                bound = 2.0**-51 + (2 * math.pi * turn + 2.0**-49) * r
            else:
                moved = unit * (1 + 2.0**-10) * math.exp(r * r / 2) / r
                bound = moved + (2 * math.pi * turn + 2.0**-49) * r + 2.0**-50 / r
            away = float((((x - want_x) ** 2 + (y - want_y) ** 2).sqrt()).upper()) / bound
            assert away <= 1, (m, k)
            nearest = max(nearest, away)
    assert nearest > 0.9


def test_composition_is_above_the_truth_and_near_it() -> None:
    """Lemma 4 beside n coins, p = (1 + x)/2 and 1/2: P(Σℓ > ε) of a binomial law, both ways."""
    n, x, delta = 1_000_000, 1e-4, 1e-9
    up, down = math.log1p(x), math.log1p(-x)
    epsilon = floating_point._composed(n, np.ones(1), np.full(1, -down), np.full(1, -down), delta)
    heads = (epsilon - n * down) / (up - down)  # Σℓ > ε from so many heads on
    assert stats.binom.sf(heads, n, (1 + x) / 2) < delta
    assert stats.binom.cdf((-epsilon - n * down) / (up - down), n, 0.5) < delta
    heads = (epsilon / 1.2 - n * down) / (up - down)
    assert stats.binom.sf(heads, n, (1 + x) / 2) > delta


NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)


def test_faces_that_move_change_a_cell_by_no_more_than_lemma_1_says() -> None:
    """Random cells within 11.7σ and their ends moved outwards or inwards, seed 1. The bound is sharp."""
    rng, nearest = np.random.default_rng(1), 0.0

    def log_mass(low: float, high: float, middle: float) -> float:
        z = (low + high) / 2 + NODES * (high - low) / 2
        return math.log((WEIGHTS * np.exp((middle**2 - z**2) / 2)).sum() * (high - low))

    for _ in range(2000):
        w, z = 2.0 ** rng.uniform(-10, -2), rng.uniform(-11.7, 11.7)
        h = w * w / 8 * 2.0 ** rng.uniform(-12, 0)
        bound = 2 * h / w * (1 + w * (floating_point._LONGEST + 1) / 2)
        for moved in (h, -h):
            ratio = log_mass(z - w / 2 - moved, z + w / 2 + moved, z) - log_mass(z - w / 2, z + w / 2, z)
            nearest = max(nearest, abs(ratio) / bound)
    assert 0.9 < nearest <= 1


def test_what_later_steps_show_of_a_pair_is_below_lemma_5() -> None:
    """Ends of both cells and all positions in them moved by D in the worst directions, seed 2."""
    rng = np.random.default_rng(2)

    def log_likelihood(low: float, high: float, moved: float, beta: float, seen: float) -> float:
        """log E e^g in a cell around its middle; ``seen`` is N + β(z − middle)."""
        y = (low + high) / 2 + NODES * (high - low) / 2
        law = WEIGHTS * np.exp(-(y**2) / 2)
        place = y + moved - middle
        return math.log((law * np.exp(beta * seen * place - (beta * place) ** 2 / 2)).sum() / law.sum())

    for _ in range(300):
        w, beta = 2.0 ** rng.uniform(-9, -2), 2.0 ** rng.uniform(-3, 4)
        far = w * w / 8 * 2.0 ** rng.uniform(-14, 0)
        kappa = 4 * far / w * (1 + w * (floating_point._LONGEST + 1) / 2)
        later = rng.standard_normal(2) * rng.choice([0.1, 1, 3])
        o = beta * w * (np.abs(later).sum() + 4 * beta * w)
        most = least = 0.0
        for n, middle in zip(later, np.clip(3 * rng.standard_normal(2), -8, 8), strict=True):
            low, high, seen = middle - w / 2, middle + w / 2, n + beta * w / 2 * rng.choice([-1, 0, 1])
            ideal = log_likelihood(low, high, 0.0, beta, seen)
            moves = itertools.product((-far, far), (-far, far), (-far, 0.0, far))
            found = [log_likelihood(low + a, high + b, c, beta, seen) - ideal for a, b, c in moves]
            most, least = most + max(found), least + min(found)
        shown = max(most, -least)
        assert shown <= kappa * (2 + o / 2)
        first = 4 * kappa * o * math.exp(min(2 * o, 300.0))
        assert shown <= first or first > floating_point._SMALL or kappa > floating_point._SMALL


def test_inverse_radii_have_the_moments_that_the_proof_takes() -> None:
    """E X < 5.42, E X² < 2¹⁴ − 2 and X < 2¹⁴ for X = 1/max(r, r₀)², r²/2 exponential."""
    s = -math.log1p(-(2.0**-15))  # r₀²/2
    tail = float(special.exp1(s))
    assert 1 / (2 * s) < 2.0**14
    assert tail / 2 - math.expm1(-s) / (2 * s) < 5.42
    assert (math.exp(-s) / s - tail) / 4 - math.expm1(-s) / (4 * s * s) < 2.0**14 - 2


def coefficients(function: str, letter: str) -> list[float]:
    """A polynomial of the CUDA kernel, the highest power first, read from its source: Triton is not needed."""
    text = Path(field.__file__).with_name("kernel.py").read_text()
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
    probability, largest, _ = floating_point._displacements(2.0**-9, 2.0**-53, 2.0**-51)
    assert abs(probability.sum() - 1) < 1e-12
    u = np.concatenate([np.geomspace(2.0**-15, 0.5, 4000), 1 - np.geomspace(2.0**-15, 0.5, 4000)[::-1]])
    radius = np.sqrt(-2 * np.log(u))
    step = 2.0**-53 / (u * radius)  # dr
    below = np.cumsum(probability)
    shell = np.minimum(np.searchsorted(below, -np.expm1(-(radius**2) / 2)), len(below) - 1)
    moved = step + radius * math.pi * 2.0**-50 + 2.0**-49 * radius + 2.0**-50 / radius
    assert (largest[shell] >= moved).all()
    assert math.sqrt((probability * largest**2).sum()) < 1.6 * 2.0**-47  # their root mean square


def test_the_proof_quotes_the_code() -> None:
    """Every constant of docs/noise-proof.md stands beside the code that has it."""
    source = Path(field.__file__).parents[1]
    page = (source.parents[1] / "docs" / "noise-proof.md").read_text()
    quotations = re.findall(r"\*In code\*: `([^`]+)` has `([^`]+)`", page)
    assert len(quotations) == page.count("*In code*") > 30
    for path, text in quotations:
        assert text in (source / path).read_text(), (path, text)


def test_what_a_run_costs() -> None:
    """Figures that docs/noise-proof.md shows."""
    run = {"steps": 4000, "parameters": 300_000, "fineness": 10, "delta": 1e-12}
    fresh = floating_point.floating_point_cost(LambdaCGD(0.9), restart_every=400, **run)
    assert 2.1e-5 < fresh.epsilon < 2.2e-5
    assert fresh.delta < 1.01e-12
    longer = floating_point.floating_point_cost(LambdaCGD(0.9), restart_every=None, **run)
    independent = floating_point.floating_point_cost(LambdaCGD(0.0), restart_every=None, **run)
    assert independent.epsilon < fresh.epsilon < longer.epsilon
    table = [
        floating_point.floating_point_cost(LambdaCGD(lam), restart_every=every, **run).epsilon
        for lam, every in ((0.0, None), (0.9, 400), (0.9, None), (0.99, 400), (0.99, None))
    ]
    page = (Path(field.__file__).parents[3] / "docs" / "noise-proof.md").read_text()
    powers = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    shown = [f"{value:.1e}".split("e") for value in table]
    assert " | ".join(f"{digits}·10{str(int(power)).translate(powers)}" for digits, power in shown) in page
    # What BLT(3) becomes for 4000 steps; to find that takes two seconds.
    blt = BLT(3, decays=(0.9953876, 0.8763107, 0.4343227), weights=(0.1276730, 0.2044865, 0.1701449))
    for mechanism, shown in ((blt, 6.1e-5), (BSR(16).resolve(Horizon(400, 10)), 1.5e-4)):
        cost = floating_point.floating_point_cost(mechanism, restart_every=None, **run)
        assert cost.epsilon == pytest.approx(shown, rel=0.05)


def test_a_run_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="Train fewer parameters or steps"):
        floating_point.cover(
            LambdaCGD(0.95), steps=40_000, restart_every=None, parameters=10**9, epsilon=0.1, delta=1e-6
        )


@dataclass(frozen=True)
class Scaled(LambdaCGD):
    """λCGD whose C is 1/scale times as large: a user's own mechanism may count its noise in any unit."""

    scale: float = 1.0

    def recurrence(self, n: int) -> BandedInverse:
        return BandedInverse(tuple(self.scale * a for a in super().recurrence(n).coefficients))


def test_cells_wider_than_the_proof_allows_are_refused() -> None:
    """Δ is a share of ζσ: in units of z, it grows with the diagonal of C. Lemma 1 ends at a quarter."""
    run = {"steps": 100, "restart_every": None, "parameters": 10_000}
    for scale, covered in ((1.0, True), (0.01, True), (0.001, False), (1e-6, False)):
        cost = floating_point.floating_point_cost(Scaled(0.9, scale=scale), fineness=10, delta=1e-12, **run)
        assert math.isfinite(cost.epsilon) == covered, scale


def test_an_epsilon_whose_delta_cannot_be_covered_is_refused_with_the_reason() -> None:
    """δ₁ is 2⁻¹⁰⁰ at least for each pair, and counts e^ε times: a larger ε does not help."""
    for epsilon in (50.0, 700.0):
        with pytest.raises(ValueError, match="Plan for an ε of at most 30"):
            floating_point.cover(
                LambdaCGD(0.9), steps=1000, restart_every=None, parameters=300_000, epsilon=epsilon, delta=1e-5
            )


def test_noise_that_is_lost_beside_the_sums_is_refused() -> None:
    """The proof takes a sum of all examples to be below 2²⁹ times the noise: |v| < 2⁴⁰Δ."""
    small = lc.plan(1000, 100, epochs=1, epsilon=8.0, delta=1e-5, mechanism=LambdaCGD(0.5))
    assert floating_point_of(small, 1000) is not None
    with pytest.raises(ValueError, match=r"more than 2\^29 times"):
        floating_point_of(replace(small, sigma=1e-7), 1000)


def test_normals_that_another_device_computes_again_are_paid_for() -> None:
    """A run may go on elsewhere: the share of z that is taken back then has other errors than when it was added."""
    run = {"steps": 4000, "restart_every": None, "parameters": 300_000, "fineness": 10, "delta": 1e-12}
    cost = floating_point.floating_point_cost(LambdaCGD(0.9), **run).epsilon
    # What two devices can differ by, 2(2⁻⁴⁹r + 2⁻⁵⁰/r), in mean squares beside the displacement of the words.
    r = np.sqrt(-2 * np.log((np.arange(1 << 16) + 0.5) / (1 << 16)))
    differ = 0.9 * math.sqrt(np.mean((2.0**-49 * r + 2.0**-50 / r) ** 2))
    words = 4 * 2.0**10 * 1.5 * 2.0**-47
    least = math.hypot(words, 4 * 2.0**10 * differ) * math.sqrt(4000 * 300_000 * math.log(1e12) / 2)
    assert cost > least


def test_the_two_homes_of_a_constant_agree() -> None:
    assert (floating_point.PAIRS, floating_point.FINEST) == (layout.PAIRS, layout.FINENESS)


def test_the_share_covers_what_the_run_costs() -> None:
    for epsilon in (0.1, 1.0, 8.0, 30.0):
        cost = floating_point.cover(
            LambdaCGD(0.9), steps=4000, restart_every=400, parameters=300_000, epsilon=epsilon, delta=1e-5
        )
        real = epsilon - set_aside(epsilon, 1e-5)["epsilon"]
        assert real + 2 * cost.epsilon <= epsilon
        assert claimed_epsilon(real) == pytest.approx(epsilon, rel=1e-12)
        delta = math.exp(cost.epsilon) * 1e-5 * (1 - DELTA_SHARE)
        assert delta + (1 + math.exp(real + cost.epsilon)) * cost.delta <= 1e-5
