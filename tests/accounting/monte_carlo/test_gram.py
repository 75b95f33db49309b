"""Every way to a Gram matrix gives the same one, and every sampler draws from it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdacgd.accounting.monte_carlo import gram as gram_module
from lambdacgd.accounting.monte_carlo.gram import DenseGram, FoldedGram, LambdaGram, gram_of
from lambdacgd.accounting.reference import dense_strategy
from lambdacgd.errors import AccountingError
from lambdacgd.mechanisms import BISR, BSR, BandInvMF, GammaBIFR, Horizon, Identity, LambdaCGD, Mechanism

MECHANISMS = [
    Identity(),
    LambdaCGD(0.0),
    LambdaCGD(0.5),
    LambdaCGD(0.995),
    LambdaCGD(0.9, normalized=True),
    BISR(4),
    BSR(3),
    GammaBIFR(5, 0.8),
]


def gram_of_matrix(strategy: np.ndarray, horizon: Horizon) -> DenseGram:
    centres = strategy.reshape(horizon.steps, horizon.epochs, horizon.steps_per_epoch).sum(axis=1)
    return DenseGram(centres.T @ centres)


def folded(mechanism: Mechanism, horizon: Horizon) -> FoldedGram:
    n = horizon.steps
    return FoldedGram(mechanism.strategy(n), mechanism.noising(n), mechanism.column_scales(n), horizon)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize(("b", "k"), [(1, 1), (1, 4), (7, 1), (12, 3)])
def test_all_forms_agree_with_the_definition(mechanism: Mechanism, b: int, k: int) -> None:
    horizon = Horizon(b, k)
    dense = gram_of_matrix(dense_strategy(mechanism, horizon), horizon)
    for other in (gram_of(mechanism, horizon), folded(mechanism, horizon)):
        np.testing.assert_allclose(other.diagonal, dense.diagonal, rtol=1e-9)
        assert math.isclose(other.mean_variance(), dense.matrix.mean(), rel_tol=1e-9)
        for length in {1, min(3, b), max(1, b // 2), b}:
            starts = np.arange(b) if length < b else np.zeros(1, dtype=np.intp)
            weights = np.zeros((len(starts), b))
            for row, start in enumerate(starts):
                weights[row, (start + np.arange(length)) % b] = 1 / length
            tolerance = 1e-9 * dense.matrix.max()
            np.testing.assert_allclose(other.rows(starts, length), weights @ dense.matrix, rtol=1e-9, atol=tolerance)
            expected = np.einsum("wi,ij,wj->w", weights, dense.matrix, weights)
            np.testing.assert_allclose(other.variances(starts, length), expected, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(lam=st.floats(0, 0.99), b=st.integers(1, 9), k=st.integers(1, 5))
def test_lambda_cgd_in_closed_form(lam: float, b: int, k: int) -> None:
    horizon = Horizon(b, k)
    dense = gram_of_matrix(dense_strategy(LambdaCGD(lam), horizon), horizon)
    closed = LambdaGram(lam, horizon).rows(np.arange(b), 1)
    np.testing.assert_allclose(closed, dense.matrix, rtol=1e-8, atol=1e-10 * dense.matrix.max())


@pytest.mark.parametrize("gap", [1e-5, 1e-9, 1e-12, 1e-15])
def test_lambda_close_to_one_keeps_its_digits(gap: float) -> None:
    # The closed form subtracts numbers of size 1/(1 − λ²); certificates rest on a relative accuracy of 2e-9.
    horizon = Horizon(3, 2)
    found = gram_of(LambdaCGD(1 - gap), horizon)
    centres = dense_strategy(LambdaCGD(1 - gap), horizon).reshape(6, 2, 3).sum(axis=1)
    expected = centres.T @ centres
    np.testing.assert_allclose(found.diagonal, np.diag(expected), rtol=1e-9)
    np.testing.assert_allclose(found.rows(np.arange(3), 1), expected, rtol=1e-9)


def test_the_cyclic_corner_is_there() -> None:
    gram = LambdaGram(0.9, Horizon(390, 10))
    row = gram.rows(np.zeros(1, dtype=np.intp), 1)[0]
    assert row[0] == pytest.approx(52.63, abs=0.005)
    assert row[1] == pytest.approx(47.37, abs=0.005)
    assert row[389] == pytest.approx(42.63, abs=0.005)


@pytest.mark.parametrize("mechanism", [LambdaCGD(0.0), LambdaCGD(0.6), LambdaCGD(0.97), BISR(4)], ids=str)
@pytest.mark.parametrize(("b", "k"), [(1, 3), (2, 1), (6, 4)])
def test_samples_have_the_covariance(mechanism: Mechanism, b: int, k: int) -> None:
    """Each entry is within 6 standard errors; over all entries of all cases a false alarm has probability < 1e-6."""
    horizon, count = Horizon(b, k), 200_000
    truth = gram_of_matrix(dense_strategy(mechanism, horizon), horizon).matrix
    for gram in (gram_of(mechanism, horizon), folded(mechanism, horizon), DenseGram(truth)):
        draws = gram.sample(np.random.default_rng(11), count)
        error = np.sqrt((truth**2 + np.outer(np.diag(truth), np.diag(truth))) / count)
        assert (np.abs(draws.T @ draws / count - truth) < 6 * error).all()


def test_the_dense_matrix_is_never_below_the_true_one() -> None:
    strategy = dense_strategy(BISR(4), Horizon(20, 3))
    centres = strategy.reshape(60, 3, 20).sum(axis=1)
    assert (gram_of_matrix(strategy, Horizon(20, 3)).matrix > centres.T @ centres).all()


def test_identical_bins_are_no_obstacle() -> None:
    gram = DenseGram(np.full((3, 3), 2.0))
    draws = gram.sample(np.random.default_rng(5), 100)
    np.testing.assert_allclose(draws[:, 0], draws[:, 2], atol=1e-4)


def test_many_bins_take_the_folded_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_module, "LARGEST_DENSE", 5)
    assert isinstance(gram_of(BISR(3), Horizon(6, 2)), FoldedGram)
    assert isinstance(gram_of(BISR(3), Horizon(5, 2)), DenseGram)


def test_bad_matrices_are_refused() -> None:
    with pytest.raises(AccountingError, match="finite"):
        DenseGram(np.full((4, 4), np.nan))
    with pytest.raises(AccountingError, match="semi-definite"):
        DenseGram(np.array([[1.0, 2.0], [2.0, 1.0]]))


def test_a_mechanism_with_negative_entries_is_refused() -> None:
    with pytest.raises(AccountingError, match=r"C ≥ 0 only"):
        gram_of(BandInvMF(2, coefficients=(1.0, 0.5)), Horizon(4, 2))
