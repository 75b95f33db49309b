"""δ(ε) at many ε for one σ: each evaluation starts from what its neighbour learned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lambdacgd.accounting.transfer_matrix.measure import FINE, Precision, Scale

if TYPE_CHECKING:
    from lambdacgd.accounting.transfer_matrix.accountant import Bound, TransferMatrix


def evaluate_curve(
    accountant: TransferMatrix, sigma: float, epsilons: list[float], *, tight_add: bool, precision: Precision = FINE
) -> list[Bound]:
    """Bounds in the order of ``epsilons``; both directions tight if ``tight_add``."""
    found: dict[float, Bound] = {}
    previous: Bound | None = None
    for epsilon in sorted(set(epsilons)):
        if previous is None:
            bound = accountant.delta(sigma, epsilon)
            if tight_add:
                scale = Scale(math.exp(epsilon), bound.delta_remove, bound.slope)
                bound = accountant.evaluate(sigma, epsilon, scale, precision, tight_add=True)
        else:
            step = epsilon - previous.epsilon
            # δ falls at least as fast as at the previous point, so the tuning is, if anything, too fine.
            size = previous.delta_remove * math.exp(-previous.slope * step)
            scale = Scale(math.exp(epsilon), size, previous.slope)
            bound = accountant.evaluate(sigma, epsilon, scale, precision, tight_add=tight_add)
        accountant.checked(bound)
        found[epsilon] = previous = bound
    return [found[epsilon] for epsilon in epsilons]
