"""DP-λCGD with bins redrawn every epoch: δ, ε and σ computed, by composing the exact accountant's single epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lambdacgd.accounting.base import SMALLEST_EPSILON, AccountingError, TwoWayBound, real
from lambdacgd.accounting.fresh_bins.composition import Composition
from lambdacgd.accounting.fresh_bins.profile import FINAL, QUICK, Resolution, one_epoch
from lambdacgd.accounting.gaussian import gaussian_delta, gaussian_sigma
from lambdacgd.accounting.transfer_matrix import TransferMatrix

METHOD = "transfer-matrix-composed"
LARGEST_EPSILON = 100.0
SMALLEST_DELTA = 1e-10
MOST_EPOCHS = 10_000
TAIL_SHARE = 1e-3
"""of δ/k: one epoch's curve is followed down to this value"""
LOOSE = 0.05
"""a composed δ of which more than this share is rounding or infinite losses is refused"""
INSTEAD = "ask for a larger δ or a smaller ε, or use fixed bins or cyclic sampling"


@dataclass(frozen=True)
class ComposedBound(TwoWayBound):
    """A bound after ``epochs`` epochs.

    Its ``budget`` lists, to first order: infinite losses and rounding of the composition, chords between the nodes of
    one epoch's curve, and under "one epoch: …" what the exact accountant lists for that curve, carried through the
    composition.
    """

    epochs: int = 1

    method: ClassVar[str] = METHOD


@dataclass(frozen=True)
class FreshBins:
    """Accountant of C_λ (or its column-normalised form), restarted with new bins at every epoch.

    Guarantee
    ---------
    Every δ returned is an upper bound on both directions of the k-fold product of the single-epoch pair
    P₁ = (1/b) Σ_j N(C[:, j], σ²I), Q₁ = N(0, σ²I). That pair dominates training under zero-out of one example if every
    epoch draws its bins and its noise anew and takes nothing back across its boundary (docs/fresh-bins.md). One epoch
    is bounded by the transfer-matrix accountant; chords, composition and rounding only add.
    """

    lam: float
    steps_per_epoch: int
    epochs: int
    normalized: bool = False

    method: ClassVar[str] = METHOD

    def __post_init__(self) -> None:
        one = self.one_epoch  # validates
        if not 1 <= real("epochs", self.epochs) <= MOST_EPOCHS or self.epochs != int(self.epochs):
            raise AccountingError(f"{self.epochs!r} epochs; this accountant composes 1 to {MOST_EPOCHS:,}")
        for name, value in (("lam", one.lam), ("steps_per_epoch", one.steps_per_epoch), ("epochs", int(self.epochs))):
            object.__setattr__(self, name, value)

    @property
    def one_epoch(self) -> TransferMatrix:
        return TransferMatrix(self.lam, self.steps_per_epoch, 1, self.normalized)

    def composed(
        self, sigma: float, delta: float, *, epochs: int | None = None, resolution: Resolution = FINAL
    ) -> Composition:
        """All epochs (or fewer) at this σ, fine enough for values of δ down to ``delta``."""
        k = self.epochs if epochs is None else epochs
        pair = one_epoch(self.one_epoch, sigma, floor=TAIL_SHARE * delta / k, resolution=resolution)
        return Composition(pair, k)

    def bound(self, composed: Composition, sigma: float, epsilon: float) -> ComposedBound:
        """Both directions at one ε."""
        remove, add = composed.remove(epsilon), composed.add(epsilon)
        governing = remove if remove.delta >= add.delta else add
        budget = {"infinite losses": governing.infinite, "rounding": governing.rounding}
        slack = composed.slack("remove" if governing is remove else "add", epsilon)
        budget |= {name: min(value, governing.delta) for name, value in slack.items()}
        details = {"nodes": len(composed.pair.index), "cell": composed.pair.quantum, "transform": composed.length}
        found = ComposedBound(sigma, epsilon, remove.delta, add.delta, budget, details, composed.copies)
        if not 0 < found.delta <= 1.01 or not math.isfinite(found.delta):
            raise AccountingError(f"composition gave δ = {found.delta:.3g}, which certifies nothing; {INSTEAD}")
        return found

    def delta(self, sigma: float, epsilon: float, *, epochs: int | None = None, like: float = 1e-6) -> ComposedBound:
        """An upper bound on δ(ε) after all epochs, or after the first ``epochs``; ``like`` is the size expected."""
        sigma, epsilon, like = real("σ", sigma), real("ε", epsilon), real("like", like)
        k = self._check(sigma=sigma, epsilon=epsilon, delta=like, epochs=epochs)
        if self.steps_per_epoch == 1:
            return self._one_bin(sigma, epsilon, k)
        found = self.bound(self.composed(sigma, like, epochs=k), sigma, epsilon)
        if found.delta < like and like > SMALLEST_DELTA:
            like = max(found.delta - found.budget["infinite losses"], 0.01 * found.delta, SMALLEST_DELTA)
            found = self.bound(self.composed(sigma, like, epochs=k), sigma, epsilon)
        return found

    def epsilon(self, sigma: float, delta: float, *, epochs: int | None = None) -> float:
        """The smallest ε certified for ``delta`` after all epochs, or after the first ``epochs``."""
        return self.spent(sigma, delta, epochs=epochs).epsilon

    def spent(self, sigma: float, delta: float, *, epochs: int | None = None) -> ComposedBound:
        """The bound at the smallest ε, from 0.001 on, that is certified for ``delta``."""
        sigma, delta = real("σ", sigma), real("δ", delta)
        k = self._check(sigma=sigma, delta=delta, epochs=epochs)
        if self.steps_per_epoch == 1:
            from lambdacgd.accounting.gaussian import gaussian_epsilon

            alone = gaussian_epsilon(sigma / math.sqrt(k), delta * (1 - 1e-8)) * (1 + 1e-9)
            return self._one_bin(sigma, max(alone, SMALLEST_EPSILON), k)
        composed = self.composed(sigma, delta, epochs=k)
        found = max(composed.epsilon(delta), SMALLEST_EPSILON)
        self._check(epsilon=found)
        return self.bound(composed, sigma, found)

    def epsilons(self, sigma: float, delta: float) -> tuple[float, ...]:
        """ε certified for ``delta`` after 1, 2, …, k epochs, all from one single-epoch curve."""
        sigma, delta = real("σ", sigma), real("δ", delta)
        self._check(sigma=sigma, delta=delta)
        if self.steps_per_epoch == 1:
            return tuple(self.epsilon(sigma, delta, epochs=epochs) for epochs in range(1, self.epochs + 1))
        pair = one_epoch(self.one_epoch, sigma, floor=TAIL_SHARE * delta / self.epochs, resolution=FINAL)
        return tuple(Composition(pair, epochs).epsilon(delta) for epochs in range(1, self.epochs + 1))

    def curve(self, sigma: float, epsilons: Sequence[float], *, delta: float = 1e-6) -> list[ComposedBound]:
        """Bounds at many ε from one composition; relative accuracy is kept down to about ``delta``."""
        sigma, delta, asked = real("σ", sigma), real("δ", delta), [real("ε", epsilon) for epsilon in epsilons]
        for epsilon in asked:
            self._check(sigma=sigma, epsilon=epsilon, delta=delta)
        if self.steps_per_epoch == 1 or not asked:
            return [self._one_bin(sigma, epsilon, self.epochs) for epsilon in asked]
        composed = self.composed(sigma, delta)
        return [self.bound(composed, sigma, epsilon) for epsilon in asked]

    def sigma(
        self, epsilon: float, delta: float, *, rtol: float = 5e-4, start: float | None = None
    ) -> tuple[float, ComposedBound]:
        """The smallest σ (to relative accuracy about ``rtol``) whose certified δ(ε) is at most ``delta``.

        The σ returned was itself evaluated and passed. ``start`` is a guess that saves time; from ``rtol`` = 3e-3 on
        every evaluation is a quick one, some 0.3% larger in σ: for searches.
        """
        from lambdacgd.accounting.fresh_bins.search import calibrate_sigma

        epsilon, delta = real("ε", epsilon), real("δ", delta)
        self._check(epsilon=epsilon, delta=delta)
        if self.steps_per_epoch == 1:
            sigma = math.sqrt(self.epochs) * gaussian_sigma(epsilon, delta) * (1 + 1e-9)
            return sigma, self._one_bin(sigma, epsilon, self.epochs)
        return calibrate_sigma(self, epsilon, delta, rtol=rtol, start=start or self.first_guess(epsilon, delta))

    def quick_sigma(
        self, epsilon: float, delta: float, *, start: float | None = None, slope: float = 15.0
    ) -> tuple[float, float]:
        """About the smallest σ and −d log δ/d log σ there, from quick evaluations only: for comparing λ, no claim."""
        from lambdacgd.accounting.fresh_bins.search import estimate_sigma

        epsilon, delta = real("ε", epsilon), real("δ", delta)
        self._check(epsilon=epsilon, delta=delta)
        if self.steps_per_epoch == 1:
            return math.sqrt(self.epochs) * gaussian_sigma(epsilon, delta), slope
        return estimate_sigma(self, epsilon, delta, start=start or self.first_guess(epsilon, delta), slope=slope)

    def evaluate(self, sigma: float, epsilon: float, delta: float, *, quick: bool) -> ComposedBound:
        """One step of a calibration to ``delta``."""
        composed = self.composed(sigma, delta, resolution=QUICK if quick else FINAL)
        return self.bound(composed, sigma, epsilon)

    def checked(self, found: ComposedBound) -> ComposedBound:
        if sum(found.budget.get(name, 0.0) for name in ("infinite losses", "rounding")) > LOOSE * found.delta:
            parts = ", ".join(f"{name} {value:.2g}" for name, value in found.budget.items())
            raise AccountingError(
                f"δ near {found.delta:.2g} cannot be certified at ε = {found.epsilon:g} over {self.epochs} epochs: "
                f"too much of it may be slack ({parts}); {INSTEAD}"
            )
        return found

    def first_guess(self, epsilon: float, delta: float) -> float:
        """σ at which a Gaussian mechanism of the same E W² after k epochs would need (ε, δ): a start, no more."""
        mu = 1 / gaussian_sigma(epsilon, delta)
        chain = self.one_epoch.chain(1.0)
        d = np.arange(1, self.steps_per_epoch)
        pairs = 2 * (self.steps_per_epoch - d) / self.steps_per_epoch**2
        end = chain.tail * float(chain.end_effect(0.0)) ** 2
        peak, covariances = chain.gain * chain.peak_variance, chain.gain * (chain.covariance(d) - end)

        def excess(log_sigma: float) -> float:
            scale = math.exp(-2 * log_sigma)
            if peak * scale > 600:
                return math.inf
            moment = math.exp(peak * scale) / self.steps_per_epoch + float(pairs @ np.exp(covariances * scale))
            return self.epochs * math.log(max(moment, 1.0 + 1e-15)) - mu**2

        low, high = math.log(self.one_epoch.smallest_sigma * 1.01), math.log(math.sqrt(self.epochs * peak) / mu) + 1.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return math.exp(high)

    def _one_bin(self, sigma: float, epsilon: float, epochs: int) -> ComposedBound:
        """b = 1: every epoch is a Gaussian mechanism of sensitivity 1, and k of them are one of sensitivity √k."""
        value = gaussian_delta(epsilon, sigma / math.sqrt(epochs)) * (1 + 1e-9)
        return ComposedBound(sigma, epsilon, value, value, {}, {"one_bin": "gaussian"}, epochs)

    def _check(
        self,
        *,
        sigma: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        epochs: int | None = None,
    ) -> int:
        if sigma is not None and not (math.isfinite(sigma) and sigma >= self.one_epoch.smallest_sigma):
            raise AccountingError(f"σ is {sigma!r}; it must be finite and at least {self.one_epoch.smallest_sigma:.3g}")
        if epsilon is not None and not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
            raise AccountingError(
                f"ε is {epsilon!r}; fresh bins are accounted for from {SMALLEST_EPSILON:g} to {LARGEST_EPSILON:g}"
            )
        if delta is not None and not SMALLEST_DELTA <= delta < 1:
            raise AccountingError(f"δ is {delta!r}; fresh bins are accounted for from {SMALLEST_DELTA:g} to 1")
        if epochs is None:
            return self.epochs
        if not 1 <= real("epochs", epochs) <= self.epochs or epochs != int(epochs):
            raise AccountingError(f"epochs is {epochs!r}; it must be an integer between 1 and {self.epochs}")
        return int(epochs)
