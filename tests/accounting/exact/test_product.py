"""Lemma 5: the transfer product against plain multiplication, and its rounding against 50-digit arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdacgd.accounting.exact import lattice as product_module
from lambdacgd.accounting.exact.accountant import EXTENDED_GAIN, FINE, Scale, loss_law
from lambdacgd.accounting.exact.lattice import (
    AVAILABLE,
    Chain,
    Columns,
    Site,
    TransferProduct,
    lattice,
    normalized_chain,
    plain_chain,
    power_cost,
    round_lognormal,
    rounding_unit,
    stretches,
    value_grid,
)
from lambdacgd.errors import AccountingError


def make(chain: Chain, *, allowed: float = 0.0, ratio: float = 1.1, reach: float = 6.0) -> TransferProduct:
    plan = stretches(chain, allowed)
    return TransferProduct(chain, lattice(chain, ratio, reach), value_grid(0.02, 0.05, 200.0), plan)


def independent(bins: int, gain: float, grid: Any) -> TransferProduct:
    chain = Chain(0.0, bins, 1, gain, 0.0)
    return TransferProduct(chain, lattice(chain, 1.1, 6.0), grid, stretches(chain, 0.0))


def matrix(chain: Chain, site: Site, grid: Any, z: complex, j: int) -> Any:
    """The transfer matrix of bin j, entry by entry from the definition."""
    shift = (chain.gain**0.5) * (chain.amplitudes[j] if chain.amplitudes else 1.0)
    variance = chain.gram()[j, j] if chain.amplitudes else chain.gain * chain.variance(0.0)
    base, log_scale = -variance / 2 - np.log(chain.bins), chain.log_scales[j]
    table = round_lognormal(shift * site.means + base, shift * site.deviation, grid)
    rows, columns = site.kernel.shape
    values = table @ np.exp(z * np.exp(log_scale) * grid)
    return np.array(
        [
            [site.kernel[i, j] * values[site.strides[0] * i + site.strides[1] * j] for j in range(columns)]
            for i in range(rows)
        ]
    )


def plain(chain: Chain, product: TransferProduct, z: complex) -> complex:
    """Bin after bin, each with its own scale."""
    path, grid = product.lattice, product.grid
    kinds = np.repeat(np.arange(len(chain.runs)), [count for count, _ in chain.runs]) if chain.runs else None
    total = matrix(chain, path.left, grid, z, 0)
    for j in range(1, chain.bins - 1):
        kind = j if chain.amplitudes else 0 if kinds is None else kinds[j]
        total = total @ matrix(chain, path.interior[kind], grid, z, j)
    return complex(np.trace(total @ matrix(chain, path.right, grid, z, chain.bins - 1)))


@pytest.mark.parametrize(
    "chain",
    [plain_chain(0.8, b, k, 2.0 * k) for b in (2, 3, 4, 9) for k in (1, 2, 5)]
    + [Chain(0.6, 21, 3, 1.0, 0.0)]
    + [normalized_chain(0.9, b, k, 1.5) for b in (2, 3, 9) for k in (1, 3)]
    + [normalized_chain(0.7, 40, 1, 1.0)],
)
def test_product_equals_bin_by_bin_multiplication(chain: Chain) -> None:
    product = make(chain)
    z = np.array([0.7j - 0.3, 5j - 0.1, -0.4 + 0j])
    expected = np.array([plain(chain, product, value) for value in z])
    np.testing.assert_allclose(product(z, "remove"), expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(product(z, "add"), expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(product(z[2:].real, "remove"), expected[2:].real, rtol=1e-11)


def test_shared_scales_bracket_the_exact_ones() -> None:
    chain = plain_chain(0.9, 60, 4, 6.0)
    exact, shared = make(chain), make(chain, allowed=0.5)
    assert len(shared.plan) < len(exact.plan)
    z = np.array([-0.8])
    assert shared(z, "remove")[0] < exact(z, "remove")[0] < shared(z, "add")[0]


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 300), st.floats(0.3, 0.999), st.floats(0.0, 0.5), st.floats(0.1, 30.0))
def test_stretches_cover_every_bin_within_budget(bins: int, lam: float, allowed: float, gain: float) -> None:
    chain = Chain(lam, bins, 5, gain, 1.0)
    scales, plan = chain.log_scales, stretches(chain, allowed)
    assert sum(s.count for s in plan) == bins - 2
    up = np.repeat([s.up for s in plan], [s.count for s in plan])[::-1]
    down = np.repeat([s.down for s in plan], [s.count for s in plan])[::-1]
    assert np.all(down <= scales[1:-1])
    assert np.all(scales[1:-1] <= up)
    assert np.sum(up - scales[1:-1]) <= allowed * (1 + 1e-9) + 1e-12 * bins


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 389])
@pytest.mark.parametrize("columns", [1, 5])
def test_power_applied_to_a_strip(count: int, columns: int) -> None:
    rng = np.random.default_rng(1)
    m = rng.random((2, 5, 5)) / 2.6
    strip = rng.random((2, 5, columns))
    got = product_module.apply_power(m, count, strip)
    np.testing.assert_allclose(got, np.linalg.matrix_power(m, count) @ strip, rtol=1e-11)
    assert power_cost(count, 5, columns)[1] < count.bit_length()
    assert power_cost(count, 5, columns)[0] <= count * columns


def test_independent_bins() -> None:
    product = independent(40, 1.3, value_grid(0.002, 0.02, 300.0))
    z = np.array([0.3j - 0.2, 6j - 0.2])
    single = np.exp(np.outer(z, product.grid)) @ product.left.table[:, 0]
    np.testing.assert_allclose(product(z, "remove"), single**40, rtol=1e-11)


@pytest.mark.skipif(not AVAILABLE, reason="needs extended precision")
@pytest.mark.parametrize("bins", [2, 40])
def test_small_transforms_keep_their_relative_accuracy(bins: int) -> None:
    """Far out on the negative axis E e^{zW} is tiny and everything Chernoff says rests on its digits."""
    z = -np.exp2(np.arange(0.0, 10.0))
    for product in (
        make(plain_chain(0.5, bins, 2, 3.0)),
        independent(bins, 0.3, value_grid(1e-3, 0.01, 50.0)),
    ):
        exact = product(z, "remove", extended=True).astype(float)
        assert exact[-1] < 1e-10
        np.testing.assert_allclose(product(z, "remove"), exact, rtol=1e-12)
        tilted = z[4] + 1j * np.array([0.0, 1.0, 30.0])
        wide = product(tilted, "remove", extended=True).astype(complex)
        np.testing.assert_allclose(product(tilted, "remove"), wide, atol=1e-12 * abs(wide[0]))


# λ, b, k, σ, ε: small and large b, flat and steep, one epoch and many, ε ≥ 8 included
CASES = [
    (0.5, 3, 3, 1.2, 8.0),
    (0.9, 30, 5, 3.0, 4.0),
    (0.9, 390, 1, 1.45, 3.0),
    pytest.param((0.9, 390, 10, 2.93, 8.0), marks=pytest.mark.slow),
    (0.9, 390, 10, 7.49, 1.0),
    (0.95, 390, 10, 8.8, 2.0),
    (0.9, 2000, 10, 2.6, 8.0),
]


@pytest.mark.skipif(not AVAILABLE, reason="needs extended precision as the yardstick")
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_transforms_keep_within_half_their_rounding_margin(case: Any, direction: Any) -> None:
    lam, b, k, sigma, epsilon = case
    strike = math.exp(epsilon if direction == "remove" else -min(epsilon, 1.0))
    law = loss_law(plain_chain(lam, b, k, sigma), Scale(strike, 1e-5, 4.0), FINE, direction=direction)
    z = (1j * np.linspace(0.0, 120.0, 41) - 2.0) / strike
    spots = [0, 1, 3, 10, 40]
    computed = law.product(z, direction)[spots]
    exact = law.product(z[spots], direction, extended=True)
    total = abs(complex(exact[0]))
    for value, truth in zip(computed, exact, strict=True):
        assert abs(complex(np.clongdouble(value) - truth)) <= 0.5 * rounding_unit(b) * total


@pytest.mark.skipif(not AVAILABLE, reason="needs extended precision as the yardstick")
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_two_chains_keep_within_half_their_rounding_margin(direction: Any) -> None:
    columns = Columns(1.34, 0.53, 0.75, second=(0.8, 0.96), hold=3)
    strike = math.exp(3.0 if direction == "remove" else -1.0)
    law = loss_law(columns.over(0.974, 390, 1, 1.43), Scale(strike, 1e-5, 4.0), FINE, direction=direction)
    z = (1j * np.linspace(0.0, 120.0, 41) - 2.0) / strike
    exact = law.product(z[:2], direction, extended=True)
    for value, truth in zip(law.product(z, direction), exact, strict=False):
        assert abs(complex(np.clongdouble(value) - truth)) <= 0.5 * rounding_unit(390) * abs(complex(exact[0]))


def test_batches_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    product, z = make(plain_chain(0.8, 30, 1, 1.5)), 1j * np.linspace(0.0, 30.0, 61) - 1.0
    together = product(z, "remove")
    monkeypatch.setattr(product_module, "BATCH", 7)
    monkeypatch.setattr(product_module, "IN_CACHE", 1)
    np.testing.assert_allclose(product(z, "remove"), together, rtol=1e-13)


def test_overflow_and_memory_are_errors_not_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    product = make(plain_chain(0.8, 9, 2, 3.0))
    with pytest.raises(AccountingError, match="overflowed"):
        product(np.array([1e4]), "remove")
    monkeypatch.setattr(product_module, "MEMORY", 1000)
    with pytest.raises(AccountingError, match="MiB each"):
        product(np.array([-1.0]), "remove")


def test_tables_that_overflow_are_refused_and_lose_no_value() -> None:
    """Where e^X is beyond the largest float, a value of W is no number: it must not pass for one that never comes."""
    product = make(normalized_chain(0.999, 2, 2, 0.3))
    with pytest.raises(AccountingError, match="overflowed"):
        product(np.array([-1.0]), "remove")


def at_50_digits(product: TransferProduct, z: complex) -> Any:
    """The same finite sums, for the same float64 tables and kernels, in 50-digit arithmetic."""
    mpmath.mp.dps = 50
    exact_z = mpmath.mpc(z.real, z.imag)

    def matrix_of(site: Any, log_scale: float) -> Any:
        scale = mpmath.mpf(float(np.exp(log_scale)))
        waves = [mpmath.exp(exact_z * scale * mpmath.mpf(float(y))) for y in product.grid]
        table = site.table
        values = [mpmath.fdot(waves, map(float, table[:, i])) for i in range(table.shape[1])]
        kernel = site.kernel
        rows, columns = kernel.shape
        return mpmath.matrix(
            [
                [
                    mpmath.mpf(float(kernel[i, j])) * values[site.strides[0] * i + site.strides[1] * j]
                    for j in range(columns)
                ]
                for i in range(rows)
            ]
        )

    strip = matrix_of(product.right, product.ends[1])
    for stretch in product.plan:
        for _ in range(stretch.count):
            strip = matrix_of(product.interior[stretch.site], stretch.up) * strip
    total = matrix_of(product.left, product.ends[0]) * strip
    return sum(total[i, i] for i in range(total.rows))


@pytest.mark.parametrize(("k", "epsilon"), [(3, 12.0), (1, 2.0)])
def test_rounding_at_three_bins_against_50_digits(k: int, epsilon: float) -> None:
    """λ = .5, b = 3: float64 stays within a third of its margin, extended precision within its own."""
    strike = np.exp(epsilon)
    product = make(replace(plain_chain(0.5, 3, k, 1.12), tail=1.0), reach=4.0)
    z = np.array([1j * w - 1.0 for w in (0.0, 0.3, 2.0, 40.0)]) / strike
    exact = [at_50_digits(product, complex(value)) for value in z]
    total = float(abs(exact[0]))
    float64 = product(z, "remove")
    errors = [float(abs(mpmath.mpc(complex(f)) - e)) / total for f, e in zip(float64, exact, strict=True)]
    assert max(errors) <= rounding_unit(3) / 3
    if AVAILABLE:
        for value, e in zip(product(z, "remove", extended=True), exact, strict=True):
            error = mpmath.mpc(*(to_mpf(part) for part in (value.real, value.imag))) - e
            assert float(abs(error)) / total <= rounding_unit(3) * EXTENDED_GAIN / 3


def to_mpf(value: np.longdouble) -> Any:
    """An x87 number without losing its last bits."""
    high = float(value)
    return mpmath.mpf(high) + mpmath.mpf(float(value - np.longdouble(high)))


def acb_transform(product: TransferProduct, z: complex) -> Any:
    """The product in 200-bit ball arithmetic (python-flint)."""
    flint = pytest.importorskip("flint")
    flint.ctx.prec = 200
    exact_z = flint.acb(z.real, z.imag)

    def matrix_of(site: Any, log_scale: float) -> Any:
        scale = flint.arb(float(np.exp(log_scale)))
        waves = flint.acb_mat([[(exact_z * scale * flint.arb(float(y))).exp() for y in product.grid]])
        values = waves * flint.acb_mat([[flint.acb(float(x)) for x in row] for row in site.table])
        kernel = site.kernel
        rows, columns = kernel.shape
        return flint.acb_mat(
            [
                [
                    flint.acb(float(kernel[i, j])) * values[0, site.strides[0] * i + site.strides[1] * j]
                    for j in range(columns)
                ]
                for i in range(rows)
            ]
        )

    strip = matrix_of(product.right, product.ends[1])
    for stretch in product.plan:
        strip = matrix_of(product.interior[stretch.site], stretch.up) ** stretch.count * strip
    total = matrix_of(product.left, product.ends[0]) * strip
    return total.trace()


@pytest.mark.parametrize(("bins", "sigma", "epsilon"), [(390, 2.93, 8.0), (390, 2.0, 16.0), (5000, 2.3, 8.0)])
def test_rounding_of_many_bins_against_ball_arithmetic(bins: int, sigma: float, epsilon: float) -> None:
    """b = 390 and 5000 at ε ≥ 8: the error grows with b and stays within a third of the margin."""
    chain = plain_chain(0.9, bins, 10, sigma)
    product = make(chain, allowed=0.05 * bins, reach=5.0)
    z = np.array([1j * w - 2.0 for w in (0.0, 1.0, 6.0, 30.0)]) / np.exp(epsilon)
    exact = [acb_transform(product, complex(value)) for value in z]
    total = float(abs(exact[0]))
    for f, e in zip(product(z, "remove"), exact, strict=True):
        assert float(abs(e - complex(f)).upper()) / total <= rounding_unit(bins) / 3
