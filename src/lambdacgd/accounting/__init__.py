"""(mechanism, sampling, ε, δ) → σ with a certificate of why it suffices. NumPy and SciPy; torch only where it pays."""

from lambdacgd.accounting.answers import Accountant, accountant_for
from lambdacgd.accounting.base import AccountingError, Calibration, Certificate
from lambdacgd.accounting.calibration import check_epsilon, methods

__all__ = [
    "Accountant",
    "AccountingError",
    "Calibration",
    "Certificate",
    "accountant_for",
    "check_epsilon",
    "methods",
]
