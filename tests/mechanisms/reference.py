"""Dense n×n matrices: the slow twin of everything in ``lambdacgd.mechanisms``."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.linalg import toeplitz

from lambdacgd.mechanisms import BandedInverse, BandedStrategy, BufferedToeplitz, Horizon, Mechanism, Workload


def lower(column: np.ndarray, n: int) -> np.ndarray:
    column = np.pad(np.asarray(column, dtype=float), (0, n))[:n]
    return np.tril(toeplitz(column))


def strategy_matrix(mechanism: Mechanism, n: int) -> np.ndarray:
    """C, straight from the recurrence: C⁻¹ is what the recurrence makes of unit noise vectors."""
    scales = mechanism.column_scales(n)
    inverse = correlation(mechanism.recurrence(n), np.eye(n))
    if scales is not None:
        inverse = scales[:, None] * inverse
    return np.linalg.inv(inverse)


def restarted(mechanism: Mechanism, horizon: Horizon) -> np.ndarray:
    """C of noise that restarts every epoch: one block an epoch, each the mechanism's C over b steps."""
    return np.kron(np.eye(horizon.epochs), strategy_matrix(mechanism, horizon.steps_per_epoch))


def correlation(recurrence: BandedInverse | BandedStrategy | BufferedToeplitz, noise: np.ndarray) -> np.ndarray:
    """The recurrence run step by step on the rows of ``noise``."""
    out = np.zeros_like(noise)
    if isinstance(recurrence, BufferedToeplitz):
        state = np.zeros((len(recurrence.decays), noise.shape[1]))
        for t, z in enumerate(noise):
            out[t] = z - np.asarray(recurrence.weights) @ state
            state = np.asarray(recurrence.decays)[:, None] * state + out[t]
        return out
    for t, z in enumerate(noise):
        if isinstance(recurrence, BandedInverse):
            out[t] = sum(a * noise[t - j] for j, a in enumerate(recurrence.coefficients) if j <= t)
        else:
            c = recurrence.coefficients
            out[t] = (z - sum(c[j] * out[t - j] for j in range(1, len(c)) if j <= t)) / c[0]
    return out


def cyclic_sensitivity(C: np.ndarray, horizon: Horizon) -> float:
    b, k = horizon.steps_per_epoch, horizon.epochs
    return max(np.linalg.norm(sum(np.abs(C)[:, j + e * b] for e in range(k))) for j in range(b))


def once_an_epoch_sensitivity(C: np.ndarray, horizon: Horizon) -> float:
    """Supremum over one column of each epoch, anywhere in it: signs do not matter, as |C| shows."""
    b, k = horizon.steps_per_epoch, horizon.epochs
    epochs = [range(e * b, (e + 1) * b) for e in range(k)]
    return max(float(np.linalg.norm(np.abs(C)[:, list(columns)].sum(axis=1))) for columns in itertools.product(*epochs))


def left_factor(mechanism: Mechanism, n: int, workload: Workload) -> np.ndarray:
    """B = A·C⁻¹."""
    return workload_matrix(n, workload) @ np.linalg.inv(strategy_matrix(mechanism, n))


def workload_matrix(n: int, workload: Workload) -> np.ndarray:
    A, rates = np.zeros((n, n)), workload_rates(n, workload)
    for start in range(n):  # SGD with momentum, decay and a schedule, run on the start-th unit gradient
        velocity, weight = 0.0, 0.0
        for t in range(start, n):
            velocity = workload.momentum * velocity + (1.0 if t == start else 0.0)
            weight = workload.decay * weight + rates[t] * velocity
            A[t, start] = weight
    return A


def workload_rates(n: int, workload: Workload) -> list[float]:
    """A rise in equal steps to 1, then a fall that would reach ``final_rate`` one step after the last."""
    rising = round(workload.warmup * n)
    rates = [(t + 1) / rising for t in range(rising)]
    for t in range(n - rising):
        way = t / (n - rising)
        shape = {"constant": 1.0, "linear": 1 - way, "cosine": math.cos(math.pi * way / 2) ** 2}[workload.schedule]
        rates.append(workload.final_rate + (1 - workload.final_rate) * shape)
    return rates
