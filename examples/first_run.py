"""A plain PyTorch loop, made private by two lines: a plan, and ``privatize``.

    python examples/first_run.py                        # handwritten digits, some seconds on a laptop
    python examples/first_run.py --out runs/first       # keeps the key, a checkpoint after every epoch, and a release

Run the second form again after an interruption: it goes on where it stopped, and ends with the same weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lambdacgd as lc
from lambdacgd import digits


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over the examples of a batch: an example's gradient must not depend on the others."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the checkpoint and the release")
    given = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits.load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    # Before anything is trained: how much noise does this promise need? Without a mechanism, λ is chosen (slower).
    plan = lc.plan(train, 16, epochs=given.epochs, epsilon=given.epsilon, delta=1e-4, mechanism=lc.LambdaCGD(0.8))
    print(plan)

    key = None  # in memory only: the run cannot be resumed
    if given.out:
        # Whoever has the key can subtract the noise: keep it outside of the folder that you copy and publish.
        path = given.out.with_name(given.out.name + ".private") / "run.key"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            lc.SecretKey.generate().save(path)
        key = lc.SecretKey.load(path)

    private = lc.privatize(model, optimizer, train, plan, max_grad_norm=1.0, key=key, loss=loss_of, earlier=[])
    if given.out:
        private.resume(given.out / "checkpoint")  # does nothing where there is no checkpoint
    for epoch in private.epochs():
        for batch in epoch:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if given.out:
            private.save(given.out / "checkpoint")
        print(f"epoch {epoch.number}: {private.spent()}")

    if given.out and not (given.out / "release").exists():
        print(f"weights and their privacy card are in {lc.export(private, given.out / 'release')}")
    private.detach()  # a plain model again
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
