"""How wrong the models are: RMSE and MaxSE of A·(G + C⁻¹Z) for a workload A."""

from __future__ import annotations

import numpy as np
from scipy.signal import fftconvolve

from lambdacgd.mechanisms.base import Array, Horizon, Mechanism
from lambdacgd.mechanisms.lambda_cgd import LambdaCGD, closed_form_errors
from lambdacgd.mechanisms.sensitivity import sensitivity
from lambdacgd.mechanisms.toeplitz import multiply
from lambdacgd.mechanisms.workload import PREFIX_SUM, Workload


def squared_row_norms(mechanism: Mechanism, n: int, workload: Workload = PREFIX_SUM) -> Array:
    """‖(A·C⁻¹)_t‖² for t = 1 … n: the variance of the t-th model under unit noise."""
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
    for i in range(p):
        for j in range(i, p):
            weight = np.zeros(n)
            weight[: n - j] = noising[i] * noising[j] * scales[i : n - j + i] * scales[j:]
            kernel = np.zeros(n)
            kernel[j:] = uses[j - i : n - i] * uses[: n - j]
            total += (1 if i == j else 2) * fftconvolve(weight, kernel)[:n]
    return total


def error_norms(mechanism: Mechanism, n: int, workload: Workload = PREFIX_SUM) -> tuple[float, float]:
    """((1/√n)‖AC⁻¹‖_F, ‖AC⁻¹‖_{2→∞}): multiply by σ for the RMSE and the MaxSE of a calibrated mechanism."""
    if workload == PREFIX_SUM and isinstance(mechanism, LambdaCGD) and not mechanism.normalized:
        return closed_form_errors(mechanism.lam, n)
    rows = squared_row_norms(mechanism, n, workload)
    return float(np.sqrt(rows.mean())), float(np.sqrt(rows.max()))


def rmse(mechanism: Mechanism, horizon: Horizon, *, workload: Workload = PREFIX_SUM) -> float:
    """(1/√n)‖AC⁻¹‖_F · sens(C): the RMSE without amplification, at unit Gaussian noise."""
    return error_norms(mechanism, horizon.steps, workload)[0] * sensitivity(mechanism, horizon).value


def maxse(mechanism: Mechanism, horizon: Horizon, *, workload: Workload = PREFIX_SUM) -> float:
    """‖AC⁻¹‖_{2→∞} · sens(C): the MaxSE without amplification, at unit Gaussian noise."""
    return error_norms(mechanism, horizon.steps, workload)[1] * sensitivity(mechanism, horizon).value
