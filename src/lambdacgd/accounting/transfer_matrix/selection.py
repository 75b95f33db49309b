"""Which chain to compute with: the exact one where it is affordable, else the least loose dominating one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lambdacgd.accounting.base import AccountingError
from lambdacgd.accounting.transfer_matrix.chain import Chain
from lambdacgd.accounting.transfer_matrix.lattice import spacing_ratio
from lambdacgd.accounting.transfer_matrix.measure import FINE
from lambdacgd.accounting.transfer_matrix.product import squarings, stretches

AFFORDABLE = 5e9
"""real operations a frequency that an evaluation may cost before a dominating chain is considered"""
POSSIBLE = 2e11
"""beyond this even the cheapest chain is refused"""
STEEPNESS = 12.0
"""a typical −d log δ / d log σ, used only to compare losses"""


def cost(chain: Chain, slope: float) -> float:
    """Real operations a complex frequency, from the lattice's size before it is built."""
    tau = math.sqrt((1 - chain.lam) / (1 + chain.lam))
    span = 14 * math.sqrt(chain.peak_variance) + math.sqrt(chain.gain) * max(chain.peak_covariance(0.5), 0.0)
    states = span / (spacing_ratio(chain.bins, FINE.lattice) * tau) + 3
    columns = 1.0 if chain.epochs == 1 else states
    total = 0.0
    for stretch in stretches(chain.log_scales, FINE.scales * chain.bins / (1 + slope)):
        s = squarings(stretch.count, int(states), int(columns))
        rest = (stretch.count >> s) + bin(stretch.count & ((1 << s) - 1)).count("1")
        total += 8 * states**2 * (s * states + rest * columns)
    return total + 8 * states**2 * columns


def loss(chain: Chain, exact: Chain, slope: float) -> float:
    """About how much σ grows (relatively) by computing with ``chain`` instead of ``exact``."""
    end = exact.gain * exact.tail * float(np.mean(exact.end_effect(np.arange(exact.bins)) ** 2)) / 2
    kept = chain.tail / exact.tail if exact.tail else 1.0
    amplification = math.log(exact.bins / (chain.bins * round(math.log(chain.lam) / math.log(exact.lam))))
    return (
        (1 + slope) * end * (1 - kept) / STEEPNESS + 0.5 * math.log(chain.gain / exact.gain) + amplification / STEEPNESS
    )


def collective_loss(chain: Chain, exact: Chain) -> float:
    """The same where σ is large, few bins stand out, and the loss is about the Gaussian mean over all of them."""
    return 0.5 * math.log(chain.mean_loss[1] / exact.mean_loss[1])


def candidates(exact: Chain) -> list[Chain]:
    """The exact chain, its stationary continuation (Lemma 7), and lumped ones (Lemma 8), shortened if need be (9)."""
    chains = [exact] + ([replace(exact, tail=0.0)] if exact.tail else [])
    longest = min(exact.bins // 2, 1 + int(0.03 / -math.log(exact.lam)))
    divisors = {g for g in range(2, longest + 1) if exact.bins % g == 0} if longest <= 10_000 else set()
    for group in sorted(divisors | {2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256}):
        if 2 <= group <= longest:
            whole = exact.shortened(exact.bins - exact.bins % group).lumped(group)
            chains += [whole] + ([replace(whole, tail=0.0)] if whole.tail else [])
    return chains


def select(exact: Chain, slope: float) -> tuple[Chain, float]:
    """The chain to compute with and the relative growth of σ it is expected to cost."""
    if cost(exact, slope) <= AFFORDABLE:
        if exact.tail:
            longer = replace(exact, tail=0.0)
            alone, together = loss(longer, exact, slope), collective_loss(longer, exact)
            if alone <= 3e-5 and together <= 1e-4:
                return longer, max(alone, together)
        return exact, 0.0
    rated = [(loss(chain, exact, slope), cost(chain, slope), chain) for chain in candidates(exact)]
    affordable = [item for item in rated if item[1] <= AFFORDABLE]
    if affordable:
        best = min(affordable, key=lambda item: item[0])
        return best[2], best[0]
    best = min(rated, key=lambda item: item[1])
    if best[1] > POSSIBLE:
        raise AccountingError(
            f"λ = {exact.lam:g} with {exact.bins} steps per epoch needs {best[1]:.1g} operations a frequency, beyond "
            f"{POSSIBLE:.1g}; use a smaller λ or the Monte Carlo accountant"
        )
    return best[2], best[0]
