"""Canaries: a model in which every example has a coordinate of its own, and a record of what training it releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from lambdacgd.planning import Plan
from lambdacgd.training.privatize import privatize

Train = Callable[[nn.Module, Optimizer, Dataset[Tensor], Plan, float], Any]

LINEAR = 16
"""At most this many canaries pass through a linear layer; the others are rows of an embedding."""
NORMS = (2.0, 50.0, 1000.0)
"""Lengths of canaries' gradients before clipping, in units of ζ."""


class Canaries(Dataset[Tensor]):
    """N examples, m of them canaries. An item is (the example's id, its coordinate).

    Coins decide whether a canary is in or zeroed out: then its coordinate is m, which no weight has. Example 0 is never
    a canary, because loaders hand it out where nobody takes part.
    """

    def __init__(self, examples: int, canaries: int, rng: np.random.Generator) -> None:
        self.ids = 1 + rng.permutation(examples - 1)[:canaries]
        self.present = rng.random(canaries) < 0.5
        coordinates = np.full(examples, canaries)
        coordinates[self.ids[self.present]] = np.flatnonzero(self.present)
        self._items = torch.from_numpy(np.stack([np.arange(examples), coordinates], axis=1))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Tensor:
        return self._items[index]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return list(self._items[torch.as_tensor(indices)])


class CanaryModel(nn.Module):
    """One loss per example, linear in the weights: canary i's gradient is a multiple of the i-th unit vector.

    ``seen`` holds the ids of examples that were passed with gradients since it was last emptied.
    """

    def __init__(self, canaries: int, max_grad_norm: float) -> None:
        super().__init__()
        self.rows = canaries - min(LINEAR, canaries // 2)
        self.embedding = nn.Embedding(self.rows + 1, 1, padding_idx=self.rows)
        self.linear = nn.Linear(canaries - self.rows, 1, bias=False)
        nn.init.zeros_(self.embedding.weight)
        nn.init.zeros_(self.linear.weight)
        self._norms = max_grad_norm * torch.tensor(NORMS)
        self._features = torch.arange(self.rows, canaries)
        self.seen: list[NDArray[np.int64]] = []

    def forward(self, items: Tensor) -> Tensor:
        ids, coordinates = items[:, 0], items[:, 1]
        if torch.is_grad_enabled():
            self.seen.append(ids.numpy().copy())
        features = (coordinates[:, None] == self._features).to(self.linear.weight.dtype)
        losses = self.embedding(coordinates.clamp(max=self.rows))[:, 0] + self.linear(features)[:, 0]
        return losses * self._norms[coordinates % len(NORMS)]

    def weights(self) -> NDArray[np.float64]:
        """All coordinates, the embedding's first."""
        return torch.cat([self.embedding.weight[:-1, 0], self.linear.weight[0]]).detach().double().numpy()


@dataclass
class Recording:
    """What one run released.

    Attributes:
        released: Noisy sums as read off the weights, a row per release and a column per canary.
        seen: The ids of the examples that each release trained on.
        present: Which canaries were in; the others were zeroed out.
        ids: The canaries' example ids.
    """

    released: NDArray[np.float64]
    seen: list[NDArray[np.int64]]
    present: NDArray[np.bool_]
    ids: NDArray[np.int64]


def record(plan: Plan, train: Train, *, canaries: int, max_grad_norm: float, rng: np.random.Generator) -> Recording:
    """Train canaries once and read what is released off the weights after every optimizer step that changes them."""
    dataset, model = Canaries(plan.examples, canaries, rng), CanaryModel(canaries, max_grad_norm)
    optimizer, before = SGD(model.parameters(), lr=1.0), model.weights()
    released: list[NDArray[np.float64]] = []
    seen: list[NDArray[np.int64]] = []

    def after_step(stepped: Optimizer, *_: Any) -> None:
        nonlocal before
        now = model.weights()
        if np.array_equal(now, before):  # a physical batch that does not complete its logical one
            return
        released.append((before - now) * (plan.batch_size / stepped.param_groups[0]["lr"]))
        # The first batch is passed several times: the clipper looks whether the model mixes examples.
        seen.append(np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *model.seen])))
        model.seen.clear()
        before = now

    hook = optimizer.register_step_post_hook(after_step)
    train(model, optimizer, dataset, plan, max_grad_norm)
    hook.remove()
    return Recording(np.array(released).reshape(-1, canaries), seen, dataset.present, dataset.ids)


def plain_loop(
    model: nn.Module, optimizer: Optimizer, dataset: Dataset[Tensor], plan: Plan, max_grad_norm: float
) -> None:
    """The loop of the README, over canaries."""
    private = privatize(model, optimizer, dataset, plan, max_grad_norm=max_grad_norm)
    private.loss_checked = True  # the mean below; to look at it would show the model examples outside any batch
    for batch in private.loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    private.detach()
