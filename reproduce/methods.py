"""The methods that training experiments compare: what each asks of ``lc.plan``, and where its search begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lambdacgd.validation import InvalidInput

# The λ that searches begin with, by ε. For fixed bins the paper's; for fresh ones near the smallest error.
_FIXED = MappingProxyType({8.0: 0.95, 4.0: 0.95, 2.0: 0.9, 1.0: 0.9, 0.5: 0.9, 0.25: 0.8})
_FRESH = MappingProxyType({8.0: 0.9, 4.0: 0.9, 2.0: 0.8, 1.0: 0.8, 0.5: 0.8, 0.25: 0.8})
# The λ that a search tries beside it: the paper finds smaller ones better than errors say.
_FIXED_OTHER = MappingProxyType({8.0: 0.9, 4.0: 0.9, 2.0: 0.8, 1.0: 0.8, 0.5: 0.8, 0.25: 0.9})
_FRESH_OTHER = MappingProxyType({8.0: 0.8, 4.0: 0.8, 2.0: 0.9, 1.0: 0.9, 0.5: 0.6, 0.25: 0.6})


@dataclass(frozen=True)
class Method:
    """A mechanism with a sampling. ``asks`` go to ``lc.plan``; ``lam`` and ``other`` are λ by ε, where it has one."""

    name: str
    title: str
    asks: dict[str, Any]
    ours: bool = False  # not in the paper's comparison
    lam: Mapping[float, float] = field(default_factory=dict)
    other: Mapping[float, float] = field(default_factory=dict)

    def request(self, lam: float | None) -> dict[str, Any]:
        """Keyword arguments for ``lc.plan``."""
        if (lam is not None) != bool(self.lam):
            raise InvalidInput("lam", lam, f"{self.name} {'needs' if self.lam else 'has no'} λ")
        return self.asks | ({} if lam is None else {"lam": lam})

    def first(self, epsilon: float) -> float | None:
        """The λ a search begins with."""
        return _nearest(self.lam, epsilon)

    def second(self, epsilon: float) -> float | None:
        """The λ a search tries beside it."""
        return _nearest(self.other, epsilon)


def _nearest(table: Mapping[float, float], epsilon: float) -> float | None:
    if not table:
        return None
    return table[min(table, key=lambda known: max(known / epsilon, epsilon / known))]


def _binned(mechanism: str, bins: str = "fixed", **more: Any) -> dict[str, Any]:
    return {"mechanism": mechanism, "sampling": "balls-in-bins", "bins": bins} | more


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("dp-sgd", "DP-SGD (Poisson)", {"mechanism": "dp-sgd", "sampling": "poisson"}),
        Method(
            "lambda-cgd-fresh",
            "DP-λCGD, fresh bins",
            _binned("lambda-cgd", "fresh"),
            ours=True,
            lam=_FRESH,
            other=_FRESH_OTHER,
        ),
        Method("lambda-cgd", "DP-λCGD", _binned("lambda-cgd"), lam=_FIXED, other=_FIXED_OTHER),
        Method("dp-sgd-fresh", "DP-SGD, fresh bins", _binned("dp-sgd", "fresh"), ours=True),
        Method("bisr-2", "BISR (p = 2)", _binned("bisr", bands=2)),
        Method("bisr-16", "BISR (p = 16)", _binned("bisr", bands=16)),
        Method("bandinvmf-2", "BandInvMF (p = 2)", _binned("bandinvmf", bands=2)),
        Method("bandinvmf-16", "BandInvMF (p = 16)", _binned("bandinvmf", bands=16)),
        Method("blt", "BLT (3 buffers)", _binned("blt", buffers=3)),
        Method(
            "lambda-cgd-normalized",
            "normalised DP-λCGD",
            _binned("lambda-cgd", normalized=True),
            ours=True,
            lam=_FIXED,
            other=_FIXED_OTHER,
        ),
        Method(
            "lambda-cgd-fresh-normalized",
            "normalised DP-λCGD, fresh bins",
            _binned("lambda-cgd", "fresh", normalized=True),
            ours=True,
            lam=_FRESH,
            other=_FRESH_OTHER,
        ),
        Method("gamma-bifr-4", "γ-BIFR (p = 4)", _binned("gamma-bifr", bands=4, objective="guideline"), ours=True),
        Method(
            "bandinvmf-amplified-4",
            "amplified BandInvMF (p = 4)",
            _binned("bandinvmf", bands=4, amplified=True),
            ours=True,
        ),
        # No amplification: a fixed order, for the sweeps over λ. λ = 0 is DP-SGD.
        Method(
            "lambda-cgd-cyclic",
            "DP-λCGD, no amplification",
            {"mechanism": "lambda-cgd", "sampling": "cyclic"},
            lam={1.0: 0.9},
        ),
    )
}


def method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise InvalidInput("method", name, f"it must be one of {', '.join(METHODS)}")
    return METHODS[name]
