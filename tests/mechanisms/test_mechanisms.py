"""Every mechanism against dense matrices, for random parameters and small horizons."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lambdacgd as lc
from lambdacgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    MECHANISMS,
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
    mechanism_from_dict,
    rmse,
    sensitivity,
)
from lambdacgd.mechanisms.error import squared_row_norms
from tests.mechanisms import reference

horizons = st.builds(Horizon, st.integers(1, 6), st.integers(1, 4))
fractions = st.floats(0, 0.999)


@st.composite
def mechanisms_and_horizons(draw):
    horizon = draw(horizons)
    bands = draw(st.integers(1, horizon.steps))
    mechanism = draw(
        st.sampled_from(
            [
                Identity(),
                Diagonal(),
                LambdaCGD(draw(fractions), normalized=draw(st.booleans())),
                BISR(bands),
                BISR(bands, momentum=draw(st.floats(0, 0.95)), decay=draw(st.floats(0.5, 1))),
                BSR(bands),
                BSR(bands, momentum=draw(st.floats(0, 0.95)), decay=draw(st.floats(0.5, 1))),
                GammaBIFR(bands, draw(fractions)),
                BandInvMF(
                    bands,
                    (1.0, *draw(st.lists(st.floats(-0.9, 0.3), min_size=bands - 1, max_size=bands - 1))),
                    normalized=draw(st.booleans()),
                ),
                BandMF(bands, (1.0, *draw(st.lists(st.floats(0, 0.9), min_size=bands - 1, max_size=bands - 1)))),
                BLT(2, (draw(st.floats(0.5, 0.99)), draw(st.floats(0.05, 0.45))), (0.3, draw(st.floats(0.05, 0.6)))),
            ]
        )
    )
    return mechanism, horizon


@given(mechanisms_and_horizons())
def test_columns_of_C_and_its_inverse_follow_from_the_recurrence(case):
    mechanism, horizon = case
    n = horizon.steps
    scales = mechanism.column_scales(n)
    D = np.diag(np.ones(n) if scales is None else scales)
    C = reference.strategy_matrix(mechanism, n)
    np.testing.assert_allclose(reference.lower(mechanism.strategy(n), n) @ np.linalg.inv(D), C, atol=1e-9, rtol=1e-9)
    inverse = D @ reference.lower(mechanism.noising(n), n)
    np.testing.assert_allclose(inverse @ C, np.eye(n), atol=1e-7)


@given(mechanisms_and_horizons())
def test_cyclic_sensitivity_is_the_largest_norm_over_all_bins(case):
    mechanism, horizon = case
    C = reference.strategy_matrix(mechanism, horizon.steps)
    found = sensitivity(mechanism, horizon)
    assert found.value == pytest.approx(reference.cyclic_sensitivity(C, horizon), rel=1e-8)
    if found.exact:
        assert C.min() > -1e-9


WORKLOADS = [
    PREFIX_SUM,
    Workload(0.9),
    Workload(0.5, 0.97),
    Workload(0.8, 0.8),
    Workload(schedule="linear"),
    Workload(schedule="cosine", warmup=0.3, final_rate=0.1),
    Workload(0.9, 0.98, schedule="linear", warmup=0.2),
    Workload(0.0, 0.9, schedule="constant", warmup=0.5),
]


@given(mechanisms_and_horizons(), st.sampled_from(WORKLOADS))
def test_errors_match_dense_matrices(case, workload):
    mechanism, horizon = case
    B = reference.left_factor(mechanism, horizon.steps, workload)
    mean, largest = error_norms(mechanism, horizon.steps, workload)
    assert mean == pytest.approx(np.linalg.norm(B) / np.sqrt(horizon.steps), rel=1e-7)
    assert largest == pytest.approx(np.linalg.norm(B, axis=1).max(), rel=1e-7)


@given(mechanisms_and_horizons())
def test_serialised_form_survives_json(case):
    mechanism, _ = case
    assert mechanism_from_dict(json.loads(json.dumps(mechanism.to_dict()))) == mechanism


def test_every_mechanism_is_registered_under_its_name():
    assert list(MECHANISMS) == [
        "dp-sgd", "lambda-cgd", "bisr", "bandinvmf", "gamma-bifr", "blt", "bsr", "bandmf", "diagonal",
    ]  # fmt: skip


@given(fractions, st.integers(2, 50))
def test_lambda_cgd_closed_forms_agree_with_the_general_path(lam, n):
    general = np.sqrt(squared_row_norms(GammaBIFR(2, lam), n))
    mean, largest = error_norms(LambdaCGD(lam), n)
    assert mean == pytest.approx(np.sqrt(np.mean(general**2)), rel=1e-9)
    assert largest == pytest.approx(general.max(), rel=1e-9)


@pytest.mark.parametrize("horizon", [Horizon(1, 1), Horizon(1, 7), Horizon(7, 1), Horizon(390, 10)])
def test_special_cases_meet(horizon):
    n = horizon.steps
    assert rmse(LambdaCGD(0.0), horizon) == pytest.approx(rmse(Identity(), horizon))
    assert rmse(BISR(1), horizon) == pytest.approx(rmse(Identity(), horizon))
    assert rmse(GammaBIFR(1, 0.7), horizon) == pytest.approx(rmse(Identity(), horizon))
    assert sensitivity(Identity(), horizon).value == pytest.approx(np.sqrt(horizon.epochs))
    if n > 1:
        assert rmse(GammaBIFR(2, 0.7), horizon) == pytest.approx(rmse(LambdaCGD(0.7), horizon))
    bands = min(n, 5)
    assert GammaBIFR(bands, 0.5).noising(n) == pytest.approx(BISR(bands).noising(n))


@given(fractions, horizons)
def test_two_normalised_bands_are_normalised_lambda_cgd(lam, horizon):
    bands = min(2, horizon.steps)
    banded, ours = BandInvMF(bands, (1.0, -lam)[:bands], normalized=True), LambdaCGD(lam, normalized=True)
    np.testing.assert_allclose(banded.column_scales(horizon.steps), ours.column_scales(horizon.steps), rtol=1e-9)
    assert rmse(banded, horizon) == pytest.approx(rmse(ours, horizon), rel=1e-9)


def test_memory_table_of_the_paper():
    """tab:noise_time_buffer: who regenerates, and how many vectors of the gradient's size are looked back at."""
    n = 100
    rows = {
        Identity(): (True, 0),
        LambdaCGD(0.9): (True, 1),
        LambdaCGD(0.9, normalized=True): (True, 1),
        BISR(16): (True, 15),
        GammaBIFR(4, 0.8): (True, 3),
        BandInvMF(4, (1.0, -0.5, -0.1, -0.1)): (True, 3),
        BandInvMF(4, (1.0, -0.5, -0.1, -0.1), normalized=True): (True, 3),
        BSR(16): (False, 15),
        BandMF(4, (1.0, 0.5, 0.3, 0.2)): (False, 3),
        BLT(2, (0.9, 0.5), (0.2, 0.3)): (False, 2),
    }
    assert {m: (m.regenerates(n), m.past_vectors(n)) for m in rows} == rows


def test_unresolved_mechanisms_say_so():
    for mechanism in (BandInvMF(3), BandMF(3), BLT(2)):
        with pytest.raises(ValueError, match="not resolved"):
            mechanism.noising(10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LambdaCGD(1.0), "lam is 1.0"),
        (lambda: LambdaCGD(-0.1), "at least 0"),
        (lambda: LambdaCGD(float("nan")), "lam is nan"),
        (lambda: LambdaCGD(True), "lam is True"),
        (lambda: LambdaCGD(0.5, normalized=1), "normalized is 1"),
        (lambda: BISR(0), "bands is 0"),
        (lambda: BISR(2.5), "bands is 2.5"),
        (lambda: BISR(2, momentum=1.0), "momentum is 1.0"),
        (lambda: BSR(2, decay=0.0), "decay is 0.0"),
        (lambda: GammaBIFR(2, 1.0), "gamma is 1.0"),
        (lambda: BLT(0), "buffers is 0"),
        (lambda: BLT(1, (1.0,), (0.5,)), "decays is"),
        (lambda: BLT(1, (0.5,)), "go together"),
        (lambda: BandInvMF(2, (1.0,)), "coefficients is"),
        (lambda: BandInvMF(2, normalized="auto"), "normalized is 'auto'"),
        (lambda: BISR(11).resolve(Horizon(5, 2)), "from 1 to 10"),
        (lambda: BandMF(11).resolve(Horizon(5, 2)), "from 1 to 10"),
        (lambda: Horizon(0, 2), "steps_per_epoch is 0"),
        (lambda: Horizon(2, True), "epochs is True"),
        (lambda: mechanism_from_dict({"name": "magic"}), "must be one of"),
        (lambda: mechanism_from_dict({"name": "bisr", "bandz": 2}), "has no parameter bandz"),
    ],
)
def test_bad_parameters_name_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_maxse_is_at_least_rmse():
    horizon = Horizon(20, 3)
    for mechanism in (Identity(), LambdaCGD(0.8), LambdaCGD(0.8, normalized=True), BISR(4), Diagonal()):
        assert maxse(mechanism, horizon) >= rmse(mechanism, horizon)


@pytest.mark.parametrize("ask", [lc.rmse, lc.maxse, lc.sensitivity])
def test_questions_take_a_mechanism_and_a_horizon(ask):
    with pytest.raises(lc.InvalidInput, match="it must be a Mechanism such as"):
        ask("lambda-cgd", lc.Horizon(10, 2))
    with pytest.raises(lc.InvalidInput, match="it must be a Horizon"):
        ask(lc.LambdaCGD(0.5), 20)
