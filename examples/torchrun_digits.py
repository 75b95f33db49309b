"""Private training with several processes, that survives a crash of any of them.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # restarts must not meet the addresses of the attempt before
    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_digits.py --out runs/digits
    torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrun_digits.py --out runs/sharded --sharded

One model is trained on handwritten digits, by all processes together: replicated
(DistributedDataParallel) or sharded (FSDP2). The result does not depend on how many there are, nor on restarts. The
folder must be one that all processes see.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lambdacgd as lc
from lambdacgd import digits


def build(sharded: bool, device: torch.device) -> nn.Module:
    """The same weights on every rank. Shard or wrap first; the optimizer and ``privatize`` come after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).to(device)
    if not sharded:
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepare(out: Path, examples: int) -> lc.SecretKey | None:
    """On rank 0, once: the plan and the key, in files. The other ranks read the plan and never see the key's file.

    Whoever has the key can subtract the noise: it is kept outside of the folder that you copy and publish.
    """
    key = out.with_name(out.name + ".private") / "run.key"
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        key.parent.mkdir(parents=True, exist_ok=True)
        if not (out / "plan.json").exists():
            plan = lc.plan(examples, 64, epochs=3, epsilon=4.0, delta=1e-4, mechanism=lc.LambdaCGD(0.8))
            plan.save(out / "plan.json")
        if not key.exists():
            lc.SecretKey.generate().save(key)
    dist.barrier()
    return lc.SecretKey.load(key) if dist.get_rank() == 0 else None


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over the examples of a batch: an example's gradient must not depend on the others."""
    device = next(model.parameters()).device
    inputs, labels = (tensor.to(device) for tensor in batch)
    return F.cross_entropy(model(inputs), labels)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Every rank evaluates the whole test set: with a sharded model they must compute together."""
    return float((model(inputs).argmax(1) == labels).float().mean())


def main(argv: list[str] | None = None, after_step: Callable[[lc.Private], None] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sharded", action="store_true", help="shard the model (FSDP2) instead of replicating it")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    args = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        # A rank that waits longer than this for another fails, and torchrun starts all of them again.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    train, test = digits.load()
    key = prepare(args.out, len(train))
    model = build(args.sharded, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = lc.Plan.load(args.out / "plan.json")
    private = lc.privatize(model, optimizer, train, plan, max_grad_norm=1.0, key=key, loss=loss_of, earlier=[])
    private.resume(args.out / "checkpoint")

    for epoch in private.epochs():
        for batch in epoch:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if after_step is not None:
                after_step(private)
            if private.steps_taken % args.save_every == 0:
                private.save(args.out / "checkpoint")
        correct = accuracy(model, *(tensor.to(device) for tensor in test.tensors))
        if dist.get_rank() == 0:
            print(f"epoch {epoch.number}: {correct:.1%} of the test digits; {private.spent()}", flush=True)

    if not (args.out / "release").exists():
        private.save(args.out / "checkpoint")  # no run resumes from before an export, and this script may start again
        lc.export(private, args.out / "release")
    private.detach()
    dist.barrier()


if __name__ == "__main__":
    try:
        main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
