"""Buffered linear Toeplitz matrices: C's column is a sum of a few geometric series (arXiv 2404.16706)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
from scipy.special import expit

from lambdacgd.errors import InvalidInput, integer
from lambdacgd.mechanisms.base import Array, BufferedToeplitz, Horizon, Mechanism
from lambdacgd.mechanisms.optimize import cached_parameters, log_squared_rmse, minimize_smooth
from lambdacgd.mechanisms.toeplitz import inverse_pullback


@dataclass(frozen=True)
class BLT(Mechanism):
    """c_0 = 1, c_i = Σ_j ω_j θ_j^{i−1}, optimised for RMSE over a horizon.

    Every output depends on the first step, so the noise cannot be regenerated: one vector is stored per buffer.

    Args:
        buffers: how many geometric series.
        decays: θ, one number in (0, 1) per buffer. Not given, they are optimised, and so are the weights.
        weights: ω, one positive number per buffer.

    Raises:
        InvalidInput: a value cannot be used, or only one of ``decays`` and ``weights`` is given.
    """

    buffers: int = field(default=3, metadata={"help": "Buffers of BLT (default 3)."})
    decays: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    name: ClassVar[str] = "blt"

    def __post_init__(self) -> None:
        buffers = integer("buffers", self.buffers, maximum=16, why=" (beyond three or four nothing is gained)")
        object.__setattr__(self, "buffers", buffers)
        if (self.decays is None) != (self.weights is None):
            raise InvalidInput("weights", self.weights, "decays and weights go together: give both or neither")
        if self.decays is None or self.weights is None:
            return
        for name, given, top in (("decays", self.decays, 1.0), ("weights", self.weights, np.inf)):
            values = np.asarray(given, dtype=np.float64)
            if values.shape != (self.buffers,) or not np.all((values > 0) & (values < top)):
                raise InvalidInput(name, given, f"it must be {self.buffers} numbers above 0 and below {top:g}")
            object.__setattr__(self, name, tuple(values.tolist()))

    @property
    def resolved(self) -> bool:
        """Whether all numbers are known."""
        return self.decays is not None

    def resolve(self, horizon: Horizon) -> Self:
        self.validate(horizon)
        if self.decays is not None:
            return self
        found = cached_parameters(self.name, self.buffers, horizon, lambda: self._optimize(horizon))
        return replace(self, decays=found[: self.buffers], weights=found[self.buffers :])

    def recurrence(self, n: int) -> BufferedToeplitz:
        if self.decays is None or self.weights is None:
            raise ValueError("blt is not resolved: call .resolve(horizon) first, its coefficients depend on it")
        return BufferedToeplitz(self.decays, self.weights)

    def _optimize(self, horizon: Horizon) -> Array:
        m, n = self.buffers, horizon.steps
        exponents = np.arange(n - 1, dtype=np.float64)[:, None]

        def split(x: Array) -> tuple[Array, Array]:
            return expit(x[:m]), np.exp(x[m:])

        def objective(x: Array) -> tuple[float, Array]:
            decays, weights = split(x)
            powers = decays[None, :] ** exponents
            both = BufferedToeplitz(tuple(decays), tuple(weights))
            strategy, noising = both.strategy(n), both.noising(n)
            value, by_strategy, by_noising = log_squared_rmse(strategy, noising, horizon)
            gradient = (by_strategy + inverse_pullback(strategy, noising, by_noising))[1:]
            by_weights = gradient @ powers
            slopes = exponents[1:] * powers[:-1]  # d θ^{i−1} / d θ
            by_decays = weights * (gradient[1:] @ slopes)
            return value, np.concatenate([by_decays * decays * (1 - decays), by_weights * weights])

        # Half-lives spread geometrically between one step and the horizon; several spreads, the best wins.
        starts = []
        for slowest in (n, horizon.steps_per_epoch, np.sqrt(n)):
            half_lives = max(float(slowest), 3.0) ** ((np.arange(m, 0, -1) - 0.5) / m) + 0.5
            decays = 1 - 1 / half_lives
            starts.append(np.concatenate([np.log(decays / (1 - decays)), np.log(np.full(m, 0.5 / m))]))
        decays, weights = split(minimize_smooth(objective, starts))
        order = np.argsort(-decays)
        return np.concatenate([decays[order], weights[order]])
