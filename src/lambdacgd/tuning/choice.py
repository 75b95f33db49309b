"""Choosing λ (or γ): four objectives, from the error without amplification to the paper's advice for training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from scipy.optimize import minimize_scalar

from lambdacgd import cache
from lambdacgd.accounting.balls_in_bins import exact_accountant as exact_with_fixed_bins
from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.fresh_bins import exact_accountant as exact_with_fresh_bins
from lambdacgd.accounting.fresh_bins.simulation import estimate_sigma
from lambdacgd.accounting.monte_carlo.build import gram_of
from lambdacgd.accounting.monte_carlo.estimate import Estimator
from lambdacgd.accounting.monte_carlo.progress import progress
from lambdacgd.mechanisms import GammaBIFR, Horizon, LambdaCGD, Mechanism, error_norms, maxse, rmse, sensitivity
from lambdacgd.validation import InvalidInput, integer, number

Objective = Literal["rmse", "maxse", "amplified-rmse", "guideline"]
Bins = Literal["fixed", "fresh"]

SHRINKAGE = 3.0  # the paper saw the best training runs 2–4 times below the minimiser, on the scale 1/(1−λ)
_FEW = 2048  # samples while searching
_FEW_EPOCHS = 12_288  # simulated epochs while searching with fresh bins
_LARGEST = 12.0  # of log 1/(1−λ): λ up to 1 − 6e-6


@dataclass(frozen=True)
class Candidate:
    """What one objective would choose. ``sigma``, ``rmse`` and ``maxse`` are under Balls-in-Bins if ``amplified``
    (σ to about 0.5%, not a claim), otherwise for unit Gaussian noise times the sensitivity."""

    objective: Objective
    value: float
    sigma: float
    rmse: float
    maxse: float
    amplified: bool


@dataclass(frozen=True)
class Choice:
    """The chosen λ (or γ), and what every objective would have chosen."""

    value: float
    objective: Objective
    candidates: tuple[Candidate, ...]
    because: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"candidates": [asdict(candidate) for candidate in self.candidates]}


_BECAUSE: dict[str, str] = {
    "rmse": "minimises the root-mean-square error without amplification",
    "maxse": "minimises the largest standard error without amplification",
    "amplified-rmse": "minimises the root-mean-square error under Balls-in-Bins",
    "guideline": f"the minimiser of the amplified error with 1/(1−x) divided by {SHRINKAGE:g}: advice from the paper's "
    "training runs, not a theorem",
}


def choose_lambda(
    horizon: Horizon,
    *,
    objective: Objective = "guideline",
    epsilon: float | None = None,
    delta: float | None = None,
    normalized: bool = False,
    bins: Bins = "fixed",
) -> Choice:
    """λ for DP-λCGD over ``horizon``.

    ``rmse`` and ``maxse`` ignore amplification and need neither ε nor δ. ``amplified-rmse`` minimises
    (1/√n)‖AC⁻¹‖_F·σ(λ) under Balls-in-Bins, σ by the exact accountant (quickly, to about 0.5%; by sampling only where
    it refuses); ``guideline`` takes that minimiser and divides 1/(1−λ) by 3, down to λ = 0. With ``bins="fresh"`` the
    noise restarts every epoch, in errors and in σ. No privacy rests on the choice: σ is certified afterwards.

    >>> round(choose_lambda(Horizon(390, 10), objective="rmse").value, 3)
    0.978
    """
    family = {"mechanism": LambdaCGD.name, "normalized": bool(normalized)}
    return _choose(lambda x: LambdaCGD(x, bool(normalized)), family, horizon, objective, epsilon, delta, bins)


def choose_gamma(
    bands: int,
    horizon: Horizon,
    *,
    objective: Objective = "amplified-rmse",
    epsilon: float | None = None,
    delta: float | None = None,
    bins: Bins = "fixed",
) -> Choice:
    """γ for γ-BIFR with ``bands`` bands, by the same search. The guideline is known to be good for λ only.

    More than two bands have no exact accountant: their σ is sampled, with the same random numbers for every γ.
    """
    integer("bands", bands, minimum=2, maximum=horizon.steps_per_epoch if bins == "fresh" else horizon.steps)
    family = {"mechanism": GammaBIFR.name, "bands": int(bands)}
    return _choose(lambda x: GammaBIFR(bands, x), family, horizon, objective, epsilon, delta, bins)


def _choose(
    make: Callable[[float], Mechanism],
    family: dict[str, Any],
    horizon: Horizon,
    objective: Objective,
    epsilon: float | None,
    delta: float | None,
    bins: Bins,
) -> Choice:
    if bins not in get_args(Bins):
        raise InvalidInput("bins", bins, f"it must be one of {', '.join(get_args(Bins))}")
    if objective not in get_args(Objective):
        raise InvalidInput("objective", objective, f"it must be one of {', '.join(get_args(Objective))}")
    amplified = objective in ("amplified-rmse", "guideline")
    if amplified or epsilon is not None or delta is not None:
        epsilon = number("epsilon", epsilon, above=0)
        delta = number("delta", delta, above=0, below=1)
    question = family | {
        "steps_per_epoch": int(horizon.steps_per_epoch),
        "epochs": int(horizon.epochs),
        "epsilon": epsilon,
        "delta": delta,
        "bins": bins,
    }

    def compute() -> list[dict[str, Any]]:
        return [asdict(candidate) for candidate in _candidates(make, horizon, epsilon, delta, bins)]

    candidates = tuple(Candidate(**found) for found in cache.cached("choice", question, compute))
    value = next(candidate.value for candidate in candidates if candidate.objective == objective)
    return Choice(value, objective, candidates, _BECAUSE[objective])


def _candidates(
    make: Callable[[float], Mechanism], horizon: Horizon, epsilon: float | None, delta: float | None, bins: Bins
) -> list[Candidate]:
    restart = horizon.steps_per_epoch if bins == "fresh" else None

    def mean(x: float) -> float:
        return rmse(make(x), horizon, restart_every=restart)

    def largest(x: float) -> float:
        return maxse(make(x), horizon, restart_every=restart)

    plain: dict[Objective, float] = {
        "rmse": _minimise(mean, _LARGEST, 1e-6),
        "maxse": _minimise(largest, _LARGEST, 1e-6),
    }
    if epsilon is None or delta is None:
        return [Candidate(name, x, 1.0, mean(x), largest(x), False) for name, x in plain.items()]
    with progress(f"choosing for ε = {epsilon:g}") as tick:
        return _amplified_candidates(make, AmplifiedError(horizon, epsilon, delta, bins=bins, tick=tick), plain)


def _amplified_candidates(
    make: Callable[[float], Mechanism], search: AmplifiedError, plain: dict[Objective, float]
) -> list[Candidate]:
    top = max(_scale(plain["rmse"]), 0.1)
    smallest = _minimise(lambda x: search.rmse(make(x)), top, 0.05)
    chosen = plain | {"amplified-rmse": smallest, "guideline": shrink(smallest)}
    found = []
    for name, x in chosen.items():
        mechanism = make(x)
        sigma = search.sigma(mechanism, more=2)
        norms = search.norms(mechanism)
        found.append(Candidate(name, x, sigma, norms[0] * sigma, norms[1] * sigma, True))
    return found


def shrink(value: float) -> float:
    """1/(1−x) divided by 3, but at least 1 (x = 0)."""
    return max(0.0, 1.0 - SHRINKAGE * (1.0 - value))


class AmplifiedError:
    """(1/√n)‖AC⁻¹‖_F·σ under Balls-in-Bins, smooth from mechanism to mechanism.

    σ comes from the exact accountant where it answers, and from few, common random numbers elsewhere.
    """

    def __init__(
        self,
        horizon: Horizon,
        epsilon: float,
        delta: float,
        *,
        bins: Bins = "fixed",
        tick: Callable[[int], None] = lambda amount: None,
    ) -> None:
        self.horizon, self.epsilon, self.delta, self.bins, self._tick = horizon, epsilon, delta, bins, tick
        self._restart = horizon.steps_per_epoch if bins == "fresh" else None
        self._exact: dict[Mechanism, float] = {}
        self._seen: list[tuple[float, float]] = []  # log of the column norm, log of σ over it
        self._slope = 15.0

    def norms(self, mechanism: Mechanism) -> tuple[float, float]:
        return error_norms(mechanism, self.horizon.steps, restart_every=self._restart)

    def rmse(self, mechanism: Mechanism) -> float:
        return self.norms(mechanism)[0] * self.sigma(mechanism)

    def sigma(self, mechanism: Mechanism, *, more: int = 1) -> float:
        """σ to about 0.5%; ``more`` takes so many times the usual samples, where it samples."""
        if mechanism in self._exact:
            return self._exact[mechanism]
        norm = sensitivity(mechanism, self.horizon, restart_every=self._restart).value
        found = self._exactly(mechanism, norm)
        if found is None:
            found = self._sampled(mechanism, norm, more)
        else:
            self._exact[mechanism] = found
        self._seen.append((math.log(norm), math.log(found / norm)))
        self._tick(1)
        return found

    def _start(self, norm: float) -> float | None:
        """σ over the sensitivity changes slowly: a line through the two nearest seen is a good start."""
        if not self._seen:
            return None
        x = math.log(norm)
        nearest = sorted(set(self._seen), key=lambda point: abs(point[0] - x))[:2]
        value = nearest[0][1]
        if len(nearest) == 2 and abs(nearest[1][0] - nearest[0][0]) > 1e-3:
            slope = (nearest[1][1] - nearest[0][1]) / (nearest[1][0] - nearest[0][0])
            value += min(max(slope * (x - nearest[0][0]), -0.5), 0.5)
        return norm * math.exp(value)

    def _exactly(self, mechanism: Mechanism, norm: float) -> float | None:
        start = self._start(norm)
        try:
            if self.bins == "fresh" and self.horizon.epochs > 1:
                composed = exact_with_fresh_bins(mechanism, self.horizon)
                if composed is None:
                    return None
                sigma, self._slope = composed.quick_sigma(self.epsilon, self.delta, start=start, slope=self._slope)
                return sigma
            exact = exact_with_fixed_bins(mechanism, self.horizon)
            return None if exact is None else exact.sigma(self.epsilon, self.delta, rtol=3e-3, start=start)[0]
        except AccountingError:
            return None

    def _sampled(self, mechanism: Mechanism, norm: float, more: int) -> float:
        start = self._start(norm)
        if self.bins == "fresh" and self.horizon.epochs > 1:
            return estimate_sigma(
                mechanism,
                self.horizon,
                epsilon=self.epsilon,
                delta=self.delta,
                samples=more * _FEW_EPOCHS,
                start=start,
            ).sigma
        estimator = Estimator(gram_of(mechanism, self.horizon), round_size=more * _FEW)
        return estimator.quick_sigma(self.epsilon, self.delta, start=start)


def _scale(value: float) -> float:
    return -math.log1p(-value)


def _minimise(error: Callable[[float], float], top: float, tolerance: float) -> float:
    """Minimiser of ``error`` over x ∈ [0, 1), searched on the scale log 1/(1−x) up to ``top``; 0 if that is best."""

    def at(scale: float) -> float:
        return error(-math.expm1(-scale))

    found = minimize_scalar(at, bounds=(0.0, top), method="bounded", options={"xatol": tolerance})
    return 0.0 if error(0.0) <= found.fun else float(-math.expm1(-found.x))
