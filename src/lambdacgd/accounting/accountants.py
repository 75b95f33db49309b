"""Who answers for a mechanism under a sampling. A pair without a proof is refused, and the refusal names others.

| sampling | mechanism | accountant |
|---|---|---|
| cyclic | any | ``gaussian.Unamplified`` |
| Poisson | C with as many bands as there are groups: one for DP-SGD | ``poisson.PoissonSampled`` |
| Balls-in-Bins, fixed bins or one epoch | λCGD in any guise, so DP-SGD too | ``exact.TransferMatrix`` |
| | BLT with one buffer | ``exact.TransferMatrix`` of a chain with a nugget |
| | others, where that takes less noise | ``exact.TransferMatrix`` of a chain with a nugget that dominates them |
| | others with C ≥ 0, and where that refuses | ``monte_carlo.MonteCarlo`` |
| Balls-in-Bins, fresh bins | λCGD in any guise, BLT with one buffer | ``composed.FreshBins`` |
| | others | ``composed.FreshBins`` of a chain with a nugget that dominates them |
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal
from functools import cached_property
from typing import Any, ClassVar, Literal

from lambdacgd import cache
from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Accountant, Bound, Calibration, Certificate
from lambdacgd.accounting.composed import METHOD as COMPOSED
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.composed.accountant import LARGEST_EPSILON as LARGEST_COMPOSED
from lambdacgd.accounting.composed.simulation import estimate_sigma, simulate
from lambdacgd.accounting.dominating import Dominating, dominating, exact_columns
from lambdacgd.accounting.exact import METHOD as EXACT
from lambdacgd.accounting.exact import TransferMatrix
from lambdacgd.accounting.exact.accountant import LARGEST_LAMBDA
from lambdacgd.accounting.gaussian import Unamplified
from lambdacgd.accounting.monte_carlo import MonteCarlo
from lambdacgd.accounting.monte_carlo.accountant import LARGEST_EPSILON as LARGEST_SAMPLED
from lambdacgd.accounting.monte_carlo.accountant import METHOD as SAMPLED
from lambdacgd.accounting.poisson import poisson_accountant
from lambdacgd.errors import AccountingError, InvalidInput, number
from lambdacgd.mechanisms import Horizon, LambdaCGD, Mechanism
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson, Sampling


def accountant_for(mechanism: Mechanism, sampling: Sampling) -> BySampling:
    """The accountant of this pair.

    Args:
        mechanism: resolved for ``sampling.block``.
        sampling: who takes part when.

    Returns:
        An ``Accountant``. A pair without a proof is refused when it is asked anything.

    Raises:
        InvalidInput: the sampling is of no known kind.
    """
    return _who(sampling)(mechanism, sampling)


def methods(sampling: Sampling) -> tuple[str, ...]:
    """The methods that certify ``sampling``: a certificate by another one was made for something else."""
    return _who(sampling).methods


def check_epsilon(sampling: Sampling, epsilon: float) -> None:
    """Refuse an ε that no accountant of ``sampling`` takes, before anything is searched for or computed.

    Raises:
        InvalidInput: ε is out of range.
    """
    low, high = _who(sampling).epsilons
    if not (math.isinf(epsilon) or low <= epsilon <= high):
        raise InvalidInput(
            "epsilon",
            epsilon,
            f"{sampling.kind} is accounted for from {low:g} to {high:g}; use cyclic sampling, which takes any, or "
            "inf to train without noise",
        )


def _who(sampling: Sampling) -> type[BySampling]:
    """The one place that tells samplings apart. Fresh bins over one epoch are fixed bins: nothing is redrawn."""
    if isinstance(sampling, Cyclic):
        return _Cyclic
    if isinstance(sampling, Poisson):
        return _Poisson
    if isinstance(sampling, BallsInBins):
        return _FreshBins if sampling.bins == "fresh" and sampling.epochs > 1 else _FixedBins
    raise InvalidInput("sampling", sampling, "it must be a BallsInBins, Poisson or Cyclic")


def adds_independent_noise(mechanism: Mechanism, horizon: Horizon) -> bool:
    """Whether this is DP-SGD under another name: C = I."""
    n = horizon.steps
    noising = mechanism.noising(n)
    return mechanism.column_scales(n) is None and noising[0] == 1.0 and not noising[1:].any()


def exact_numbers(mechanism: Mechanism, steps: int) -> dict[str, Any] | None:
    """λ and what else the exact accountants take for λCGD in any guise and for one buffer; None for other mechanisms.

    The λ of λCGD itself may be beyond their range, so that they say so.
    """
    noising = mechanism.noising(steps)
    if type(mechanism) is LambdaCGD:  # a subclass may correlate its noise in another way
        return {"lam": mechanism.resolved_lam, "normalized": mechanism.normalized is True}
    if mechanism.column_scales(steps) is None and noising[0] == 1.0 and not noising[2:].any():
        lam = -float(noising[1]) if len(noising) > 1 else 0.0
        return {"lam": lam} if 0 <= lam <= LARGEST_LAMBDA else None
    same = exact_columns(mechanism, steps)
    return None if same is None else {"lam": same.lam, "columns": same.columns}


Question = Literal["sigma", "epsilon", "delta"]


@dataclass(frozen=True)
class BySampling:
    """An ``Accountant`` of one mechanism, resolved, under one sampling; there is a subclass for each kind of sampling.

    What all of them share: numbers are checked at the door, answers are kept on disk, ε = inf means no noise at all,
    and a certificate names its kind of sampling, because σ of fresh bins is worth nothing over fixed ones.

    Guarantee
    ---------
    What a certificate of kind "bound" says is proven under zero-out of one example, both directions: surely where its
    confidence is 1, else with that probability over the accountant's own coin flips, which is counted into δ.
    """

    mechanism: Mechanism
    sampling: Sampling

    methods: ClassVar[tuple[str, ...]]
    epsilons: ClassVar[tuple[float, float]] = (0.0, math.inf)
    """the smallest and the largest ε that it takes"""

    def sigma(self, epsilon: float, delta: float, *, estimate: bool = False) -> Calibration:
        """The smallest noise multiplier σ that is certified for (ε, δ).

        Args:
            epsilon: ε; inf asks for no noise.
            delta: δ.
            estimate: whether a quick point estimate will do where only sampling can answer. Its certificate says
                ``kind="estimate"`` and claims nothing.

        Returns:
            σ, relative to the clipping norm, with its certificate.

        Raises:
            InvalidInput: ε or δ is out of range, or this pair of mechanism and sampling has no proof.
            AccountingError: nothing could be certified; the message says what can be asked instead.
        """
        epsilon = number("epsilon", epsilon, above=0, include=(math.inf,))
        delta = number("delta", delta, above=0, below=1)
        if math.isinf(epsilon):
            claim = Certificate("none", "both", 1.0, math.inf, delta, details={"because": "ε = inf"})
            return Calibration(0.0, self._named(claim))
        check_epsilon(self.sampling, epsilon)
        self.mechanism.validate(self.sampling.block)
        sigma, claim = self._cached("sigma", epsilon, delta, estimate=bool(estimate))
        if claim.kind == "estimate" and not estimate:
            raise InvalidInput(
                "sampling",
                self.sampling.kind,
                f"{self.mechanism.name} has only a point estimate there, which claims nothing: ask for it (estimate), "
                "or use fixed bins or cyclic sampling, which are certified",
            )
        return Calibration(sigma, self._named(claim))

    def epsilon(self, sigma: float, delta: float) -> Certificate:
        """The smallest ε, from 0.001 on, that is certified for a noise multiplier σ.

        Args:
            sigma: σ.
            delta: δ.

        Returns:
            A certificate. Its ε is rounded up to six digits: what is printed is what was certified.

        Raises:
            InvalidInput: σ or δ is out of range, or this pair of mechanism and sampling has no proof.
            AccountingError: σ has no certified ε.
        """
        sigma = number("sigma", sigma, above=0)
        delta = number("delta", delta, above=0, below=1)
        self.mechanism.validate(self.sampling.block)
        try:
            _, claim = self._cached("epsilon", sigma, delta)
        except AccountingError as error:
            raise AccountingError(
                f"σ = {sigma:g} has no certified ε at δ = {delta:g} ({error}); plan for an ε instead"
            ) from error
        if not math.isfinite(claim.epsilon):
            raise AccountingError(f"σ = {sigma:g} has no finite ε at δ = {delta:g}: use more noise")
        return self._named(replace(claim, epsilon=_rounded_up(claim.epsilon)))

    def delta(self, sigma: float, epsilon: float) -> Certificate:
        """The smallest δ that is certified at noise multiplier σ and ε.

        Raises:
            InvalidInput: σ or ε is out of range, or this pair of mechanism and sampling has no proof.
            AccountingError: nothing could be certified.
        """
        sigma = number("sigma", sigma, above=0)
        epsilon = number("epsilon", epsilon, above=0)
        self.mechanism.validate(self.sampling.block)
        return self._named(self._answer("delta", sigma, epsilon).certificate)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None, effort: int = 1) -> float:
        """About the smallest σ, to 0.5%, for comparing mechanisms. It claims nothing.

        Args:
            epsilon: ε.
            delta: δ.
            start: a guess of σ that saves time.
            effort: so many times the usual samples are drawn, where it samples.
        """
        return self._accountant.quick_sigma(epsilon, delta, start=start)

    def first_guess(self, epsilon: float, delta: float) -> float | None:
        """About σ by a closed form, up to 15% too small, in milliseconds; None where there is none."""
        return None

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        """δ(ε) at this σ by Monte Carlo, which shares no code with the exact accountant, with its standard error."""
        raise InvalidInput("cross_check", "Only Balls-in-Bins has two independent accountants: leave cross_check out.")

    def curve(self, sigma: float, epsilons: Sequence[float], delta: float) -> list[tuple[float, float]]:
        """(ε, δ) at this σ where they are computed exactly, fine down to about ``delta``; nothing elsewhere."""
        return []

    def epsilon_after_epochs(self, sigma: float, epsilon: float, delta: float) -> tuple[float, ...]:
        """ε that σ would give a run planned for 1, 2, …, k epochs; ``epsilon`` is that of all k."""
        shorter = (replace(self, sampling=replace(self.sampling, epochs=k)) for k in range(1, self.sampling.epochs))
        return (*(accountant.epsilon(sigma, delta).epsilon for accountant in shorter), epsilon)

    # What the subclasses answer

    @cached_property
    def _accountant(self) -> Accountant:
        raise NotImplementedError

    def _answer(self, question: Question, first: float, second: float, *, estimate: bool = False) -> Calibration:
        """``question`` is asked with these two numbers; ε and δ are answered at the σ that comes first."""
        return _asked(self._accountant, question, first, second, estimate=estimate)

    def _named(self, certificate: Certificate) -> Certificate:
        return _with(certificate, {"sampling": self.sampling.kind})

    def _cached(
        self, question: Question, first: float, second: float, *, estimate: bool = False
    ) -> tuple[float, Certificate]:
        asked = {"numbers": [first, second], "estimate": estimate} | self._filed_under()
        answer = cache.cached(
            f"{question}-{self.methods[0]}",
            asked,
            lambda: asdict(self._answer(question, first, second, estimate=estimate)),
        )
        return answer["sigma"], Certificate(**answer["certificate"])

    def _filed_under(self) -> dict[str, Any]:
        return self.mechanism.question(self.sampling.block.steps) | self.sampling.question


def _asked(accountant: Any, question: Question, first: float, second: float, **how: bool) -> Calibration:
    """The answer of any accountant as a σ with its certificate."""
    if question == "sigma" and isinstance(accountant, (TransferMatrix, FreshBins)):
        bound = accountant.sigma(first, second)
        return Calibration(bound.sigma, bound.certificate(second))
    if question == "sigma":
        return accountant.sigma(first, second, **how)
    answer = getattr(accountant, question)(first, second)
    if isinstance(answer, Bound):
        answer = answer.certificate(second if question == "epsilon" else None)
    return Calibration(first, answer)


class _Cyclic(BySampling):
    """Exactly cyclic participation: no amplification."""

    methods = ("analytic",)

    @cached_property
    def _accountant(self) -> Accountant:
        return Unamplified(self.mechanism, self.sampling.horizon)


class _Poisson(BySampling):
    """Poisson sampling, in as many groups as C has bands."""

    methods = ("pld",)

    @cached_property
    def _accountant(self) -> Accountant:
        assert isinstance(self.sampling, Poisson)
        return poisson_accountant(self.mechanism, self.sampling)


CLOSE = 0.004
"""relative growth of σ, as E W² has it, up to which columns that dominate are taken without asking for a sampled
certificate, which costs about as much or more"""


class _BallsInBins(BySampling):
    """What both kinds of bins share: an exact accountant, of the mechanism itself or of columns that dominate it."""

    def _exactly(self, lam: float, **columns: Any) -> TransferMatrix | FreshBins:
        """The exact accountant of these columns."""
        raise NotImplementedError

    @cached_property
    def _numbers(self) -> dict[str, Any] | None:
        return exact_numbers(self.mechanism, self.sampling.block.steps)

    @cached_property
    def _exact(self) -> TransferMatrix | FreshBins | None:
        """That of the mechanism itself; None where there is none, and where λ is beyond its range."""
        with contextlib.suppress(AccountingError):
            return None if self._numbers is None else self._exactly(**self._numbers)
        return None

    def _named(self, certificate: Certificate) -> Certificate:
        steps = self.sampling.block.steps
        # Columns of one buffer, scaled to norm 1, are accounted for through others that dominate them.
        by = exact_columns(self.mechanism, steps) if self.mechanism.column_scales(steps) is not None else None
        return super()._named(certificate if by is None else _with(certificate, {"dominated_by": by.details()}))

    def _through_columns(self, question: Question, first: float, second: float) -> Calibration:
        """Certified through columns that dominate the mechanism; which dominate it best depends on (ε, δ)."""

        def near(epsilon: float, delta: float) -> Calibration:
            accountant, by = self._columns(epsilon, delta)
            answer = _asked(accountant, question, first, second)
            return replace(answer, certificate=_with(answer.certificate, {"dominated_by": by.details()}))

        if question != "epsilon":
            return near(first, second) if question == "sigma" else near(second, 1e-6)
        tried = [near(2.0, second)]
        tried.append(near(min(max(tried[0].certificate.epsilon, SMALLEST_EPSILON), 20.0), second))
        return min(tried, key=_SIZES["epsilon"])

    def _columns(self, epsilon: float, delta: float) -> tuple[TransferMatrix | FreshBins, Dominating]:
        restarts = self.sampling.restart_every is not None
        by = dominating(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta, restarts=restarts)
        return self._exactly(by.lam, columns=by.columns), by

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None, effort: int = 1) -> float:
        if self._exact is not None:
            with contextlib.suppress(AccountingError):  # sampling answers where the exact accountant refuses
                return self._exact.quick_sigma(epsilon, delta, start=start)
        return self._sampled_sigma(epsilon, delta, start, effort)

    def _sampled_sigma(self, epsilon: float, delta: float, start: float | None, effort: int) -> float:
        raise NotImplementedError


_SIZES: dict[Question, Callable[[Calibration], float]] = {
    "sigma": lambda answer: answer.sigma,
    "epsilon": lambda answer: answer.certificate.epsilon,
    "delta": lambda answer: answer.certificate.delta,
}
"""what makes one answer better than another"""


class _FixedBins(_BallsInBins):
    """Balls-in-Bins whose bins stay for all epochs, and fresh bins over one epoch; C ≥ 0.

    Guarantee
    ---------
    λCGD (and so DP-SGD, its λ = 0) and BLT with one buffer are certified by the transfer-matrix accountant,
    deterministically. So are other mechanisms, through columns that dominate them, where that costs least. Elsewhere,
    and where the exact accountant refuses, Monte Carlo certifies with a failure probability that is counted into δ.
    """

    methods = (EXACT, SAMPLED)
    epsilons = (SMALLEST_EPSILON, math.nextafter(LARGEST_SAMPLED, 0.0))

    @cached_property
    def _accountant(self) -> MonteCarlo:
        return MonteCarlo(self.mechanism, self.sampling.horizon)

    def _exactly(self, lam: float, **columns: Any) -> TransferMatrix:
        return TransferMatrix(lam, self.sampling.steps_per_epoch, self.sampling.epochs, **columns)

    def _answer(self, question: Question, first: float, second: float, *, estimate: bool = False) -> Calibration:
        refused, found = {}, None
        if self._numbers is not None:
            try:
                return _asked(self._exactly(**self._numbers), question, first, second)
            except AccountingError as error:
                refused = {"transfer_matrix_refused": str(error)}
        elif not estimate:
            with contextlib.suppress(AccountingError):
                found = self._through_columns(question, first, second)
                if found.certificate.details["dominated_by"]["sigma_loss"] <= CLOSE:
                    return found
        try:
            drawn = _asked(self._accountant, question, first, second, estimate=estimate)
        except AccountingError as error:
            exact = self._exact
            if found is None and question == "sigma" and isinstance(exact, TransferMatrix):  # what is certain is told
                alone = exact.unamplified(first, second)
                claim = _with(alone.certificate(second), refused | {"sampling_refused": str(error)})
                return Calibration(alone.sigma, claim)
            if found is None:
                raise
            return found
        drawn = replace(drawn, certificate=_with(drawn.certificate, refused))
        return drawn if found is None else min(found, drawn, key=_SIZES[question])

    def _sampled_sigma(self, epsilon: float, delta: float, start: float | None, effort: int) -> float:
        return self._accountant.quick_sigma(epsilon, delta, start=start, effort=effort)

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        drawn = self._accountant.estimate_delta(epsilon, sigma, samples=262_144)
        return {"delta": drawn.value, "standard_error": drawn.standard_error}

    def curve(self, sigma: float, epsilons: Sequence[float], delta: float) -> list[tuple[float, float]]:
        exact = self._exact
        return [(b.epsilon, b.delta) for b in exact.curve(sigma, epsilons)] if isinstance(exact, TransferMatrix) else []


class _FreshBins(_BallsInBins):
    """Balls-in-Bins whose bins and noise are drawn anew in every epoch.

    Guarantee
    ---------
    If no noise is taken back across the boundary of an epoch, λCGD (and so DP-SGD, its λ = 0) and BLT with one buffer
    are certified deterministically by composition of the exact single-epoch accountant. Every other mechanism is
    certified through a chain with a nugget that dominates it, just as deterministically but with more noise than it
    needs (where C has negative entries, than |C| needs); ``estimate`` asks for the simulated σ instead, which is close
    and claims nothing.
    """

    methods = (COMPOSED,)
    epsilons = (SMALLEST_EPSILON, LARGEST_COMPOSED)
    _exact: FreshBins | None

    def _exactly(self, lam: float, **columns: Any) -> FreshBins:
        return FreshBins(lam, self.sampling.steps_per_epoch, self.sampling.epochs, **columns)

    def _answer(self, question: Question, first: float, second: float, *, estimate: bool = False) -> Calibration:
        if self._exact is not None:
            return _asked(self._exact, question, first, second)
        more: dict[str, Any] = {}
        if question == "sigma" and (estimate or bool((self.mechanism.strategy(self.sampling.block.steps) >= 0).all())):
            drawn = self._simulated(first, second)
            if estimate:
                details = {"sigma_standard_error": drawn["standard_error"], "samples": drawn["samples"]}
                claim = Certificate("simulation-composed", "both", 0.5, first, second, "estimate", details)
                return Calibration(drawn["sigma"], claim)
            more = {"estimate": drawn["sigma"], "estimate_standard_error": drawn["standard_error"]}
        answer = self._through_columns(question, first, second)
        return replace(answer, certificate=_with(answer.certificate, more))

    def _simulated(self, epsilon: float, delta: float) -> dict[str, Any]:
        def compute() -> dict[str, Any]:
            return asdict(estimate_sigma(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta))

        question = {"epsilon": epsilon, "delta": delta} | self._filed_under()
        return dict(cache.cached(f"simulation-{COMPOSED}", question, compute))

    def _sampled_sigma(self, epsilon: float, delta: float, start: float | None, effort: int) -> float:
        how = {"epsilon": epsilon, "delta": delta, "samples": 12_288 * effort, "start": start}
        return estimate_sigma(self.mechanism, self.sampling.horizon, **how).sigma  # type: ignore[arg-type]

    def first_guess(self, epsilon: float, delta: float) -> float | None:
        return None if self._exact is None else self._exact.first_guess(epsilon, delta)

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        return simulate(self.mechanism, self.sampling.horizon, sigma=sigma, epsilon=epsilon)

    def curve(self, sigma: float, epsilons: Sequence[float], delta: float) -> list[tuple[float, float]]:
        bounds = [] if self._exact is None else self._exact.curve(sigma, epsilons, delta=delta)
        return [(b.epsilon, b.delta) for b in bounds]

    def epsilon_after_epochs(self, sigma: float, epsilon: float, delta: float) -> tuple[float, ...]:
        """Upper bounds on ε after 1, 2, …, k whole epochs of a run planned for ``epsilon`` at ``sigma``.

        As for the plan's own σ, λCGD is composed exactly and other mechanisms through the chain that dominates them.
        """
        composed = self._exact or self._columns(epsilon, delta)[0]
        assert isinstance(composed, FreshBins)
        return composed.epsilons(sigma, delta)


def _with(certificate: Certificate, more: dict[str, Any]) -> Certificate:
    return replace(certificate, details=certificate.details | more)


def _rounded_up(epsilon: float) -> float:
    """ε rounded up to six digits, and to the smallest that is stated."""
    value = Decimal(repr(max(epsilon, SMALLEST_EPSILON)))
    return float(Context(prec=6, rounding=ROUND_CEILING).plus(value))
