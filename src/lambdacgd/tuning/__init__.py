"""Choosing λ, γ and coefficients. It needs mechanisms and accounting, and serves the plan. No torch."""

from lambdacgd.tuning.band_inv_mf import amplified_band_inv_mf
from lambdacgd.tuning.choice import Candidate, Choice, Objective, choose_gamma, choose_lambda

__all__ = ["Candidate", "Choice", "Objective", "amplified_band_inv_mf", "choose_gamma", "choose_lambda"]
