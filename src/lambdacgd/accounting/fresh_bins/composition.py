"""δ(ε) of k independent copies of a discrete pair: one convolution in floating point, its rounding bounded.

The composed loss is a sum of k independent ones. Its tail is found by the fast Fourier transform of *tilted* masses
x_i = p_i e^{θl_i}/M(θ), with θ the saddle point: then the losses near ε are the likely ones, and rounding is small
beside δ however small δ is. Nothing is truncated and nothing wraps around.

Rounding. For masses that sum to 1, a transform of length N = 2^L errs by at most 8uL of its Euclidean norm
(Higham 2002, Theorem 24.2, with weights accurate to u = 2⁻⁵³); |x̂| ≤ 1, so raising to the k-th power errs by k times
that, and by 4u a multiplication; transforming back errs as before. With Parseval, the composed tilted masses err by at
most u‖x‖₂(8L(1.01k + 1) + 4k) in the Euclidean norm, and δ by that times the norm of what they are multiplied with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from lambdacgd.accounting.base import AccountingError, calibrate
from lambdacgd.accounting.fresh_bins.pair import DiscretePair

Array = NDArray[np.float64]
OneWay = Literal["remove", "add"]

LONGEST = 1 << 24
"""of a transform: about half a gigabyte"""
_UNIT = 2.0**-53
_RELATIVE = 1e-9
"""covers the relative rounding of the tilted masses (under 1e-12 each, k of them multiplied) and of the last sum"""


@dataclass(frozen=True)
class Tail:
    """δ(ε) ≤ ``delta``, of which ``infinite`` comes from infinite losses and ``rounding`` is the margin."""

    delta: float
    infinite: float
    rounding: float


class Composition:
    """``copies`` independent copies of ``pair``, in both directions."""

    def __init__(self, pair: DiscretePair, copies: int) -> None:
        self.pair, self.copies = pair, copies
        span = int(pair.index[-1] - pair.index[0])
        self.length = 1 << max(4, int(copies * span + 1).bit_length())
        if self.length > LONGEST:
            raise AccountingError(f"{copies} epochs of {span} cells each need a transform beyond {LONGEST:,} numbers")

    def remove(self, epsilon: float) -> Tail:
        """δ of (P'^k, Q'^k)."""
        return self._tail(epsilon, self.pair.index, self.pair.p, self.pair.p_infinite)

    def add(self, epsilon: float) -> Tail:
        """δ of (Q'^k, P'^k): the losses change sign."""
        return self._tail(epsilon, -self.pair.index[::-1], self.pair.q[::-1], self.pair.q_infinite)

    def delta(self, epsilon: float) -> float:
        """The larger of both directions."""
        return max(self.remove(epsilon).delta, self.add(epsilon).delta)

    def epsilon(self, delta: float, *, rtol: float = 1e-5) -> float:
        """The smallest ε > 0 with δ(ε) ≤ ``delta``, from above."""
        return calibrate(self.delta, delta, rtol=rtol, limits=(1e-6, 1e4))

    def _tail(self, epsilon: float, index: NDArray[np.int64], masses: Array, infinite: float) -> Tail:
        k, losses = self.copies, index * self.pair.quantum
        # A copy's infinite loss makes the sum infinite; the others' masses add up to `whole` at most.
        whole = float(masses.sum()) + infinite
        lost = k * infinite * max(whole, 1.0) ** (k - 1)
        if epsilon >= k * float(losses[-1]):
            return Tail(lost * (1 + _RELATIVE), lost, 0.0)
        positive = masses > 0
        index, losses, masses = index[positive], losses[positive], masses[positive]
        logs = np.log(masses)

        def cumulant(theta: float) -> float:
            return k * float(logsumexp(logs + theta * losses)) - theta * epsilon

        most = 600.0 / max(float(np.abs(losses).max()), 1e-12)
        theta = float(minimize_scalar(cumulant, bounds=(0.0, most), method="bounded").x)
        log_mgf = float(logsumexp(logs + theta * losses))
        tilted = np.exp(logs + theta * losses - log_mgf)
        dense = np.zeros(int(index[-1] - index[0]) + 1)
        dense[index - index[0]] = tilted
        composed = irfft(_power(rfft(dense, self.length), k), self.length)
        first = math.floor(epsilon / self.pair.quantum) + 1  # losses above ε, counted from k·index[0]
        sums = np.arange(max(first, k * int(index[0])), k * int(index[-1]) + 1)
        at = sums * self.pair.quantum
        weights = np.maximum(-np.expm1(epsilon - at), 0.0) * np.exp(k * log_mgf - theta * at)
        value = float(weights @ composed[sums - k * int(index[0])])
        levels = math.log2(self.length)
        units = 8 * levels * (1.01 * k + 1) + 4 * k
        margin = _UNIT * units * float(np.linalg.norm(dense)) * float(np.linalg.norm(weights))
        return Tail((max(value, 0.0) + margin + lost) * (1 + _RELATIVE), lost, margin)


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """baseᵏ by repeated squaring: k − 1 products in all, as far as rounding is concerned."""
    result: NDArray[np.complex128] | None = None
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if exponent:
            base = base * base
    assert result is not None
    return result
