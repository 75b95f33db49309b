"""What the paper says about λ and full batches in numbers (arXiv 2601.22334): theorem on full batches, hyperparameters.

Its figures on λ and on column normalisation are drawn without tables; only what is printed can be set beside ours.
"""

from __future__ import annotations

import math

# Theorem "Constant-optimal bounds for multi-participation error, full-batch regime": RMSE/n as n grows.
FULL_BATCH = {"DP-SGD": 1 / math.sqrt(2), "optimal diagonal": 2 / 3, "lower bound": 1 / math.sqrt(3)}
# The sentences around it: DP-SGD over the diagonal, DP-SGD over the bound, the diagonal over the bound.
FULL_BATCH_GAPS = {"DP-SGD / diagonal": 1.06, "DP-SGD / bound": 1.23, "diagonal / bound": 1.15}

# Table of hyperparameters, CIFAR-10 with B = 128, k = 10: λ chosen by validation accuracy, by ε.
TRAINED = {0.25: 0.8, 0.5: 0.9, 1.0: 0.9, 2.0: 0.9, 4.0: 0.95, 8.0: 0.95}
RMSE_OPTIMAL = 0.977  # the same table's BandInvMF with p = 2, which minimises the RMSE without amplification
# "Practical considerations": the best λ is typically this much smaller than amplified RMSE's, on the scale 1/(1−λ).
SMALLER_BY = (2.0, 4.0)
