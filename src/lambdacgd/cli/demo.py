"""``lambdacgd demo``: DP-SGD and DP-λCGD with both kinds of bins on handwritten digits, at the same (ε, δ)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lambdacgd import digits
from lambdacgd.errors import integer
from lambdacgd.mechanisms import Identity, LambdaCGD, Mechanism
from lambdacgd.planning import Plan
from lambdacgd.planning import plan as make_plan
from lambdacgd.sampling import BallsInBins, Poisson, Sampling
from lambdacgd.training.privatize import privatize

EPSILON, DELTA, EPOCHS, BATCH_SIZE = 2.0, 1e-4, 2, 8


@dataclass(frozen=True)
class Method:
    """One column of the demo, with the settings that did best on a validation split (results/demo_tuning.json)."""

    name: str
    mechanism: Mechanism
    sampling: Sampling
    learning_rate: float
    max_grad_norm: float


METHODS = (
    Method("DP-SGD (Poisson)", Identity(), Poisson(), 0.125, 1.0),
    Method("DP-λCGD, fixed bins", LambdaCGD(0.8), BallsInBins("fixed"), 0.03125, 4.0),
    Method("DP-λCGD, fresh bins", LambdaCGD(0.8), BallsInBins("fresh"), 0.25, 1.0),
)


def demo(seeds: int) -> None:
    """Train every method ``seeds`` times, with other weights, batches and noise, and print the test accuracies."""
    integer("seeds", seeds)
    console, began = Console(highlight=False), time.monotonic()
    torch.set_num_threads(1)  # the model is so small that threads would only wait for each other
    train, test = digits.load()
    run: dict[str, Any] = {"epochs": EPOCHS, "epsilon": EPSILON, "delta": DELTA}
    plans = []
    for method in METHODS:
        with console.status(f"calibrating the noise of {method.name}"):
            plan = make_plan(train, BATCH_SIZE, **run, mechanism=method.mechanism, sampling=method.sampling)
        plans.append(plan)
        console.print(f"{method.name}: σ = {plan.sigma:.3f}, RMSE {plan.rmse:.2f} ({plan.certificate.method})")
    accuracies: list[list[float]] = [[] for _ in METHODS]
    table = Table(title=f"Test accuracy on {len(test)} digits, (ε = {EPSILON:g}, δ = {DELTA:g})", title_justify="left")
    for heading in ("seed", *(method.name for method in METHODS)):
        table.add_column(heading, justify="right")
    for seed in range(seeds):
        for method, plan, reached in zip(METHODS, plans, accuracies, strict=True):
            with console.status(f"seed {seed + 1} of {seeds}: {method.name}, {plan.steps} steps"):
                reached.append(train_once(train, test, plan, method, seed))
        table.add_row(str(seed + 1), *(f"{100 * reached[-1]:.1f}%" for reached in accuracies))
    table.add_section()
    table.add_row("mean", *map(_mean, accuracies), style="bold")
    console.print(table)
    console.print(
        "σ is the noise in clipping norms, RMSE what it does to the sum of all gradients: smaller is better. "
        f"{EPOCHS} epochs of {plans[0].steps_per_epoch} steps, about {BATCH_SIZE} examples a step, "
        "SGD; λ = 0.8. Learning rate and clipping norm were chosen for each method on a validation split beforehand, "
        "which ε does not cover. Few epochs and small batches are where correlated noise pays most. "
        f"{time.monotonic() - began:.0f} s."
    )


def train_once(train: TensorDataset, test: TensorDataset, plan: Plan, method: Method, seed: int) -> float:
    """The test accuracy of one private run."""
    torch.manual_seed(seed)
    model = digits.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=method.learning_rate)

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    private = privatize(model, optimizer, train, plan, max_grad_norm=method.max_grad_norm, loss=loss)
    for batch in private.loader:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    private.detach()
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def _mean(values: list[float]) -> str:
    text = f"{100 * statistics.mean(values):.1f}%"
    if len(values) > 1:
        text += f" ± {100 * statistics.stdev(values) / len(values) ** 0.5:.1f}"
    return text
