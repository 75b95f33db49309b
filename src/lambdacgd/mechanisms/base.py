"""What every noise mechanism is made of: a recurrence that correlates the noise, and column scales.

A mechanism releases ``G + C⁻¹Z``: clipped gradient sums G (n rows, one per step) plus noise Z correlated by C⁻¹.
Here the strategy is always ``C = T·D⁻¹``, with T lower-triangular Toeplitz (first column ``strategy(n)``) and D a
positive diagonal (``column_scales(n)``; absent means the identity). One of three recurrences generates the noise,
and the recurrence is all that a mechanism has to say: the columns of T and T⁻¹ follow from it.

Lower-triangular Toeplitz matrices are power series cut off at degree n: products are convolutions, inverses are
reciprocals. Nothing here builds an n×n matrix.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.signal import fftconvolve, lfilter

from lambdacgd.errors import InvalidInput, integer, number

Array = NDArray[np.float64]

Auto = Literal["auto"]
"""The value of a parameter that ``lc.plan`` chooses."""

Objective = Literal["rmse", "maxse", "amplified-rmse", "guideline"]
"""What an automatic parameter is chosen by."""


def parameter(default: Any, help: str, *, symbol: str = "", request: bool = False, kw_only: bool = False) -> Any:
    """A field that is also a flag of ``lambdacgd plan``; for ``symbol`` and ``request`` see ``Mechanism``."""
    return field(default=default, kw_only=kw_only, metadata={"help": help, "symbol": symbol, "request": request})


@dataclass(frozen=True)
class Horizon:
    """How often an example can take part: once in each of k epochs of b steps, in the same place each time.

    Args:
        steps_per_epoch: the paper's b.
        epochs: the paper's k.

    Raises:
        InvalidInput: a number is not an integer of at least 1.
    """

    steps_per_epoch: int
    epochs: int

    def __post_init__(self) -> None:
        for name in ("steps_per_epoch", "epochs"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))

    @property
    def steps(self) -> int:
        """n = k·b."""
        return self.steps_per_epoch * self.epochs


Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Workload:
    """What the noisy gradients are used for: A maps the sequence of gradients to the sequence of models.

    SGD with momentum β, weight decay and the learning rates η·χ_1, …, η·χ_n keeps a velocity v_t = βv_{t−1} + g_t and a
    model θ_t = αθ_{t−1} − ηχ_t·v_t. The default is plain SGD, whose A is the prefix-sum matrix of ones. A schedule of
    the rates (arXiv 2511.17994) weighs column t of that matrix by χ_t. It is public: fix it before training.

    Args:
        momentum: β in [0, 1).
        decay: α in (0, 1], what is left of a weight after one step (1 − learning rate · weight decay).
        schedule: how the rate falls from its largest value, which counts as 1: "constant", "linear" or "cosine".
        warmup: the share of the steps, in [0, 1), over which it rises first, in equal steps.
        final_rate: where a falling rate would arrive at step n + 1, as a share in [0, 1] of the largest.

    Raises:
        InvalidInput: a value is outside its range.

    Examples:
        >>> Workload(schedule="linear", warmup=0.4).rates(5).round(3).tolist()
        [0.5, 1.0, 1.0, 0.667, 0.333]
    """

    momentum: float = 0.0
    decay: float = 1.0
    schedule: Schedule = parameter(
        "constant", "Learning rates that λ and errors are for: constant (default), linear or cosine.", kw_only=True
    )
    warmup: float = parameter(0.0, "Share of the steps over which the rate rises (default 0).", kw_only=True)
    final_rate: float = parameter(0.0, "Where a schedule ends, as a share of the rate (default 0).", kw_only=True)

    def __post_init__(self) -> None:
        for name, ends in (("momentum", (0,)), ("decay", (1,)), ("warmup", (0,)), ("final_rate", (0, 1))):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0, below=1, include=ends))
        if self.schedule not in get_args(Schedule):
            raise InvalidInput("schedule", self.schedule, f"it must be one of {', '.join(get_args(Schedule))}")
        if self.schedule == "constant" and self.final_rate:
            raise InvalidInput("final_rate", self.final_rate, "a constant rate stays: use a linear or cosine schedule")

    def __str__(self) -> str:
        """What differs from plain SGD, in a few words."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed.items()) or "plain SGD"

    def rates(self, n: int) -> Array | None:
        """χ_1 … χ_n over n steps; None where all are 1."""
        rising = round(self.warmup * n)
        if self.schedule == "constant" and not rising:
            return None
        way = np.arange(n - rising) / (n - rising) if n > rising else np.zeros(0)
        falling = {"constant": np.ones_like(way), "linear": 1 - way, "cosine": (1 + np.cos(np.pi * way)) / 2}
        after = self.final_rate + (1 - self.final_rate) * falling[self.schedule]
        return np.concatenate([np.arange(1, rising + 1) / max(rising, 1), after])


PREFIX_SUM = Workload()


# A direct recursion costs n·p multiplications and is accurate term by term; beyond this many the FFT takes over.
DIRECT_LIMIT = 1_000_000_000


def series_inverse(column: Array, n: int) -> Array:
    """First n coefficients of 1 / (column_0 + column_1 x + …).

    >>> series_inverse(np.array([1.0, -0.5]), 4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    column = np.asarray(column, dtype=np.float64)[:n]
    if len(column) * n <= DIRECT_LIMIT:
        return lfilter([1.0], column, np.eye(1, n)[0])
    # Newton's iteration y ← y(2 − cy) doubles the number of correct coefficients.
    inverse = np.array([1.0 / column[0]])
    while len(inverse) < n:
        size = min(2 * len(inverse), n)
        residual = -multiply(column[:size], inverse, size)
        residual[0] += 2.0
        inverse = multiply(inverse, residual, size)
    return inverse


def multiply(left: Array, right: Array, n: int) -> Array:
    """First n coefficients of the product of two series."""
    left, right = left[:n], right[:n]
    direct = len(left) * len(right) <= DIRECT_LIMIT
    product = (np.convolve(left, right) if direct else fftconvolve(left, right))[:n]
    return np.pad(product, (0, n - len(product)))


def inverse_pullback(column: Array, inverse: Array, gradient: Array) -> Array:
    """Gradient with respect to ``column`` of a function of ``inverse = series_inverse(column, n)``.

    With T the Toeplitz matrix of ``column``: d(inverse) = −T⁻¹ T(d column) inverse, so the pulled-back gradient is
    −⟨shift_j(inverse), T⁻ᵀ gradient⟩ for each j.
    """
    n, p = len(inverse), len(column)
    if p * n <= DIRECT_LIMIT:
        adjoint = lfilter([1.0], column, gradient[::-1])[::-1]
    else:
        adjoint = multiply(inverse, gradient[::-1], n)[::-1]
    return -fftconvolve(adjoint, inverse[::-1])[n - 1 : n - 1 + p]


@dataclass(frozen=True)
class _Recurrence:
    """What the three recurrences share: lists and arrays become tuples of floats, so that equal ones are the same."""

    def __post_init__(self) -> None:
        for numbers in fields(self):
            object.__setattr__(self, numbers.name, tuple(map(float, getattr(self, numbers.name))))


@dataclass(frozen=True)
class _Bands(_Recurrence):
    coefficients: tuple[float, ...]

    @property
    def past_vectors(self) -> int:
        return len(self.coefficients) - 1


class BandedInverse(_Bands):
    """x_t = Σ_{j<p} a_j z_{t−j}: C⁻¹ has p bands, so the noise can be computed again from the last p fields."""

    def strategy(self, n: int) -> Array:
        return series_inverse(np.asarray(self.coefficients), n)

    def noising(self, n: int) -> Array:
        return np.asarray(self.coefficients[:n])


class BandedStrategy(_Bands):
    """x_t = (z_t − Σ_{1≤j<p} c_j x_{t−j}) / c_0: C has p bands; the last p−1 *outputs* must be kept."""

    def strategy(self, n: int) -> Array:
        head = np.asarray(self.coefficients[:n])
        return np.pad(head, (0, n - len(head)))

    def noising(self, n: int) -> Array:
        return series_inverse(np.asarray(self.coefficients), n)


@dataclass(frozen=True)
class BufferedToeplitz(_Recurrence):
    """x_t = z_t − Σ_j ω_j S_j, then S_j ← θ_j S_j + x_t: one buffer S_j per pair (θ, ω), zero at the start."""

    decays: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def past_vectors(self) -> int:
        return len(self.decays)

    def strategy(self, n: int) -> Array:
        powers = np.asarray(self.decays)[None, :] ** np.arange(n - 1)[:, None]
        return np.concatenate([[1.0], powers @ np.asarray(self.weights)])

    def noising(self, n: int) -> Array:
        # c(x) = 1 + x Σ_j ω_j / (1 − θ_j x) is a ratio of two polynomials of degree m; its reciprocal swaps them.
        below = np.polynomial.polynomial.polyfromroots(self.decays)[::-1]
        above = below.copy()
        for j, weight in enumerate(self.weights):
            others = np.delete(np.asarray(self.decays), j)
            above[1:] += weight * np.polynomial.polynomial.polyfromroots(others)[::-1]
        return lfilter(below, above, np.eye(1, n)[0])


Recurrence = BandedInverse | BandedStrategy | BufferedToeplitz


@dataclass(frozen=True)
class Mechanism:
    """A noise mechanism: public parameters only, printable, comparable and serialisable.

    Some mechanisms are asked for before all of their numbers are known: an "auto" parameter depends on the privacy
    budget and the sampling, and optimised coefficients depend on the horizon. ``lc.plan`` fills in both, so that a run
    never depends on an optimiser; ``resolve(horizon)`` fills in the latter alone.

    ``name`` stands in plan files and on the command line, ``title`` in tables; a class of one's own needs no title.
    A field made by ``parameter`` is a flag of ``lambdacgd plan``, too; ``symbol`` is how tables call it. One with
    ``request`` is left out of ``to_dict`` where it has its default: it says how a number is to be chosen, and has its
    default once that is done, or it is younger than plan files that do not name it.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    optimised: ClassVar[tuple[str, ...]] = ()
    """The fields that ``resolve`` fills in, None until then."""

    def __init_subclass__(cls, **how: Any) -> None:
        """A class of one's own without a name is called by that of the class."""
        super().__init_subclass__(**how)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __str__(self) -> str:
        """The mechanism in a few words, as tables show it."""
        words = [self.title or self.name]
        for f in fields(self):
            value, symbol = getattr(self, f.name), f.metadata.get("symbol")
            if value is True:
                words.append(symbol or f.name)
            elif isinstance(value, str | float | int) and value is not False and (symbol or value != f.default):
                words.append(f"{symbol or f.name}={value if isinstance(value, str) else _short(value)}")
        return " ".join(words)

    @property
    def automatic(self) -> bool:
        """Whether ``lc.plan`` has a parameter to choose: one that is "auto", or coefficients under amplification."""
        values = [getattr(self, f.name) for f in fields(self)]
        return any(isinstance(value, str) and value == "auto" for value in values) or getattr(self, "amplified", False)

    @property
    def resolved(self) -> bool:
        """Whether all numbers are known. Only a resolved mechanism can be asked about its noise."""
        return not self.automatic and all(getattr(self, name) is not None for name in self.optimised)

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
        if self.automatic:
            raise self._not_resolved()
        return self if self.resolved else self._optimised_for(horizon)

    def _optimised_for(self, horizon: Horizon) -> Self:
        raise NotImplementedError

    def _known(self, name: str) -> Any:
        """A parameter, if it is known already."""
        value = getattr(self, name)
        if value is None or isinstance(value, str):
            raise self._not_resolved()
        return value

    def _not_resolved(self) -> ValueError:
        missing = "its coefficients depend on the horizon. Call .resolve(horizon) first"
        if self.automatic:
            missing = "lc.plan chooses its parameters for the budget and the sampling. Ask plan.mechanism instead"
        return ValueError(f"{self.name} is not resolved: {missing}, or give them")

    def validate(self, horizon: Horizon) -> None:
        """Raise ``ValueError`` if the mechanism makes no sense over this horizon."""

    def recurrence(self, n: int) -> Recurrence:
        """How the correlated noise of n steps is generated."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrence(n), which says how its noise is made")

    def column_scales(self, n: int) -> Array | None:
        """d_1 … d_n of C = T·D⁻¹, or None for the identity. The noise of step t is multiplied by d_t."""
        return None

    def strategy(self, n: int) -> Array:
        """First column of the Toeplitz factor T of C = T·D⁻¹ (length n)."""
        return self.recurrence(n).strategy(n)

    def noising(self, n: int) -> Array:
        """Noising coefficients: first column of T⁻¹, without the zeros behind the last band."""
        return self.recurrence(n).noising(n)

    def strategy_bands(self, n: int) -> int:
        """How many bands C has over n steps: n unless the recurrence says that entries further down are zero."""
        recurrence = self.recurrence(n)
        if isinstance(recurrence, BufferedToeplitz):
            return n
        used = int(np.flatnonzero(recurrence.coefficients)[-1]) + 1
        return min(used, n) if used == 1 or isinstance(recurrence, BandedStrategy) else n

    def regenerates(self, n: int) -> bool:
        """Whether the noise can be computed again from the key alone, with nothing stored."""
        return isinstance(self.recurrence(n), BandedInverse)

    def past_vectors(self, n: int) -> int:
        """How many vectors of the gradient's size step n looks back at: regenerated if it can be, else stored."""
        return self.recurrence(n).past_vectors

    def to_dict(self) -> dict[str, Any]:
        """The name and the parameters, as plan files hold them."""
        answer: dict[str, Any] = {"name": self.name}
        for f in fields(self):
            value = getattr(self, f.name)
            if not (f.metadata.get("request") and value == f.default):
                answer[f.name] = list(value) if isinstance(value, tuple) else value
        return answer

    @property
    def foreign(self) -> bool:
        """Whether the class is not one of this package."""
        return type(self).__module__.split(".")[0] != __name__.split(".")[0]

    def question(self, n: int) -> dict[str, Any]:
        """What a cached answer about this mechanism over n steps is filed under.

        Name and parameters say all about the classes of this package, whose code is part of the cache's keys. Code of
        a user's class is not, and it may change while its name stays: so what it computes is part of the question.
        """
        if not self.foreign:
            return {"mechanism": self.to_dict()}
        digest = hashlib.sha256()
        for values in (self.strategy(n), self.noising(n), self.column_scales(n)):
            digest.update(b"none" if values is None else np.asarray(values, dtype=np.float64).tobytes())
        return {"mechanism": self.to_dict(), "computes": digest.hexdigest()}


def _short(value: float) -> str:
    """Four digits, or all of them where four would round something below 1 to 1."""
    text = f"{value:.4g}"
    return text if value >= 1 or float(text) < 1 else repr(value)


def from_dict(kind: str, classes: dict[str, type[Any]], data: dict[str, Any]) -> Any:
    """Make the mechanism or sampling (``kind``) that ``to_dict`` described, or refuse what does not describe one."""
    given = dict(data)
    name = given.pop("name", None)
    if name not in classes:
        known = f"it must be one of {', '.join(classes)}; files hold none of your own: plan anew with lc.plan"
        raise InvalidInput(kind, name, known)
    if unknown := sorted(set(given) - {f.name for f in fields(classes[name])}):
        raise InvalidInput(unknown[0], f"The {kind} {name} has no parameter {', '.join(unknown)}.")
    return classes[name](**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def check_automatic(mechanism: Mechanism, parameter: str, objective: str | None) -> None:
    """Check a parameter that is a number in [0, 1) or "auto", and the objective that "auto" is chosen by."""
    value = getattr(mechanism, parameter)
    if isinstance(value, str) and value != "auto":
        raise InvalidInput(parameter, value, "it must be a number at least 0 and below 1, or 'auto'")
    if value != "auto":
        object.__setattr__(mechanism, parameter, number(parameter, value, above=0, below=1, include=(0,)))
    if objective not in (None, *get_args(Objective)):
        raise InvalidInput("objective", objective, f"it must be one of {', '.join(get_args(Objective))}")
    if objective is not None and value != "auto":
        raise InvalidInput("objective", objective, f"it applies where {parameter} is auto; leave one of them out")
