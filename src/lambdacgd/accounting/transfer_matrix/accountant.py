"""The transfer-matrix accountant: δ(σ, ε), ε(σ, δ) and σ(ε, δ) of DP-λCGD under Balls-in-Bins, computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from lambdacgd.accounting.base import SMALLEST_EPSILON, AccountingError, TwoWayBound, device, real
from lambdacgd.accounting.transfer_matrix.chain import Chain, gaussian_delta, normalized_chain, plain_chain
from lambdacgd.accounting.transfer_matrix.evaluate import (
    Evaluation,
    evaluate_add,
    evaluate_remove,
    governing_budget,
    jensen,
)
from lambdacgd.accounting.transfer_matrix.measure import (
    COARSE,
    FINE,
    LARGEST_LOSS_VARIANCE,
    SLACK_SHARE,
    Precision,
    Scale,
    measure,
)
from lambdacgd.accounting.transfer_matrix.selection import collective_loss, select

METHOD = "transfer-matrix"
LARGEST_LAMBDA = 0.9999
SMALLEST_LAMBDA = 1e-6
LARGEST_EPSILON = 20.0
MOST_STEPS = 10_000_000
"""steps per epoch, and epochs: a few arrays of this length are made"""
SMALLEST_DELTA = 1e-12
ROUNDING_SHARE = 0.01
"""a rounding margin above this share of δ is refused"""


@dataclass(frozen=True)
class Bound(TwoWayBound):
    """A bound of this accountant."""

    slope: float = math.nan
    """−d log δ/dε, about"""

    method: ClassVar[str] = METHOD


@dataclass(frozen=True)
class TransferMatrix:
    """Accountant of ``C_λ`` (or its column-normalised form) under Balls-in-Bins with bins kept for all epochs.

    Guarantee
    ---------
    Every δ returned is an upper bound on max(δ_remove, δ_add) of the dominating pair of Balls-in-Bins,
    P = (1/b) Σ_j N(m_j, σ²I) and Q = N(0, σ²I), under zero-out adjacency of one example. The bound is proven
    (docs/exact-accountant.md); the float64 rounding of its evaluation is covered by an explicit margin. That this pair
    dominates adaptive training is the Balls-in-Bins paper's lemma (arXiv 2410.06266).
    """

    lam: float
    steps_per_epoch: int
    epochs: int
    normalized: bool = False
    device: str = "auto"

    method: ClassVar[str] = METHOD

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", real("λ", self.lam))
        if not 0 <= self.lam <= LARGEST_LAMBDA:
            raise AccountingError(f"λ is {self.lam!r}; this accountant takes 0 ≤ λ ≤ {LARGEST_LAMBDA}")
        for name in ("steps_per_epoch", "epochs"):
            value = getattr(self, name)
            if not real(name, value).is_integer() or value < 1:
                raise AccountingError(f"{name} is {value!r}; it must be an integer of at least 1")
            if value > MOST_STEPS:
                raise AccountingError(f"{name} is {value!r}; this accountant takes at most {MOST_STEPS:,}")
            object.__setattr__(self, name, int(value))

    # What to compute with

    def chain(self, sigma: float) -> Chain:
        """The exact chain at this σ (for the normalised form, the one that dominates it)."""
        make = normalized_chain if self.normalized else plain_chain
        # Every entry of G grows with λ, so a tiny λ may be rounded up (Lemma 7).
        if self.lam == 0:
            return Chain(0.0, self.steps_per_epoch, self.epochs, self.epochs / sigma**2, 0.0)
        return make(max(self.lam, SMALLEST_LAMBDA), self.steps_per_epoch, self.epochs, sigma)

    @property
    def smallest_sigma(self) -> float:
        """Below this e^X comes near overflow."""
        one = self.chain(1.0)
        return math.sqrt(one.gain * one.peak_variance / LARGEST_LOSS_VARIANCE)

    @cached_property
    def normalizing_loss(self) -> float:
        """About how much σ, where it is large, grows because a chain stands in for normalised columns (Lemma 7)."""
        steps = self.steps_per_epoch * self.epochs
        if not self.normalized or self.lam == 0 or steps > MOST_STEPS:
            return 0.0
        from scipy.signal import lfilter

        norms = np.sqrt(-np.expm1(2 * np.arange(steps, 0, -1) * math.log(self.lam)) / (1 - self.lam**2))
        together = np.asarray(lfilter([1.0], [1.0, -self.lam], 1 / norms)) / self.steps_per_epoch  # the mean column
        return 0.5 * math.log(self.chain(1.0).mean_loss[1] / float(together @ together))

    def device_asked_for(self) -> str:
        """Where large products are to be computed; "auto" unless this accountant or the environment says otherwise."""
        return device() if self.device == "auto" else self.device

    def working_chain(self, sigma: float, slope: float, *, coarse: bool) -> tuple[Chain, float]:
        """The exact chain or an affordable one that dominates it, and by how much σ is expected to grow for it."""
        exact = self.chain(sigma)
        if self.lam == 0 or self.steps_per_epoch == 1:
            return exact, 0.0
        chosen, expected_loss = select(exact, slope)
        expected_loss += self.normalizing_loss
        if coarse and chosen.tail and (1 + slope) * float(chosen.log_scales.mean()) < 0.2:
            longer = replace(chosen, tail=0.0)
            if collective_loss(longer, chosen) < 0.25:  # else it says nothing about δ's size
                return longer, expected_loss
        return chosen, expected_loss

    # One evaluation

    def evaluate(self, sigma: float, epsilon: float, scale: Scale, precision: Precision) -> Bound:
        """Both directions at one (σ, ε), tuned to ``scale``. Valid whatever the tuning; tight only if it fits."""
        if self.steps_per_epoch == 1:
            exact = self.chain(sigma)
            value = gaussian_delta(math.sqrt(exact.gain * exact.peak_variance), epsilon) * (1 + 1e-9)
            return Bound(sigma, epsilon, value, value, {}, {"remove": "gaussian", "add": "gaussian"}, scale.slope)
        chain, expected_loss = self.working_chain(sigma, scale.slope, coarse=precision is COARSE)
        law = measure(chain, scale, precision, direction="remove", device=self.device_asked_for())
        remove = evaluate_remove(law, scale, precision)
        add = self._add(chain, epsilon, remove, precision)
        details: dict[str, str | float] = {
            "remove": remove.method,
            "add": add.method,
            "bins": float(chain.bins),
            "tail": chain.tail,
            "dominating_chain_sigma_loss": expected_loss,
        }
        budget = governing_budget(remove, add)
        return Bound(sigma, epsilon, remove.delta, add.delta, budget, details, remove.slope)

    def _add(self, chain: Chain, epsilon: float, remove: Evaluation, precision: Precision) -> Evaluation:
        """The cheapest bound on δ_add that does not govern; the finest one where add does govern."""
        best = jensen(chain, epsilon)
        slope, size = max(remove.slope, 1.0), min(remove.delta, best.delta)
        for step in (COARSE, COARSE, COARSE, precision, precision):
            if best.delta <= remove.delta:
                break
            scale = Scale(math.exp(-epsilon), size, slope)
            try:
                law = measure(chain, scale, step, direction="add", device=self.device_asked_for())
                fourier = evaluate_add(law, scale, step)
            except AccountingError:
                break  # Jensen's bound stands
            size = min(max(fourier.core, fourier.delta * 1e-2), 1.0)
            slope = max(fourier.slope, 1.0)
            best = min(best, fourier, key=lambda item: item.delta)
        return best

    def delta(self, sigma: float, epsilon: float) -> Bound:
        """Upper bounds on δ_remove(ε) and δ_add(ε) at noise multiplier σ, refined until their slack is small."""
        sigma, epsilon = real("σ", sigma), real("ε", epsilon)
        self._validate(sigma=sigma, epsilon=epsilon)
        scale = self.settle(sigma, epsilon)
        for _ in range(8):  # a slope far off is corrected by at most a factor of three each time
            bound = self.evaluate(sigma, epsilon, scale, FINE)
            if sum(bound.budget.values()) <= SLACK_SHARE * bound.delta:
                break
            scale = next_scale(scale, bound)
        return self.checked(bound)

    def settle(self, sigma: float, epsilon: float) -> Scale:
        """Learn how large and how steep δ is from coarse evaluations, flat ones first: those are cheap."""
        scale = Scale(math.exp(epsilon), 1e-3, min(first_slope(epsilon, 1e-3), 4.0))
        for _ in range(12):
            found = next_scale(scale, self.evaluate(sigma, epsilon, scale, COARSE))
            settled = abs(math.log(found.delta / scale.delta)) < 1 and abs(math.log(found.slope / scale.slope)) < 0.3
            scale = found
            if scale.delta < SMALLEST_DELTA / 10:
                raise AccountingError(
                    f"at σ = {sigma:g}, ε = {epsilon:g} δ lies below {SMALLEST_DELTA:g}, the smallest this accountant "
                    "certifies; ask at a smaller σ or ε"
                )
            if settled:
                break
        return scale

    def checked(self, bound: Bound, *, slack: float = SLACK_SHARE) -> Bound:
        """The bound, if its slack is within limits; otherwise an error that says what can be reached."""
        rounding = bound.budget.get("rounding", 0.0)
        if rounding > ROUNDING_SHARE * bound.delta:
            raise AccountingError(
                f"δ near {bound.delta:.2g} cannot be certified at ε = {bound.epsilon:g}: rounding may reach "
                f"{rounding:.2g}; the smallest δ reachable there is about {rounding / ROUNDING_SHARE:.1g}"
            )
        if sum(bound.budget.values()) <= slack * bound.delta:
            return bound
        raise AccountingError(
            f"the bound at σ = {bound.sigma:g}, ε = {bound.epsilon:g} stayed loose: δ ≤ {bound.delta:.3g} "
            f"of which {sum(bound.budget.values()):.2g} may be slack {bound.budget}; use the Monte Carlo accountant"
        )

    # Calibration

    def sigma(
        self, epsilon: float, delta: float, *, rtol: float = 2e-4, start: float | None = None
    ) -> tuple[float, Bound]:
        """The smallest σ (to relative accuracy about ``rtol``) whose certified δ(ε) is at most ``delta``.

        ``start`` is a guess that saves time; a larger ``rtol`` makes the last evaluations coarser too. The σ returned
        was itself evaluated and passed.
        """
        from lambdacgd.accounting.transfer_matrix.calibration import calibrate_sigma

        epsilon, delta = real("ε", epsilon), real("δ", delta)
        self._validate(epsilon=epsilon, delta=delta)
        for name, value in (("rtol", rtol), ("start", start)):
            if value is not None and not (math.isfinite(real(name, value)) and value > 0):
                raise AccountingError(f"{name} is {value!r}; it must be positive and finite")
        return calibrate_sigma(self, epsilon, delta, rtol=float(rtol), start=None if start is None else float(start))

    def epsilon(self, sigma: float, delta: float, *, rtol: float = 2e-4) -> tuple[float, Bound]:
        """The smallest ε (to relative accuracy about ``rtol``) whose certified δ(ε) at this σ is at most ``delta``."""
        from lambdacgd.accounting.transfer_matrix.calibration import calibrate_epsilon

        sigma, delta = real("σ", sigma), real("δ", delta)
        self._validate(sigma=sigma, delta=delta)
        return calibrate_epsilon(self, sigma, delta, rtol=float(rtol))

    def curve(self, sigma: float, epsilons: Sequence[float], *, tight_add: bool = True) -> list[Bound]:
        """Bounds at many ε for one σ, in both directions.

        ``tight_add=False`` bounds δ_add only as far as it takes to see that remove governs, which is quicker.
        Together the two directions give δ_remove at negative ε: δ_remove(−ε) = 1 − e^{−ε} + e^{−ε} δ_add(ε).
        """
        from lambdacgd.accounting.transfer_matrix.curve import evaluate_curve

        sigma, asked = real("σ", sigma), [real("ε", epsilon) for epsilon in epsilons]
        for epsilon in asked:
            self._validate(sigma=sigma, epsilon=epsilon)
        return evaluate_curve(self, sigma, asked, tight_add=tight_add) if asked else []

    def _validate(
        self, *, sigma: float | None = None, epsilon: float | None = None, delta: float | None = None
    ) -> None:
        if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
            raise AccountingError(f"σ is {sigma!r}; it must be positive and finite")
        if sigma is not None and sigma < self.smallest_sigma:
            raise AccountingError(
                f"σ = {sigma:g} is too small to compute with; the smallest is {self.smallest_sigma:.3g}"
            )
        if epsilon is not None and not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
            raise AccountingError(
                f"ε is {epsilon!r}; this accountant takes {SMALLEST_EPSILON:g} ≤ ε ≤ {LARGEST_EPSILON:g}"
            )
        if delta is not None and not SMALLEST_DELTA <= delta < 1:
            raise AccountingError(
                f"δ is {delta!r}; this accountant takes 1e-12 ≤ δ < 1, nearest {min(max(delta, 1e-12), 0.999)}"
            )


def first_slope(epsilon: float, delta: float) -> float:
    """A guess of −d log δ/dε before anything was computed."""
    return max(1.4 * math.log(1 / min(delta, 0.1)) / epsilon, 1.5)


def next_scale(scale: Scale, bound: Bound) -> Scale:
    """What the last evaluation says about δ's size and steepness."""
    core = bound.delta - sum(bound.budget.values())
    size = min(max(core, bound.delta * 1e-3), 1.0)
    slope = min(max(bound.slope, scale.slope / 3, 0.3), scale.slope * 3)
    return Scale(scale.strike, size, slope)
