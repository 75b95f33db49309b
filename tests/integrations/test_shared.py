"""What all integrations share, without a library beneath."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd.integrations.shared import logged_claim


@pytest.mark.parametrize("for_tests", [True, False])
@pytest.mark.filterwarnings("ignore:NOT")
def test_logs_claim_what_is_certified_and_nothing_else(for_tests: bool) -> None:
    plan = lc.plan(40, 10, epochs=2, epsilon=2.0, delta=1e-3, mechanism=lc.BISR(3), sampling=lc.BallsInBins())
    model = nn.Linear(2, 2)
    key = lc.SecretKey.for_tests(0) if for_tests else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    private = lc.privatize(model, optimizer, TensorDataset(torch.zeros(40, 2)), plan, max_grad_norm=1.0, key=key)
    assert logged_claim(private) == {"privacy_epsilon": math.inf if for_tests else 2.0, "privacy_delta": 1e-3}
