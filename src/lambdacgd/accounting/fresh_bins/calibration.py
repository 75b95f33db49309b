"""Which accountant answers for a mechanism under fresh bins."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from lambdacgd import cache
from lambdacgd.accounting.balls_in_bins import balls_in_bins, exact_calibration
from lambdacgd.accounting.balls_in_bins import exact_accountant as exact_single_epoch
from lambdacgd.accounting.base import SMALLEST_EPSILON, Calibration, Certificate
from lambdacgd.accounting.fresh_bins.accountant import FreshBins
from lambdacgd.accounting.fresh_bins.dominating import dominating
from lambdacgd.accounting.fresh_bins.simulation import estimate_sigma
from lambdacgd.mechanisms import Horizon, Mechanism
from lambdacgd.validation import InvalidInput


def fresh_bins(
    mechanism: Mechanism, horizon: Horizon, *, epsilon: float, delta: float, estimate: bool = False
) -> Calibration:
    """σ of a mechanism (resolved for one epoch) that restarts with new bins in each of ``horizon.epochs`` epochs.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out of one example, both directions, if every epoch draws bins and noise anew and takes no
    noise back across its boundary. λCGD (and so DP-SGD, its λ = 0) is certified deterministically by composition of
    the exact single-epoch accountant. Every other mechanism with C ≥ 0 is certified through a λCGD chain that dominates
    it, just as deterministically but with more noise than it needs; ``estimate`` asks for the simulated σ instead,
    which is close and claims nothing.
    """
    if epsilon < SMALLEST_EPSILON:
        raise InvalidInput(
            "epsilon",
            epsilon,
            f"balls-in-bins is accounted for from {SMALLEST_EPSILON:g} on; below it, use cyclic sampling",
        )
    if horizon.epochs == 1:  # nothing to redraw
        return balls_in_bins(mechanism, horizon, epsilon=epsilon, delta=delta, estimate=estimate)
    exact = exact_accountant(mechanism, horizon)
    if exact is not None:
        return exact_calibration(exact, epsilon, delta)
    simulated = _estimate(mechanism, horizon, epsilon, delta)
    return simulated if estimate else _dominated(mechanism, horizon, epsilon, delta, simulated)


def exact_accountant(mechanism: Mechanism, horizon: Horizon) -> FreshBins | None:
    """The composed transfer-matrix accountant of this mechanism, if it is λCGD in any guise."""
    one = exact_single_epoch(mechanism, Horizon(horizon.steps_per_epoch, 1))
    return None if one is None else FreshBins(one.lam, one.steps_per_epoch, horizon.epochs, one.normalized)


def _estimate(mechanism: Mechanism, horizon: Horizon, epsilon: float, delta: float) -> Calibration:
    question = mechanism.question(horizon.steps_per_epoch) | {"b": horizon.steps_per_epoch, "k": horizon.epochs}

    def compute() -> dict[str, Any]:
        return asdict(estimate_sigma(mechanism, horizon, epsilon=epsilon, delta=delta))

    found = cache.cached("fresh-bins-estimate", question | {"epsilon": epsilon, "delta": delta}, compute)
    details = {"sigma_standard_error": found["standard_error"], "samples": found["samples"]}
    return Calibration(
        found["sigma"], Certificate("simulation-composed", "both", 0.5, epsilon, delta, "estimate", details)
    )


def _dominated(
    mechanism: Mechanism, horizon: Horizon, epsilon: float, delta: float, simulated: Calibration
) -> Calibration:
    chain = dominating(mechanism, horizon, epsilon=epsilon, delta=delta)
    found = exact_calibration(chain.accountant, epsilon, delta)
    sigma = found.sigma * chain.norm
    more = {
        "dominated_by": {"lam": chain.accountant.lam, "norm": chain.norm},
        "estimate": simulated.sigma,
        "estimate_standard_error": simulated.certificate.details["sigma_standard_error"],
    }
    return Calibration(sigma, replace(found.certificate, details=found.certificate.details | more))


def epsilon_after_epochs(
    mechanism: Mechanism, horizon: Horizon, *, sigma: float, epsilon: float, delta: float
) -> tuple[float, ...]:
    """Upper bounds on ε at ``delta`` after 1, 2, …, k whole epochs of a run planned for ``epsilon`` at ``sigma``.

    As for the plan's own σ, λCGD is composed exactly and other mechanisms through the chain that dominates them.
    """
    exact = exact_accountant(mechanism, horizon)
    if exact is not None:
        return exact.epsilons(sigma, delta)
    chain = dominating(mechanism, horizon, epsilon=epsilon, delta=delta)
    return chain.accountant.epsilons(sigma / chain.norm, delta)
