"""Differentially private training whose noise cancels itself: DP-λCGD for PyTorch.

``lc.plan(...)`` fixes what a run will do and what it costs; everything that trains takes that plan. Names load when
they are first used, and torch is imported only with those that train or make noise: planning needs none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lambdacgd.version import __version__

if TYPE_CHECKING:
    from lambdacgd.accounting import Calibration, Certificate
    from lambdacgd.auditing import audit
    from lambdacgd.choosing import choose_lambda
    from lambdacgd.errors import (
        AccountingError,
        CheckpointError,
        ClippingError,
        InvalidInput,
        KeyFileError,
        LedgerError,
        NonFiniteSum,
        NotPrivateWarning,
        TrainingError,
    )
    from lambdacgd.keys import SecretKey
    from lambdacgd.ledger import Ledger
    from lambdacgd.mechanisms import (
        BISR,
        BLT,
        BSR,
        BandInvMF,
        BandMF,
        Diagonal,
        GammaBIFR,
        Horizon,
        Identity,
        LambdaCGD,
        Mechanism,
        Workload,
        maxse,
        rmse,
    )
    from lambdacgd.mechanisms.error import sensitivity
    from lambdacgd.noise import BufferedNoise, Layout, NoiseField, RegeneratedNoise
    from lambdacgd.planning import Plan, plan
    from lambdacgd.questions import compare, epsilon, noise_multiplier
    from lambdacgd.sampling import BallsInBins, Cyclic, Poisson, Sampling
    from lambdacgd.training import EMA, Noiser, Private, Spent
    from lambdacgd.training.export import export
    from lambdacgd.training.privatize import privatize

_HOMES = {
    "lambdacgd.accounting": ("Calibration", "Certificate"),
    "lambdacgd.auditing": ("audit",),
    "lambdacgd.errors": (
        "AccountingError", "CheckpointError", "ClippingError", "InvalidInput", "KeyFileError", "LedgerError",
        "NonFiniteSum", "NotPrivateWarning", "TrainingError",
    ),
    "lambdacgd.keys": ("SecretKey",),
    "lambdacgd.ledger": ("Ledger",),
    "lambdacgd.mechanisms": (
        "BISR", "BLT", "BSR", "BandInvMF", "BandMF", "Diagonal", "GammaBIFR", "Horizon", "Identity", "LambdaCGD",
        "Mechanism", "Workload", "maxse", "rmse", "sensitivity",
    ),
    "lambdacgd.noise": ("BufferedNoise", "Layout", "NoiseField", "RegeneratedNoise"),
    "lambdacgd.planning": ("Plan", "plan"),
    "lambdacgd.questions": ("compare", "epsilon", "noise_multiplier"),
    "lambdacgd.sampling": ("BallsInBins", "Cyclic", "Poisson", "Sampling"),
    "lambdacgd.training": ("EMA", "Noiser", "Private", "Spent", "export", "privatize"),
    "lambdacgd.choosing": ("choose_lambda",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BISR", "BLT", "BSR", "EMA", "AccountingError", "BallsInBins", "BandInvMF", "BandMF", "BufferedNoise",
    "Calibration", "Certificate", "CheckpointError", "ClippingError", "Cyclic", "Diagonal", "GammaBIFR",
    "Horizon", "Identity", "InvalidInput", "KeyFileError", "LambdaCGD", "Layout", "Ledger", "LedgerError",
    "Mechanism", "NoiseField", "Noiser", "NonFiniteSum", "NotPrivateWarning", "Plan", "Poisson", "Private",
    "RegeneratedNoise", "Sampling", "SecretKey", "Spent", "TrainingError", "Workload", "__version__",
    "audit", "choose_lambda", "compare", "epsilon", "export", "maxse", "noise_multiplier", "plan",
    "privatize", "rmse", "sensitivity",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lambdacgd' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
