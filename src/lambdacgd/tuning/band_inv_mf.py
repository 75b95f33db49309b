"""BandInvMF for amplified training: noising coefficients optimised with the Balls-in-Bins accountant in the loop."""

from __future__ import annotations

from typing import get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from lambdacgd import cache
from lambdacgd.accounting.monte_carlo.progress import progress
from lambdacgd.mechanisms import BISR, BandInvMF, GammaBIFR, Horizon
from lambdacgd.tuning.choice import AmplifiedError, Bins, choose_gamma
from lambdacgd.validation import InvalidInput, integer, number

MOST_BANDS = 16  # the search is derivative-free: beyond this it is slow and gains nothing
_EVALUATIONS = 40  # for each coefficient
_SHRINK = (0.01, 0.02, 0.04, 0.08)
_SMALLEST = 1e-6


def amplified_band_inv_mf(
    bands: int, horizon: Horizon, *, epsilon: float, delta: float, bins: Bins = "fixed"
) -> BandInvMF:
    """BandInvMF whose coefficients minimise (1/√n)‖AC⁻¹‖_F·σ with σ under Balls-in-Bins.

    The coefficients after the first are searched among negative ones, −e^θ: then C = 1/(1 − Σ|a_j|x^j) ≥ 0, which
    Balls-in-Bins accounting needs. The search starts at the best of γ-BIFR, BISR and the optimum without
    amplification, each also with its correlation reduced. With ``bins="fresh"`` the noise restarts every epoch, in
    errors and in σ. σ is a quick estimate with common random numbers; no privacy rests on it, since the plan's σ is
    certified for the coefficients found.
    """
    if bins not in get_args(Bins):
        raise InvalidInput("bins", bins, f"it must be one of {', '.join(get_args(Bins))}")
    block = Horizon(horizon.steps_per_epoch, 1) if bins == "fresh" else horizon
    integer("bands", bands, minimum=2, maximum=min(MOST_BANDS, block.steps))
    epsilon = number("epsilon", epsilon, above=0)
    delta = number("delta", delta, above=0, below=1)
    question = {
        "bands": int(bands),
        "steps_per_epoch": int(horizon.steps_per_epoch),
        "epochs": int(horizon.epochs),
        "epsilon": epsilon,
        "delta": delta,
        "bins": bins,
    }

    def compute() -> list[float]:
        with progress(f"optimising {bands} bands for ε = {epsilon:g}", _EVALUATIONS * (bands - 1)) as tick:
            return _optimise(bands, block, AmplifiedError(horizon, epsilon, delta, bins=bins, tick=tick))

    found = cache.cached("amplified-bandinvmf", question, compute)
    return BandInvMF(bands, coefficients=tuple(found))


def _optimise(bands: int, block: Horizon, search: AmplifiedError) -> list[float]:
    """The search itself; ``block`` is the stretch that noise is correlated over."""

    def coefficients(logs: NDArray[np.float64]) -> tuple[float, ...]:
        return (1.0, *(-float(value) for value in np.exp(logs)))

    def error(logs: NDArray[np.float64]) -> float:
        if np.exp(logs).sum() >= 1.0:  # C would grow without bound
            return 1e300
        return search.rmse(BandInvMF(bands, coefficients=coefficients(logs)))

    chosen = choose_gamma(
        bands,
        search.horizon,
        objective="amplified-rmse",
        epsilon=search.epsilon,
        delta=search.delta,
        bins=search.bins,
    )
    starts = [GammaBIFR(bands, chosen.value), BISR(bands), BandInvMF(bands).resolve(block)]
    points = [_logs(np.asarray(start.noising(block.steps))[1:], bands - 1) for start in starts]
    # Amplification wants less correlation: first shrink each start as a whole, then let the best one move freely.
    shrunk = [point + shift for point in points for shift in (0.0, *np.log1p(-np.array(_SHRINK)))]
    best = min(shrunk, key=error)
    simplex = np.vstack([best] + [best - 0.1 * np.eye(bands - 1)[i] for i in range(bands - 1)])
    found = minimize(
        error,
        best,
        method="Nelder-Mead",
        options={"initial_simplex": simplex, "xatol": 5e-3, "fatol": 1e-4, "maxfev": _EVALUATIONS * (bands - 1)},
    )
    return list(coefficients(found.x))


def _logs(tail: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """log|a_j| of the negative coefficients; others become tiny."""
    padded = np.zeros(size)
    padded[: len(tail)] = tail[:size]
    return np.log(np.maximum(-padded, _SMALLEST))
