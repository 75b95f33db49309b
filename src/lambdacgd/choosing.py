"""Choosing λ, γ, bands and coefficients for a plan. No torch.

No privacy rests on a choice: σ is certified for what was chosen, afterwards. Four objectives are known, from the error
without amplification to the paper's advice for training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
    sensitivity,
)
from lambdacgd.sampling import BallsInBins, Bins, Poisson, Sampling

SHRINKAGE = 3.0  # the paper saw the best training runs 2–4 times below the minimiser, on the scale 1/(1−λ)
_AMPLIFIED: tuple[Objective, ...] = ("amplified-rmse", "guideline")
_LARGEST = 12.0  # of log 1/(1−λ): λ up to 1 − 6e-6
_BECAUSE: dict[Objective, str] = {
    "rmse": "minimises the root-mean-square error without amplification",
    "maxse": "minimises the largest standard error without amplification",
    "amplified-rmse": "minimises the root-mean-square error under Balls-in-Bins",
    "guideline": f"the minimiser of the amplified error with 1/(1−x) divided by {SHRINKAGE:g}: advice from the paper's "
    "training runs, not a theorem",
}


@dataclass(frozen=True)
class Setting:
    """What parameters are chosen for.

    Args:
        sampling: who takes part when, bound. The number of examples makes no difference.
        epsilon: ε; None if it is not known, and infinite for a run without noise.
        delta: δ; None if it is not known.
        workload: what errors are of; plain SGD by default.
    """

    sampling: Sampling
    epsilon: float | None = None
    delta: float | None = None
    workload: Workload = PREFIX_SUM

    @property
    def amplified(self) -> bool:
        """Whether σ at (ε, δ) depends on the correlation through the amplification of Balls-in-Bins."""
        known = self.epsilon is not None and math.isfinite(self.epsilon)
        return known and isinstance(self.sampling, BallsInBins)

    @property
    def budget(self) -> tuple[float, float]:
        """ε and δ, where both are known."""
        assert self.epsilon is not None
        assert self.delta is not None
        return self.epsilon, self.delta

    @property
    def question(self) -> dict[str, Any]:
        """What a cached choice is filed under, but for the family of mechanisms."""
        budget = {"epsilon": self.epsilon, "delta": self.delta}
        return self.sampling.question | budget | {"workload": asdict(self.workload)}

    def norms(self, mechanism: Mechanism) -> tuple[float, float]:
        """What makes an RMSE and a MaxSE of a noise multiplier."""
        restart = self.sampling.restart_every
        return error_norms(mechanism, self.sampling.steps, self.workload, restart_every=restart)

    def sensitivity(self, mechanism: Mechanism) -> float:
        """How far one example can move C·G."""
        return sensitivity(mechanism, self.sampling.horizon, restart_every=self.sampling.restart_every).value


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
    candidates: list[Candidate]
    because: str


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
            of the accountant's, and else by the exact accountant (quickly, to about 0.5%). ``guideline``
            takes that minimiser and divides 1/(1−λ) by 3, down to λ = 0.
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
    if objective not in get_args(Objective):
        raise InvalidInput("objective", objective, f"it must be one of {', '.join(get_args(Objective))}")
    if objective in _AMPLIFIED or epsilon is not None or delta is not None:
        epsilon = number("epsilon", epsilon, above=0)
        delta = number("delta", delta, above=0, below=1)
    b, k = horizon.steps_per_epoch, horizon.epochs
    sampling = BallsInBins(bins, examples=b, steps_per_epoch=b, epochs=k)
    setting = Setting(sampling, epsilon, delta, workload)
    return _best(LambdaCGD(normalized=bool(normalized)), "lam", objective, setting)


def choose(mechanism: Mechanism, setting: Setting) -> tuple[Mechanism, dict[str, Any] | None]:
    """Choose what depends on the privacy budget: an automatic λ, γ or number of bands, or amplified coefficients.

    Args:
        mechanism: what was asked for.
        setting: what it is chosen for.

    Returns:
        The mechanism with these numbers filled in, and how they were chosen: None if there was nothing to choose.

    Raises:
        InvalidInput: the mechanism asks for a choice that cannot be made in this setting.
    """
    if isinstance(mechanism, LambdaCGD) and mechanism.lam == "auto":
        if mechanism.normalized == "auto":  # with fixed bins and without amplification λCGD stays as the paper has it
            restarts = setting.sampling.restart_every is not None
            pays = restarts and setting.amplified and normalizing_pays(setting)
            mechanism = replace(mechanism, normalized=pays)
        best = _best(mechanism, "lam", _objective("lam", mechanism.objective, setting), setting)
        return replace(mechanism, lam=best.value, objective=None), {"parameter": "lambda"} | asdict(best)
    if isinstance(mechanism, GammaBIFR) and mechanism.gamma == "auto":
        if mechanism.bands == 1:  # one band is DP-SGD whatever γ: nothing to choose
            return replace(mechanism, gamma=0.0, objective=None), None
        best = _best(mechanism, "gamma", _objective("gamma", mechanism.objective, setting), setting)
        return replace(mechanism, gamma=best.value, objective=None), {"parameter": "gamma"} | asdict(best)
    if isinstance(mechanism, BandMF) and mechanism.bands == "auto":
        if not isinstance(setting.sampling, Poisson) or setting.epsilon in (None, math.inf):
            raise InvalidInput("bands", "auto", "only Poisson sampling at a finite epsilon chooses them; say how many")
        bands, selection = _best_bands(setting.sampling, setting)
        return replace(mechanism, bands=bands), {"parameter": "bands", "objective": "amplified-rmse"} | selection
    if isinstance(mechanism, BandInvMF | BLT) and mechanism.amplified:
        if not setting.amplified:
            asked = f"{type(mechanism).__name__}(amplified=True)"
            if setting.epsilon is None:
                how = "make a plan for an ε and give its mechanism=plan.mechanism here, or give its coefficients"
                raise InvalidInput("amplified", f"{asked} is optimised for an ε. With a noise_multiplier {how}.")
            raise InvalidInput("amplified", f"{asked} needs Balls-in-Bins and a finite epsilon.")
        because = "they minimise the root-mean-square error under Balls-in-Bins, the accountant in the loop"
        selection = {"objective": "amplified-rmse", "because": because}
        if isinstance(mechanism, BLT):
            return _amplified_blt(mechanism.normalized, setting), {"parameter": "decays and weights"} | selection
        return _amplified_bands(mechanism, setting), {"parameter": "coefficients"} | selection
    return mechanism, None


def _objective(parameter: str, objective: Objective | None, setting: Setting) -> Objective:
    """What an automatic parameter is chosen by: RMSE, amplified with bins; λ with fixed ones by the paper's guideline.

    The guideline corrects the amplified optimum of fixed bins, which lies far above the λ that trains best; that of
    fresh bins is three times lower already, on the scale 1/(1−λ). Nothing is known of γ that asks for it.
    """
    amplified = isinstance(setting.sampling, BallsInBins) and setting.epsilon != math.inf
    if objective is None:
        fixed = setting.sampling.restart_every is None
        objective = ("guideline" if parameter == "lam" and fixed else "amplified-rmse") if amplified else "rmse"
    if objective in _AMPLIFIED and not amplified:
        raise InvalidInput("objective", objective, "without amplification it must be rmse or maxse")
    if objective in _AMPLIFIED and setting.epsilon is None:
        why = f"is chosen for an ε (by {objective}). With a noise_multiplier give a number, or the objective 'rmse'"
        raise InvalidInput(parameter, f"An automatic {'λ' if parameter == 'lam' else 'γ'} {why}.")
    return objective


# One number: λ or γ


def _best(mechanism: LambdaCGD | GammaBIFR, parameter: str, objective: Objective, setting: Setting) -> Choice:
    """The parameter of this mechanism by one objective, and what the others would choose."""
    plain = replace(mechanism, objective=None)

    def make(value: float) -> Mechanism:
        given: dict[str, Any] = {parameter: value}
        return replace(plain, **given)

    def compute() -> list[dict[str, Any]]:
        return [asdict(candidate) for candidate in _candidates(make, setting)]

    question = {"mechanism": plain.to_dict()} | setting.question
    candidates = [Candidate(**stored) for stored in cache.cached("choice", question, compute)]
    value = next(candidate.value for candidate in candidates if candidate.objective == objective)
    return Choice(value, objective, candidates, _BECAUSE[objective])


def _candidates(make: Callable[[float], Mechanism], setting: Setting) -> list[Candidate]:
    def errors(x: float) -> tuple[float, float]:
        mechanism = make(x)
        norms, sens = setting.norms(mechanism), setting.sensitivity(mechanism)
        return norms[0] * sens, norms[1] * sens

    plain: dict[Objective, float] = {
        "rmse": _minimise(lambda x: errors(x)[0], _LARGEST, 1e-6),
        "maxse": _minimise(lambda x: errors(x)[1], _LARGEST, 1e-6),
    }
    if not setting.amplified:
        return [Candidate(name, x, 1.0, *errors(x), amplified=False) for name, x in plain.items()]
    with progress(f"choosing for ε = {setting.epsilon:g}") as tick:
        search = AmplifiedError(setting, tick)

        def error(x: float) -> float:
            return search.guess(make(x))

        top = max(-math.log1p(-plain["rmse"]), 0.1)
        smallest = _minimise(error, top, 0.05 if search.closed_form(make(0.5)) is None else 1e-3)
        # The closed form is right up to a factor that changes slowly with λ: one accountant's σ sets it for all.
        factor = search.rmse(make(smallest)) / error(smallest)
        candidates = []
        for name, x in (plain | {"amplified-rmse": smallest, "guideline": shrink(smallest)}).items():
            mean, largest = setting.norms(make(x))
            sigma = factor * error(x) / mean
            candidates.append(Candidate(name, x, sigma, mean * sigma, largest * sigma, amplified=True))
        return candidates


def shrink(value: float) -> float:
    """1/(1−x) divided by 3, but at least 1 (x = 0)."""
    return max(0.0, 1.0 - SHRINKAGE * (1.0 - value))


def normalizing_pays(setting: Setting) -> bool:
    """Whether the best column-normalised λCGD has a smaller RMSE than the best plain one, with fresh bins.

    Both are judged by the closed form, which is right up to a factor that is nearly the same for both. It knows the
    chain that stands in for normalised columns, so what that one costs is counted. One epoch has no closed form: then
    the answer is no.
    """
    search = AmplifiedError(setting)

    def smallest(normalized: bool) -> float:
        def error(x: float) -> float:
            return search.closed_form(LambdaCGD(x, normalized)) or math.inf

        return error(_minimise(error, _LARGEST / 2, 1e-2))

    return bool(cache.cached("normalizing", setting.question, lambda: smallest(True) < smallest(False)))


def _minimise(error: Callable[[float], float], top: float, tolerance: float) -> float:
    """Minimiser of ``error`` over x ∈ [0, 1), searched on the scale log 1/(1−x) up to ``top``; 0 if that is best."""

    def at(scale: float) -> float:
        return error(-math.expm1(-scale))

    minimum = minimize_scalar(at, bounds=(0.0, top), method="bounded", options={"xatol": tolerance})
    return 0.0 if error(0.0) <= minimum.fun else float(-math.expm1(-minimum.x))


class AmplifiedError:
    """(1/√n)‖AC⁻¹‖_F·σ under Balls-in-Bins, smooth from mechanism to mechanism.

    Args:
        setting: with a finite ε.
        tick: called after each σ, for a progress bar.
    """

    def __init__(self, setting: Setting, tick: Callable[[int], None] = lambda amount: None) -> None:
        self.setting, self._tick = setting, tick
        self._computed: dict[Mechanism, float] = {}
        self._points: list[tuple[float, float]] = []  # log of the sensitivity, log of σ over it

    def guess(self, mechanism: Mechanism) -> float:
        """By a closed form, up to a factor that changes slowly from mechanism to mechanism, or else ``rmse``."""
        value = self.closed_form(mechanism)
        return self.rmse(mechanism) if value is None else value

    def closed_form(self, mechanism: Mechanism) -> float | None:
        """About ``rmse``, in milliseconds; None where there is no closed form."""
        guess = accountant_for(mechanism, self.setting.sampling).first_guess(*self.setting.budget)
        return None if guess is None else self.setting.norms(mechanism)[0] * guess

    def rmse(self, mechanism: Mechanism) -> float:
        """With σ from the accountant, to about 0.5%."""
        if mechanism not in self._computed:
            norm = self.setting.sensitivity(mechanism)
            accountant = accountant_for(mechanism, self.setting.sampling)
            sigma = accountant.quick_sigma(*self.setting.budget, start=self._start(norm))
            self._computed[mechanism] = sigma
            self._points.append((math.log(norm), math.log(sigma / norm)))
            self._tick(1)
        return self.setting.norms(mechanism)[0] * self._computed[mechanism]

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


# Bands of BandMF under cyclic Poisson sampling


def _best_bands(sampling: Poisson, setting: Setting) -> tuple[int, dict[str, Any]]:
    """The bands of BandMF, and so the groups of Poisson sampling: the power of two with the smallest RMSE.

    Returns:
        The bands, and how they were chosen, with the RMSE of all that were tried. A sampling that has groups already
        decides it: there are as many bands.
    """
    if sampling.groups:
        return sampling.groups, {"because": "as many as the sampling has groups"}

    def error(bands: int) -> float:
        mechanism = BandMF(bands).resolve(sampling.horizon)
        sigma = accountant_for(mechanism, sampling.fitted(mechanism)).quick_sigma(*setting.budget)
        return setting.norms(mechanism)[0] * sigma

    def compute() -> list[float]:
        tried = [error(1)]
        for power in range(1, sampling.steps_per_epoch.bit_length()):
            tried.append(error(1 << power))
            if tried[-1] > tried[-2]:  # it falls, then rises
                break
        return tried

    tried = cache.cached("bands", setting.question, compute)
    because = "the power of two with the smallest root-mean-square error under cyclic Poisson sampling"
    by_bands = {str(1 << power): value for power, value in enumerate(tried)}
    return 1 << int(np.argmin(tried)), {"because": because, "tried": by_bands}


# Coefficients of BLT and BandInvMF under Balls-in-Bins

MOST_BANDS = 16  # the search is derivative-free: beyond this it is slow and gains nothing
_EVALUATIONS = 40  # for each coefficient
_SHRINK = (0.01, 0.02, 0.04, 0.08)
_SMALLEST = 1e-6
_SLOWEST = 6.5  # of log 1/(1−θ) of one buffer: θ up to .9985, beyond which the accountant is slow


def _amplified_blt(normalized: bool, setting: Setting) -> BLT:
    """BLT with one buffer, whose θ and ω minimise (1/√n)‖AC⁻¹‖_F·σ with σ under Balls-in-Bins.

    C = (1 − φx)/(1 − θx) is searched over θ and φ = θ − ω in [0, θ], for which the accountant is exact. With fresh bins
    σ comes from a closed form, and else from the accountant, quickly.
    """

    def parameters(x: NDArray[np.float64]) -> list[float]:
        decay = -math.expm1(-min(max(float(x[0]), 0.01), _SLOWEST))
        return [decay, decay / (1 + math.exp(min(float(x[1]), 30.0)))]

    def made(decay: float, weight: float) -> BLT:
        return BLT(1, (decay,), (weight,), normalized=normalized)

    def compute() -> list[float]:
        with progress(f"choosing a buffer for ε = {setting.epsilon:g}") as tick:
            search = AmplifiedError(setting, tick)

            def error(x: NDArray[np.float64]) -> float:
                return search.guess(made(*parameters(x)))

            simplex = [[3.0, 1.0], [3.5, 1.0], [3.0, 1.5]]
            options = {"initial_simplex": simplex, "xatol": 0.01, "fatol": 1e-3}
            return parameters(minimize(error, np.array(simplex[0]), method="Nelder-Mead", options=options).x)

    return made(*cache.cached("amplified-blt", {"normalized": normalized} | setting.question, compute))


def _amplified_bands(mechanism: BandInvMF, setting: Setting) -> BandInvMF:
    """BandInvMF whose coefficients minimise (1/√n)‖AC⁻¹‖_F·σ with σ under Balls-in-Bins.

    Those after the first are searched among negative ones, −e^θ: then C = 1/(1 − Σ|a_j|x^j) ≥ 0, for which
    Balls-in-Bins accounting is tight. The search starts at the best of γ-BIFR, BISR and the optimum without
    amplification, each also with its correlation reduced. σ is that of a closed form.
    """
    bands = integer("bands", mechanism.bands, minimum=2, maximum=min(MOST_BANDS, setting.sampling.block.steps))

    def coefficients(logs: NDArray[np.float64]) -> tuple[float, ...]:
        return (1.0, *(-float(value) for value in np.exp(logs)))

    def made(found: tuple[float, ...]) -> BandInvMF:
        return replace(mechanism, coefficients=found, amplified=False)

    def compute() -> list[float]:
        gamma = _best(GammaBIFR(bands), "gamma", "amplified-rmse", setting).value
        starts = [GammaBIFR(bands, gamma), BISR(bands), BandInvMF(bands).resolve(setting.sampling.block)]
        tails = [start.noising(setting.sampling.block.steps)[1:] for start in starts]
        points = [np.log(np.maximum(-tail, _SMALLEST)) for tail in tails]  # what is not negative becomes tiny
        # Amplification wants less correlation: first shrink each start as a whole, then let the best one move freely.
        shrunk = [point + shift for point in points for shift in (0.0, *np.log1p(-np.array(_SHRINK)))]
        most = _EVALUATIONS * (bands - 1)
        with progress(f"optimising {bands} bands for ε = {setting.epsilon:g}", most) as tick:
            search = AmplifiedError(setting, tick)

            def error(logs: NDArray[np.float64]) -> float:
                if np.exp(logs).sum() >= 1.0:  # C would grow without bound
                    return 1e300
                return search.guess(made(coefficients(logs)))

            best = min(shrunk, key=error)
            simplex = np.vstack([best, best - 0.1 * np.eye(bands - 1)])
            options = {"initial_simplex": simplex, "xatol": 5e-3, "fatol": 1e-4, "maxfev": most}
            return list(coefficients(minimize(error, best, method="Nelder-Mead", options=options).x))

    question = {"bands": bands, "normalized": mechanism.normalized} | setting.question
    return made(tuple(cache.cached("amplified-bandinvmf", question, compute)))
