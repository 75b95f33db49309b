"""The result does not depend on how many processes there are, nor on how they hold the model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.training.distributed import jobs, launch

# What every world is asked to do. Each ends with the weights of one process with the same mechanism, bins, optimizer.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "fsdp": {"kind": "fsdp"},
    "unwrapped": {"kind": "plain"},
    "ddp, physical batches": {"kind": "ddp", "physical": 2},
    "fsdp, physical batches": {"kind": "fsdp", "physical": 2},
    "ddp, fresh bins": {"kind": "ddp", "bins": "fresh"},
    "fsdp, fresh bins, AdamW": {"kind": "fsdp", "bins": "fresh", "optimizer": "adamw"},
    "ddp, BLT": {"kind": "ddp", "mechanism": "blt"},
    "fsdp, BLT": {"kind": "fsdp", "mechanism": "blt"},
    "fsdp, ranks without examples": {"kind": "fsdp", "batch": 2, "physical": 1},
    "ddp, ranks without examples": {"kind": "ddp", "batch": 2},
    "fsdp, two views": {"kind": "fsdp", "augmentations": 2, "physical": 2},
    "fsdp, per layer": {"kind": "fsdp", "clipping_mode": "per-layer"},
}
WORLDS = {
    1: ["fsdp", "fsdp, physical batches", "fsdp, BLT"],
    2: list(CASES),
    4: ["ddp", "fsdp", "fsdp, physical batches", "fsdp, ranks without examples", "ddp, ranks without examples"],
}
_ALONE = ("mechanism", "batch", "bins", "optimizer", "clipping_mode", "augmentations")


def alone(case: str) -> dict[str, Any]:
    return {"kind": "plain"} | {key: value for key, value in CASES[case].items() if key in _ALONE}


@functools.lru_cache(maxsize=1)
def expected() -> dict[str, dict[str, torch.Tensor]]:
    """One process, without a process group."""
    return dict(zip(CASES, launch.run(0, jobs.train_many, [alone(case) for case in CASES])[0], strict=True))


@functools.lru_cache(maxsize=4)
def found(size: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Every rank's weights, case by case: one launch for all."""
    ranks = launch.run(size, jobs.train_many, [CASES[case] for case in WORLDS[size]], timeout=240, together=120)
    return {case: [results[k] for results in ranks] for k, case in enumerate(WORLDS[size])}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in WORLDS.items() for case in cases])
def test_same_weights_in_every_world(size, case):
    for rank, weights in enumerate(found(size)[case]):
        assert weights.keys() == expected()[case].keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected()[case][name], rtol=0, atol=1e-13, msg=lambda m: f"{rank} {m}")  # noqa: B023


def test_the_cases_are_different_runs():
    """Mechanisms, bins and optimizers lead elsewhere: equality above is no accident of weights that never moved."""
    start = jobs.net().state_dict()
    ends = [expected()[case] for case in ("ddp", "ddp, fresh bins", "ddp, BLT", "fsdp, fresh bins, AdamW")]
    for k, one in enumerate(ends):
        assert all(float((one["last.weight"] - other["last.weight"]).abs().max()) > 1e-3 for other in ends[:k])
        assert float((one["last.weight"] - start["last.weight"]).abs().max()) > 1e-3


def test_replicas_are_equal_to_the_bit():
    for case in ("ddp", "ddp, BLT"):
        first, *others = found(2)[case]
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_the_whole_grid(size, case):
    """All worlds, also one that divides nothing."""
    (wanted,) = launch.run(0, jobs.train_many, [alone(case)])[0]
    for ranks in launch.run(size, jobs.train_many, [CASES[case]], timeout=240, together=120):
        for name, value in ranks[0].items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-13)
