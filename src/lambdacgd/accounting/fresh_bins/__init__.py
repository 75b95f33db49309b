"""Balls-in-Bins with bins redrawn every epoch: certified for one epoch, composed over all (docs/fresh-bins.md)."""

from lambdacgd.accounting.fresh_bins.accountant import METHOD, ComposedBound, FreshBins
from lambdacgd.accounting.fresh_bins.calibration import epsilon_after_epochs, exact_accountant, fresh_bins

__all__ = ["METHOD", "ComposedBound", "FreshBins", "epsilon_after_epochs", "exact_accountant", "fresh_bins"]
