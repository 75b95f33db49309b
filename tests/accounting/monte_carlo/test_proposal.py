"""The proposal's densities are densities, and its weights stay within what is proven."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad

from lambdacgd.accounting.certificate import OneWay
from lambdacgd.accounting.gaussian import gaussian_delta
from lambdacgd.accounting.monte_carlo.gram import gram_of
from lambdacgd.accounting.monte_carlo.proposal import Envelope, Pilot, excess, levels_of, overshoot, tilted
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import BISR, Horizon, LambdaCGD

GRAM = gram_of(BISR(3), Horizon(12, 2))
LEVELS = levels_of(GRAM)


@pytest.mark.parametrize(("epsilon", "variance"), [(4.0, 1.0), (0.3, 0.4), (0.1, 1.0), (1.0, 9.0), (0.2, 0.002)])
def test_overshoot_has_its_density(epsilon: float, variance: float) -> None:
    """Kolmogorov–Smirnov at 20 000 draws; false alarm below 1e-6 a case (critical value 2.7/√n)."""
    slope = (epsilon - variance / 2) / variance

    def density(y: float) -> float:
        return -math.expm1(-y) * math.exp(-slope * y - y * y / (2 * variance) + max(-slope, 0) ** 2 * variance / 2)

    draws = np.sort(overshoot(np.random.default_rng(3), epsilon, np.full(20_000, variance)))
    grid = np.linspace(0, draws[-1] * 1.5, 4000)
    cumulative = np.concatenate([[0], np.cumsum([quad(density, a, b)[0] for a, b in pairwise(grid)])])
    expected = np.interp(draws, grid, cumulative / cumulative[-1])
    empirical = (np.arange(len(draws)) + 0.5) / len(draws)
    assert np.abs(expected - empirical).max() < 2.7 / math.sqrt(len(draws))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("epsilon", "sigma"), [(0.2, 6.0), (2.0, 1.5), (6.0, 0.9)])
def test_components_are_densities(direction: OneWay, epsilon: float, sigma: float) -> None:
    """Drawn from R, each (dR_l/dQ)/(dR/dQ) has mean 1: within 5 standard errors (false alarm below 1e-5 in all)."""
    pilot = Pilot(GRAM, LEVELS, seed=1)
    proposal = pilot.proposal(epsilon, sigma, direction, envelope_share=0.4)
    draws = np.concatenate([proposal.draw(np.random.default_rng(s), proposal.round) for s in range(20)])
    _, densities = proposal.densities(draws)
    mixed = densities / (densities @ np.asarray(proposal.shares))[:, None]
    error = mixed.std(axis=0) / math.sqrt(len(mixed))
    assert (np.abs(mixed.mean(axis=0) - 1) < 5 * error).all()


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_envelope_dominates_and_bounds_every_weight(direction: OneWay) -> None:
    epsilon, sigma = 1.0, 2.0
    envelope = Envelope.of(GRAM, epsilon, sigma, direction)
    expected = np.mean([gaussian_delta(epsilon, sigma / math.sqrt(g)) for g in GRAM.diagonal])
    assert envelope.bound == pytest.approx(expected)
    rng = np.random.default_rng(2)
    wild = 8 * rng.standard_normal((5000, 12))  # not from any proposal: the inequality holds everywhere
    ratios = np.exp(wild)
    assert (excess(ratios.mean(axis=1), epsilon, direction) <= envelope.density(ratios) * expected * (1 + 1e-12)).all()
    proposal = Pilot(GRAM, LEVELS, seed=1).proposal(epsilon, sigma, direction, envelope_share=0.3)
    weights = proposal.weights(np.concatenate([wild, proposal.draw(rng, proposal.round)]))
    assert weights.max() <= proposal.largest_weight * (1 + 1e-12)


def test_windows_wrap_around_the_cycle() -> None:
    samples = np.arange(12.0)[None, :]
    cumulative = np.concatenate([np.zeros((1, 1)), np.cumsum(samples, axis=1)], axis=1)
    for level in LEVELS:
        expected = [np.mean([(s + i) % 12 for i in range(level.length)]) for s in level.starts]
        np.testing.assert_allclose(level.means(samples, cumulative)[0], expected)


def test_what_float64_cannot_hold_is_refused() -> None:
    gram = gram_of(LambdaCGD(0.9), Horizon(8, 2))
    pilot = gram.sample(np.random.default_rng(0), 16)
    with pytest.raises(AccountingError, match="too small"):
        tilted(gram, levels_of(gram), 1.0, 0.05, "remove", pilot=pilot)
    with pytest.raises(AccountingError, match="below the smallest number"):
        tilted(gram, levels_of(gram), 200.0, 100.0, "remove", pilot=pilot)


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.9), BISR(3)], ids=str)
def test_penalties_are_the_variances_of_the_tilts(mechanism: LambdaCGD | BISR) -> None:
    """Exactly aᵀGa for a = local·window + common·(all bins)/b, also where windows do not cover the bins evenly."""
    gram = gram_of(mechanism, Horizon(31, 2))
    matrix = gram.rows(np.arange(31), 1)
    pilot = gram.sample(np.random.default_rng(0), 64)
    tilts = tilted(gram, levels_of(gram), 0.6, 4.0, "remove", pilot=pilot).tilts
    assert any(tilt.common for tilt in tilts)
    for tilt in tilts:
        directions = np.full((len(tilt.level.starts), 31), tilt.common / 31)
        for row, start in enumerate(tilt.level.starts):
            directions[row, (start + np.arange(tilt.level.length)) % 31] += tilt.local / tilt.level.length
        expected = np.einsum("wi,ij,wj->w", directions, matrix, directions)
        np.testing.assert_allclose(tilt.penalties(), expected, rtol=1e-10)
