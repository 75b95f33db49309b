"""Poisson sampling, through dp-accounting's privacy loss distributions: DP-SGD, and banded C with cyclic groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lambdacgd.accounting.certificate import Bound
from lambdacgd.accounting.root import smallest
from lambdacgd.errors import AccountingError, InvalidInput
from lambdacgd.mechanisms import Mechanism
from lambdacgd.mechanisms.error import largest_column_norm
from lambdacgd.sampling import Poisson

METHOD = "pld"
# What the FFTs of a composition can be off by: up to 5e-13 was seen (values that are 0 came out as −4e-14).
ROUND_OFF = 2e-12


@dataclass(frozen=True)
class PoissonSampled:
    """Accountant of Gaussian steps, each of which an example enters with the same probability.

    Args:
        rate: q, that probability.
        steps: how many such steps an example has: all of DP-SGD's.
        norm: how far it moves one of them, 1 for DP-SGD.
        details: what certificates say besides.

    Guarantee
    ---------
    (ε, δ)-DP under zero-out (equivalently add-or-remove) of one example, both directions. The privacy loss
    distribution is rounded pessimistically ("connect the dots"), so the bound is deterministic up to floating point.
    """

    rate: float
    steps: int
    norm: float = 1.0
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    def delta(self, sigma: float, epsilon: float) -> Bound:
        return self._bound(sigma, epsilon, self._delta(sigma / self.norm, epsilon))

    def epsilon(self, sigma: float, delta: float) -> Bound:
        _check_delta(delta)
        epsilon = 1.0
        for _ in range(2):  # the first answer says how finely to compute the second
            composed = _composed(sigma / self.norm, self.rate, self.steps, _interval(epsilon))
            epsilon = float(composed.get_epsilon_for_delta(delta - ROUND_OFF))
        return self._bound(sigma, epsilon, delta)

    def sigma(self, epsilon: float, delta: float) -> Bound:
        _check_delta(delta)
        sigma = smallest(lambda s: self._delta(s, epsilon), delta, rtol=2e-5, limits=(0.05, 1e7))
        return self._bound(sigma * self.norm, epsilon, delta)

    def quick_sigma(self, epsilon: float, delta: float, *, start: float | None = None) -> float:
        return self.norm * smallest(lambda s: self._delta(s, epsilon, 10.0), delta, rtol=1e-3, limits=(0.05, 1e7))

    def _delta(self, sigma: float, epsilon: float, coarser: float = 1.0) -> float:
        """An upper bound on δ(ε) of the steps at sensitivity 1; ``coarser`` widens the cells."""
        composed = _composed(sigma, self.rate, self.steps, coarser * _interval(epsilon))
        return max(float(composed.get_delta_for_epsilon(epsilon)), 0.0) + ROUND_OFF

    def _bound(self, sigma: float, epsilon: float, delta: float) -> Bound:
        return Bound(sigma, epsilon, delta, delta, METHOD, details=self.details)


def poisson_accountant(mechanism: Mechanism, sampling: Poisson) -> PoissonSampled:
    """The accountant of a mechanism whose C has at most as many bands as the sampling has groups.

    Args:
        mechanism: resolved for the whole run.
        sampling: with p groups; one group is plain Poisson sampling, where C must be diagonal.

    Raises:
        InvalidInput: C has more bands than there are groups.

    Guarantee
    ---------
    Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization". An example of group g can take part at steps
    t = g, g + p, g + 2p, … only, ⌈n/p⌉ of them at most, and at each by a coin of its own that falls with probability at
    most p/b. Column t of C is zero outside rows t … t + p − 1, so what it adds to C·G at one of these steps and at
    another lies in different rows. Given all earlier rows and all other examples, the rows t … t + p − 1 are therefore
    a Gaussian mechanism that one coin decides about, of sensitivity ‖C[:, t]‖; and the rows of all these steps compose
    adaptively. C may have any sign. The largest column norm stands for all of them.
    """
    n, groups = sampling.steps, max(1, sampling.groups)
    bands = mechanism.strategy_bands(n)
    if bands > groups:
        raise InvalidInput(
            "sampling",
            sampling.kind,
            f"C of {mechanism.name} has {bands} bands, and Poisson sampling with {groups} groups is accounted for up "
            f"to {groups}: an example's columns would overlap. Use balls-in-bins or cyclic, or a mechanism with a "
            "banded C (bandmf, bsr, dp-sgd) and as many groups",
        )
    norm = largest_column_norm(mechanism, n)
    if groups == 1 and norm == 1.0:
        return PoissonSampled(sampling.rate, n)
    steps = math.ceil(n / groups)
    details = {"groups": groups, "steps_of_an_example": steps, "column_norm": norm}
    return PoissonSampled(sampling.rate, steps, norm, details)


def _check_delta(delta: float) -> None:
    """Refuse a δ that round-off could reach."""
    if delta < 100 * ROUND_OFF:
        raise AccountingError(
            f"δ = {delta:g} is too close to floating-point error for PLD accounting; use δ ≥ {100 * ROUND_OFF:g}"
        )


def _interval(epsilon: float) -> float:
    """Width of the cells of the privacy loss: fine enough that rounding adds under 0.1% to δ in the paper's setting."""
    return 1e-4 * min(max(epsilon, 0.1), 8.0)


@lru_cache(maxsize=64)
def _composed(sigma: float, rate: float, steps: int, interval: float):  # type: ignore[no-untyped-def]  # dp-accounting is untyped
    from dp_accounting.pld import privacy_loss_distribution as pld

    one_step = pld.from_gaussian_mechanism(
        standard_deviation=sigma,
        value_discretization_interval=interval,
        sampling_prob=rate,
        pessimistic_estimate=True,
        use_connect_dots=True,
    )
    return one_step.self_compose(steps)
