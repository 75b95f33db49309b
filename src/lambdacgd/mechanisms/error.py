"""How wrong the models are: RMSE and MaxSE of A·(G + C⁻¹Z) for a workload A.

With ``restart_every`` = b the noise starts anew at steps 1, b+1, 2b+1, …: C is block-diagonal, its blocks are the
mechanism's C over b steps, and a row of A·C⁻¹ is made of what completed blocks left and of the current block's row.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import fftconvolve, lfilter

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.mechanisms.base import PREFIX_SUM, Array, Horizon, Mechanism, Workload, multiply
from lambdacgd.mechanisms.families import LambdaCGD
from lambdacgd.mechanisms.sensitivity import check_question, sensitivity

_FEW = 16  # bands of scaled columns up to which p²/2 convolutions are quicker than n columns


def squared_row_norms(
    mechanism: Mechanism, n: int, workload: Workload = PREFIX_SUM, *, restart_every: int | None = None
) -> Array:
    """‖(A·C⁻¹)_t‖² for t = 1 … n: the variance of the t-th model under unit noise."""
    if restart_every is None:
        return _without_restarts(mechanism, n, workload)
    b = _stretch(n, restart_every)
    within = _without_restarts(mechanism, b, workload)
    # One block's share of ‖row t‖² is g(t): its own rows while it lasts, what it left behind afterwards. A later block
    # does the same b steps later, and different blocks have different z, so the squares add.
    share = np.concatenate([within, _left_behind(mechanism, b, n - b, float(within[-1]), workload)])
    return np.cumsum(share.reshape(-1, b), axis=0).reshape(-1)


def _stretch(n: int, restart_every: int) -> int:
    b = integer("restart_every", restart_every, maximum=n, why=f" (the number of steps, {n})")
    if n % b:
        raise InvalidInput("restart_every", restart_every, f"{n} steps are not a whole number of such stretches")
    return b


def _left_behind(mechanism: Mechanism, b: int, later: int, last: float, workload: Workload) -> Array:
    """The squared norm of a block's noise in the models 1, 2, …, ``later`` steps after its end; ``last`` at its end."""
    if workload == PREFIX_SUM:
        return np.full(later, last)
    # A's column obeys w_{m+j} = w_m w_j − αβ w_{m−1} w_{j−1} with w_{−1} = 0, so the block's share of a later model is
    # a combination of its last two rows.
    final, before = (_row(mechanism, b, row, workload) for row in (b, b - 1))
    w = workload.column(later + 1)
    first, second = w[1:], -workload.decay * workload.momentum * w[:-1]
    return first**2 * last + 2 * first * second * float(final @ before) + second**2 * float(before @ before)


def _row(mechanism: Mechanism, n: int, t: int, workload: Workload) -> Array:
    """Row t (1 … n, or the empty sum 0) of A·C⁻¹ over n steps."""
    noising, scales = mechanism.noising(n), mechanism.column_scales(n)
    uses = np.zeros(n)
    uses[:t] = workload.column(n)[:t][::-1]  # A[t, i] for i = 1 … n
    if scales is not None:
        uses *= scales
    # Σ_i A[t, i] d_i a_{i−s} for each s: a correlation with the noising coefficients.
    return multiply(noising, uses[::-1], n)[::-1]


def _without_restarts(mechanism: Mechanism, n: int, workload: Workload) -> Array:
    noising = mechanism.noising(n)
    uses = workload.column(n)
    scales = mechanism.column_scales(n)
    if scales is None:
        left = (
            np.cumsum(np.pad(noising, (0, n - len(noising)))) if workload == PREFIX_SUM else multiply(noising, uses, n)
        )
        return np.cumsum(left**2)
    # B[t, s] = Σ_j A[t−s−j] d[s+j] a_j. Squaring gives, for each pair (i, j) of bands, a convolution in s.
    total = np.zeros(n)
    p = len(noising)
    if p > _FEW:  # column by column
        recursion = [1.0, -(workload.decay + workload.momentum), workload.decay * workload.momentum]
        padded = np.pad(noising, (0, n - p))
        for s in range(n):
            total[s:] += lfilter([1.0], recursion, scales[s:] * padded[: n - s]) ** 2
        return total
    for i in range(p):
        for j in range(i, p):
            weight = np.zeros(n)
            weight[: n - j] = noising[i] * noising[j] * scales[i : n - j + i] * scales[j:]
            kernel = np.zeros(n)
            kernel[j:] = uses[j - i : n - i] * uses[: n - j]
            total += (1 if i == j else 2) * fftconvolve(weight, kernel)[:n]
    return total


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
    b = n if restart_every is None else _stretch(n, restart_every)
    earlier = n // b - 1
    if type(mechanism) is LambdaCGD and not mechanism.normalized:
        mean, largest = (norm**2 for norm in closed_form_errors(mechanism.resolved_lam, b))
        left = largest
    else:
        within = _without_restarts(mechanism, b, workload)
        mean, largest, left = float(within.mean()), float(within.max()), float(within[-1])
    return float(np.sqrt(mean + earlier * left / 2)), float(np.sqrt(largest + earlier * left))


def closed_form_errors(lam: float, n: int) -> tuple[float, float]:
    """((1/√n)‖AC⁻¹‖_F, ‖AC⁻¹‖_{2→∞}) of plain λCGD for prefix sums."""
    growth = (1 - lam) ** 2 * (n - 1)
    return math.sqrt(1 + growth / 2), math.sqrt(1 + growth)


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
    check_question(mechanism, horizon)
    norms = error_norms(mechanism, horizon.steps, workload, restart_every=restart_every)
    return norms[0] * sensitivity(mechanism, horizon, restart_every=restart_every).value


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
    check_question(mechanism, horizon)
    norms = error_norms(mechanism, horizon.steps, workload, restart_every=restart_every)
    return norms[1] * sensitivity(mechanism, horizon, restart_every=restart_every).value
