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
from typing import Any, ClassVar

from lambdacgd import cache
from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Accountant, Bound, Calibration, Certificate
from lambdacgd.accounting.composed import METHOD as COMPOSED
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.composed.accountant import LARGEST_EPSILON as LARGEST_COMPOSED
from lambdacgd.accounting.composed.simulation import estimate_sigma, simulate
from lambdacgd.accounting.dominating import dominating, exact_columns
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
    who = _who(sampling)
    if not (math.isinf(epsilon) or who.takes(epsilon)):
        raise InvalidInput(
            "epsilon",
            epsilon,
            f"{sampling.kind} is accounted for {who.limits}; use cyclic sampling, which takes any, or inf to train "
            "without noise",
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


def exact_accountant(mechanism: Mechanism, horizon: Horizon) -> TransferMatrix | None:
    """The transfer-matrix accountant of this mechanism, if it is λCGD in any guise or one buffer, within its range."""
    n = horizon.steps
    noising = mechanism.noising(n)
    if type(mechanism) is LambdaCGD:  # a subclass may correlate its noise in another way
        lam, normalized = mechanism.resolved_lam, mechanism.normalized is True  # λ is resolved, so this is too
    elif mechanism.column_scales(n) is None and noising[0] == 1.0 and not noising[2:].any():
        lam, normalized = (-float(noising[1]) if len(noising) > 1 else 0.0), False
    elif (same := exact_columns(mechanism, n)) is not None:
        return TransferMatrix(same.lam, horizon.steps_per_epoch, horizon.epochs, columns=same.columns)
    else:
        return None
    try:
        return TransferMatrix(lam, horizon.steps_per_epoch, horizon.epochs, normalized)
    except AccountingError:  # λ outside its range
        return None


@dataclass(frozen=True)
class QuickSigma:
    """About the smallest σ, −d log δ/d log σ there, and whether random numbers decided it. It claims nothing."""

    sigma: float
    slope: float
    sampled: bool = False


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
    limits: ClassVar[str] = "from above 0"
    """the ε that it takes, in words"""

    @classmethod
    def takes(cls, epsilon: float) -> bool:
        return True

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
        answer = self._cached(
            "sigma",
            {"epsilon": epsilon, "delta": delta, "estimate": bool(estimate)},
            lambda: asdict(self._sigma(epsilon, delta, bool(estimate))),
        )
        claim = Certificate(**answer["certificate"])
        if claim.kind == "estimate" and not estimate:
            raise InvalidInput(
                "sampling",
                self.sampling.kind,
                f"{self.mechanism.name} has only a point estimate there, which claims nothing: ask for it (estimate), "
                "or use fixed bins or cyclic sampling, which are certified",
            )
        return Calibration(answer["sigma"], self._named(claim))

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
            answer = self._cached(
                "epsilon", {"sigma": sigma, "delta": delta}, lambda: self._epsilon(sigma, delta).to_dict()
            )
        except AccountingError as error:
            raise AccountingError(
                f"σ = {sigma:g} has no certified ε at δ = {delta:g} ({error}); plan for an ε instead"
            ) from error
        if not math.isfinite(answer["epsilon"]):
            raise AccountingError(f"σ = {sigma:g} has no finite ε at δ = {delta:g}: use more noise")
        return self._named(Certificate(**(answer | {"epsilon": _rounded_up(answer["epsilon"])})))

    def delta(self, sigma: float, epsilon: float) -> Certificate:
        """The smallest δ that is certified at noise multiplier σ and ε.

        Raises:
            InvalidInput: σ or ε is out of range, or this pair of mechanism and sampling has no proof.
            AccountingError: nothing could be certified.
        """
        sigma = number("sigma", sigma, above=0)
        epsilon = number("epsilon", epsilon, above=0)
        self.mechanism.validate(self.sampling.block)
        return self._named(self._delta(sigma, epsilon))

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """About the smallest σ, to 0.5%, for comparing mechanisms. It claims nothing.

        Args:
            epsilon: ε.
            delta: δ.
            start: a guess of σ that saves time.
        """
        return self.quick(epsilon, delta, start=start).sigma

    def quick(
        self, epsilon: float, delta: float, *, start: float | None = None, slope: float = 15.0, effort: int = 1
    ) -> QuickSigma:
        """``quick_sigma`` with all that a search over many mechanisms carries from one to the next.

        Args:
            epsilon: ε.
            delta: δ.
            start: a guess of σ that saves time.
            slope: a guess of the slope, such as that of a mechanism nearby.
            effort: so many times the usual samples are drawn, where it samples.
        """
        return QuickSigma(self._accountant.quick_sigma(epsilon, delta, start=start), slope)

    def first_guess(self, epsilon: float, delta: float) -> float | None:
        """About σ by a closed form, up to 15% too small, in milliseconds; None where there is none."""
        return None

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        """δ(ε) at this σ by Monte Carlo, which shares no code with the exact accountant, with its standard error."""
        raise InvalidInput("cross_check", True, "only balls-in-bins is accounted in two independent ways")

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

    def _sigma(self, epsilon: float, delta: float, estimate: bool) -> Calibration:
        return self._accountant.sigma(epsilon, delta, estimate=estimate)

    def _epsilon(self, sigma: float, delta: float) -> Certificate:
        return self._accountant.epsilon(sigma, delta)

    def _delta(self, sigma: float, epsilon: float) -> Certificate:
        return self._accountant.delta(sigma, epsilon)

    def _named(self, certificate: Certificate) -> Certificate:
        return _with(certificate, {"sampling": self.sampling.kind} | self._stand_in())

    def _stand_in(self) -> dict[str, Any]:
        """What a certificate says about columns that stand in for the mechanism's own."""
        return {}

    def _cached(self, kind: str, question: dict[str, Any], compute: Callable[[], Any]) -> Any:
        question |= self.mechanism.question(self.sampling.block.steps)
        question |= self.sampling.question
        return cache.cached(f"{kind}-{self.methods[0]}", question, compute)


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


class _FixedBins(BySampling):
    """Balls-in-Bins whose bins stay for all epochs, and fresh bins over one epoch; C ≥ 0.

    Guarantee
    ---------
    λCGD (and so DP-SGD, its λ = 0) and BLT with one buffer are certified by the transfer-matrix accountant,
    deterministically. So are other mechanisms, through columns that dominate them, where that costs least. Elsewhere,
    and where the exact accountant refuses, Monte Carlo certifies with a failure probability that is counted into δ.
    """

    methods = (EXACT, SAMPLED)
    limits = f"from {SMALLEST_EPSILON:g} to below {LARGEST_SAMPLED:g}"

    @classmethod
    def takes(cls, epsilon: float) -> bool:
        return SMALLEST_EPSILON <= epsilon < LARGEST_SAMPLED

    @cached_property
    def _accountant(self) -> MonteCarlo:
        return MonteCarlo(self.mechanism, self.sampling.horizon)

    @cached_property
    def _exact(self) -> TransferMatrix | None:
        return exact_accountant(self.mechanism, self.sampling.horizon)

    def _stand_in(self) -> dict[str, Any]:
        return _normalised_buffer(self.mechanism, self.sampling.block.steps)

    def _ask_exact(self, question: Callable[[TransferMatrix], Bound]) -> Bound | str | None:
        """The exact accountant's answer, or why it refused; None for mechanisms that it is not for."""
        if self._exact is None:
            beyond = type(self.mechanism) is LambdaCGD
            return f"λ = {self.mechanism.to_dict()['lam']!r} lies beyond {LARGEST_LAMBDA}" if beyond else None
        try:
            return question(self._exact)
        except AccountingError as error:
            return str(error)

    def _columns(self, epsilon: float, delta: float) -> tuple[TransferMatrix, dict[str, Any]]:
        """The accountant of columns that dominate the mechanism near (ε, δ), and what certificates say of them."""
        b, k = self.sampling.steps_per_epoch, self.sampling.epochs
        by = dominating(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta, restarts=False)
        return TransferMatrix(by.lam, b, k, columns=by.columns), {"dominated_by": by.details()}

    def _smaller(
        self,
        columns: Callable[[TransferMatrix], Calibration],
        sampled: Callable[[], Calibration],
        size: Callable[[Calibration], float],
        near: tuple[float, float],
    ) -> Calibration:
        """A mechanism without an exact accountant: the smaller of two certificates, of columns that dominate it, and
        by sampling. That takes longer and is left out where the columns are close."""
        found: Calibration | None = None
        with contextlib.suppress(AccountingError):
            accountant, by = self._columns(*near)
            answer = columns(accountant)
            found = replace(answer, certificate=_with(answer.certificate, by))
            if by["dominated_by"]["sigma_loss"] <= CLOSE:
                return found
        try:
            drawn = sampled()
        except AccountingError:
            if found is None:
                raise
            return found
        return drawn if found is None or size(drawn) < size(found) else found

    def _sigma(self, epsilon: float, delta: float, estimate: bool) -> Calibration:
        answer = self._ask_exact(lambda exact: exact.sigma(epsilon, delta))
        if isinstance(answer, Bound):
            return Calibration(answer.sigma, answer.certificate(delta))

        def sampled() -> Calibration:
            drawn = self._accountant.sigma(epsilon, delta, estimate=estimate)
            return replace(drawn, certificate=_refused(drawn.certificate, answer))

        if estimate or answer is not None:
            return sampled()

        def columns(accountant: TransferMatrix) -> Calibration:
            bound = accountant.sigma(epsilon, delta)
            return Calibration(bound.sigma, bound.certificate(delta))

        return self._smaller(columns, sampled, lambda c: c.sigma, (epsilon, delta))

    def _epsilon(self, sigma: float, delta: float) -> Certificate:
        answer = self._ask_exact(lambda exact: exact.epsilon(sigma, delta))
        if isinstance(answer, Bound):
            return answer.certificate(delta)

        def sampled() -> Calibration:
            return Calibration(sigma, _refused(self._accountant.epsilon(sigma, delta), answer))

        if answer is not None:
            return sampled().certificate

        def columns(accountant: TransferMatrix) -> Calibration:
            return Calibration(sigma, accountant.epsilon(sigma, delta).certificate(delta))

        near = 2.0  # which columns dominate best depends on ε: the first answer says near which
        with contextlib.suppress(AccountingError):
            near = self._columns(near, delta)[0].epsilon(sigma, delta).epsilon
        return self._smaller(columns, sampled, lambda c: c.certificate.epsilon, (near, delta)).certificate

    def _delta(self, sigma: float, epsilon: float) -> Certificate:
        answer = self._ask_exact(lambda exact: exact.delta(sigma, epsilon))
        if isinstance(answer, Bound):
            return answer.certificate()

        def sampled() -> Calibration:
            return Calibration(sigma, _refused(self._accountant.delta(sigma, epsilon), answer))

        if answer is not None:
            return sampled().certificate

        def columns(accountant: TransferMatrix) -> Calibration:
            return Calibration(sigma, accountant.delta(sigma, epsilon).certificate())

        return self._smaller(columns, sampled, lambda c: c.certificate.delta, (epsilon, 1e-6)).certificate

    def quick(
        self, epsilon: float, delta: float, *, start: float | None = None, slope: float = 15.0, effort: int = 1
    ) -> QuickSigma:
        answer = self._ask_exact(lambda exact: exact.sigma(epsilon, delta, rtol=3e-3, start=start))
        if isinstance(answer, Bound):
            return QuickSigma(answer.sigma, slope)
        sigma = self._accountant.quick_sigma(epsilon, delta, start=start, effort=effort)
        return QuickSigma(sigma, slope, sampled=True)

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        drawn = self._accountant.estimate_delta(epsilon, sigma, samples=262_144)
        return {"delta": drawn.value, "standard_error": drawn.standard_error}

    def curve(self, sigma: float, epsilons: Sequence[float], delta: float) -> list[tuple[float, float]]:
        return [] if self._exact is None else [(b.epsilon, b.delta) for b in self._exact.curve(sigma, epsilons)]


def _refused(certificate: Certificate, because: Bound | str | None) -> Certificate:
    """A sampled certificate that says why the exact accountant did not answer."""
    more = {} if because is None else {"transfer_matrix_refused": because}
    return replace(certificate, details=certificate.details | more)


class _FreshBins(BySampling):
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
    limits = f"from {SMALLEST_EPSILON:g} to {LARGEST_COMPOSED:g}"

    @classmethod
    def takes(cls, epsilon: float) -> bool:
        return SMALLEST_EPSILON <= epsilon <= LARGEST_COMPOSED

    @cached_property
    def _exact(self) -> FreshBins | None:
        single = exact_accountant(self.mechanism, self.sampling.block)
        return (
            None
            if single is None
            else FreshBins(single.lam, single.steps_per_epoch, self.sampling.epochs, single.normalized, single.columns)
        )

    def _stand_in(self) -> dict[str, Any]:
        return _normalised_buffer(self.mechanism, self.sampling.block.steps)

    def _chain(self, epsilon: float, delta: float) -> tuple[FreshBins, dict[str, Any]]:
        """The accountant of a chain that dominates the mechanism, and what a certificate says about it."""
        by = dominating(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta)
        b, k = self.sampling.steps_per_epoch, self.sampling.epochs
        return FreshBins(by.lam, b, k, columns=by.columns), {"dominated_by": by.details()}

    def _sigma(self, epsilon: float, delta: float, estimate: bool) -> Calibration:
        if self._exact is not None:
            bound = self._exact.sigma(epsilon, delta)
            return Calibration(bound.sigma, bound.certificate(delta))
        more: dict[str, Any] = {}
        if estimate or bool((self.mechanism.strategy(self.sampling.block.steps) >= 0).all()):
            drawn = self._simulated(epsilon, delta)
            if estimate:
                details = {"sigma_standard_error": drawn["standard_error"], "samples": drawn["samples"]}
                claim = Certificate("simulation-composed", "both", 0.5, epsilon, delta, "estimate", details)
                return Calibration(drawn["sigma"], claim)
            more = {"estimate": drawn["sigma"], "estimate_standard_error": drawn["standard_error"]}
        chain, by = self._chain(epsilon, delta)
        bound = chain.sigma(epsilon, delta)
        return Calibration(bound.sigma, _with(bound.certificate(delta), by | more))

    def _simulated(self, epsilon: float, delta: float) -> dict[str, Any]:
        question = {"epsilon": epsilon, "delta": delta}
        return dict(
            self._cached(
                "simulation",
                question,
                lambda: asdict(estimate_sigma(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta)),
            )
        )

    def _epsilon(self, sigma: float, delta: float) -> Certificate:
        if self._exact is not None:
            return self._exact.epsilon(sigma, delta).certificate(delta)
        best: Certificate | None = None
        for _ in range(2):  # the chain that dominates best depends on ε: the first answer says near which
            near = 2.0 if best is None else min(max(best.epsilon, SMALLEST_EPSILON), 20.0)
            chain, by = self._chain(near, delta)
            claim = _with(chain.epsilon(sigma, delta).certificate(delta), by)
            best = claim if best is None or claim.epsilon < best.epsilon else best
        assert best is not None
        return best

    def _delta(self, sigma: float, epsilon: float) -> Certificate:
        if self._exact is not None:
            return self._exact.delta(sigma, epsilon).certificate()
        chain, by = self._chain(epsilon, 1e-6)
        return _with(chain.delta(sigma, epsilon).certificate(), by)

    def quick(
        self, epsilon: float, delta: float, *, start: float | None = None, slope: float = 15.0, effort: int = 1
    ) -> QuickSigma:
        try:
            if self._exact is not None:
                return QuickSigma(self._exact.quick_sigma(epsilon, delta, start=start), slope)
        except AccountingError:
            pass  # sampling answers where the exact accountant refuses
        samples = 12_288 * effort
        horizon = self.sampling.horizon
        drawn = estimate_sigma(self.mechanism, horizon, epsilon=epsilon, delta=delta, samples=samples, start=start)
        return QuickSigma(drawn.sigma, slope, sampled=True)

    def first_guess(self, epsilon: float, delta: float) -> float | None:
        return None if self._exact is None else self._exact.first_guess(epsilon, delta)

    def cross_check(self, sigma: float, epsilon: float) -> dict[str, float]:
        drawn = simulate(self.mechanism, self.sampling.horizon, sigma=sigma, epsilon=epsilon)
        return {"delta": float(drawn["delta"]), "standard_error": float(drawn["standard_error"])}

    def curve(self, sigma: float, epsilons: Sequence[float], delta: float) -> list[tuple[float, float]]:
        if self._exact is None:
            return []
        return [(b.epsilon, b.delta) for b in self._exact.curve(sigma, epsilons, delta=delta)]

    def epsilon_after_epochs(self, sigma: float, epsilon: float, delta: float) -> tuple[float, ...]:
        """Upper bounds on ε after 1, 2, …, k whole epochs of a run planned for ``epsilon`` at ``sigma``.

        As for the plan's own σ, λCGD is composed exactly and other mechanisms through the chain that dominates them.
        """
        if self._exact is not None:
            return self._exact.epsilons(sigma, delta)
        chain, _ = self._chain(epsilon, delta)
        return chain.epsilons(sigma, delta)


def _normalised_buffer(mechanism: Mechanism, steps: int) -> dict[str, Any]:
    """Columns of one buffer, scaled to norm 1, are accounted for through others that dominate them."""
    found = exact_columns(mechanism, steps) if mechanism.column_scales(steps) is not None else None
    return {} if found is None else {"dominated_by": found.details()}


def _with(certificate: Certificate, more: dict[str, Any]) -> Certificate:
    return replace(certificate, details=certificate.details | more)


def _rounded_up(epsilon: float) -> float:
    """ε rounded up to six digits, and to the smallest that is stated."""
    value = Decimal(repr(max(epsilon, SMALLEST_EPSILON)))
    return float(Context(prec=6, rounding=ROUND_CEILING).plus(value))
