"""Adam: post-processing as it is; its second moment corrected only where that is unbiased."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import privatize
from reproduce.debiased_adam import DebiasedAdam
from tests.training import oracle


def test_without_noise_it_is_adamw():
    p = oracle.plan(epsilon=math.inf, mechanism=lc.Identity())
    one, two = oracle.model(dtype=torch.float64), oracle.model(dtype=torch.float64)
    ours = DebiasedAdam(one.parameters(), p, max_grad_norm=math.inf, lr=0.05, weight_decay=0.1)
    theirs = torch.optim.AdamW(two.parameters(), lr=0.05, weight_decay=0.1)
    x, y = oracle.data().tensors
    for _ in range(20):
        for m, o in ((one, ours), (two, theirs)):
            o.zero_grad()
            F.cross_entropy(m(x.double()), y).backward()
            o.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_second_moment_is_that_of_the_gradient():
    """400 steps of constant gradient g = 3s in 2 000 coordinates: √(v̂ − s²) is g within 2%, √v̂ is not.

    v̂ averages about 1 500 effective draws over coordinates·steps ≫ 10⁵, so the mean is within 0.1%: no false alarms.
    """
    p = oracle.plan(mechanism=lc.Identity())
    weight = torch.nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    optimizer = DebiasedAdam([weight], p, max_grad_norm=1.0, lr=0.0)
    s = math.sqrt(optimizer.noise_variance)
    assert s == pytest.approx(p.sigma / p.batch_size)
    g = torch.Generator().manual_seed(5)
    for _ in range(400):
        weight.grad = 3 * s + s * torch.randn(2000, generator=g, dtype=torch.float64)
        optimizer.step()
    square = optimizer.state[weight]["exp_avg_sq"] / (1 - 0.999**400)
    assert float((square - s * s).mean()) == pytest.approx(9 * s * s, rel=0.02)
    assert float(square.mean()) == pytest.approx(10 * s * s, rel=0.02)


def test_trains_privately_and_refuses_correlated_noise():
    p = oracle.plan(mechanism=lc.LambdaCGD(0.0))
    module = oracle.model()
    optimizer = DebiasedAdam(module.parameters(), p, max_grad_norm=1.0, lr=0.05)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0, max_physical_batch_size=5)
    oracle.loop(private, module, optimizer)
    assert private.finished
    private.detach()
    assert all(bool(torch.isfinite(w).all()) for w in module.parameters())
    with pytest.raises(lc.InvalidInput, match="correlated"):
        DebiasedAdam(module.parameters(), oracle.plan(), max_grad_norm=1.0)
    with pytest.raises(lc.InvalidInput, match="closure"):
        optimizer.step(lambda: 0)


def test_correlated_noise_and_the_gradient_are_not_independent():
    """On f(w) = |w|²/2 with SGD: E 2ḡx = 2ληs², from 20 000 coordinates and 200 steps.

    The mean of 4·10⁶ products has standard error below 1% of the expected value; the bound of 10% is over ten of them.
    """
    lam, rate, s = 0.8, 0.1, 1.0
    g = torch.Generator().manual_seed(8)
    w, before, cross = torch.zeros(20_000), torch.zeros(20_000), []
    for t in range(220):
        z = torch.randn(20_000, generator=g)
        noise = s * (z - lam * before)
        if t >= 20:
            cross.append(float((2 * w * noise).mean()))  # the gradient of |w|²/2 is w
        w, before = w - rate * (w + noise), z
    assert sum(cross) / len(cross) == pytest.approx(2 * lam * rate * s * s, rel=0.1)
