"""Lemmas 2 and 3: the lattice sum against the integral, and truncation against its bound."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lambdacgd.accounting.exact.lattice import Chain, lattice, plain_chain, poisson_eta, spacing_ratio, value_grid
from lambdacgd.accounting.exact.product import Stretch, TransferProduct
from lambdacgd.errors import AccountingError


def product_of(chain: Chain, *, ratio: float, reach: float, fine: float = 2e-3, top: float = 1e5) -> TransferProduct:
    """Every bin with its own scale, nothing shared."""
    plan = [Stretch(1, float(c), float(c)) for c in chain.log_scales[1:-1][::-1]]
    return TransferProduct(chain, lattice(chain, ratio, reach), value_grid(fine, 0.02, top), plan, "cpu")


def mean_of(product: TransferProduct, z: float) -> float:
    """E W e^{zW} by a complex step."""
    return float(product(np.array([z + 1e-60j]), "up")[0].imag / 1e-60)


@pytest.mark.parametrize("ratio", [0.8, 1.1, 1.6, 2.4])
def test_poisson_factor(ratio: float) -> None:
    shifts = np.linspace(0, 1, 101)[:, None]
    lattice_points = (np.arange(-200, 201)[None, :] + shifts) * ratio
    sums = ratio * np.sum(np.exp(-(lattice_points**2) / 2), axis=1) / math.sqrt(2 * math.pi)
    eta = poisson_eta(ratio)
    assert np.max(np.abs(sums - 1)) <= eta * (1 + 1e-9) + 1e-14
    assert np.max(np.abs(sums - 1)) >= 0.99 * eta - 1e-14


def test_spacing_meets_its_tolerance_and_eta_is_kept_small() -> None:
    for links in (1, 390, 10**6):
        assert links * poisson_eta(spacing_ratio(links, 1e-4)) <= 1e-4
    with pytest.raises(AccountingError, match="too coarse"):
        poisson_eta(5.0)


CHAINS = [
    pytest.param(plain_chain(0.9, 390, 10, 5.5), id="paper"),
    pytest.param(plain_chain(0.9, 390, 1, 1.5), id="one epoch"),
    pytest.param(plain_chain(0.999, 40, 3, 60.0), id="lambda^b near 1"),
    pytest.param(plain_chain(0.05, 30, 4, 1.5), id="small lambda"),
    pytest.param(plain_chain(0.7, 2, 5, 4.0), id="two bins"),
    pytest.param(plain_chain(0.7, 2, 1, 1.2), id="two bins, one epoch"),
    pytest.param(Chain(0.9, 60, 4, 1.2, 0.0), id="stationary continuation"),
    pytest.param(Chain(0.9, 60, 4, 1.2, 0.6), id="between"),
]


@pytest.mark.parametrize("chain", CHAINS)
def test_mass_mean_and_second_moment(chain: Chain) -> None:
    """E 1 = 1, E W = 1 and E W² = b⁻² Σ e^{G_ij/σ²}: the last sees every covariance, the corner too."""
    product = product_of(chain, ratio=0.75, reach=8.0, fine=2e-4)
    mass, mean = float(product(np.array([0.0]), "up")[0]), mean_of(product, 0.0)
    assert mass == pytest.approx(1.0, abs=1e-9)
    assert mean == pytest.approx(1.0, abs=1e-8)
    second = (mean_of(product, 1e-6) - mean_of(product, -1e-6)) / 2e-6
    expected = float(np.mean(np.exp(chain.gram())))
    # The grid's rounding adds variance: at most Σ step²/6 with steps of 2e-4 or 2%.
    assert expected * (1 - 1e-6) <= second <= expected * (1 + 0.02**2) + chain.bins * (2e-4) ** 2


@pytest.mark.parametrize("chain", CHAINS[:4])
@pytest.mark.parametrize("reach", [2.0, 3.0])
def test_truncation_loses_no_more_than_its_bound(chain: Chain, reach: float) -> None:
    product = product_of(chain, ratio=0.75, reach=reach, top=1e7)
    mass, mean = float(product(np.array([0.0]), "up")[0]), mean_of(product, 0.0)
    assert 0 <= 1 - mass <= product.lattice.exit_add
    assert -1e-9 <= 1 - mean <= product.lattice.exit_remove


def test_unshifted_lattice_is_smaller_and_claims_nothing_about_remove() -> None:
    chain = plain_chain(0.9, 50, 3, 3.0)
    small, large = lattice(chain, 1.0, 6.0, shifted=False), lattice(chain, 1.0, 6.0)
    assert small.states < large.states
    assert small.exit_remove == math.inf
