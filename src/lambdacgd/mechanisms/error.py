"""How wrong the models are: RMSE and MaxSE of A·(G + C⁻¹Z) for a workload A.

With ``restart_every`` = b the noise starts anew at steps 1, b+1, 2b+1, …: C is block-diagonal, its blocks are the
mechanism's C over b steps, and a row of A·C⁻¹ is made of what completed blocks left and of the current block's row.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import lfilter

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.mechanisms.base import PREFIX_SUM, Array, Horizon, Mechanism, Workload, multiply
from lambdacgd.mechanisms.families import LambdaCGD
from lambdacgd.mechanisms.sensitivity import check_question, sensitivity


def squared_row_norms(
    mechanism: Mechanism, n: int, workload: Workload = PREFIX_SUM, *, restart_every: int | None = None
) -> Array:
    """‖(A·C⁻¹)_t‖² for t = 1 … n: the variance of the t-th model under unit noise."""
    b = n if restart_every is None else _stretch(n, restart_every)
    rates, blocks = workload.rates(n), n // b
    rows, left = [], np.zeros((2, 2))  # what completed blocks left in model and velocity: a covariance
    for block in range(blocks):
        here = None if rates is None else rates[b * block : b * (block + 1)]
        if block == 0 or here is not None:
            own, end = _block(mechanism, b, workload, here, last=blocks == 1)
        if left.any():
            onward, left = _onward(left, workload, np.ones(b) if here is None else here)
            rows.append(own + onward)
        else:
            rows.append(own)
        left = left + end
    return np.concatenate(rows)


def _stretch(n: int, restart_every: int) -> int:
    b = integer("restart_every", restart_every, maximum=n, why=f" (the number of steps, {n})")
    if n % b:
        raise InvalidInput("restart_every", restart_every, f"{n} steps are not a whole number of such stretches")
    return b


def _block(mechanism: Mechanism, n: int, workload: Workload, rates: Array | None, *, last: bool) -> tuple[Array, Array]:
    """The squared row norms of n steps of correlated noise, and the covariance it leaves in model and velocity.

    The latter is for those that come after: without momentum its second row and column do not matter and are zero, and
    where none come (``last``) all of it may be.
    """
    noising, scales = mechanism.noising(n), mechanism.column_scales(n)
    if rates is None and scales is None and (last or not workload.momentum):
        # A and C⁻¹ are Toeplitz, and so is their product.
        prefix = workload == PREFIX_SUM
        column = (
            np.cumsum(np.pad(noising, (0, n - len(noising)))) if prefix else multiply(noising, workload.column(n), n)
        )
        rows = np.cumsum(column**2)
        return rows, np.array([[rows[-1], 0.0], [0.0, 0.0]])
    scales = np.ones(n) if scales is None else scales
    rates = np.ones(n) if rates is None else rates
    alpha, beta, bands = workload.decay, workload.momentum, len(noising)
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


def _onward(left: Array, workload: Workload, rates: Array) -> tuple[Array, Array]:
    """The variance that what is ``left`` in model and velocity has in the models of further steps, and what is left
    then."""
    steps = np.arange(1, len(rates) + 1)
    alphas, betas = workload.decay**steps, workload.momentum**steps
    moved = lfilter([1.0], [1.0, -workload.decay], rates * betas)  # by a velocity of 1
    rows = alphas**2 * left[0, 0] + 2 * alphas * moved * left[0, 1] + moved**2 * left[1, 1]
    onward = np.array([[alphas[-1], moved[-1]], [0.0, betas[-1]]])
    return rows, onward @ left @ onward.T


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
        within = squared_row_norms(mechanism, b)
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
