"""The other way round: what a given amount of noise costs. The accountants are those of ``calibration``."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from lambdacgd import cache
from lambdacgd.accounting.base import SMALLEST_EPSILON, AccountingError, Certificate, device
from lambdacgd.accounting.calibration import require_independent_noise
from lambdacgd.accounting.gaussian import gaussian_epsilon
from lambdacgd.accounting.poisson import check_delta, poisson_epsilon
from lambdacgd.mechanisms import Horizon, Mechanism, sensitivity
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson, Sampling
from lambdacgd.validation import InvalidInput, number

# Sampled certificates are tried at these multiples of the estimated ε; the failure probability is shared by all.
_LADDER = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5)


def certify_noise(mechanism: Mechanism, sampling: Sampling, *, sigma: float, delta: float) -> Certificate:
    """The smallest ε that can be certified for a noise multiplier σ, from 0.001 on; ``mechanism`` must be resolved.

    Guarantee
    ---------
    As for ``calibrate_noise`` at the certificate's (ε, δ): its σ may be smaller than the one asked about, and more
    noise is never less private.
    """
    sigma = number("sigma", sigma, above=0)
    delta = number("delta", delta, above=0, below=1)
    mechanism.validate(sampling.block)
    question = mechanism.question(sampling.block.steps)
    question |= {"sampling": sampling.to_dict(), "sigma": sigma, "delta": delta}
    try:
        found = cache.cached(
            "epsilon",
            question | {"device": device()},
            lambda: _certificate(mechanism, sampling, sigma, delta).to_dict(),
        )
    except AccountingError as error:
        raise AccountingError(
            f"σ = {sigma:g} has no certified ε at δ = {delta:g} ({error}); plan for an ε instead"
        ) from error
    if not math.isfinite(found["epsilon"]):
        raise AccountingError(f"σ = {sigma:g} has no finite ε at δ = {delta:g}: use more noise")
    details = found["details"] | {"sampling": sampling.kind}
    return Certificate(**(found | {"epsilon": _said(found["epsilon"]), "details": details}))


def _said(epsilon: float) -> float:
    """ε rounded up to six digits: what is printed is what was certified."""
    value = Decimal(repr(max(epsilon, SMALLEST_EPSILON)))
    return float(Context(prec=6, rounding=ROUND_CEILING).plus(value))


def _certificate(mechanism: Mechanism, sampling: Sampling, sigma: float, delta: float) -> Certificate:
    horizon = sampling.horizon
    if isinstance(sampling, Cyclic):
        known = sensitivity(mechanism, horizon)
        details = {"sensitivity_is": "exact" if known.exact else "upper bound", "because": known.because}
        return Certificate(
            "analytic", "both", 1.0, gaussian_epsilon(sigma / known.value, delta), delta, "bound", details
        )
    if isinstance(sampling, Poisson):
        require_independent_noise(mechanism, sampling)
        check_delta(delta)
        return Certificate("pld", "both", 1.0, poisson_epsilon(sigma, delta, horizon), delta)
    if not isinstance(sampling, BallsInBins):
        raise InvalidInput("sampling", sampling, "it must be a BallsInBins, Poisson or Cyclic")
    if sampling.bins == "fresh" and horizon.epochs > 1:
        return _composed(mechanism, horizon, sigma, delta)
    return _fixed(mechanism, horizon, sigma, delta)


def _composed(mechanism: Mechanism, horizon: Horizon, sigma: float, delta: float) -> Certificate:
    """λCGD exactly, other mechanisms through the λCGD chain that dominates them best near the answer."""
    from lambdacgd.accounting.fresh_bins.calibration import exact_accountant
    from lambdacgd.accounting.fresh_bins.dominating import dominating

    exact = exact_accountant(mechanism, horizon)
    if exact is not None:
        return exact.spent(sigma, delta).certificate(delta)
    found: Certificate | None = None
    for _ in range(2):
        near = 2.0 if found is None else min(max(found.epsilon, SMALLEST_EPSILON), 20.0)
        chain = dominating(mechanism, horizon, epsilon=near, delta=delta)
        one = chain.accountant.spent(sigma / chain.norm, delta).certificate(delta)
        more: dict[str, Any] = {"dominated_by": {"lam": chain.accountant.lam, "norm": chain.norm}}
        if found is None or one.epsilon < found.epsilon:
            found = replace(one, details=one.details | more)
    assert found is not None
    return found


def _fixed(mechanism: Mechanism, horizon: Horizon, sigma: float, delta: float) -> Certificate:
    """λCGD exactly; where that refuses, and for every other mechanism, by sampling."""
    from lambdacgd.accounting.balls_in_bins import exact_accountant
    from lambdacgd.accounting.monte_carlo import MonteCarlo

    exact, refusal = exact_accountant(mechanism, horizon), None
    if exact is not None:
        try:
            return exact.epsilon(sigma, delta)[1].certificate(delta)
        except AccountingError as error:
            refusal = str(error)
    sampled = MonteCarlo(mechanism, horizon)
    middle = max(sampled.epsilon(delta, sigma), SMALLEST_EPSILON)
    beta = min(1e-9, delta / 1000)
    for more in _LADDER:
        found = sampled.certify(middle * more, delta, failure_probability=beta / len(_LADDER))
        if found.sigma <= sigma:
            details = found.certificate.details | ({} if refusal is None else {"transfer_matrix_refused": refusal})
            return replace(found.certificate, confidence=1 - beta, details=details)
    raise AccountingError(f"estimated is {middle:.3g}, but sampling certifies none up to {middle * _LADDER[-1]:.3g}")
