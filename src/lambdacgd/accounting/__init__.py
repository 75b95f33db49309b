"""(mechanism, sampling, ε, δ) → σ with a certificate. NumPy and SciPy; torch only as a lazily imported backend."""

from lambdacgd.accounting.base import AccountingError, Calibration, Certificate, calibrate

__all__ = ["AccountingError", "Calibration", "Certificate", "calibrate"]
