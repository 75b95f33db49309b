"""Other ways to hold a model: wrapped late, checkpointed activations, tied weights, mixed precision, CPU offload."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lambdacgd.training import privatize
from tests.training import oracle
from tests.training.distributed import jobs, launch


def bind(model: Any, dataset: Any = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"max_grad_norm": 1.0, "key": oracle.key()} | options
    private = privatize(model, optimizer, dataset or jobs.data(), jobs.plan(), **settings)
    private.run._id = jobs.RUN
    return private, optimizer


@functools.lru_cache(maxsize=1)
def plain() -> dict[str, torch.Tensor]:
    """One process, without a process group."""
    found: dict[str, torch.Tensor] = launch.run(0, jobs.train_with, {"kind": "plain"})[0]
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 1e-13) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=atol)


def wrapped_late() -> Any:
    """Privatized first, wrapped afterwards, as accelerate does; other weights on rank 1 to begin with."""
    model = jobs.net(seed=1 + 7 * dist.get_rank())
    private, optimizer = bind(model)
    wrapper = nn.parallel.DistributedDataParallel(model)
    jobs.loop(private, wrapper, optimizer)
    found = jobs.weights(wrapper)
    private.detach()
    assert wrapper.require_backward_grad_sync
    # Given back, it is an ordinary wrapped model, whose gradients are averaged again.
    x, y = jobs.data().tensors
    F.cross_entropy(wrapper(x[dist.get_rank() :: 2]), y[dist.get_rank() :: 2]).backward()
    return found, model.last.weight.grad


def key_made_by_rank_0() -> Any:
    """No key is given anywhere: rank 0 makes one and shares it."""
    model = jobs.wrap(jobs.net(), "ddp")
    private, optimizer = bind(model, key=None)
    jobs.loop(private, model, optimizer)
    return private.run.key.fingerprint(), jobs.weights(model)


def test_wrapped_after_privatize_and_given_back():
    wanted = plain()
    (first, gradient), (second, other) = launch.run(2, wrapped_late)
    same(first, wanted)
    same(second, wanted)
    assert torch.equal(gradient, other)


def test_a_key_that_nobody_gave():
    (name, weights), (other, others) = launch.run(2, key_made_by_rank_0)
    assert name == other
    same(weights, others, atol=0)
    again = launch.run(2, key_made_by_rank_0)[0]
    assert again[0] != name
    assert not torch.equal(again[1]["last.weight"], weights["last.weight"])


def unusual_buffers() -> Any:
    """Types that process groups do not know, and one without memory of its own; other values on rank 1."""
    model, rank = jobs.net(), dist.get_rank()
    model.register_buffer("small", torch.full((3,), 7 + rank, dtype=torch.int16))
    model.register_buffer("tiny", torch.full((3,), 1.0 + rank).to(torch.float8_e4m3fn))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t() + rank)
    model.register_buffer("repeated", torch.arange(3).expand(4, 3))
    bind(model)
    return {name: value.float() for name, value in model.named_buffers()}


def test_buffers_of_unusual_kinds_are_sent():
    first, second = launch.run(2, unusual_buffers)
    same(second, first, atol=0)
    assert first["small"].tolist() == [7.0] * 3
    assert torch.equal(first["turned"], torch.arange(6.0).view(2, 3).t())


def zeroed(kind: str) -> Any:
    """zero_grad(set_to_none=False), of all gradients at once: DTensors do not count that as a change."""
    model = jobs.wrap(jobs.net(), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    private = privatize(model, optimizer, jobs.data(), jobs.plan(), max_grad_norm=1.0, key=oracle.key())
    private.run._id = jobs.RUN
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return jobs.weights(model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_zeroed_in_place(kind):
    wanted = plain()
    for found in launch.run(2, zeroed, kind):
        same(found, wanted)


class Checkpointed(jobs.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x * self.scale))
        out: torch.Tensor = self.last(self.norm(h + checkpoint(self.block, h, use_reentrant=False)))
        return out


def recomputed(kind: str) -> Any:
    torch.manual_seed(1)
    model = jobs.wrap(Checkpointed().double(), kind)
    private, optimizer = bind(model)
    jobs.loop(private, model, optimizer)
    return jobs.weights(model)


def test_activation_checkpointing():
    wanted = plain()
    for found in launch.run(2, recomputed, "fsdp"):
        same(found, wanted)


def mixed(ranks: int) -> Any:
    """Gathered and computed in bfloat16; shards, sums and noise in float32."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    low = jobs.train("fsdp", dtype=torch.float32, wrapping={"mp_policy": policy})
    exact = jobs.train("fsdp", dtype=torch.float32)
    kept = jobs.train("fsdp", dtype=torch.float32, wrapping={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    return low, exact, kept


def test_mixed_precision_and_offload():
    (low, exact, kept), (one, _, _) = (launch.run(ranks, mixed, ranks)[0] for ranks in (2, 1))
    same(kept, exact, atol=1e-6)
    assert all(value.dtype == torch.float32 for value in low.values())
    distance = max(float((low[name] - exact[name]).abs().max()) for name in exact)
    assert 0 < distance < 0.05  # computed in bfloat16, but not far
    same(low, one, atol=2e-3)  # layers round differently with other batches; `test_traffic` counts the sums' bytes


class Tied(nn.Module):
    """A small language model whose output layer is its embedding, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.places = nn.Embedding(5, 6)
        self.mix = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        out: torch.Tensor = self.out(h + self.mix(h))
        return out


def tied(kind: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(2)
    model: Any = Tied().double()
    if kind == "fsdp":
        fully_shard(model.mix)
        fully_shard(model)
    tokens = torch.randint(11, (48, 5), generator=torch.Generator().manual_seed(3))
    private, optimizer = bind(model, torch.utils.data.TensorDataset(tokens))
    for (batch,) in private.loader:
        each = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none").mean(1)
        each.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return jobs.weights(model)


@pytest.mark.parametrize("ranks", [2])
def test_tied_embeddings(ranks):
    wanted = launch.run(0, tied, "plain")[0]
    for found in launch.run(ranks, tied, "fsdp"):
        same(found, wanted, atol=1e-12)


def part_not_sharded() -> Any:
    """Only some modules are sharded: the rest is replicated, and its sums are added up all the same."""
    from torch.distributed.fsdp import fully_shard

    model = jobs.net()
    fully_shard(model.block)
    fully_shard(model.last)
    private, optimizer = bind(model, max_physical_batch_size=3)
    jobs.loop(private, model, optimizer)
    return jobs.weights(model)


def test_a_model_sharded_in_part():
    wanted = plain()
    for found in launch.run(2, part_not_sharded):
        same(found, wanted)


def test_evaluation_between_steps():
    """Evaluation between steps keeps the root gathered: training goes on with the right weights."""
    wanted = plain()
    for found in launch.run(2, evaluating):
        same(found, wanted)


def evaluating() -> Any:
    model = jobs.wrap(jobs.net(), "fsdp")
    private, optimizer = bind(model)
    average = private.ema(0.5)
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = jobs.weights(model)
        F.cross_entropy(model(x), y).backward()  # outside any batch: for nothing, and nothing is reduced
        with torch.no_grad():
            outputs = model(x)
        with average.applied(), torch.no_grad():
            averaged = model(x)
        if private.steps_taken > 2:
            assert not torch.equal(averaged, outputs)
        with torch.no_grad():
            assert torch.equal(model(x), outputs)
        assert all(torch.equal(value, before[name]) for name, value in jobs.weights(model).items())
    return jobs.weights(model)
