"""How far one example can move C·G, and how surely that is known.

An example adds a vector of norm at most 1 (clipping norms are accounted for elsewhere) at each step it takes part in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms.base import Array, Horizon, Mechanism
from lambdacgd.mechanisms.families import Diagonal, LambdaCGD

Participation = Literal["cyclic", "min-separation"]

# Largest number of entries of C that a column-scaled mechanism without a lemma may be summed over.
_DENSE_LIMIT = 50_000_000


@dataclass(frozen=True)
class Sensitivity:
    """The value, whether it is the supremum itself (``exact``) or only bounds it, and the statement it rests on."""

    value: float
    exact: bool
    because: str


def participation_sum(column: Array, horizon: Horizon) -> Array:
    """m_0 = Σ_{e<k} (first column shifted down by e·b): what an example of the first bin adds over all epochs."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    # m_0[t] = c[t] + m_0[t − b]: a running sum down each residue class modulo b.
    return np.cumsum(column.reshape(k, b), axis=0).reshape(-1)


def check_question(mechanism: object, horizon: object) -> None:
    """Refuse a name where a mechanism is meant, or a number of steps where a horizon is."""
    if not isinstance(mechanism, Mechanism):
        raise InvalidInput("mechanism", mechanism, "it must be a Mechanism such as LambdaCGD(0.9)")
    if not isinstance(horizon, Horizon):
        raise InvalidInput("horizon", horizon, "it must be a Horizon(steps_per_epoch=…, epochs=…)")


def sensitivity(
    mechanism: Mechanism,
    horizon: Horizon,
    *,
    participation: Participation = "cyclic",
    restart_every: int | None = None,
) -> Sensitivity:
    """How far one example can move C·G, when it takes part once in each of ``horizon.epochs`` epochs.

    Args:
        mechanism: a resolved mechanism.
        horizon: the whole training, k epochs of b steps.
        participation: "cyclic" (the same step of every epoch) or "min-separation" (any k steps at least b apart).
        restart_every: b, if the noise restarts every epoch (fresh bins); else None.

    Returns:
        The value, whether it is exact, and the statement it rests on.

    Raises:
        InvalidInput: an argument cannot be used, C grows beyond all floats, or no bound is known.

    Guarantee
    ---------
    Adjacency is zero-out of one example. ``cyclic`` participation means exactly the same step of every epoch, which
    is what Balls-in-Bins and a fixed order do; ``min-separation`` allows any steps at least b apart, at most k of
    them. ``exact`` is False where the value is an upper bound: C with negative entries (|C| is used instead), or
    min-separation without a lemma (the smallest non-increasing sequence above |c| is used instead).

    With ``restart_every`` = b (fresh bins) C is block-diagonal, one block an epoch, so the columns of different epochs
    are orthogonal: the value is √k times the largest column norm of a block, for *any* place in each epoch and for
    C of any sign. It is exact, and ``participation`` makes no difference.
    """
    check_question(mechanism, horizon)
    if participation not in ("cyclic", "min-separation"):
        raise InvalidInput("participation", participation, "it must be 'cyclic' or 'min-separation'")
    if restart_every is not None and restart_every != horizon.steps_per_epoch:
        raise InvalidInput(
            "restart_every", restart_every, f"it must be the steps per epoch, {horizon.steps_per_epoch}, or None"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        if restart_every is None:
            answer = _sensitivity(mechanism, horizon, participation)
        else:
            answer = _with_restarts(mechanism, horizon)
    if not np.isfinite(answer.value):
        raise InvalidInput(
            "mechanism", f"The strategy C of {mechanism.name} grows beyond all floats over {horizon.steps} steps."
        )
    return answer


def _with_restarts(mechanism: Mechanism, horizon: Horizon) -> Sensitivity:
    value = math.sqrt(horizon.epochs) * largest_column_norm(mechanism, horizon.steps_per_epoch)
    return Sensitivity(value, True, "one participation an epoch, epochs orthogonal")


def largest_column_norm(mechanism: Mechanism, n: int) -> float:
    """max_t ‖C[:, t]‖ over n steps: how far an example can move C·G that takes part once."""
    # ‖T[:, j]‖² is the sum of the first n − j squares of T's first column.
    norms = np.sqrt(np.cumsum(mechanism.strategy(n) ** 2)[::-1])
    scales = mechanism.column_scales(n)
    return float(norms.max() if scales is None else (norms / scales).max())


def _sensitivity(mechanism: Mechanism, horizon: Horizon, participation: Participation) -> Sensitivity:
    n = horizon.steps
    # Closed forms and lemmas are of the class itself: a subclass may correlate its noise in another way.
    if type(mechanism) is LambdaCGD and not mechanism.normalized:
        return Sensitivity(closed_form_sensitivity(mechanism.resolved_lam, horizon), True, "closed form of λCGD")
    scales = mechanism.column_scales(n)
    column = mechanism.strategy(n)
    magnitudes = np.abs(column)
    signed = bool(np.any(column < 0))
    if scales is not None:
        return _scaled(mechanism, magnitudes, scales, horizon, participation, signed)
    if participation == "cyclic":
        # m_j is m_0 shifted down by j and cut off at n, so the first bin is the worst one.
        value = float(np.linalg.norm(participation_sum(magnitudes, horizon)))
        because = "cyclic participation, |C| in place of C" if signed else "cyclic participation, C ≥ 0"
        return Sensitivity(value, not signed, because)
    majorant = np.maximum.accumulate(magnitudes[::-1])[::-1]
    decreasing = not signed and bool(np.all(majorant == magnitudes))
    value = float(np.linalg.norm(participation_sum(majorant, horizon)))
    because = "non-increasing C ≥ 0 (Theorem 2)" if decreasing else "Theorem 2 for the least non-increasing c̄ ≥ |c|"
    return Sensitivity(value, decreasing, because)


def closed_form_sensitivity(lam: float, horizon: Horizon) -> float:
    """sens of plain λCGD: sqrt((1−λ^{2b}) / ((1−λ²)(1−λ^b)²) · Σ_{j=1..k} (1−λ^{bj})²)."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    if lam == 0.0:
        return math.sqrt(k)
    rate = math.log(lam)
    geometric = np.expm1(rate * b * np.arange(1, k + 1)) / math.expm1(rate * b)
    return math.sqrt(math.expm1(2 * rate * b) / math.expm1(2 * rate) * float(geometric @ geometric))


def _scaled(
    mechanism: Mechanism,
    magnitudes: Array,
    scales: Array,
    horizon: Horizon,
    participation: Participation,
    signed: bool,
) -> Sensitivity:
    b, k, n = horizon.steps_per_epoch, horizon.epochs, horizon.steps
    if type(mechanism) is LambdaCGD:
        # The normalised lemma: the leftmost admissible columns are the worst, under either participation.
        value = _bin_norm(magnitudes, scales, 0, horizon)
        return Sensitivity(value, True, "lemma for column-normalised λCGD")
    if type(mechanism) is Diagonal:
        # Columns are orthogonal and their norms 1/d_t decrease, so again the leftmost are the worst.
        return Sensitivity(float(np.linalg.norm(1 / scales[::b][:k])), True, "diagonal C with decreasing entries")
    if participation == "min-separation" or n * b > _DENSE_LIMIT:
        raise InvalidInput(
            "participation",
            f"The sensitivity of a column-scaled {mechanism.name} over {n} steps is known for cyclic participation "
            f"only, and for n·b ≤ {_DENSE_LIMIT}.",
        )
    value = max(_bin_norm(magnitudes, scales, j, horizon) for j in range(b))
    return Sensitivity(value, not signed, "cyclic participation, all bins")


def _bin_norm(magnitudes: Array, scales: Array, first: int, horizon: Horizon) -> float:
    """‖Σ_e |C|[:, first + e·b]‖ for C = T·D⁻¹."""
    n, b = horizon.steps, horizon.steps_per_epoch
    total = np.zeros(n)
    for start in range(first, n, b):
        total[start:] += magnitudes[: n - start] / scales[start]
    return float(np.linalg.norm(total))
