"""Bad set-ups are errors on every rank, with advice; no rank is left waiting and none steps alone."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn

import lambdacgd as lc
from lambdacgd.errors import InvalidInput
from lambdacgd.training.distributed.world import World
from tests.faults import fault
from tests.training.distributed import jobs, launch, mistakes

# What the message says on rank 0 and on rank 1.
SAYS = {
    "other_plan": ("load its file on all",) * 2,
    "other_key": ("would not be one run's",) * 2,
    "key_on_the_wrong_rank": ("Give the key on rank 0",) * 2,
    "shorter_dataset": ("failed on rank 1", "the plan is for 48"),
    "shuffled_dataset": ("in one order",) * 2,
    "other_clipping_norm": ("max_grad_norm: 1.0 on rank 0, 2.0 on rank 1",) * 2,
    "other_clipping_mode": ("clipping_mode",) * 2,
    "other_physical_batch": ("max_physical_batch_size",) * 2,
    "other_sharded_modules": ("fully_shard on the same modules",) * 2,
    "other_model": ("Build the same model",) * 2,
    "layers_in_another_order": ("same order",) * 2,
    "other_learning_rate": ("lr of the optimizer's group 0: 0.1 on rank 0, 0.2 on rank 1",) * 2,
    "other_optimizer": ("optimizer: 'SGD' on rank 0, 'AdamW' on rank 1",) * 2,
    "schedules_that_part": ("after step 6: the ranks differ",) * 2,
    "other_kind_of_device": ("use one kind",) * 2,
    "invalid_on_one_rank": ("failed on rank 1", "max_grad_norm"),
    "optimizer_before_sharding": ("then make the optimizer",) * 2,
    "sharding_after_privatize": ("fully_shard was called after privatize",) * 2,
    "sharding_columns": ("Shard dimension 0 alone",) * 2,
    "static_graph": ("Leave them out",) * 2,
    "static_graph_after_privatize": ("Leave them out",) * 2,
    "wrapped_part": ("Wrap the whole model",) * 2,
    "convert_after_wrapping": ("Convert first",) * 2,
    "convert_after_sharding": ("Convert first",) * 2,
    "new_layer_after_wrapping": ("then wrap it",) * 2,
    "clip_a_wrapped_model": ("attach to its .module",) * 2,
    "stray_gradient_of_a_gathered_weight": ("received a gradient that was not clipped",) * 2,
    "unknown_stray_gradient": ("written by something other",) * 2,
    "weights_changed_on_one_rank": ("drifted apart",) * 2,
    "sums_of_different_steps": ("drifted",) * 2,
    "a_rank_at_another_step": ("drifted",) * 2,
    "a_shard_at_another_step": ("drifted",) * 2,
    "save_with_a_key_in_memory": ("lives in memory only",) * 2,
    "captured_step": ("loop over private.loader",) * 2,
    "infinite_sum": ("NaN or an infinity",) * 2,
}


@functools.lru_cache(maxsize=1)
def answers() -> list[list[tuple[str, str] | None]]:
    return launch.run(2, mistakes.commit, list(SAYS), timeout=150, together=60)


def test_every_mistake_is_expected():
    assert list(SAYS) == list(mistakes.MISTAKES)


@pytest.mark.parametrize("name", SAYS)
def test_refused_on_every_rank(name):
    for rank, said in enumerate(SAYS[name]):
        answer = answers()[rank][list(SAYS).index(name)]
        assert answer is not None, f"rank {rank} went on"
        assert said in answer[1], f"rank {rank} says {answer}"


def make_noiser() -> str | None:
    try:
        lc.Noiser(jobs.plan())
    except lc.TrainingError as error:
        return str(error)
    return None


def test_a_noiser_on_every_rank():
    """They would be two runs over the same data."""
    first, second = launch.run(2, make_noiser)
    assert first is None
    assert "Use it on rank 0" in second


@fault(
    "The wrong key, plan, data or number of processes",
    "A job of several processes begins without `init_process_group`.",
    says="Call torch.distributed.init_process_group() before privatize, so that they train one model",
    loses="Nothing: it is refused before the first step.",
)
def test_a_job_of_many_without_a_process_group(monkeypatch, sentence):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match=sentence):
        World.here()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert World.here().size == 1


def test_a_process_group_that_came_after_privatize(monkeypatch):
    model = jobs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = lc.privatize(model, optimizer, jobs.data(), jobs.plan(), max_grad_norm=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: 2)
        with pytest.raises(lc.TrainingError, match="initialised over 2 processes after privatize"):
            iter(private.loader)
    jobs.loop(private, model, optimizer)
    assert private.finished


def test_fsdp1_is_refused():
    from lambdacgd.training.distributed.models import unwrap

    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(InvalidInput, match="fully_shard"):
        unwrap(nn.Sequential(FullyShardedDataParallel()), World())


def claim_of_a_run_for_tests() -> tuple[bool, str, str]:
    model = jobs.net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    key = lc.SecretKey.for_tests(5)
    private = lc.privatize(model, optimizer, jobs.data(torch.float32), jobs.plan(), max_grad_norm=1.0, key=key)
    return private.run.key.is_for_tests, private.card()["claim"], private.run.id


def test_a_key_for_tests_claims_nothing_on_any_rank():
    first, second = launch.run(2, claim_of_a_run_for_tests)
    assert first == second
    assert first[0]
    assert first[1].startswith("none: trained with a key for tests")
