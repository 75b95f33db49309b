"""Noise that restarts every epoch: errors and sensitivity against dense block-diagonal matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    PREFIX_SUM,
    BandInvMF,
    BandMF,
    Diagonal,
    GammaBIFR,
    Horizon,
    Identity,
    LambdaCGD,
    Workload,
    error_norms,
    maxse,
    rmse,
    sensitivity,
)
from lambdacgd.mechanisms.error import squared_row_norms
from tests.mechanisms import reference
from tests.mechanisms.test_mechanisms import fractions, horizons, mechanisms_and_horizons

WORKLOADS = [
    PREFIX_SUM,
    Workload(0.9),
    Workload(0.5, 0.97),
    Workload(0.8, 0.8),
    Workload(0.0, 0.9),
    Workload(schedule="linear"),
    Workload(schedule="cosine", warmup=0.3, final_rate=0.1),
    Workload(0.9, 0.98, schedule="linear", warmup=0.2),
    Workload(0.0, 0.9, schedule="constant", warmup=0.5),
]
RESOLVED = [
    Identity(), Diagonal(), LambdaCGD(0.9), LambdaCGD(0.9, normalized=True), BISR(4), BandInvMF(3), GammaBIFR(4, 0.7),
    BLT(2), BSR(4), BandMF(4),
]  # fmt: skip


@given(mechanisms_and_horizons(), st.sampled_from(WORKLOADS))
def test_errors_match_dense_matrices(case, workload):
    mechanism, horizon = case
    n, b = horizon.steps, horizon.steps_per_epoch
    B = reference.workload_matrix(n, workload) @ np.linalg.inv(reference.restarted(mechanism, horizon))
    rows = squared_row_norms(mechanism, n, workload, restart_every=b)
    np.testing.assert_allclose(rows, (B**2).sum(axis=1), rtol=1e-7)
    mean, largest = error_norms(mechanism, n, workload, restart_every=b)
    assert mean == pytest.approx(np.linalg.norm(B) / np.sqrt(n), rel=1e-7)
    assert largest == pytest.approx(np.linalg.norm(B, axis=1).max(), rel=1e-7)


@pytest.mark.parametrize("mechanism", RESOLVED, ids=str)
@pytest.mark.parametrize("workload", [PREFIX_SUM, Workload(0.9, 0.99)], ids=str)
def test_mechanisms_resolved_over_one_epoch(mechanism, workload):
    """The whole path of a plan: optimised for n = b, k = 1, then used k times."""
    horizon = Horizon(8, 3)
    found = mechanism.resolve(Horizon(8, 1))
    B = reference.workload_matrix(24, workload) @ np.linalg.inv(reference.restarted(found, horizon))
    expected = reference.once_an_epoch_sensitivity(reference.restarted(found, horizon), horizon)
    assert rmse(found, horizon, workload=workload, restart_every=8) == pytest.approx(
        expected * np.linalg.norm(B) / np.sqrt(24), rel=1e-7
    )
    assert maxse(found, horizon, workload=workload, restart_every=8) == pytest.approx(
        expected * np.linalg.norm(B, axis=1).max(), rel=1e-7
    )


@given(fractions, st.integers(1, 40), st.integers(1, 6))
def test_lambda_cgd_has_a_closed_form(lam, b, k):
    """‖row‖² = e((b−1)(1−λ)² + 1) + r(1−λ)² + 1 after e completed epochs and r steps of the current one."""
    e, r = np.divmod(np.arange(b * k), b)
    expected = e * ((b - 1) * (1 - lam) ** 2 + 1) + r * (1 - lam) ** 2 + 1
    np.testing.assert_allclose(squared_row_norms(LambdaCGD(lam), b * k, restart_every=b), expected, rtol=1e-9)
    mean, largest = error_norms(LambdaCGD(lam), b * k, restart_every=b)
    assert mean == pytest.approx(np.sqrt(expected.mean()), rel=1e-9)
    assert largest == pytest.approx(np.sqrt(expected.max()), rel=1e-9)


@settings(max_examples=60)
@given(mechanisms_and_horizons())
def test_sensitivity_is_that_of_any_place_in_every_epoch(case):
    mechanism, horizon = case
    if horizon.steps_per_epoch**horizon.epochs > 300:
        horizon = Horizon(horizon.steps_per_epoch, 2)
    brute = reference.once_an_epoch_sensitivity(reference.restarted(mechanism, horizon), horizon)
    found = sensitivity(mechanism, horizon, restart_every=horizon.steps_per_epoch)
    assert found.exact
    assert found.value == pytest.approx(brute, rel=1e-8)


@given(horizons)
def test_known_sensitivities(horizon):
    b, k = horizon.steps_per_epoch, horizon.epochs
    root = np.sqrt(k)
    assert sensitivity(LambdaCGD(0.9, normalized=True), horizon, restart_every=b).value == pytest.approx(root)
    assert sensitivity(Identity(), horizon, restart_every=b).value == pytest.approx(root)
    plain = np.sqrt((1 - 0.9 ** (2 * b)) / (1 - 0.9**2))
    assert sensitivity(LambdaCGD(0.9), horizon, restart_every=b).value == pytest.approx(root * plain)


@given(mechanisms_and_horizons(), st.sampled_from(WORKLOADS))
def test_one_epoch_and_independent_noise_do_not_notice_restarts(case, workload):
    mechanism, horizon = case
    b = horizon.steps_per_epoch
    one = Horizon(b, 1)
    assert rmse(mechanism, one, workload=workload, restart_every=b) == pytest.approx(
        rmse(mechanism, one, workload=workload), rel=1e-9
    )
    assert error_norms(Identity(), horizon.steps, workload, restart_every=b) == pytest.approx(
        error_norms(Identity(), horizon.steps, workload), rel=1e-9
    )


def test_restarts_cost_a_little_error_at_the_same_noise():
    """λ = .9, b = 390, k = 10: each boundary costs one uncancelled z, 2λ − λ² = .99 a boundary."""
    plain, restarted = (error_norms(LambdaCGD(0.9), 3900, restart_every=every)[1] ** 2 for every in (None, 390))
    assert restarted - plain == pytest.approx(9 * (1 - 0.1**2), rel=1e-9)


@pytest.mark.parametrize("every", [0, 5, 25, 2.5])
def test_stretches_must_fill_the_run(every):
    with pytest.raises(InvalidInput, match="restart_every"):
        error_norms(LambdaCGD(0.5), 24, restart_every=every)
    with pytest.raises(InvalidInput, match="restart_every"):
        sensitivity(LambdaCGD(0.5), Horizon(8, 3), restart_every=every)
