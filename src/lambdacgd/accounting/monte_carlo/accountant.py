"""The Monte Carlo accountant for Balls-in-Bins: any mechanism with C ≥ 0; estimates, and certificates."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdacgd import cache
from lambdacgd.accounting.base import SMALLEST_EPSILON, Calibration, Certificate, Direction, device
from lambdacgd.accounting.gaussian import gaussian_sigma
from lambdacgd.accounting.monte_carlo import certificate
from lambdacgd.accounting.monte_carlo.build import gram_of, gram_of_matrix
from lambdacgd.accounting.monte_carlo.estimate import Estimate, Estimator, SigmaEstimate, add_bound
from lambdacgd.accounting.monte_carlo.gram import Gram
from lambdacgd.accounting.monte_carlo.sweep import certified_sigma
from lambdacgd.mechanisms.base import Horizon, Mechanism
from lambdacgd.validation import InvalidInput, integer, number

LARGEST_EPSILON = 300.0
"""beyond it e^ε times a density comes near overflow"""


class MonteCarlo:
    """δ, ε and σ of one mechanism over one horizon under Balls-in-Bins with fixed bins, by sampling.

    Guarantee
    ---------
    Adjacency is zero-out of one example; both directions count unless one is asked for. ``estimate_…`` and
    ``epsilon`` are point estimates with a standard error and claim nothing. ``certify`` returns a σ for which the
    mechanism is (ε, δ)-DP *including* the probability β that the verification errs: δ(ε, σ) ≤ δ − β holds except
    with probability β over the verifier's own fresh and secret randomness. Proof: docs/monte-carlo.md.
    """

    def __init__(self, mechanism: Mechanism, horizon: Horizon) -> None:
        resolved = mechanism.resolve(horizon)
        self._setup(gram_of(resolved, horizon), resolved.question(horizon.steps), horizon)

    @classmethod
    def from_matrix(cls, strategy: NDArray[np.float64], horizon: Horizon) -> MonteCarlo:
        """The accountant of a dense strategy C (n×n, lower-triangular, non-negative)."""
        accountant = cls.__new__(cls)
        digest = hashlib.sha256(np.ascontiguousarray(strategy, dtype=np.float64).tobytes()).hexdigest()
        accountant._setup(gram_of_matrix(strategy, horizon), {"matrix": digest}, horizon)
        return accountant

    def _setup(self, gram: Gram, question: dict[str, Any], horizon: Horizon) -> None:
        self.gram, self.horizon = gram, horizon
        self._question = question | {"steps_per_epoch": int(horizon.steps_per_epoch), "epochs": int(horizon.epochs)}
        self._estimator: Estimator | None = None

    @property
    def estimator(self) -> Estimator:
        if self._estimator is None:
            self._estimator = Estimator(self.gram)
        return self._estimator

    def _cached(self, kind: str, question: dict[str, Any], compute: Any) -> Any:
        return cache.cached(f"monte-carlo-{kind}", self._question | question | {"device": device()}, compute)

    def without_amplification(self, epsilon: float, delta: float) -> float:
        """σ that suffices without any amplification: the largest ‖m_j‖ times the Gaussian mechanism's σ."""
        return math.sqrt(float(self.gram.diagonal.max())) * gaussian_sigma(epsilon, delta)

    def estimate_delta(
        self, epsilon: float, sigma: float, *, samples: int = 65_536, direction: Direction = "both"
    ) -> Estimate:
        """δ(ε, σ) with its standard error."""
        _check(epsilon=epsilon, sigma=sigma, direction=direction)
        integer("samples", samples)
        question = {"epsilon": epsilon, "sigma": sigma, "samples": samples, "direction": direction}
        found = self._cached(
            "delta",
            question,
            lambda: self.estimator.delta(epsilon, sigma, samples=samples, direction=direction).to_dict(),
        )
        return Estimate(**found)

    def epsilon(self, delta: float, sigma: float, *, samples: int = 32_768, direction: Direction = "both") -> float:
        """ε(δ, σ), a point estimate."""
        _check(delta=delta, sigma=sigma, direction=direction)
        integer("samples", samples)
        question = {"delta": delta, "sigma": sigma, "samples": samples, "direction": direction}
        found = self._cached(
            "epsilon",
            question,
            lambda: self.estimator.epsilon(delta, sigma, samples=samples, direction=direction),
        )
        return float(found)

    def estimate_sigma(
        self,
        epsilon: float,
        delta: float,
        *,
        relative_error: float = 0.018,
        max_samples: int = 131_072,
        direction: Direction = "both",
    ) -> SigmaEstimate:
        """σ(ε, δ), from as many samples as bring δ's relative standard error down to ``relative_error``."""
        _check(epsilon=epsilon, delta=delta, direction=direction)
        number("relative_error", relative_error, above=0, below=1)
        integer("max_samples", max_samples, minimum=4096)
        question = {"epsilon": epsilon, "delta": delta, "relative_error": relative_error}
        found = self._cached(
            "sigma",
            question | {"max_samples": max_samples, "direction": direction},
            lambda: self.estimator.sigma(
                epsilon, delta, relative_error=relative_error, max_samples=max_samples, direction=direction
            ).to_dict(),
        )
        return SigmaEstimate(**(found | {"delta": Estimate(**found["delta"])}))

    def estimate(self, epsilon: float, delta: float) -> Calibration:
        """``estimate_sigma`` in the form that plans carry; its certificate says ``kind="estimate"``."""
        found = self.estimate_sigma(epsilon, delta)
        details = {
            "sigma_standard_error": found.standard_error,
            "delta_relative_error": found.delta.relative_error,
            "samples": found.delta.samples,
        }
        return Calibration(
            found.sigma, Certificate("monte-carlo", "both", 0.5, epsilon, delta, kind="estimate", details=details)
        )

    def certify(
        self, epsilon: float, delta: float, *, failure_probability: float | None = None, max_samples: int = 5_000_000
    ) -> Calibration:
        """A certified σ: both directions, with probability of error β = ``failure_probability`` counted into δ.

        β defaults to min(1e-9, δ/1000). At most ``max_samples`` are drawn for a test (there may be several); a δ that
        they cannot certify is refused with the number that could.
        """
        _check(epsilon=epsilon, delta=delta)
        _check_certifiable(epsilon)
        beta = min(1e-9, delta / 1000) if failure_probability is None else failure_probability
        number("failure_probability", beta, above=0, below=delta)
        integer("max_samples", max_samples, minimum=4096)
        question = {"epsilon": epsilon, "delta": delta, "failure": beta, "max_samples": max_samples}

        def compute() -> dict[str, Any]:
            estimate = self.estimate_sigma(epsilon, delta)
            widest = self.without_amplification(epsilon, delta)
            return certified_sigma(self.estimator, estimate, widest, delta=delta, beta=beta, max_samples=max_samples)

        found = self._cached("certificate", question, compute)
        claim = Certificate("monte-carlo", "both", 1.0 - beta, epsilon, delta, details=found["details"])
        return Calibration(found["sigma"], claim)

    def certify_delta(
        self, epsilon: float, sigma: float, *, failure_probability: float = 1e-9, samples: int = 1_000_000
    ) -> float:
        """An upper bound on δ(ε, σ) in both directions that fails with probability at most ``failure_probability``."""
        _check(epsilon=epsilon, sigma=sigma)
        _check_certifiable(epsilon)
        number("failure_probability", failure_probability, above=0, below=1)
        integer("samples", samples, minimum=4096)
        bound = certificate.upper_bound(
            self.estimator, epsilon, sigma, "remove", failure=0.5 * failure_probability, samples=samples
        )
        analytic = add_bound(self.gram, epsilon, sigma)
        if analytic <= bound:
            return bound
        add = certificate.upper_bound(
            self.estimator, epsilon, sigma, "add", failure=0.5 * failure_probability, samples=samples
        )
        return max(bound, min(add, analytic))


def _check(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    sigma: float | None = None,
    direction: Direction = "both",
) -> None:
    if epsilon is not None:
        number("epsilon", epsilon, above=0, below=LARGEST_EPSILON)
    if delta is not None:
        number("delta", delta, above=0, below=1)
    if sigma is not None:
        number("sigma", sigma, above=0)
    if direction not in ("both", "remove", "add"):
        raise InvalidInput("direction", direction, "it must be 'both', 'remove' or 'add'")


def _check_certifiable(epsilon: float) -> None:
    if epsilon < SMALLEST_EPSILON:
        raise InvalidInput("epsilon", epsilon, f"certificates are given from {SMALLEST_EPSILON:g} on")


__all__ = ["MonteCarlo"]
