"""The slow twin of private training: one example at a time, noise as a matrix. And small things to train."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd.accounting import Certificate, methods
from lambdacgd.accounting.certificate import set_aside
from lambdacgd.mechanisms import error_norms, sensitivity
from lambdacgd.noise import Layout, NoiseField
from lambdacgd.planning import Plan
from lambdacgd.sampling import BallsInBins, Bins
from tests.noise.helpers import fill

KEY = bytes(range(32))


def key() -> lc.SecretKey:
    return lc.SecretKey.from_bytes(KEY)


def data(examples: int = 48, features: int = 5, classes: int = 3, seed: int = 7) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(examples, features, generator=g), torch.randint(classes, (examples,), generator=g))


def model(features: int = 5, classes: int = 3, seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, classes)).to(dtype)


def plan(
    examples: int = 48,
    batch_size: int = 12,
    epochs: int = 2,
    epsilon: float = 4.0,
    mechanism: lc.Mechanism | None = None,
) -> Plan:
    """A plan without amplification, which needs no accountant but the closed form."""
    return lc.plan(
        examples,
        batch_size,
        epochs=epochs,
        epsilon=epsilon,
        delta=1e-5,
        mechanism=mechanism or lc.LambdaCGD(0.6),
        sampling=lc.Cyclic(),
    )


def binned_plan(
    examples: int,
    batch_size: int,
    epochs: int,
    sigma: float = 0.5,
    mechanism: lc.Mechanism | None = None,
    bins: Bins = "fixed",
) -> Plan:
    """A Balls-in-Bins plan with a made-up σ, which no accountant was asked about: its certificate is false."""
    sampling = BallsInBins(bins, examples=examples, steps_per_epoch=examples // batch_size, epochs=epochs)
    resolved = (mechanism or lc.LambdaCGD(0.6)).resolve(sampling.block)
    mean, largest = error_norms(resolved, sampling.steps, restart_every=sampling.restart_every)
    details = {"sampling": sampling.kind, "floating_point": set_aside(1.0, 1e-5)}
    return Plan(
        mechanism=resolved,
        sampling=sampling,
        epsilon=1.0,
        delta=1e-5,
        requested_batch_size=batch_size,
        sensitivity=sensitivity(resolved, sampling.horizon, restart_every=sampling.restart_every).value,
        sigma=sigma,
        rmse=mean * sigma,
        maxse=largest * sigma,
        certificate=Certificate(methods(sampling)[0], "both", 1.0, 1.0, 1e-5, details=details),
    )


def per_example(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Gradients of one example at a time."""
    found = []
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]), list(named.values()))
        found.append(dict(zip(named, grads, strict=True)))
    return found


def clipped_sum(grads: list[dict[str, torch.Tensor]], zeta: float) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for g in grads:
        norm = math.sqrt(sum(float(v.double().square().sum()) for v in g.values()))
        factor = min(1.0, zeta / norm) if norm else 1.0
        for name, v in g.items():
            total[name] = total.get(name, torch.zeros_like(v)) + factor * v
    return total


def assert_close_but_for_lattice(a: torch.Tensor, b: torch.Tensor, tolerance: float, msg: str = "") -> None:
    """Equal to rounding, except for a few numbers: sums that differ by a rounding can be released a Δ apart."""
    off = (a - b).abs() > tolerance * (1 + b.abs())
    assert float(off.double().mean()) <= 0.02 + 2 / max(off.numel(), 1), msg
    torch.testing.assert_close(a, b, rtol=0, atol=100 * tolerance, msg=msg)


def lattice(p: Plan, zeta: float) -> float:
    """Half of the largest Δ that the plan's noise is released on, where its columns are not scaled."""
    return zeta * p.sigma * 2.0**-10 * (1 + 1e-6)


def correlated_noise(
    p: Plan, secret: lc.SecretKey, run: str, module: nn.Module, zeta: float
) -> list[dict[str, torch.Tensor]]:
    """ζσ·D·T⁻¹Z by a dense matrix over all steps, or over each epoch where the noise restarts."""
    layout = Layout.of_parameters(module.named_parameters())
    field = NoiseField(secret, layout, run_id=run)
    n, block = p.steps, p.restart_every or p.steps
    column = np.zeros(block)
    coefficients = p.mechanism.noising(block)
    column[: len(coefficients)] = coefficients
    scales = p.mechanism.column_scales(block)
    scales = np.ones(block) if scales is None else scales
    z = []
    for step in range(1, n + 1):
        tensors = {name: torch.zeros(q.shape) for name, q in module.named_parameters()}
        fill(field, tensors, step)
        z.append(tensors)
    return [
        {
            name: sum(
                zeta * p.sigma * scales[t % block] * column[t - s] * z[s][name].double()
                for s in range(t - t % block, t + 1)
            )
            for name in z[0]
        }
        for t in range(n)
    ]


def train_slowly(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: TensorDataset,
    p: Plan,
    secret: lc.SecretKey,
    run: str,
    zeta: float,
) -> None:
    """The whole run, by definition."""
    noise = correlated_noise(p, secret, run, module, zeta) if p.sigma else None
    for t, indices in enumerate(p.sampling.batches(secret, run=run)):
        x, y = dataset.tensors[0][indices], dataset.tensors[1][indices]
        total = clipped_sum(per_example(module, x, y), zeta) if len(indices) else {}
        for name, q in module.named_parameters():
            g = total.get(name, torch.zeros_like(q)).double()
            if noise is not None:
                g = g + noise[t][name]
            q.grad = (g / p.batch_size).to(q.dtype)
        optimizer.step()
        optimizer.zero_grad()


def loop(private: object, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The user's loop."""
    for x, y in private.loader:  # type: ignore[attr-defined]
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}
