"""Counting what is sent: every collective that a block runs, by kind, in elements that go in."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lambdacgd.training import privatize
from tests.training import oracle
from tests.training.distributed import jobs


class Traffic(TorchDispatchMode):
    """Bytes given to each c10d operation, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname
            # The input is what counts: of reduce_scatter and all_gather the second argument.
            given = args[0] if name.startswith(("allreduce", "broadcast")) else args[1]
            self.calls[name] += 1
            self.bytes[name] += sum(t.numel() * t.element_size() for t in tree_leaves(given) if torch.is_tensor(t))
        return func(*args, **(kwargs or {}))


def measure(kind: str, device: str = "cpu", **sharding: Any) -> Any:
    """(traffic of one ordinary step, of one private step), after warming up, in float32."""
    found = []
    x, y = (t[:4].to(device) for t in jobs.data(torch.float32).tensors)
    for private_too in (False, True):
        model = jobs.wrap(jobs.net(torch.float32).to(device), kind, **sharding)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = None
        batches: Any = iter([(x, y)] * 9)
        if private_too:
            private = privatize(
                model, optimizer, jobs.data(torch.float32), jobs.plan(), max_grad_norm=1.0, key=oracle.key()
            )
            batches = iter(private.loader)
        for _ in range(4):
            bx, by = (t.to(device) for t in next(batches))
            traffic = Traffic()
            with traffic:
                F.cross_entropy(model(bx), by).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((dict(traffic.calls), dict(traffic.bytes)))
        if private is not None:
            private.detach()
    return found


def measure_low(kind: str) -> Any:
    """As `measure`, with a policy that asks for computation and reductions in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = torch.bfloat16
    return measure(kind, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low))


def measure_physical(kind: str) -> Any:
    """(traffic of a logical step in parts of one example, of one in one part)."""
    found = []
    for size in (1, None):
        model = jobs.wrap(jobs.net(torch.float32), kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(
            model,
            optimizer,
            jobs.data(torch.float32),
            jobs.plan(),
            max_grad_norm=1.0,
            key=oracle.key(),
            max_physical_batch_size=size,
        )
        parts, traffic = 0, Traffic()
        for x, y in private.loader:
            counting = traffic if private.steps_taken == 1 else contextlib.nullcontext()
            with counting:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            parts += counting is traffic
            if private.steps_taken == 2:
                break
        assert (parts > 1) == (size == 1)
        found.append((dict(traffic.calls), dict(traffic.bytes)))
        private.detach()
    return found
