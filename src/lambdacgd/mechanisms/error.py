"""What a mechanism costs: how far one example can move C·G, and how wrong the models A·(G + C⁻¹Z) are.

An example adds a vector of norm at most 1 (clipping norms are accounted for elsewhere) at each step it takes part in.

With ``restart_every`` = b the noise starts anew at steps 1, b+1, 2b+1, …: C is block-diagonal, its blocks are the
mechanism's C over b steps, and a row of A·C⁻¹ is made of what completed blocks left and of the current block's row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from lambdacgd.errors import InvalidInput
from lambdacgd.mechanisms.base import PREFIX_SUM, Array, Horizon, Mechanism, Workload
from lambdacgd.mechanisms.families import Diagonal, LambdaCGD

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


def sensitivity(mechanism: Mechanism, horizon: Horizon, *, restart_every: int | None = None) -> Sensitivity:
    """How far one example can move C·G, when it takes part once in each of ``horizon.epochs`` epochs.

    Args:
        mechanism: a resolved mechanism.
        horizon: the whole training, k epochs of b steps.
        restart_every: b, if the noise restarts every epoch (fresh bins); else None.

    Returns:
        The value, whether it is exact, and the statement it rests on.

    Raises:
        InvalidInput: an argument cannot be used, C grows beyond all floats, or no bound is known.

    Guarantee
    ---------
    Adjacency is zero-out of one example. It takes part in exactly the same step of every epoch, as with fixed bins and
    in a fixed order. ``exact`` is False where the value is an upper bound: for C with negative entries |C| is used.

    With ``restart_every`` = b (fresh bins) C is block-diagonal, one block an epoch, so the columns of different epochs
    are orthogonal: the value is √k times the largest column norm of a block, for *any* place in each epoch and for
    C of any sign, and it is exact.
    """
    if not isinstance(mechanism, Mechanism):
        raise InvalidInput("mechanism", mechanism, "it must be a Mechanism such as LambdaCGD(0.9)")
    if not isinstance(horizon, Horizon):
        raise InvalidInput("horizon", horizon, "it must be a Horizon(steps_per_epoch=…, epochs=…)")
    if restart_every is not None and restart_every != horizon.steps_per_epoch:
        why = f"it must be the steps per epoch, {horizon.steps_per_epoch}, or None"
        raise InvalidInput("restart_every", restart_every, why)
    with np.errstate(over="ignore", invalid="ignore"):
        if restart_every is None:
            answer = _once_in_the_same_step(mechanism, horizon)
        else:
            value = math.sqrt(horizon.epochs) * largest_column_norm(mechanism, restart_every)
            answer = Sensitivity(value, True, "one participation an epoch, epochs orthogonal")
    if not np.isfinite(answer.value):
        raise InvalidInput("mechanism", f"C of {mechanism.name} grows beyond all floats over {horizon.steps} steps.")
    return answer


def largest_column_norm(mechanism: Mechanism, n: int) -> float:
    """max_t ‖C[:, t]‖ over n steps: how far an example can move C·G that takes part once."""
    # ‖T[:, j]‖² is the sum of the first n − j squares of T's first column.
    norms = np.sqrt(np.cumsum(mechanism.strategy(n) ** 2)[::-1])
    scales = mechanism.column_scales(n)
    return float(norms.max() if scales is None else (norms / scales).max())


def _once_in_the_same_step(mechanism: Mechanism, horizon: Horizon) -> Sensitivity:
    """The sensitivity under participation in the same step of every epoch."""
    b, n = horizon.steps_per_epoch, horizon.steps
    # Closed forms and lemmas are of the class itself: a subclass may correlate its noise in another way.
    if type(mechanism) is LambdaCGD and not mechanism.normalized:
        return Sensitivity(closed_form_sensitivity(mechanism.resolved_lam, horizon), True, "closed form of λCGD")
    scales, column = mechanism.column_scales(n), mechanism.strategy(n)
    magnitudes, exact = np.abs(column), not np.any(column < 0)
    if scales is None:
        # m_j is m_0 shifted down by j and cut off at n, so the first bin is the worst one.
        value = float(np.linalg.norm(participation_sum(magnitudes, horizon)))
        because = "cyclic participation, C ≥ 0" if exact else "cyclic participation, |C| in place of C"
        return Sensitivity(value, exact, because)
    lemmas = {LambdaCGD: "lemma for column-normalised λCGD", Diagonal: "diagonal C with decreasing entries"}
    if type(mechanism) in lemmas:
        return Sensitivity(_bin_norm(magnitudes, scales, 0, horizon), True, lemmas[type(mechanism)])
    if n * b > _DENSE_LIMIT:
        known = f"the sensitivity of a column-scaled {mechanism.name} is known for n·b ≤ {_DENSE_LIMIT}"
        raise InvalidInput("mechanism", f"Over {n} steps {known}: use fewer.")
    value = max(_bin_norm(magnitudes, scales, j, horizon) for j in range(b))
    return Sensitivity(value, exact, "cyclic participation, all bins")


def closed_form_sensitivity(lam: float, horizon: Horizon) -> float:
    """sens of plain λCGD: sqrt((1−λ^{2b}) / ((1−λ²)(1−λ^b)²) · Σ_{j=1..k} (1−λ^{bj})²)."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    if lam == 0.0:
        return math.sqrt(k)
    rate = math.log(lam)
    geometric = np.expm1(rate * b * np.arange(1, k + 1)) / math.expm1(rate * b)
    return math.sqrt(math.expm1(2 * rate * b) / math.expm1(2 * rate) * float(geometric @ geometric))


def _bin_norm(magnitudes: Array, scales: Array, first: int, horizon: Horizon) -> float:
    """‖Σ_e |C|[:, first + e·b]‖ for C = T·D⁻¹."""
    n, b = horizon.steps, horizon.steps_per_epoch
    magnitudes = np.trim_zeros(magnitudes, "b")
    total = np.zeros(n)
    for start in range(first, n, b):
        total[start : start + len(magnitudes)] += magnitudes[: n - start] / scales[start]
    return float(np.linalg.norm(total))


# Errors


def squared_row_norms(
    mechanism: Mechanism, n: int, workload: Workload = PREFIX_SUM, *, restart_every: int | None = None
) -> Array:
    """‖(A·C⁻¹)_t‖² for t = 1 … n: the variance of the t-th model under unit noise."""
    b = _stretch(n, restart_every)
    rates, blocks = workload.rates(n), n // b
    rows, carried = [], np.zeros((2, 2))  # covariance of what completed blocks leave in model and velocity
    for block in range(blocks):
        here = None if rates is None else rates[b * block : b * (block + 1)]
        if block == 0 or here is not None:
            own, end = _block(mechanism, b, workload, here, last=blocks == 1)
        rows.append(own)
        if block:
            onward, carried = _carried_on(carried, workload, np.ones(b) if here is None else here)
            rows[-1] = own + onward
        carried = carried + end
    return np.concatenate(rows)


def _stretch(n: int, restart_every: int | None) -> int:
    """Over how many of n steps noise is correlated."""
    b = n if restart_every is None else restart_every
    if b < 1 or n % b:
        raise InvalidInput("restart_every", restart_every, f"it must divide the number of steps, {n}")
    return b


def _block(mechanism: Mechanism, n: int, workload: Workload, rates: Array | None, *, last: bool) -> tuple[Array, Array]:
    """The squared row norms of n steps of correlated noise, and the covariance it leaves in model and velocity.

    The latter is for those that come after: without momentum its second row and column do not matter and are zero, and
    where none come (``last``) all of it may be.
    """
    noising, scales = mechanism.noising(n), mechanism.column_scales(n)
    alpha, beta, bands = workload.decay, workload.momentum, len(noising)
    if rates is None and scales is None and (last or not beta):
        # A and C⁻¹ are Toeplitz, and so is their product: A is the series 1 / ((1 − αx)(1 − βx)).
        column = lfilter([1.0], [1.0, -(alpha + beta), alpha * beta], np.pad(noising, (0, n - bands)))
        rows = np.cumsum(column**2)
        return rows, np.array([[rows[-1], 0.0], [0.0, 0.0]])
    scales = np.ones(n) if scales is None else scales
    rates = np.ones(n) if rates is None else rates
    rows, ends = np.zeros(n), np.zeros((2, n))
    model, velocity = np.zeros(n), np.zeros(n)  # of each z_s, as of step s + lag
    for lag in range(n if beta else bands):
        velocity = beta * velocity[: n - lag]
        if lag < bands:
            velocity = velocity + noising[lag] * scales[lag:]
        model = alpha * model[: n - lag] + rates[lag:] * velocity
        rows[lag:] += model**2
        ends[:, n - lag - 1] = model[-1], velocity[-1]
    if not beta:  # beyond the bands nothing is added, and the model forgets
        settled = model[:-1]
        rows[bands:] += lfilter([alpha**2], [1.0, -(alpha**2)], settled**2)
        ends[0, : len(settled)] = settled * alpha ** np.arange(len(settled), 0, -1)
        ends[1] = 0.0
    return rows, ends @ ends.T


def _carried_on(carried: Array, workload: Workload, rates: Array) -> tuple[Array, Array]:
    """What an earlier covariance of model and velocity adds to the later models' variances, and what remains of it."""
    steps = np.arange(1, len(rates) + 1)
    alphas, betas = workload.decay**steps, workload.momentum**steps
    moved = lfilter([1.0], [1.0, -workload.decay], rates * betas)  # by a velocity of 1
    rows = alphas**2 * carried[0, 0] + 2 * alphas * moved * carried[0, 1] + moved**2 * carried[1, 1]
    onward = np.array([[alphas[-1], moved[-1]], [0.0, betas[-1]]])
    return rows, onward @ carried @ onward.T


def error_norms(
    mechanism: Mechanism, n: int, workload: Workload = PREFIX_SUM, *, restart_every: int | None = None
) -> tuple[float, float]:
    """The norms that make an RMSE and a MaxSE of a noise multiplier.

    Args:
        mechanism: a resolved mechanism.
        n: the number of steps.
        workload: A; plain SGD by default.
        restart_every: after how many steps the noise restarts; None for never.

    Returns:
        (1/√n)‖AC⁻¹‖_F and ‖AC⁻¹‖_{2→∞}: times σ they are the RMSE and the MaxSE of a calibrated mechanism.

    Raises:
        InvalidInput: n is not a whole number of stretches between restarts.

    For prefix sums the t-th row of restarted noise has squared norm e·S + R_r after e completed blocks and r steps of
    the current one, with R the squared row norms within a block and S = R_b. For λCGD R_r = 1 + (r−1)(1−λ)².

    >>> round(error_norms(LambdaCGD(0.5), 6, restart_every=3)[1] ** 2, 6)  # S + R_3 = 2·(1 + 2/4)
    3.0
    """
    if workload != PREFIX_SUM:
        rows = squared_row_norms(mechanism, n, workload, restart_every=restart_every)
        return float(np.sqrt(rows.mean())), float(np.sqrt(rows.max()))
    b = _stretch(n, restart_every)
    earlier = n // b - 1
    if type(mechanism) is LambdaCGD and not mechanism.normalized:
        growth = (1 - mechanism.resolved_lam) ** 2 * (b - 1)
        mean, largest, left = 1 + growth / 2, 1 + growth, 1 + growth
    else:
        within = squared_row_norms(mechanism, b)
        mean, largest, left = float(within.mean()), float(within.max()), float(within[-1])
    return float(np.sqrt(mean + earlier * left / 2)), float(np.sqrt(largest + earlier * left))


def rmse(
    mechanism: Mechanism, horizon: Horizon, *, workload: Workload = PREFIX_SUM, restart_every: int | None = None
) -> float:
    """The root-mean-square error without amplification, at unit Gaussian noise: (1/√n)‖AC⁻¹‖_F · sens(C).

    Times the Gaussian mechanism's σ at (ε, δ) it is the RMSE of the running sum of gradients, in units of the clipping
    norm. ``Plan.rmse`` is (1/√n)‖AC⁻¹‖_F times the plan's own σ, amplification included.

    Args:
        mechanism: a resolved mechanism.
        horizon: the whole training, k epochs of b steps.
        workload: A; plain SGD by default.
        restart_every: b, if the noise restarts every epoch (fresh bins); else None.

    Returns:
        The error.

    Raises:
        InvalidInput: an argument cannot be used.
    """
    unit = sensitivity(mechanism, horizon, restart_every=restart_every).value
    return unit * error_norms(mechanism, horizon.steps, workload, restart_every=restart_every)[0]


def maxse(
    mechanism: Mechanism, horizon: Horizon, *, workload: Workload = PREFIX_SUM, restart_every: int | None = None
) -> float:
    """The largest standard error without amplification, at unit Gaussian noise: ‖AC⁻¹‖_{2→∞} · sens(C).

    Args:
        mechanism: a resolved mechanism.
        horizon: the whole training, k epochs of b steps.
        workload: A; plain SGD by default.
        restart_every: b, if the noise restarts every epoch (fresh bins); else None.

    Returns:
        The error, in the units of ``rmse``.

    Raises:
        InvalidInput: an argument cannot be used.
    """
    unit = sensitivity(mechanism, horizon, restart_every=restart_every).value
    return unit * error_norms(mechanism, horizon.steps, workload, restart_every=restart_every)[1]
