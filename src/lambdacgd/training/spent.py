"""What a run has cost so far, and what it would have cost had it been planned shorter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lambdacgd.accounting import Certificate, accountant_for
from lambdacgd.planning import Plan


@dataclass(frozen=True)
class Spent:
    """The claim of a run. Releasing its weights after any number of steps costs the plan's (ε, δ), no less.

    ``after_epochs`` (on request) is informational: the ε that the same σ would give a run *planned* for 1, 2, …
    epochs. With fixed bins it is not what stopping early costs. With fresh bins, whose epochs compose, it is what the
    weights after so many whole epochs have cost, provided that the private data had no say in when to stop.
    """

    epsilon: float
    delta: float
    certificate: Certificate
    steps_taken: int
    steps: int
    after_epochs: tuple[float, ...] | None = None

    @property
    def share(self) -> float:
        """The share of the plan's steps that were taken."""
        return self.steps_taken / self.steps

    @property
    def private(self) -> bool:
        """Whether anything is claimed: not for ε = inf, not for an estimate."""
        return math.isfinite(self.epsilon) and self.certificate.kind == "bound"

    def __str__(self) -> str:
        if not math.isfinite(self.epsilon):
            return f"NOT PRIVATE (ε = inf, no noise, no clipping), {self.steps_taken} of {self.steps} steps"
        what = "" if self.certificate.kind == "bound" else " (a point estimate, not a claim)"
        return f"(ε = {self.epsilon:g}, δ = {self.delta:g}){what}, {self.steps_taken} of {self.steps} steps taken"


def epsilon_after_epochs(plan: Plan) -> tuple[float, ...]:
    """ε at the plan's σ and δ for a run planned over 1, 2, …, k epochs with the same mechanism. Informational."""
    if plan.sigma == 0:
        return (math.inf,) * plan.epochs
    accountant = accountant_for(plan.mechanism, plan.sampling)
    return (*accountant.epsilon_after_epochs(plan.sigma, plan.epsilon, plan.delta)[:-1], plan.epsilon)
