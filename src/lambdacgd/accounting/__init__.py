"""(mechanism, sampling, ε, δ) → σ with a certificate of why it suffices. NumPy and SciPy, no torch."""

from lambdacgd.accounting.accountants import Accountant, accountant_for, check_epsilon, check_scales, methods
from lambdacgd.accounting.certificate import Calibration, Certificate
from lambdacgd.errors import AccountingError

__all__ = [
    "Accountant",
    "AccountingError",
    "Calibration",
    "Certificate",
    "accountant_for",
    "check_epsilon",
    "check_scales",
    "methods",
]
