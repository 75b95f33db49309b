"""Which accountant answers for which pair of mechanism and sampling. A pair without a proof raises and names others."""

from __future__ import annotations

import math
from dataclasses import replace

from lambdacgd.accounting.base import SMALLEST_EPSILON, Calibration, Certificate
from lambdacgd.accounting.gaussian import without_amplification
from lambdacgd.accounting.poisson import poisson_dp_sgd
from lambdacgd.mechanisms import Horizon, Mechanism
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson, Sampling
from lambdacgd.validation import InvalidInput, number


def adds_independent_noise(mechanism: Mechanism, horizon: Horizon) -> bool:
    """Whether this is DP-SGD under another name: C = I."""
    n = horizon.steps
    noising = mechanism.noising(n)
    return mechanism.column_scales(n) is None and noising[0] == 1.0 and not noising[1:].any()


def require_independent_noise(mechanism: Mechanism, sampling: Poisson) -> None:
    """Poisson sampling is accounted for DP-SGD alone."""
    if not adds_independent_noise(mechanism, sampling.horizon):
        raise InvalidInput(
            "sampling",
            sampling.name,
            f"{mechanism.name} correlates its noise and Poisson sampling has no tight accountant for that; use "
            "balls-in-bins or cyclic, or the mechanism dp-sgd",
        )


def calibrate_noise(
    mechanism: Mechanism,
    sampling: Sampling,
    *,
    epsilon: float,
    delta: float,
    estimate: bool = False,
) -> Calibration:
    """The noise multiplier σ that makes ``mechanism`` under ``sampling`` (ε, δ)-DP, with its certificate.

    ``mechanism`` must be resolved. ``estimate`` asks for a quick point estimate where only sampling can answer; its
    certificate says ``kind="estimate"`` and is not a privacy claim. ε = inf means no noise at all. Its
    details name the kind of sampling: σ of fresh bins is worth nothing over fixed ones.
    """
    found = _calibrate_noise(mechanism, sampling, epsilon, delta, estimate)
    if found.certificate.kind == "estimate" and not estimate:
        raise InvalidInput(
            "sampling",
            sampling.kind,
            f"{mechanism.name} has only a point estimate there, which claims nothing: ask for it (estimate), or use "
            "fixed bins or cyclic sampling, which are certified",
        )
    details = found.certificate.details | {"sampling": sampling.kind}
    return Calibration(found.sigma, replace(found.certificate, details=details))


def _calibrate_noise(
    mechanism: Mechanism, sampling: Sampling, epsilon: float, delta: float, estimate: bool
) -> Calibration:
    epsilon = number("epsilon", epsilon, above=0, include=(math.inf,))
    delta = number("delta", delta, above=0, below=1)
    if math.isinf(epsilon):
        return Calibration(0.0, Certificate("none", "both", 1.0, math.inf, delta, details={"because": "ε = inf"}))
    horizon = sampling.horizon
    mechanism.validate(sampling.block)
    if isinstance(sampling, Cyclic):
        return without_amplification(mechanism, horizon, epsilon=epsilon, delta=delta)
    if isinstance(sampling, Poisson):
        require_independent_noise(mechanism, sampling)
        return poisson_dp_sgd(horizon, epsilon=epsilon, delta=delta)
    if isinstance(sampling, BallsInBins) and sampling.bins == "fresh":
        from lambdacgd.accounting.fresh_bins import fresh_bins

        return fresh_bins(mechanism, horizon, epsilon=epsilon, delta=delta, estimate=estimate)
    if isinstance(sampling, BallsInBins):
        from lambdacgd.accounting.balls_in_bins import balls_in_bins

        return balls_in_bins(mechanism, horizon, epsilon=epsilon, delta=delta, estimate=estimate)
    raise InvalidInput("sampling", sampling, "it must be a BallsInBins, Poisson or Cyclic")


def check_epsilon(sampling: Sampling, epsilon: float) -> None:
    """Refuse an ε that no accountant of ``sampling`` takes, before anything is searched for or computed."""
    if not isinstance(sampling, BallsInBins) or math.isinf(epsilon):
        return
    from lambdacgd.accounting.fresh_bins.accountant import LARGEST_EPSILON as COMPOSED
    from lambdacgd.accounting.monte_carlo.accountant import LARGEST_EPSILON as SAMPLED

    composed = sampling.bins == "fresh" and sampling.epochs > 1
    within = epsilon <= COMPOSED if composed else epsilon < SAMPLED
    if epsilon < SMALLEST_EPSILON or not within:
        largest = f"to {COMPOSED:g}" if composed else f"to below {SAMPLED:g}"
        raise InvalidInput(
            "epsilon",
            epsilon,
            f"{sampling.kind} is accounted for from {SMALLEST_EPSILON:g} {largest}; use cyclic sampling, which takes "
            "any, or inf to train without noise",
        )


def methods(sampling: Sampling) -> tuple[str, ...]:
    """The methods that certify ``sampling``: a certificate by another one was made for something else."""
    if isinstance(sampling, BallsInBins):
        composed = sampling.bins == "fresh" and sampling.epochs > 1
        return ("transfer-matrix-composed",) if composed else ("transfer-matrix", "monte-carlo")
    return ("analytic",) if isinstance(sampling, Cyclic) else ("pld",)


def cross_check(mechanism: Mechanism, sampling: Sampling, *, sigma: float, epsilon: float) -> dict[str, float]:
    """δ(ε) at this σ by Monte Carlo, which shares no code with the exact accountant: for ``plan --cross-check``."""
    if not isinstance(sampling, BallsInBins):
        raise InvalidInput("cross_check", True, "only balls-in-bins is accounted in two independent ways")
    if sampling.bins == "fresh":
        from lambdacgd.accounting.fresh_bins.simulation import simulate

        drawn = simulate(mechanism, sampling.horizon, sigma=sigma, epsilon=epsilon)
        return {"delta": float(drawn["delta"]), "standard_error": float(drawn["standard_error"])}
    from lambdacgd.accounting.monte_carlo import MonteCarlo

    found = MonteCarlo(mechanism, sampling.horizon).estimate_delta(epsilon, sigma, samples=262_144)
    return {"delta": found.value, "standard_error": found.standard_error}
