"""A deterministic accountant for DP-λCGD under Balls-in-Bins; the proof is in docs/exact-accountant.md."""

from lambdacgd.accounting.transfer_matrix.accountant import METHOD, Bound, TransferMatrix

__all__ = ["METHOD", "Bound", "TransferMatrix"]
