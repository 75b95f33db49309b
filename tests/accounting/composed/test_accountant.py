"""λCGD with fresh bins: known values, special cases, quadrature and sampled compositions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lambdacgd.accounting import Calibration, accountant_for
from lambdacgd.accounting import composed as module
from lambdacgd.accounting.composed import (
    FINAL,
    METHOD,
    QUICK,
    Composition,
    DiscretePair,
    FreshBins,
    Resolution,
    _core,
    dominating_pair,
)
from lambdacgd.accounting.exact.accountant import Evaluation
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.errors import AccountingError, InvalidInput
from lambdacgd.mechanisms import Horizon, Identity, LambdaCGD, Mechanism
from lambdacgd.sampling import BallsInBins, Bins
from reproduce.reference import gram, quadrature
from reproduce.simulated import simulate


def fresh_bins(mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float) -> Calibration:
    return accountant_for(mechanism, fresh(horizon)).sigma(epsilon, delta)


def fresh(horizon: Horizon, bins: Bins = "fresh") -> BallsInBins:
    b, k = horizon.steps_per_epoch, horizon.epochs
    return BallsInBins(examples=b, steps_per_epoch=b, epochs=k, bins=bins)


def test_without_correlation_it_is_random_allocation_composed_over_epochs() -> None:
    # A deterministic accountant of random allocation, composed, gives ε(1e-5) between 7.52 and 7.59.
    assert 7.52 <= FreshBins(0.0, 390, 10).epsilon(0.494, 1e-5).epsilon <= 7.59


@pytest.mark.parametrize(("epsilon", "sampled"), [(8.0, 0.487), (2.0, 0.706)])
def test_dp_sgd_needs_what_sampling_says(epsilon: float, sampled: float) -> None:
    found = fresh_bins(Identity(), Horizon(390, 10), epsilon=epsilon, delta=1e-5)
    assert found.sigma == pytest.approx(sampled, rel=0.02)
    assert (found.certificate.method, found.certificate.kind, found.certificate.confidence) == (METHOD, "bound", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lam", "epsilon", "sampled"),
    [(0.9, 8.0, 1.434), (0.95, 8.0, 2.376), (0.9, 2.0, 3.356), (0.8, 2.0, 1.789), (0.8, 0.5, 5.65), (0.9, 0.5, 11.15)],
)
def test_sampled_values_are_met(lam: float, epsilon: float, sampled: float) -> None:
    found = fresh_bins(LambdaCGD(lam), Horizon(390, 10), epsilon=epsilon, delta=1e-5)
    assert found.sigma == pytest.approx(sampled, rel=0.02)


def test_one_epoch_is_fixed_bins() -> None:
    for mechanism in (LambdaCGD(0.8), Identity()):
        one = Horizon(30, 1)
        both = [accountant_for(mechanism, fresh(one, bins)).sigma(2.0, 1e-5) for bins in ("fresh", "fixed")]
        assert both[0].sigma == both[1].sigma
        assert both[0].certificate.method == both[1].certificate.method
    exact, composed = both[0].sigma, FreshBins(0.0, 30, 1).sigma(2.0, 1e-5).sigma
    assert exact * 0.999 <= composed <= exact * 1.004


def test_one_bin_is_the_gaussian_mechanism() -> None:
    found = fresh_bins(LambdaCGD(0.7), Horizon(1, 9), epsilon=1.0, delta=1e-6)
    assert found.sigma == pytest.approx(3 * gaussian_sigma(1.0, 1e-6), rel=1e-6)


def test_fewer_epochs_cost_less() -> None:
    accountant = FreshBins(0.0, 40, 6)
    spent = accountant.epsilons(0.8, 1e-5)
    assert list(spent) == sorted(spent)
    assert spent[-1] == pytest.approx(accountant.epsilon(0.8, 1e-5).epsilon, rel=1e-9)
    assert spent[2] == pytest.approx(replace(accountant, epochs=3).epsilon(0.8, 1e-5).epsilon, rel=1e-3)


def test_one_composition_answers_for_many_epsilons() -> None:
    accountant = FreshBins(0.0, 40, 6)
    composition = accountant.composed(0.8, 1e-6)
    deltas = [accountant.bound(composition, 0.8, epsilon).delta for epsilon in (0.5, 1.0, 2.0, 4.0)]
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[2] == pytest.approx(accountant.delta(0.8, 2.0).delta, rel=1e-2)


@pytest.mark.parametrize(("lam", "steps"), [(0.999, 2), (0.9999, 3)])
def test_few_bins_whose_noise_hardly_decays(lam: float, steps: int) -> None:
    """A chain that never ends says nothing about theirs: guesses from it were far off, and the search refused."""
    bound = FreshBins(lam, steps, 10).sigma(2.0, 1e-5)
    sigma = bound.sigma
    drawn = simulate(LambdaCGD(lam), Horizon(steps, 10), sigma=sigma, epsilon=2.0, seed=3)
    # At 5 standard errors: a false alarm in 1.7e6. One percent of δ is less than 0.1% of σ.
    truth, error = float(drawn["delta"]), float(drawn["standard_error"])
    assert truth - 5 * error <= bound.delta <= 1e-5
    assert truth + 5 * error >= 0.95e-5


def test_out_of_range_says_what_is_in_it() -> None:
    accountant = FreshBins(0.5, 40, 6)
    for epsilon, delta in ((1e-4, 1e-5), (1000.0, 1e-5), (1.0, 1e-13), (1.0, 1.0)):
        with pytest.raises(AccountingError):
            accountant.sigma(epsilon, delta)
    with pytest.raises(AccountingError):
        accountant.delta(math.nan, 1.0)
    with pytest.raises(InvalidInput):
        fresh_bins(LambdaCGD(0.5), Horizon(40, 6), epsilon=1e-5, delta=1e-5)
    for epochs in (2.5, "2", True, None, 0):
        with pytest.raises(AccountingError, match="epochs"):
            FreshBins(0.5, 40, epochs)  # type: ignore[arg-type]
    for wrong in ("1", None, True):
        with pytest.raises(AccountingError, match="must be a number"):
            accountant.sigma(wrong, 1e-5)  # type: ignore[arg-type]
        with pytest.raises(AccountingError, match="must be a number"):
            accountant.delta(wrong, 1.0)  # type: ignore[arg-type]


def test_numbers_of_another_precision_are_computed_with_in_float64() -> None:
    small = FreshBins(np.float32(0.5), np.int32(3), np.int64(2))  # type: ignore[arg-type]
    assert small == FreshBins(0.5, 3, 2)
    assert small.delta(np.float32(2.0), np.float32(1.0)) == FreshBins(0.5, 3, 2).delta(2.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("lam", "bins", "sigma"), [(0.7, 4, 1.5), (0.0, 3, 0.8), (0.9, 4, 4.0), (0.5, 2, 1.0)])
@pytest.mark.parametrize("resolution", [QUICK, FINAL], ids=["quick", "final"])
def test_one_epoch_is_dominated_at_every_epsilon(lam: float, bins: int, sigma: float, resolution: Resolution) -> None:
    """Against quadrature, on both sides of 0, at nodes and between; the fine one within 3% of δ where δ counts."""
    pair = FreshBins(lam, bins, 1).composed(sigma, 1e-6, resolution=resolution).pair
    remove_of, add_of = pair.side("remove").delta, pair.side("add").delta
    for epsilon in (0.01, 0.1137, 0.5, 1.03, 2.2, 3.3):
        remove, add = quadrature(gram(lam, bins, 1), sigma, epsilon, step=0.02 if bins < 4 else 0.2)
        e = math.exp(-epsilon)
        for found, truth in (
            (remove_of(epsilon), remove),
            (add_of(epsilon), add),
            (remove_of(-epsilon), 1 - e + e * add),
            (add_of(-epsilon), 1 - e + e * remove),
        ):
            assert found >= truth * (1 - 1e-9)
            if resolution is FINAL and truth > 1e-6:
                assert found <= 1.03 * truth


def test_composed_epochs_are_above_sampled_ones_in_many_cases() -> None:
    """Random settings (seed 5): never below by more than 5 standard errors (a false alarm in 100 000 runs)."""
    rng = np.random.default_rng(5)
    for _ in range(3):
        lam, b, k = float(rng.uniform(0, 0.95)), int(rng.integers(2, 60)), int(rng.integers(2, 12))
        epsilon = float(np.exp(rng.uniform(-0.5, 1.5)))
        sigma = FreshBins(lam, b, k).quick_sigma(epsilon, 1e-4)
        bound = FreshBins(lam, b, k).delta(sigma, epsilon)
        drawn = simulate(LambdaCGD(lam), Horizon(b, k), sigma=sigma, epsilon=epsilon, samples=30_000)
        assert bound.delta >= float(drawn["delta"]) - 5 * float(drawn["standard_error"])
        assert bound.delta <= 1.08 * float(drawn["delta"]) + 5 * float(drawn["standard_error"])


def composed_truth(lam: float, epochs: int, sigma: float, *, quantum: float) -> Composition:
    """Two bins: one epoch by quadrature at every cell, composed. Above the truth by its own chords only."""
    values = {}
    for i in range(1, int(19 / quantum)):
        values[i] = quadrature(gram(lam, 2, 1), sigma, i * quantum, step=0.02)
        if values[i][0] < 1e-13:
            break
    remove, add = ({i: both[way] for i, both in values.items() if both[way] > 1e-13} for way in (0, 1))
    return Composition(dominating_pair(quantum, remove, add), epochs)


def nodes_of(pair: DiscretePair) -> tuple[dict[int, float], dict[int, float]]:
    """δ_remove and δ_add at the pair's own nodes."""
    index, quantum = pair.index.tolist(), pair.quantum
    return (
        {i: pair.side("remove").delta(i * quantum) for i in index if i > 0},
        {-i: pair.side("add").delta(-i * quantum) for i in index if i < 0},
    )


@pytest.mark.parametrize("resolution", [QUICK, FINAL], ids=["quick", "final"])
@pytest.mark.parametrize(
    ("lam", "epochs", "sigma", "epsilon"),
    [(0.5, 3, 5.85, 1.0), (0.5, 3, 1.23, 6.0), (0.8, 4, 1.01, 12.0), (0.2, 2, 0.52, 15.0), (0.9, 30, 11.8, 2.0)],
)
def test_the_budget_accounts_for_the_distance_to_the_truth(
    lam: float, epochs: int, sigma: float, epsilon: float, resolution: Resolution
) -> None:
    accountant = FreshBins(lam, 2, epochs)
    bound = accountant.bound(accountant.composed(sigma, 1e-5, resolution=resolution), sigma, epsilon)
    truth = composed_truth(lam, epochs, sigma, quantum=0.02 if sigma < 2 else 0.002)
    near = truth.tail("remove", epsilon).delta
    assert bound.direction == "remove"
    values = [{i: Evaluation(v, 1.0) for i, v in side.items()} for side in nodes_of(truth.pair)]
    without_chords = Composition(_core(truth.pair, *values), epochs)
    assert without_chords.tail("remove", epsilon).delta <= bound.delta
    assert bound.delta - sum(bound.budget.values()) <= near
    assert sum(bound.budget.values()) <= 0.02 * bound.delta + 5 * (bound.delta - near)
    assert set(bound.budget) == {"infinite losses", "rounding", "one epoch"}


def test_a_certificate_carries_its_budget_and_an_analytic_bound_has_no_more_slack_than_the_lattice() -> None:
    """δ_add at large σ: a Gaussian bound lies below the lattice's, which says how much of it can be slack."""
    found = fresh_bins(LambdaCGD(0.5), Horizon(2, 4), epsilon=0.1, delta=1e-4)
    budget = found.certificate.details["budget"]
    assert 0 < budget["one epoch"] < 0.1 * found.certificate.delta
    assert all(0 <= value <= found.certificate.delta for value in budget.values())


def test_work_is_capped_and_what_is_in_hand_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lattice may do no more, analytic bounds take over: larger, and still bounds."""
    free = FreshBins(0.7, 20, 3).delta(1.5, 2.0)
    module._curve.cache_clear()
    monkeypatch.setattr(module, "FINAL", replace(FINAL, work=1e8))
    composed = FreshBins(0.7, 20, 3).composed(1.5, 1e-6, resolution=module.FINAL)
    capped = FreshBins(0.7, 20, 3).bound(composed, 1.5, 2.0)
    assert capped.delta > free.delta
    assert capped.budget["one epoch"] > free.budget["one epoch"]


@pytest.mark.parametrize(("epsilon", "normalized"), [(0.3, False), (3.0, True)])
def test_a_shallow_add_side_is_a_bound_and_changes_nothing_that_governs(epsilon: float, normalized: bool) -> None:
    accountant = FreshBins(0.6, 15, 3, normalized)
    sigma = accountant.sigma(epsilon, 1e-5).sigma
    deep, shallow = (
        accountant.bound(accountant.composed(sigma, 1e-5, shallow=shallow), sigma, epsilon) for shallow in (False, True)
    )
    assert shallow.delta_add >= deep.delta_add * (1 - 1e-9)
    assert shallow.delta_remove == pytest.approx(deep.delta_remove, rel=2e-3)


def test_the_closed_form_is_near_what_is_certified() -> None:
    for lam, b, k, epsilon, normalized in (
        (0.9, 60, 4, 2.0, True),
        (0.5, 30, 10, 0.5, False),
        (0.8, 40, 5, 6.0, False),
    ):
        accountant = FreshBins(lam, b, k, normalized)
        assert 0.97 < accountant.sigma(epsilon, 1e-5).sigma / accountant.first_guess(epsilon, 1e-5) < 1.15
