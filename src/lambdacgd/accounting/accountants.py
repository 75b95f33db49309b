"""Who answers for a mechanism under a sampling. A pair without a proof is refused, and the refusal names others.

| sampling | mechanism | accountant |
|---|---|---|
| cyclic | any | ``gaussian.Unamplified`` |
| Poisson | C with as many bands as there are groups: one for DP-SGD | ``poisson.PoissonSampled`` |
| Balls-in-Bins, fixed bins or one epoch | λCGD in any guise, so DP-SGD too | ``exact.TransferMatrix`` |
| | BLT with one buffer | ``exact.TransferMatrix`` of a chain with a nugget |
| | others | the same of one, or two, that dominate them, or ``composed.FreshBins`` with what all bins share |
| Balls-in-Bins, fresh bins | the same three | ``composed.FreshBins`` of the same |
| | where these refuse | ``gaussian.Unamplified``: amplification never hurts |

Every answer is deterministic.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter, methodcaller
from typing import Any, ClassVar, Literal

import numpy as np

from lambdacgd import cache
from lambdacgd.accounting.certificate import SMALLEST_EPSILON, Bound, Bounding, Calibration, Certificate
from lambdacgd.accounting.composed import LARGEST_EPSILON as LARGEST_COMPOSED
from lambdacgd.accounting.composed import METHOD as COMPOSED
from lambdacgd.accounting.composed import FreshBins
from lambdacgd.accounting.dominating import Dominating, dominating, exact_columns, first_guess
from lambdacgd.accounting.exact.accountant import LARGEST_LAMBDA, TransferMatrix
from lambdacgd.accounting.exact.accountant import METHOD as EXACT
from lambdacgd.accounting.gaussian import METHOD as ANALYTIC
from lambdacgd.accounting.gaussian import Unamplified
from lambdacgd.accounting.poisson import METHOD as POISSON
from lambdacgd.accounting.poisson import poisson_accountant
from lambdacgd.errors import AccountingError, InvalidInput, at_least, brief, number
from lambdacgd.mechanisms import LambdaCGD, Mechanism
from lambdacgd.sampling import BallsInBins, Cyclic, Poisson, Sampling

SAMPLED = "monte-carlo"  #: the method of plans that earlier releases certified by sampling: they stay what they are


def accountant_for(mechanism: Mechanism, sampling: Sampling) -> Accountant:
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
        allowed = f"{sampling.kind} is accounted for from {low:g} to {high:g}; use cyclic sampling, which takes any"
        raise InvalidInput("epsilon", epsilon, allowed)


def check_scales(mechanism: Mechanism, n: int) -> None:
    """Refuse columns scaled by what is not positive: their signs and sizes would hide what they add.

    Raises:
        InvalidInput: a scale is not a positive finite number, or some are missing.
    """
    scales = mechanism.column_scales(n)
    if scales is not None and not (np.shape(scales) == (n,) and np.isfinite(scales).all() and np.min(scales) > 0):
        wanted = f"column_scales() of {mechanism.name} must return {n} positive finite numbers, one a step"
        raise InvalidInput("mechanism", f"{wanted}, and it returned {brief(scales)}.")


def _who(sampling: Sampling) -> type[Accountant]:
    """The one place that tells samplings apart. Fresh bins over one epoch are fixed bins: nothing is redrawn."""
    if isinstance(sampling, Cyclic):
        return _Cyclic
    if isinstance(sampling, Poisson):
        return _Poisson
    if isinstance(sampling, BallsInBins):
        return _FreshBins if sampling.bins == "fresh" and sampling.epochs > 1 else _FixedBins
    raise InvalidInput("sampling", sampling, "it must be a BallsInBins, Poisson or Cyclic")


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
class Accountant:
    """The answers for one mechanism, resolved, under one sampling; there is a subclass for each kind of sampling.

    What all of them share: numbers are checked at the door, answers are kept on disk, ε = inf means no noise at all,
    and a certificate names its kind of sampling, because σ of fresh bins is worth nothing over fixed ones.

    Guarantee
    ---------
    What a certificate says is proven under zero-out of one example, both directions, and nothing of it is estimated.
    """

    mechanism: Mechanism
    sampling: Sampling

    methods: ClassVar[tuple[str, ...]]
    epsilons: ClassVar[tuple[float, float]] = (0.0, math.inf)  #: the smallest and the largest ε that it takes

    def sigma(self, epsilon: float, delta: float) -> Calibration:
        """The smallest noise multiplier σ that is certified for (ε, δ).

        Args:
            epsilon: ε; inf asks for no noise.
            delta: δ.

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
        return self._certified("sigma", epsilon, delta)

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
        try:
            claim = self._certified("epsilon", sigma, delta).certificate
        except AccountingError as error:
            raise AccountingError(f"σ = {sigma:g} has no certified ε at δ = {delta:g}: {error}") from error
        if not math.isfinite(claim.epsilon):
            raise AccountingError(f"σ = {sigma:g} has no finite ε at δ = {delta:g}: use more noise")
        return replace(claim, epsilon=float(at_least(max(claim.epsilon, SMALLEST_EPSILON))))

    def delta(self, sigma: float, epsilon: float) -> Certificate:
        """The smallest δ that is certified at noise multiplier σ and ε.

        Raises:
            InvalidInput: σ or ε is out of range, or this pair of mechanism and sampling has no proof.
            AccountingError: nothing could be certified.
        """
        sigma = number("sigma", sigma, above=0)
        epsilon = number("epsilon", epsilon, above=0)
        return self._certified("delta", sigma, epsilon).certificate

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        """About the smallest σ, to 0.5%, for comparing mechanisms. It claims nothing.

        Args:
            epsilon: ε.
            delta: δ.
            start: a guess of σ that saves time.
        """
        return self._accountant.quick_sigma(epsilon, delta, start=start)

    def first_guess(self, epsilon: float, delta: float) -> float | None:
        """About σ by a closed form, within 15% or so, in milliseconds; None where there is none."""
        return None

    def epsilon_after_epochs(self, sigma: float, epsilon: float, delta: float) -> tuple[float, ...]:
        """ε that σ would give a run planned for 1, 2, …, k epochs; ``epsilon`` is that of all k."""
        shorter = (replace(self, sampling=replace(self.sampling, epochs=k)) for k in range(1, self.sampling.epochs))
        return (*(accountant.epsilon(sigma, delta).epsilon for accountant in shorter), epsilon)

    # What the subclasses answer

    @cached_property
    def _accountant(self) -> Bounding:
        raise NotImplementedError

    def _answer(self, question: Question, first: float, second: float) -> Bound:
        """``question`` is asked with these two numbers."""
        return getattr(self._accountant, question)(first, second)

    def _certified(self, question: Question, first: float, second: float) -> Calibration:
        """The answer as a certificate, from the disk if it was given before; that of "delta" is always computed."""
        self.mechanism.validate(self.sampling.block)
        check_scales(self.mechanism, self.sampling.block.steps)

        def compute() -> dict[str, Any]:
            bound = self._answer(question, first, second)
            claimed = bound.certificate(None if question == "delta" else second)
            return {"sigma": bound.sigma, "certificate": asdict(claimed)}

        asked = {"numbers": [first, second]} | self.mechanism.question(self.sampling.block.steps)
        asked |= self.sampling.question
        answer = compute() if question == "delta" else cache.cached(f"{question}-{self.methods[0]}", asked, compute)
        return Calibration(answer["sigma"], self._named(Certificate(**answer["certificate"])))

    def _named(self, certificate: Certificate) -> Certificate:
        return replace(certificate, details=certificate.details | {"sampling": self.sampling.kind})

    @cached_property
    def _unamplified(self) -> Unamplified:
        return Unamplified(self.mechanism, self.sampling.horizon, self.sampling.restart_every)


class _Cyclic(Accountant):
    """Exactly cyclic participation: no amplification."""

    methods = (ANALYTIC,)

    @cached_property
    def _accountant(self) -> Bounding:
        return self._unamplified


class _Poisson(Accountant):
    """Poisson sampling, in as many groups as C has bands."""

    methods = (POISSON,)

    @cached_property
    def _accountant(self) -> Bounding:
        assert isinstance(self.sampling, Poisson)
        return poisson_accountant(self.mechanism, self.sampling)


class _FixedBins(Accountant):
    """Balls-in-Bins whose bins stay for all epochs, and fresh bins over one epoch.

    Guarantee
    ---------
    λCGD (and so DP-SGD, its λ = 0) and BLT with one buffer are certified by the exact accountant, every other mechanism
    through a chain with a nugget that dominates it, with more noise than it needs (where C has negative entries, than
    |C| needs). Where that refuses, or takes more noise, the claim is that of the same run without amplification: given
    the example's bins training is the Gaussian mechanism that ``Unamplified`` speaks of, whatever the bins are, and δ
    is convex in the law of what is released with the example, of which the bins make a mixture; without the example
    they make no difference.
    """

    methods: ClassVar[tuple[str, ...]] = (EXACT, ANALYTIC, SAMPLED)
    epsilons = (SMALLEST_EPSILON, math.inf)

    def _made(self, lam: float, **columns: Any) -> TransferMatrix | FreshBins:
        """The exact accountant of these columns; what all of them share is composed with the rest."""
        b, k = self.sampling.steps_per_epoch, self.sampling.epochs
        if "columns" in columns and columns["columns"].shared:
            return FreshBins(lam, b, 1, kept=k, **columns)
        return TransferMatrix(lam, b, k, **columns)

    @cached_property
    def _exact(self) -> TransferMatrix | FreshBins | None:
        """That of the mechanism itself; None where there is none, and where λ is beyond its range."""
        numbers = exact_numbers(self.mechanism, self.sampling.block.steps)
        with contextlib.suppress(AccountingError):
            return None if numbers is None else self._made(**numbers)
        return None

    def _columns(
        self, epsilon: float, delta: float, *, two: bool = True
    ) -> tuple[TransferMatrix | FreshBins, Dominating]:
        """That of the columns that dominate the mechanism best near (ε, δ); ``two`` allows two chains."""
        restarts = self.sampling.restart_every is not None
        by = dominating(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta, restarts=restarts, two=two)
        return self._made(by.lam, columns=by.columns), by

    def _asked(self, epsilon: float, delta: float, ask: Callable[[Any], Any]) -> tuple[Any, Dominating]:
        """What the accountant of these columns says; of one chain, where it refuses two."""
        accountant, by = self._columns(epsilon, delta)
        try:
            return ask(accountant), by
        except AccountingError:
            if not by.columns.second:
                raise
        accountant, by = self._columns(epsilon, delta, two=False)
        return ask(accountant), by

    def _answer(self, question: Question, first: float, second: float) -> Bound:
        try:
            if self._exact is not None:
                return getattr(self._exact, question)(first, second)
            found = self._through_columns(question, first, second)
        except AccountingError as error:
            alone = getattr(self._unamplified, question)(first, second)
            return replace(alone, details=alone.details | {"transfer_matrix_refused": str(error)})
        return min(found, getattr(self._unamplified, question)(first, second), key=attrgetter(question))

    def _through_columns(self, question: Question, first: float, second: float) -> Bound:
        """Which columns dominate the mechanism best depends on (ε, δ): where one is asked for, it is guessed first."""

        def near(epsilon: float, delta: float) -> Bound:
            answer, by = self._asked(epsilon, delta, methodcaller(question, first, second))
            return replace(answer, method=self.methods[0], details=answer.details | {"dominated_by": by.details()})

        if question == "sigma":
            return near(first, second)
        if question == "epsilon":
            guess = near(2.0, second)
            again = near(min(max(guess.epsilon, SMALLEST_EPSILON), 20.0), second)
        else:
            guess = near(second, 1e-6)
            again = near(second, min(max(guess.delta, 1e-12), 0.5))
        return min(guess, again, key=attrgetter(question))

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        try:
            quickly = methodcaller("quick_sigma", epsilon, delta, start=start)
            return float(quickly(self._exact) if self._exact else self._asked(epsilon, delta, quickly)[0])
        except AccountingError:
            return self._unamplified.quick_sigma(epsilon, delta)

    def first_guess(self, epsilon: float, delta: float) -> float | None:
        if isinstance(self._exact, FreshBins):
            return self._exact.first_guess(epsilon, delta)
        if self._exact is not None:  # its own quick σ is what searches go by
            return None
        restarts = self.sampling.restart_every is not None
        return first_guess(self.mechanism, self.sampling.horizon, epsilon=epsilon, delta=delta, restarts=restarts)

    def _named(self, certificate: Certificate) -> Certificate:
        steps = self.sampling.block.steps
        # Columns of one buffer, scaled to norm 1, are accounted for through others that dominate them.
        by = exact_columns(self.mechanism, steps) if self.mechanism.column_scales(steps) is not None else None
        more = {} if by is None else {"dominated_by": by.details()}
        return super()._named(replace(certificate, details=certificate.details | more))


class _FreshBins(_FixedBins):
    """Balls-in-Bins whose bins and noise are drawn anew in every epoch.

    Guarantee
    ---------
    As for fixed bins, if no noise is taken back across the boundary of an epoch: a single epoch is accounted for
    exactly, or through a chain with a nugget that dominates it, and epochs are composed.
    """

    methods = (COMPOSED, ANALYTIC)
    epsilons = (SMALLEST_EPSILON, LARGEST_COMPOSED)

    def _made(self, lam: float, **columns: Any) -> FreshBins:
        return FreshBins(lam, self.sampling.steps_per_epoch, self.sampling.epochs, **columns)

    def epsilon_after_epochs(self, sigma: float, epsilon: float, delta: float) -> tuple[float, ...]:
        """Upper bounds on ε after 1, 2, …, k whole epochs of a run planned for ``epsilon`` at ``sigma``.

        As for the plan's own σ, λCGD is composed exactly and other mechanisms through the chain that dominates them.
        """
        ask = methodcaller("epsilons", sigma, delta)
        return tuple(ask(self._exact) if self._exact else self._asked(epsilon, delta, ask)[0])
