"""FSDP2 on one GPU over nccl (a world of one): the noise stage, whole runs, mixed precision, CPU offload, traffic.

Run with ``python -m pytest tests/training/distributed/test_cuda.py -m gpu``.
"""

from __future__ import annotations

import math
import os
import socket

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.noise import NoiseField
from lambdacgd.training import privatize
from tests.noise.helpers import fill
from tests.training import oracle
from tests.training.distributed import jobs, traffic

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def mesh():
    """A process group of one, over nccl."""
    from torch.distributed.device_mesh import init_device_mesh

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def train(kind, mesh, *, dtype=torch.float32, physical=None, mechanism="cgd", optimizer="momentum", **sharding):
    """A whole run on the GPU; returns the weights it ends with, whole, on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = jobs.net(dtype).cuda()
    if kind == "fsdp":
        model = jobs.shard(model, mesh=mesh, **sharding)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    make = {"momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adamw": torch.optim.AdamW}[optimizer]
    chosen = make(model.parameters())
    private = privatize(
        model,
        chosen,
        jobs.data(dtype),
        jobs.plan(mechanism),
        max_grad_norm=1.0,
        max_physical_batch_size=physical,
        key=oracle.key(),
    )
    private.run._id = jobs.RUN
    for x, y in private.loader:
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        chosen.step()
        chosen.zero_grad()
    assert private.finished
    found = {name: value.cpu() for name, value in jobs.weights(model).items()}
    private.detach()
    return found


def close(found, wanted, atol):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wanted[name].double(), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mechanism", ["cgd", "blt"])
def test_a_whole_run_under_fsdp2(mesh, dtype, mechanism):
    plain = train("plain", mesh, dtype=dtype, mechanism=mechanism)
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    close(train("fsdp", mesh, dtype=dtype, mechanism=mechanism), plain, atol)
    close(train("fsdp", mesh, dtype=dtype, mechanism=mechanism, physical=2), plain, atol)


def test_ddp(mesh):
    close(train("ddp", mesh, dtype=torch.float64), train("plain", mesh, dtype=torch.float64), 1e-12)


def test_adamw_under_fsdp2(mesh):
    wanted = train("plain", mesh, dtype=torch.float64, optimizer="adamw")
    close(train("fsdp", mesh, dtype=torch.float64, optimizer="adamw"), wanted, 1e-10)


def test_the_noise_of_shards_is_the_noise_of_the_whole(mesh):
    """z on the device, shard by shard with offsets, against the CPU's whole field."""
    model = jobs.shard(jobs.net(torch.float32).cuda(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, jobs.data(torch.float32), jobs.plan(), max_grad_norm=1.0, key=oracle.key())
    field = NoiseField(oracle.key(), private.private_step.layout, run_id=jobs.RUN)
    whole = {name: torch.zeros(p.shape) for name, p in private.clipper.parameters.items()}
    fill(field, whole, 3)
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            parts, offsets = {}, {}
            for name, p in private.clipper.parameters.items():
                rows = -(-p.shape[0] // ranks)
                part = whole[name][rank * rows : (rank + 1) * rows]
                parts[name] = torch.zeros(part.shape, device="cuda")
                offsets[name] = min(rank * rows, p.shape[0]) * math.prod(p.shape[1:])
            fill(NoiseField(oracle.key(), private.private_step.layout, run_id=jobs.RUN), parts, 3, offsets=offsets)
            for name, part in parts.items():
                rows = -(-whole[name].shape[0] // ranks)
                torch.testing.assert_close(part.cpu(), whole[name][rank * rows : (rank + 1) * rows], rtol=0, atol=1e-5)
    private.detach()


def test_bfloat16_mixed_precision(mesh):
    """Parameters gathered and computed in bfloat16; sums and noise stay in float32, so weights stay close."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    exact, low = train("fsdp", mesh), train("fsdp", mesh, mp_policy=policy)
    assert all(value.dtype == torch.float32 for value in low.values())
    distance = max(float((exact[name] - low[name]).abs().max()) for name in exact)
    assert 0 < distance < 0.05, distance


def test_cpu_offload(mesh):
    from torch.distributed.fsdp import CPUOffloadPolicy

    wanted = train("fsdp", mesh, dtype=torch.float64)
    close(train("fsdp", mesh, dtype=torch.float64, offload_policy=CPUOffloadPolicy()), wanted, 1e-12)


def test_autocast_under_fsdp2(mesh):
    """autocast casts gathered weights layer by layer."""
    model = jobs.shard(jobs.net(torch.float32).cuda(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, jobs.data(torch.float32), jobs.plan(), max_grad_norm=1.0, key=oracle.key())
    for x, y in private.loader:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool(torch.isfinite(value).all()) for value in jobs.weights(model).values())
    private.detach()


def test_checkpoint_folder_of_a_gpu_run(mesh, tmp_path):
    """Saved from a sharded GPU model in the middle, gone on from by a plain model on the same GPU."""
    key = lc.SecretKey.from_bytes(oracle.KEY)
    key.save(tmp_path / "run.key")
    ends = []
    for kind, stop in (("fsdp", 5), ("fsdp", None)):
        model = jobs.net(torch.float64).cuda()
        model = jobs.shard(model, mesh=mesh) if kind == "fsdp" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        private = privatize(
            model,
            optimizer,
            jobs.data(),
            jobs.plan(),
            max_grad_norm=1.0,
            key=lc.SecretKey.load(tmp_path / "run.key"),
        )
        assert private.resume(tmp_path / "checkpoint") == (stop is None)
        for x, y in private.loader:
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if private.steps_taken == stop:
                private.save(tmp_path / "checkpoint")
                break
        ends.append((private.steps_taken, jobs.weights(model)))
        private.detach()
    assert [step for step, _ in ends] == [5, 12]
    assert not torch.equal(ends[0][1]["last.weight"], ends[1][1]["last.weight"])


def test_traffic_of_fsdp2_over_nccl(mesh):
    """In a world of one an ordinary step may send nothing at all; a private one sends no more."""
    (calls, _), (private_calls, _) = traffic.measure("fsdp", device="cuda", mesh=mesh)
    assert private_calls.get("_reduce_scatter_base_", 0) <= calls.get("_reduce_scatter_base_", 0)
    assert private_calls.get("_allgather_base_", 0) <= calls.get("_allgather_base_", 0)
    assert "allreduce_" not in private_calls
