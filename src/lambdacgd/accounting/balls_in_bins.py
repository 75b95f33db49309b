"""Balls-in-Bins with fixed bins: the exact accountant where there is one, a sampled certificate elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lambdacgd import cache
from lambdacgd.accounting.base import SMALLEST_EPSILON, AccountingError, Calibration, Certificate, device
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.accounting.transfer_matrix import TransferMatrix
from lambdacgd.accounting.transfer_matrix.accountant import LARGEST_LAMBDA
from lambdacgd.mechanisms import Horizon, LambdaCGD, Mechanism
from lambdacgd.validation import InvalidInput

if TYPE_CHECKING:
    from lambdacgd.accounting.fresh_bins.accountant import FreshBins


def balls_in_bins(
    mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float, estimate: bool = False
) -> Calibration:
    """σ of a mechanism with C ≥ 0 whose examples are spread over the bins of an epoch, once and for all epochs.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out of one example, both directions. λCGD (and so DP-SGD, its λ = 0) is certified by the
    transfer-matrix accountant, deterministically. Where that refuses, and for every other mechanism, Monte Carlo
    certifies with a failure probability that is counted into δ; ``estimate`` asks for its point estimate instead.
    """
    if epsilon < SMALLEST_EPSILON:
        raise InvalidInput(
            "epsilon",
            epsilon,
            f"balls-in-bins is accounted for from {SMALLEST_EPSILON:g} on; below it, use cyclic sampling",
        )
    exact = exact_accountant(mechanism, horizon)
    refusal = None
    if exact is not None:
        try:
            return exact_calibration(exact, epsilon, delta)
        except AccountingError as error:
            refusal = str(error)
    elif type(mechanism) is LambdaCGD:
        refusal = f"λ = {mechanism.lam!r} lies beyond {LARGEST_LAMBDA}"
    sampled = MonteCarlo(mechanism, horizon)
    found = sampled.estimate(epsilon, delta) if estimate else sampled.certify(epsilon, delta)
    if refusal is not None:
        found.certificate.details["transfer_matrix_refused"] = refusal
    return found


def exact_accountant(mechanism: Mechanism, horizon: Horizon) -> TransferMatrix | None:
    """The transfer-matrix accountant of this mechanism, if it is λCGD in any guise."""
    n = horizon.steps
    noising = mechanism.noising(n)
    if type(mechanism) is LambdaCGD:  # a subclass may correlate its noise in another way
        lam, normalized = mechanism.resolved_lam, mechanism.normalized
    elif mechanism.column_scales(n) is None and noising[0] == 1.0 and not noising[2:].any():
        lam, normalized = (-float(noising[1]) if len(noising) > 1 else 0.0), False
    else:
        return None
    try:
        return TransferMatrix(
            lam, steps_per_epoch=horizon.steps_per_epoch, epochs=horizon.epochs, normalized=normalized
        )
    except AccountingError:  # λ outside its range
        return None


def exact_calibration(accountant: TransferMatrix | FreshBins, epsilon: float, delta: float) -> Calibration:
    """σ and its certificate from an exact accountant, kept on disk."""
    question = {
        "lam": accountant.lam,
        "normalized": accountant.normalized,
        "b": accountant.steps_per_epoch,
        "k": accountant.epochs,
        "epsilon": epsilon,
        "delta": delta,
        "device": device(),
    }

    def compute() -> dict[str, Any]:
        sigma, bound = accountant.sigma(epsilon, delta)
        return {"sigma": sigma, "certificate": bound.certificate(delta).to_dict()}

    found = cache.cached(accountant.method, question, compute)
    return Calibration(found["sigma"], Certificate(**found["certificate"]))
