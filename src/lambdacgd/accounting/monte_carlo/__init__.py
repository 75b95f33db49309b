"""Balls-in-Bins accounting by sampling: estimates with a standard error, certificates with a proof."""

from lambdacgd.accounting.monte_carlo.accountant import MonteCarlo
from lambdacgd.accounting.monte_carlo.estimate import Estimate, SigmaEstimate

__all__ = ["Estimate", "MonteCarlo", "SigmaEstimate"]
