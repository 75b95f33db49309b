"""Balls-in-Bins with bins redrawn every epoch: certified for one epoch, composed over all (docs/fresh-bins.md)."""

from lambdacgd.accounting.composed.accountant import METHOD, FreshBins

__all__ = ["METHOD", "FreshBins"]
