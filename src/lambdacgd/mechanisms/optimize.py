"""The one objective behind BandInvMF, BandMF and BLT: log of the squared RMSE, with its gradient.

RMSE² = (mean_t Σ_{s≤t} B_s²) · ‖m_0‖², with B = A·T⁻¹ for prefix sums and m_0 the participation sum of |T|. The three
mechanisms differ only in how T's column c and T⁻¹'s column a depend on their parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize

from lambdacgd import cache
from lambdacgd.mechanisms.base import Array, Horizon
from lambdacgd.mechanisms.sensitivity import participation_sum


def log_squared_rmse(strategy: Array, noising: Array, horizon: Horizon) -> tuple[float, Array, Array]:
    """log RMSE² and its gradients with respect to c (length n) and a (length n)."""
    n, b, k = horizon.steps, horizon.steps_per_epoch, horizon.epochs
    left = np.cumsum(noising)
    rows_containing = np.arange(n, 0, -1) / n  # B_s enters the squared norms of the last n − s rows
    error = float(rows_containing @ left**2)
    by_left = 2 * rows_containing * left / error
    by_noising = np.cumsum(by_left[::-1])[::-1]

    together = participation_sum(np.abs(strategy), horizon)
    squared = float(together @ together)
    by_together = (2 * together / squared).reshape(k, b)
    by_strategy = np.cumsum(by_together[::-1], axis=0)[::-1].reshape(-1) * np.sign(strategy)
    return float(np.log(error) + np.log(squared)), by_strategy, by_noising


def minimize_smooth(
    objective: Callable[[Array], tuple[float, Array]], starts: list[Array], *, upper: float | None = None
) -> Array:
    """The best of L-BFGS runs from fixed starts: deterministic, so that a mechanism is the same everywhere."""
    best_value, best = np.inf, starts[0]
    for start in starts:
        value, found = _descend(objective, start, upper)
        if value < best_value:
            best_value, best = value, found
    return best


def _descend(
    objective: Callable[[Array], tuple[float, Array]], start: Array, upper: float | None
) -> tuple[float, Array]:
    # The first trial step of L-BFGS has length up to 1, which throws a banded inverse into divergence. In units of
    # 1/SCALE it is a small one; a run is repeated from where it ended until it gains nothing more.
    scale = 100.0

    def scaled(x: Array) -> tuple[float, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # a step into a divergent series is answered with a wall
            value, gradient = objective(x / scale)
        if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
            return 1e10, np.zeros_like(x)
        return value, gradient / scale

    bounds = None if upper is None else [(None, upper * scale)] * len(start)
    options = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30}
    x, value = start * scale, np.inf
    for _ in range(10):
        result = minimize(scaled, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        gained, value, x = value - result.fun, float(result.fun), result.x
        if not gained > 1e-10:
            break
    return value, np.asarray(x / scale, dtype=np.float64)


def cached_parameters(name: str, size: int, horizon: Horizon, compute: Callable[[], Array]) -> tuple[float, ...]:
    """Optimised parameters from disk, or computed and kept."""
    question = {"mechanism": name, "size": size, "b": horizon.steps_per_epoch, "k": horizon.epochs}
    answer = cache.cached("mechanism", question, lambda: [float(value) for value in compute()])
    return tuple(answer)
