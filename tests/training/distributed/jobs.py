"""What the ranks do in the tests: build, train, report weights. Importable by processes of the fork server."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd.training import Private, privatize
from lambdacgd.training.distributed.models import gathered
from tests.training import oracle

RUN = "ab" * 16


class Net(nn.Module):
    """Layers of every kind of record, sizes that no number of ranks divides, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.block = nn.Sequential(nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 7))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x * self.scale))
        out: torch.Tensor = self.last(self.norm(h + self.block(h)))
        return out


def net(dtype: torch.dtype = torch.float64, seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def data(dtype: torch.dtype = torch.float64, examples: int = 48) -> TensorDataset:
    x, y = oracle.data(examples).tensors
    return TensorDataset(x.to(dtype), y)


def shard(model: Net, **options: Any) -> Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.block, model.last):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def wrap(model: Any, kind: str, **options: Any) -> Any:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    return shard(model, **options) if kind == "fsdp" else model


def plan(mechanism: str = "cgd", bins: str = "fixed", batch: int = 8) -> lc.Plan:
    chosen = {"cgd": lc.LambdaCGD(0.6), "blt": lc.BLT(2), "identity": lc.Identity()}[mechanism]
    return oracle.binned_plan(48, batch, 2, mechanism=chosen, bins=bins)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights, on every rank."""
    model = getattr(model, "module", model)
    found = {}
    for name, value in model.state_dict().items():
        found[name] = gathered(value).detach().clone()
    return found


def loop(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer, until: int | None = None) -> None:
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if private.between_steps and private.steps_taken == until:
            return


def train(
    kind: str,
    *,
    dtype: torch.dtype = torch.float64,
    mechanism: str = "cgd",
    bins: str = "fixed",
    batch: int = 8,
    optimizer: str = "momentum",
    physical: int | None = None,
    wrapping: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """A whole run; returns the weights it ends with."""
    inner = net(dtype)
    model = wrap(inner, kind, **(wrapping or {}))
    kinds = {"momentum": (torch.optim.SGD, {"momentum": 0.9}), "adamw": (torch.optim.AdamW, {})}
    make, settings = kinds[optimizer]
    chosen = make(model.parameters(), lr=0.1, **settings)
    private = privatize(
        model,
        chosen,
        data(dtype),
        plan(mechanism, bins, batch),
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
        key=oracle.key(),
        **options,
    )
    private.run._id = RUN
    loop(private, model, chosen)
    assert private.finished
    return weights(model)


def train_with(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return train(**options)


def train_many(cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Several runs, one after another, in the same processes."""
    return [train(**options) for options in cases]


def bound(
    kind: str, folder: str | None, seed: int = 1, bins: str = "fixed"
) -> tuple[Private, Any, torch.optim.Optimizer]:
    """A run of AdamW with an average, under the key in the folder, which rank 0 alone reads; always with one run id."""
    model = wrap(net(seed=seed), kind)
    chosen = torch.optim.AdamW(model.parameters(), lr=0.05)
    rank = dist.get_rank() if dist.is_initialized() else 0
    secret = lc.SecretKey.load(Path(folder) / "run.key") if folder is not None and rank == 0 else None
    if folder is None:
        secret = oracle.key()
    private = privatize(model, chosen, data(), plan(bins=bins), max_grad_norm=1.0, key=secret)
    private.ema(0.9)
    if folder is None:
        private.run._id = RUN
    return private, model, chosen


def ends(private: Private, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with private.averages[0].applied():
        averaged = weights(model)
    return weights(model), averaged


def uninterrupted(bins: str) -> Any:
    private, model, chosen = bound("plain", None, bins=bins)
    loop(private, model, chosen)
    return ends(private, model)


def begin_and_save(kind: str, folder: str, steps: int, bins: str) -> None:
    with mock.patch("lambdacgd.ledger.secrets.token_hex", return_value=RUN):
        private, model, chosen = bound(kind, folder, bins=bins)
        loop(private, model, chosen, steps)
    private.save(Path(folder) / "checkpoint", extra={"note": "mine", "tensor": torch.arange(3)})
    assert (private.run.key.path is None) == (dist.is_initialized() and dist.get_rank() > 0)
    private.detach()


def go_on(kind: str, folder: str, bins: str) -> Any:
    """Resume in a model with other weights: they must come from the checkpoint."""
    private, model, chosen = bound(kind, folder, seed=99, bins=bins)
    with torch.no_grad():
        model(data().tensors[0][:2])  # a sharded root keeps its gathered parameters after this: they must not survive
    assert private.resume(Path(folder) / "checkpoint")
    assert private.extra["note"] == "mine"
    assert torch.equal(private.extra["tensor"], torch.arange(3))
    start = private.steps_taken
    loop(private, model, chosen)
    found = start, *ends(private, model)
    private.detach()
    return found
