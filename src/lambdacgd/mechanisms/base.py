"""What every noise mechanism is made of: a recurrence that correlates the noise, and column scales.

A mechanism releases ``G + C⁻¹Z``: clipped gradient sums G (n rows, one a step) plus noise Z correlated by C⁻¹.
Here the strategy is always ``C = T·D⁻¹``, with T lower-triangular Toeplitz (first column ``strategy(n)``) and D a
positive diagonal (``column_scales(n)``; absent means the identity). One of three recurrences generates the noise,
and the recurrence is all that a mechanism has to say: the columns of T and T⁻¹ follow from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from lambdacgd.errors import InvalidInput, number
from lambdacgd.mechanisms.toeplitz import series_inverse

Array = NDArray[np.float64]

Auto = Literal["auto"]
"""The value of a parameter that ``lc.plan`` chooses."""

Objective = Literal["rmse", "maxse", "amplified-rmse", "guideline"]
"""What an automatic parameter is chosen by."""


@dataclass(frozen=True)
class Horizon:
    """How often an example can take part: once in each of k epochs of b steps, in the same place each time.

    ``steps_per_epoch`` is the paper's b, ``epochs`` its k, and ``steps`` its n = k·b.
    """

    steps_per_epoch: int
    epochs: int

    def __post_init__(self) -> None:
        for name in ("steps_per_epoch", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
            object.__setattr__(self, name, int(value))

    @property
    def steps(self) -> int:
        """n = k·b."""
        return self.steps_per_epoch * self.epochs


@dataclass(frozen=True)
class BandedInverse:
    """x_t = Σ_{j<p} a_j z_{t−j}: C⁻¹ has p bands, so the noise can be computed again from the last p fields."""

    coefficients: tuple[float, ...]

    @property
    def past_vectors(self) -> int:
        return len(self.coefficients) - 1

    def strategy(self, n: int) -> Array:
        return series_inverse(np.asarray(self.coefficients), n)

    def noising(self, n: int) -> Array:
        return np.asarray(self.coefficients[:n])


@dataclass(frozen=True)
class BandedStrategy:
    """x_t = (z_t − Σ_{1≤j<p} c_j x_{t−j}) / c_0: C has p bands; the last p−1 *outputs* must be kept."""

    coefficients: tuple[float, ...]

    @property
    def past_vectors(self) -> int:
        return len(self.coefficients) - 1

    def strategy(self, n: int) -> Array:
        column = np.zeros(n)
        head = self.coefficients[:n]
        column[: len(head)] = head
        return column

    def noising(self, n: int) -> Array:
        return series_inverse(np.asarray(self.coefficients), n)


@dataclass(frozen=True)
class BufferedToeplitz:
    """x_t = z_t − Σ_j ω_j S_j, then S_j ← θ_j S_j + x_t: one buffer S_j a pair (θ, ω), zero at the start."""

    decays: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def past_vectors(self) -> int:
        return len(self.decays)

    def strategy(self, n: int) -> Array:
        column = np.ones(n)
        powers = np.asarray(self.decays)[None, :] ** np.arange(n - 1)[:, None]
        column[1:] = powers @ np.asarray(self.weights)
        return column

    def noising(self, n: int) -> Array:
        # c(x) = 1 + x Σ_j ω_j / (1 − θ_j x) is a ratio of two polynomials of degree m; its reciprocal swaps them.
        below = np.polynomial.polynomial.polyfromroots(self.decays)[::-1]
        above = below.copy()
        for j, weight in enumerate(self.weights):
            others = np.delete(np.asarray(self.decays), j)
            above[1:] += weight * np.polynomial.polynomial.polyfromroots(others)[::-1]
        impulse = np.zeros(n)
        impulse[0] = 1.0
        return lfilter(below, above, impulse)


Recurrence = BandedInverse | BandedStrategy | BufferedToeplitz


@dataclass(frozen=True)
class Mechanism:
    """A noise mechanism: public parameters only, printable, comparable and serialisable.

    Some mechanisms are asked for before all of their numbers are known: an "auto" parameter depends on the privacy
    budget and the sampling, and optimised coefficients depend on the horizon. ``lc.plan`` fills in both, so that a run
    never depends on an optimiser; ``resolve(horizon)`` fills in the latter alone.

    A field whose metadata has ``"help"`` becomes a flag of ``lambdacgd plan``. One with ``"request"`` says how a number
    is to be chosen; it is left out of ``to_dict`` where it has its default, which it has in every resolved mechanism.
    """

    name: ClassVar[str]

    @property
    def resolved(self) -> bool:
        """Whether all numbers are known. Only a resolved mechanism can be asked about its noise."""
        return True

    def resolve(self, horizon: Horizon) -> Self:
        """Fix everything that depends on the horizon.

        Args:
            horizon: the stretch over which noise is correlated (``sampling.block``).

        Returns:
            The resolved mechanism: this one itself, unless it is optimised.

        Raises:
            InvalidInput: the mechanism makes no sense over this horizon.
            ValueError: a parameter must be chosen by ``lc.plan``.
        """
        self.validate(horizon)
        if not self.resolved:
            raise not_chosen(self)
        return self

    def validate(self, horizon: Horizon) -> None:
        """Raise ``ValueError`` if the mechanism makes no sense over this horizon."""

    def recurrence(self, n: int) -> Recurrence:
        """How the correlated noise of n steps is generated."""
        raise NotImplementedError

    def column_scales(self, n: int) -> Array | None:
        """d_1 … d_n of C = T·D⁻¹, or None for the identity. The noise of step t is multiplied by d_t."""
        return None

    def strategy(self, n: int) -> Array:
        """First column of the Toeplitz factor T of C = T·D⁻¹ (length n)."""
        return self.recurrence(n).strategy(n)

    def noising(self, n: int) -> Array:
        """Noising coefficients: first column of T⁻¹, without the zeros behind the last band."""
        return self.recurrence(n).noising(n)

    def regenerates(self, n: int) -> bool:
        """Whether the noise can be computed again from the key alone, with nothing stored."""
        return isinstance(self.recurrence(n), BandedInverse)

    def past_vectors(self, n: int) -> int:
        """How many vectors of the gradient's size step n looks back at: regenerated if it can be, else stored."""
        return self.recurrence(n).past_vectors

    def to_dict(self) -> dict[str, Any]:
        """The name and the parameters, as plan files hold them."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if not _default_request(f, self)}
        return {"name": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @property
    def foreign(self) -> bool:
        """Whether the class is not one of this package."""
        return type(self).__module__.split(".")[0] != __name__.split(".")[0]

    def question(self, n: int) -> dict[str, Any]:
        """What a cached answer about this mechanism over n steps is filed under.

        Parameters say all about the classes of this package, whose code is part of the cache's keys. Those of anybody
        else's class do not: it may be another one by tomorrow, under the same name. What it computes goes along.
        """
        if not self.foreign:
            return {"mechanism": self.to_dict()}
        digest = hashlib.sha256()
        for values in (self.strategy(n), self.noising(n), self.column_scales(n)):
            digest.update(b"none" if values is None else np.asarray(values, dtype=np.float64).tobytes())
        return {"mechanism": self.to_dict(), "computes": digest.hexdigest()}

    @classmethod
    def from_fields(cls, data: dict[str, Any]) -> Self:
        """Make a mechanism of this class.

        Args:
            data: the parameters of ``to_dict``, without the name.

        Raises:
            ValueError: a parameter is not known, or its value cannot be used.
        """
        known = {f.name for f in fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(
                f"mechanism {cls.name} has no parameter {', '.join(sorted(unknown))}; it takes {sorted(known)}"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


def _default_request(field: Field[Any], mechanism: Mechanism) -> bool:
    return bool(field.metadata.get("request")) and getattr(mechanism, field.name) == field.default


def number_or_auto(parameter: str, value: float | str) -> float | Auto:
    """Check a parameter that is a number in [0, 1) or "auto"."""
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        raise InvalidInput(parameter, value, "it must be a number at least 0 and below 1, or 'auto'")
    return number(parameter, value, above=0, below=1, include=(0,))


def check_objective(objective: str | None, parameter: str, value: float | Auto) -> None:
    """Refuse an objective that is not known, or that has nothing to choose."""
    if objective is None:
        return
    if objective not in get_args(Objective):
        raise InvalidInput("objective", objective, f"it must be one of {', '.join(get_args(Objective))}")
    if value != "auto":
        raise InvalidInput("objective", objective, f"it applies where {parameter} is auto; leave one of them out")


def not_chosen(mechanism: Mechanism) -> ValueError:
    """The error of a mechanism that is asked about its noise before ``lc.plan`` has chosen a parameter."""
    return ValueError(
        f"{mechanism.name} is not resolved: lc.plan chooses its parameters for the privacy budget and the sampling. "
        "Ask plan.mechanism instead, or give them"
    )
