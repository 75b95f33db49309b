"""A deterministic accountant for DP-λCGD under Balls-in-Bins; the proof is in docs/exact-accountant.md."""

from lambdacgd.accounting.exact.accountant import METHOD, TransferMatrix

__all__ = ["METHOD", "TransferMatrix"]
