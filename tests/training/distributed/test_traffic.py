"""A private step sends what an ordinary one sends: nothing for the noise, nothing for physical batches."""

from __future__ import annotations

import pytest

from tests.training.distributed import launch, traffic

PARAMETERS = 5 + (7 * 5 + 7) + (7 + 7) + (6 * 7) + (7 * 6 + 7) + (3 * 7 + 3)
TAG = 2 * 4  # two float32 numbers in a bucket, which say its step


def test_ddp_sends_each_parameter_once():
    (ordinary, private) = launch.run(2, traffic.measure, "ddp")[0]
    assert ordinary == ({"allreduce_": 1}, {"allreduce_": 4 * PARAMETERS})
    assert private == ({"allreduce_": 1}, {"allreduce_": 4 * PARAMETERS + TAG})


@pytest.mark.parametrize("ranks", [2])
def test_fsdp_gathers_and_scatters_as_without_privacy(ranks):
    (calls, sent), (private_calls, private_sent) = launch.run(ranks, traffic.measure, "fsdp")[0]
    assert private_calls == calls
    groups = calls["_reduce_scatter_base_"]
    assert groups == 3  # block, last, and the rest
    assert private_sent["_allgather_base_"] == sent["_allgather_base_"]
    assert private_sent["_reduce_scatter_base_"] == sent["_reduce_scatter_base_"] + groups * ranks * TAG


def test_sums_travel_in_float32_whatever_the_policy_says():
    (_, sent), (_, low) = launch.run(2, traffic.measure_low, "fsdp")[0]
    (_, private) = launch.run(2, traffic.measure, "fsdp")[0][1]
    assert sent["_reduce_scatter_base_"] < low["_reduce_scatter_base_"]  # ordinary training follows it
    assert low["_reduce_scatter_base_"] == private["_reduce_scatter_base_"]
    assert low["_allgather_base_"] == sent["_allgather_base_"]


def test_physical_batches_reduce_once():
    for kind in ("ddp", "fsdp"):
        split, whole = launch.run(2, traffic.measure_physical, kind)[0]
        reductions = "allreduce_" if kind == "ddp" else "_reduce_scatter_base_"
        assert split[0][reductions] == whole[0][reductions]
        assert split[1][reductions] == whole[1][reductions]
