"""Choosing λ, γ and coefficients for a plan. No privacy rests on a choice: σ is certified for it afterwards. No torch.

Four objectives are known, from the error without amplification to the paper's advice for training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar

from lambdacgd import cache
from lambdacgd.accounting import accountant_for
from lambdacgd.accounting.certificate import progress
from lambdacgd.errors import InvalidInput, integer, number
from lambdacgd.mechanisms import (
    BISR,
    BLT,
    PREFIX_SUM,
    BandInvMF,
    BandMF,
    GammaBIFR,
    Horizon,
    LambdaCGD,
    Mechanism,
    Objective,
    Workload,
    error_norms,
    maxse,
    rmse,
    sensitivity,
)
from lambdacgd.sampling import BallsInBins, Bins, Poisson

SHRINKAGE = 3.0  # the paper saw the best training runs 2–4 times below the minimiser, on the scale 1/(1−λ)
_LARGEST = 12.0  # of log 1/(1−λ): λ up to 1 − 6e-6


@dataclass(frozen=True)
class Candidate:
    """What one objective would choose. ``sigma``, ``rmse`` and ``maxse`` are under Balls-in-Bins if ``amplified``,
    otherwise for unit Gaussian noise times the sensitivity.

    An amplified σ is no claim: good to about 0.5%, but with fresh bins only that of ``amplified-rmse`` is; the others
    follow from it by a closed form, good to a few percent.
    """

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
    workload: Workload = PREFIX_SUM,
) -> Choice:
    """Choose λ for DP-λCGD.

    Args:
        horizon: b steps an epoch, k epochs.
        objective: ``rmse`` and ``maxse`` ignore amplification and need neither ε nor δ. ``amplified-rmse`` minimises
            (1/√n)‖AC⁻¹‖_F·σ(λ) under Balls-in-Bins, σ by a closed form with fresh bins, whose minimum lies within 0.1%
            of the accountant's, and else by the exact accountant (quickly, to about 0.5%; by sampling only where it
            refuses). ``guideline`` takes that minimiser and divides 1/(1−λ) by 3, down to λ = 0.
        epsilon: ε, for the amplified objectives.
        delta: δ, likewise.
        normalized: whether the columns of C are scaled to norm 1.
        bins: with "fresh" ones the noise restarts every epoch, in errors and in σ.
        workload: what errors are of; plain SGD by default.

    Returns:
        The choice, and what every objective would have chosen.

    Raises:
        InvalidInput: an argument is out of range, or missing for the objective.

    Examples:
        >>> round(choose_lambda(Horizon(390, 10), objective="rmse").value, 3)
        0.978
    """
    family = {"mechanism": LambdaCGD.name, "normalized": bool(normalized)}
    return _choose(lambda x: LambdaCGD(x, bool(normalized)), family, horizon, objective, epsilon, delta, bins, workload)


def normalizing_pays(horizon: Horizon, *, epsilon: float, delta: float, workload: Workload = PREFIX_SUM) -> bool:
    """Whether the best column-normalised λCGD has a smaller RMSE than the best plain one, with fresh bins.

    Both are judged by the closed form, which is right up to a factor that is nearly the same for both. It knows the
    chain that stands in for normalised columns, so what that one costs is counted. One epoch has no closed form: then
    the answer is no.
    """
    epsilon, delta = number("epsilon", epsilon, above=0), number("delta", delta, above=0, below=1)
    search = AmplifiedError(horizon, epsilon, delta, bins="fresh", workload=workload)

    def smallest(normalized: bool) -> float:
        def error(x: float) -> float:
            return search.closed_form(LambdaCGD(x, normalized)) or math.inf

        return error(_minimise(error, _LARGEST / 2, 1e-2))

    question = _question(horizon, epsilon, delta, "fresh", workload)
    return bool(cache.cached("normalizing", question, lambda: smallest(True) < smallest(False)))


def choose_gamma(
    bands: int,
    horizon: Horizon,
    *,
    objective: Objective = "amplified-rmse",
    epsilon: float | None = None,
    delta: float | None = None,
    bins: Bins = "fixed",
    workload: Workload = PREFIX_SUM,
) -> Choice:
    """Choose γ for γ-BIFR by the same search. The guideline is known to be good for λ only.

    More than two bands have no exact accountant: their σ is sampled, with the same random numbers for every γ.

    Args:
        bands: the number of bands, at least 2.
        horizon: b steps an epoch, k epochs.
        objective: as for ``choose_lambda``.
        epsilon: ε, for the amplified objectives.
        delta: δ, likewise.
        bins: with "fresh" ones the noise restarts every epoch, in errors and in σ.
        workload: what errors are of; plain SGD by default.

    Returns:
        The choice, and what every objective would have chosen.

    Raises:
        InvalidInput: an argument is out of range, or missing for the objective.
    """
    integer("bands", bands, minimum=2, maximum=_sampling(horizon, bins).block.steps)
    family = {"mechanism": GammaBIFR.name, "bands": int(bands)}
    return _choose(lambda x: GammaBIFR(bands, x), family, horizon, objective, epsilon, delta, bins, workload)


def _choose(
    make: Callable[[float], Mechanism],
    family: dict[str, Any],
    horizon: Horizon,
    objective: Objective,
    epsilon: float | None,
    delta: float | None,
    bins: Bins,
    workload: Workload,
) -> Choice:
    if objective not in get_args(Objective):
        raise InvalidInput("objective", objective, f"it must be one of {', '.join(get_args(Objective))}")
    amplified = objective in ("amplified-rmse", "guideline")
    if amplified or epsilon is not None or delta is not None:
        epsilon = number("epsilon", epsilon, above=0)
        delta = number("delta", delta, above=0, below=1)
    question = family | _question(horizon, epsilon, delta, bins, workload)

    def compute() -> list[dict[str, Any]]:
        return [asdict(candidate) for candidate in _candidates(make, horizon, epsilon, delta, bins, workload)]

    candidates = tuple(Candidate(**stored) for stored in cache.cached("choice", question, compute))
    value = next(candidate.value for candidate in candidates if candidate.objective == objective)
    return Choice(value, objective, candidates, _BECAUSE[objective])


def _question(
    horizon: Horizon, epsilon: float | None, delta: float | None, bins: Bins, workload: Workload
) -> dict[str, Any]:
    """What a cached choice is filed under, but for the family of mechanisms."""
    b, k = int(horizon.steps_per_epoch), int(horizon.epochs)
    question = {"steps_per_epoch": b, "epochs": k, "epsilon": epsilon, "delta": delta, "bins": bins}
    return question | {"workload": asdict(workload)}


def _sampling(horizon: Horizon, bins: Bins) -> BallsInBins:
    """The sampling that a choice is made for. Neither errors nor σ depend on the number of examples."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    return BallsInBins(examples=b, steps_per_epoch=b, epochs=k, bins=bins)


def _candidates(
    make: Callable[[float], Mechanism],
    horizon: Horizon,
    epsilon: float | None,
    delta: float | None,
    bins: Bins,
    workload: Workload,
) -> list[Candidate]:
    restart = _sampling(horizon, bins).restart_every

    def mean(x: float) -> float:
        return rmse(make(x), horizon, workload=workload, restart_every=restart)

    def largest(x: float) -> float:
        return maxse(make(x), horizon, workload=workload, restart_every=restart)

    plain: dict[Objective, float] = {
        "rmse": _minimise(mean, _LARGEST, 1e-6),
        "maxse": _minimise(largest, _LARGEST, 1e-6),
    }
    if epsilon is None or delta is None:
        return [Candidate(name, x, 1.0, mean(x), largest(x), False) for name, x in plain.items()]
    with progress(f"choosing for ε = {epsilon:g}") as tick:
        search = AmplifiedError(horizon, epsilon, delta, bins=bins, workload=workload, tick=tick)
        return _amplified_candidates(make, search, plain)


def _amplified_candidates(
    make: Callable[[float], Mechanism], search: AmplifiedError, plain: dict[Objective, float]
) -> list[Candidate]:
    top = max(_scale(plain["rmse"]), 0.1)
    closed = search.closed_form(make(0.5)) is not None

    def error(x: float) -> float:
        value = search.closed_form(make(x)) if closed else search.rmse(make(x))
        assert value is not None
        return value

    smallest = _minimise(error, top, 1e-3 if closed else 0.05)
    chosen = plain | {"amplified-rmse": smallest, "guideline": shrink(smallest)}
    # The closed form is right up to a factor that changes slowly with λ: one accountant's σ sets it for all.
    factor = search.rmse(make(smallest)) / error(smallest) if closed else 1.0
    candidates = []
    for name, x in chosen.items():
        mechanism = make(x)
        norms = search.norms(mechanism)
        sigma = factor * error(x) / norms[0] if closed else search.sigma(mechanism, effort=2)
        candidates.append(Candidate(name, x, sigma, norms[0] * sigma, norms[1] * sigma, True))
    return candidates


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
        workload: Workload = PREFIX_SUM,
        tick: Callable[[int], None] = lambda amount: None,
    ) -> None:
        self.horizon, self.epsilon, self.delta, self._tick = horizon, epsilon, delta, tick
        self.workload = workload
        self.sampling = _sampling(horizon, bins)
        self._computed: dict[tuple[Mechanism, int], float] = {}
        self._points: list[tuple[float, float]] = []  # log of the column norm, log of σ over it

    def norms(self, mechanism: Mechanism) -> tuple[float, float]:
        return error_norms(mechanism, self.horizon.steps, self.workload, restart_every=self.sampling.restart_every)

    def rmse(self, mechanism: Mechanism) -> float:
        return self.norms(mechanism)[0] * self.sigma(mechanism)

    def closed_form(self, mechanism: Mechanism) -> float | None:
        """About ``rmse``, in milliseconds; None where there is no closed form."""
        guess = accountant_for(mechanism, self.sampling).first_guess(self.epsilon, self.delta)
        return None if guess is None else self.norms(mechanism)[0] * guess

    def sigma(self, mechanism: Mechanism, *, effort: int = 1) -> float:
        """σ to about 0.5%; ``effort`` takes so many times the usual samples, where it samples."""
        if (mechanism, effort) in self._computed:
            return self._computed[mechanism, effort]
        norm = sensitivity(mechanism, self.horizon, restart_every=self.sampling.restart_every).value
        sigma = accountant_for(mechanism, self.sampling).quick_sigma(
            self.epsilon, self.delta, start=self._start(norm), effort=effort
        )
        self._computed[mechanism, effort] = sigma
        self._points.append((math.log(norm), math.log(sigma / norm)))
        self._tick(1)
        return sigma

    def _start(self, norm: float) -> float | None:
        """σ over the sensitivity changes slowly: a line through the two nearest points is a good start."""
        if not self._points:
            return None
        x = math.log(norm)
        nearest = sorted(set(self._points), key=lambda point: abs(point[0] - x))[:2]
        value = nearest[0][1]
        if len(nearest) == 2 and abs(nearest[1][0] - nearest[0][0]) > 1e-3:
            slope = (nearest[1][1] - nearest[0][1]) / (nearest[1][0] - nearest[0][0])
            value += min(max(slope * (x - nearest[0][0]), -0.5), 0.5)
        return norm * math.exp(value)


def _scale(value: float) -> float:
    return -math.log1p(-value)


def _minimise(error: Callable[[float], float], top: float, tolerance: float) -> float:
    """Minimiser of ``error`` over x ∈ [0, 1), searched on the scale log 1/(1−x) up to ``top``; 0 if that is best."""

    def at(scale: float) -> float:
        return error(-math.expm1(-scale))

    minimum = minimize_scalar(at, bounds=(0.0, top), method="bounded", options={"xatol": tolerance})
    return 0.0 if error(0.0) <= minimum.fun else float(-math.expm1(-minimum.x))


def choose_bands(
    sampling: Poisson, *, epsilon: float, delta: float, workload: Workload = PREFIX_SUM
) -> tuple[int, dict[str, Any]]:
    """Choose the bands of BandMF, and so the groups of Poisson sampling: the power of two with the smallest RMSE.

    Args:
        sampling: bound. If it has groups already, there are as many bands.
        epsilon: ε.
        delta: δ.
        workload: what errors are of; plain SGD by default.

    Returns:
        The bands, and how they were chosen, with the RMSE of all that were tried.
    """
    because = "the power of two with the smallest root-mean-square error under cyclic Poisson sampling"
    said = {"parameter": "bands", "objective": "amplified-rmse", "because": because}
    if sampling.groups:
        return sampling.groups, said | {"because": "as many as the sampling has groups"}

    def error(bands: int) -> float:
        mechanism = BandMF(bands).resolve(sampling.horizon)
        sigma = accountant_for(mechanism, sampling.fitted(mechanism)).quick_sigma(epsilon, delta)
        return error_norms(mechanism, sampling.steps, workload)[0] * sigma

    def compute() -> list[float]:
        tried = [error(1)]
        for power in range(1, sampling.steps_per_epoch.bit_length()):
            tried.append(error(1 << power))
            if tried[-1] > tried[-2]:  # it falls, then rises
                break
        return tried

    question = sampling.question | {"epsilon": epsilon, "delta": delta, "workload": asdict(workload)}
    tried = cache.cached("bands", question, compute)
    return 1 << int(np.argmin(tried)), said | {"tried": {str(1 << power): value for power, value in enumerate(tried)}}


# BandInvMF

MOST_BANDS = 16  # the search is derivative-free: beyond this it is slow and gains nothing
_EVALUATIONS = 40  # for each coefficient
_SHRINK = (0.01, 0.02, 0.04, 0.08)
_SMALLEST = 1e-6
_SLOWEST = 6.5  # of log 1/(1−θ) of one buffer: θ up to .9985, beyond which the accountant is slow


def amplified_band_inv_mf(
    bands: int,
    horizon: Horizon,
    *,
    epsilon: float,
    delta: float,
    bins: Bins = "fixed",
    workload: Workload = PREFIX_SUM,
) -> BandInvMF:
    """BandInvMF whose coefficients minimise (1/√n)‖AC⁻¹‖_F·σ with σ under Balls-in-Bins.

    The coefficients after the first are searched among negative ones, −e^θ: then C = 1/(1 − Σ|a_j|x^j) ≥ 0, which
    Balls-in-Bins accounting needs. The search starts at the best of γ-BIFR, BISR and the optimum without
    amplification, each also with its correlation reduced. With ``bins="fresh"`` the noise restarts every epoch, in
    errors and in σ. σ is a quick estimate with common random numbers.

    Args:
        bands: the number of bands, from 2 to 16.
        horizon: b steps an epoch, k epochs.
        epsilon: ε.
        delta: δ.
        bins: "fixed" or "fresh".
        workload: what errors are of; plain SGD by default.

    Returns:
        The mechanism with its coefficients.

    Raises:
        InvalidInput: an argument is out of range.
    """
    block = _sampling(horizon, bins).block
    integer("bands", bands, minimum=2, maximum=min(MOST_BANDS, block.steps))
    epsilon = number("epsilon", epsilon, above=0)
    delta = number("delta", delta, above=0, below=1)
    question = {"bands": int(bands)} | _question(horizon, epsilon, delta, bins, workload)

    def compute() -> list[float]:
        with progress(f"optimising {bands} bands for ε = {epsilon:g}", _EVALUATIONS * (bands - 1)) as tick:
            search = AmplifiedError(horizon, epsilon, delta, bins=bins, workload=workload, tick=tick)
            return _optimise(bands, block, search)

    coefficients = cache.cached("amplified-bandinvmf", question, compute)
    return BandInvMF(bands, coefficients=tuple(coefficients))


def amplified_blt(
    horizon: Horizon,
    *,
    epsilon: float,
    delta: float,
    normalized: bool = False,
    bins: Bins = "fixed",
    workload: Workload = PREFIX_SUM,
) -> BLT:
    """BLT with one buffer, whose θ and ω minimise (1/√n)‖AC⁻¹‖_F·σ with σ under Balls-in-Bins.

    C = (1 − φx)/(1 − θx) is searched over θ and φ = θ − ω in [0, θ], for which the accountant is exact. With fresh bins
    σ comes from a closed form, and else from the accountant, quickly.

    Args:
        horizon: b steps an epoch, k epochs.
        epsilon: ε.
        delta: δ.
        normalized: whether the columns of C are scaled to norm 1.
        bins: "fixed" or "fresh".
        workload: what errors are of; plain SGD by default.

    Returns:
        The mechanism with its numbers.

    Raises:
        InvalidInput: an argument is out of range.
    """
    epsilon = number("epsilon", epsilon, above=0)
    delta = number("delta", delta, above=0, below=1)
    question = {"normalized": bool(normalized)} | _question(horizon, epsilon, delta, bins, workload)

    def made(x: NDArray[np.float64]) -> BLT:
        decay = -math.expm1(-min(max(float(x[0]), 0.01), _SLOWEST))
        weight = decay / (1 + math.exp(min(float(x[1]), 30.0)))
        return BLT(1, (decay,), (weight,), normalized=bool(normalized))

    def compute() -> list[float]:
        with progress(f"choosing a buffer for ε = {epsilon:g}") as tick:
            search = AmplifiedError(horizon, epsilon, delta, bins=bins, workload=workload, tick=tick)
            minimum = minimize(
                lambda x: search.closed_form(made(x)) or search.rmse(made(x)),
                np.array([3.0, 1.0]),
                method="Nelder-Mead",
                options={"initial_simplex": [[3.0, 1.0], [3.5, 1.0], [3.0, 1.5]], "xatol": 0.01, "fatol": 1e-3},
            )
        best = made(minimum.x)
        assert best.decays is not None
        assert best.weights is not None
        return [best.decays[0], best.weights[0]]

    decay, weight = cache.cached("amplified-blt", question, compute)
    return BLT(1, (decay,), (weight,), normalized=bool(normalized))


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
        bins=search.sampling.bins,
        workload=search.workload,
    )
    starts = [GammaBIFR(bands, chosen.value), BISR(bands), BandInvMF(bands).resolve(block)]
    points = [_logs(np.asarray(start.noising(block.steps))[1:], bands - 1) for start in starts]
    # Amplification wants less correlation: first shrink each start as a whole, then let the best one move freely.
    shrunk = [point + shift for point in points for shift in (0.0, *np.log1p(-np.array(_SHRINK)))]
    best = min(shrunk, key=error)
    simplex = np.vstack([best] + [best - 0.1 * np.eye(bands - 1)[i] for i in range(bands - 1)])
    minimum = minimize(
        error,
        best,
        method="Nelder-Mead",
        options={"initial_simplex": simplex, "xatol": 5e-3, "fatol": 1e-4, "maxfev": _EVALUATIONS * (bands - 1)},
    )
    return list(coefficients(minimum.x))


def _logs(tail: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """log|a_j| of the negative coefficients; others become tiny."""
    padded = np.zeros(size)
    padded[: len(tail)] = tail[:size]
    return np.log(np.maximum(-padded, _SMALLEST))
