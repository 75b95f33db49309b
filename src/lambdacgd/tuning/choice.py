"""Choosing λ (or γ): four objectives, from the error without amplification to the paper's advice for training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from scipy.optimize import minimize_scalar

from lambdacgd import cache
from lambdacgd.accounting.monte_carlo.build import gram_of
from lambdacgd.accounting.monte_carlo.estimate import Estimator
from lambdacgd.accounting.monte_carlo.progress import progress
from lambdacgd.mechanisms import GammaBIFR, Horizon, LambdaCGD, Mechanism, error_norms, maxse, rmse
from lambdacgd.validation import InvalidInput, integer, number

Objective = Literal["rmse", "maxse", "amplified-rmse", "guideline"]

SHRINKAGE = 3.0  # the paper saw the best training runs 2–4 times below the minimiser, on the scale 1/(1−λ)
_FEW = 2048  # samples while searching
_LARGEST = 12.0  # of log 1/(1−λ): λ up to 1 − 6e-6


@dataclass(frozen=True)
class Candidate:
    """What one objective would choose. ``sigma``, ``rmse`` and ``maxse`` are under Balls-in-Bins if ``amplified``
    (a quick estimate of σ), otherwise for unit Gaussian noise times the sensitivity."""

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
) -> Choice:
    """λ for DP-λCGD over ``horizon``.

    ``rmse`` and ``maxse`` ignore amplification and need neither ε nor δ. ``amplified-rmse`` minimises
    (1/√n)‖AC⁻¹‖_F·σ(λ) under Balls-in-Bins, with the same random numbers for every λ; ``guideline`` takes that
    minimiser and divides 1/(1−λ) by 3, down to λ = 0. No privacy rests on the choice: σ is certified afterwards.

    >>> round(choose_lambda(Horizon(390, 10), objective="rmse").value, 3)
    0.978
    """
    family = {"mechanism": LambdaCGD.name, "normalized": bool(normalized)}
    return _choose(lambda x: LambdaCGD(x, bool(normalized)), family, horizon, objective, epsilon, delta)


def choose_gamma(
    bands: int,
    horizon: Horizon,
    *,
    objective: Objective = "guideline",
    epsilon: float | None = None,
    delta: float | None = None,
) -> Choice:
    """γ for γ-BIFR with ``bands`` bands, by the same search; the guideline is carried over from λ by analogy."""
    integer("bands", bands, minimum=2, maximum=horizon.steps)
    family = {"mechanism": GammaBIFR.name, "bands": int(bands)}
    return _choose(lambda x: GammaBIFR(bands, x), family, horizon, objective, epsilon, delta)


def _choose(
    make: Callable[[float], Mechanism],
    family: dict[str, Any],
    horizon: Horizon,
    objective: Objective,
    epsilon: float | None,
    delta: float | None,
) -> Choice:
    if objective not in get_args(Objective):
        raise InvalidInput("objective", objective, f"it must be one of {', '.join(get_args(Objective))}")
    amplified = objective in ("amplified-rmse", "guideline")
    if amplified or epsilon is not None or delta is not None:
        number("epsilon", epsilon, above=0)
        number("delta", delta, above=0, below=1)
    question = family | {
        "steps_per_epoch": int(horizon.steps_per_epoch),
        "epochs": int(horizon.epochs),
        "epsilon": epsilon,
        "delta": delta,
    }

    def compute() -> list[dict[str, Any]]:
        return [asdict(candidate) for candidate in _candidates(make, horizon, epsilon, delta)]

    candidates = tuple(Candidate(**found) for found in cache.cached("choice", question, compute))
    value = next(candidate.value for candidate in candidates if candidate.objective == objective)
    return Choice(value, objective, candidates, _BECAUSE[objective])


def _candidates(
    make: Callable[[float], Mechanism], horizon: Horizon, epsilon: float | None, delta: float | None
) -> list[Candidate]:
    plain: dict[Objective, float] = {
        "rmse": _minimise(lambda x: rmse(make(x), horizon), _LARGEST, 1e-6),
        "maxse": _minimise(lambda x: maxse(make(x), horizon), _LARGEST, 1e-6),
    }
    if epsilon is None or delta is None:
        return [
            Candidate(name, x, 1.0, rmse(make(x), horizon), maxse(make(x), horizon), False) for name, x in plain.items()
        ]
    with progress(f"choosing for ε = {epsilon:g}") as tick:
        return _amplified_candidates(make, horizon, AmplifiedError(horizon, epsilon, delta, tick=tick), plain)


def _amplified_candidates(
    make: Callable[[float], Mechanism], horizon: Horizon, search: AmplifiedError, plain: dict[Objective, float]
) -> list[Candidate]:
    top = max(_scale(plain["rmse"]), 0.1)
    smallest = _minimise(lambda x: search.rmse(make(x)), top, 0.05)
    chosen = plain | {"amplified-rmse": smallest, "guideline": shrink(smallest)}
    found = []
    for name, x in chosen.items():
        mechanism = make(x)
        sigma = search.sigma(mechanism, round_size=2 * _FEW)
        norms = error_norms(mechanism, horizon.steps)
        found.append(Candidate(name, x, sigma, norms[0] * sigma, norms[1] * sigma, True))
    return found


def shrink(value: float) -> float:
    """1/(1−x) divided by 3, but at least 1 (x = 0)."""
    return max(0.0, 1.0 - SHRINKAGE * (1.0 - value))


class AmplifiedError:
    """(1/√n)‖AC⁻¹‖_F·σ under Balls-in-Bins from few, common random numbers: smooth from mechanism to mechanism."""

    def __init__(
        self, horizon: Horizon, epsilon: float, delta: float, *, tick: Callable[[int], None] = lambda amount: None
    ) -> None:
        self.horizon, self.epsilon, self.delta, self._tick = horizon, epsilon, delta, tick
        self._last: float | None = None

    def sigma(self, mechanism: Mechanism, *, round_size: int = _FEW) -> float:
        estimator = Estimator(gram_of(mechanism, self.horizon), round_size=round_size)
        # The ratio to the unamplified σ changes slowly, so the last one is a good start.
        norm = math.sqrt(float(estimator.gram.diagonal.max()))
        start = None if self._last is None else self._last * norm
        found = estimator.quick_sigma(self.epsilon, self.delta, start=start)
        self._last = found / norm
        self._tick(1)
        return found

    def rmse(self, mechanism: Mechanism) -> float:
        return error_norms(mechanism, self.horizon.steps)[0] * self.sigma(mechanism)


def _scale(value: float) -> float:
    return -math.log1p(-value)


def _minimise(error: Callable[[float], float], top: float, tolerance: float) -> float:
    """Minimiser of ``error`` over x ∈ [0, 1), searched on the scale log 1/(1−x) up to ``top``; 0 if that is best."""

    def at(scale: float) -> float:
        return error(-math.expm1(-scale))

    found = minimize_scalar(at, bounds=(0.0, top), method="bounded", options={"xatol": tolerance})
    return 0.0 if error(0.0) <= found.fun else float(-math.expm1(-found.x))
