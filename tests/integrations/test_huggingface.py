"""The Trainer trains what the loop by hand trains."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.integrations import hf

import lambdacgd as lc

KINDS = ["bert", "gpt2", "llama"]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_equals_the_loop_by_hand(kind, lora, tmp_path):
    """Same key, run and initial weights; other physical batches; a loss written out example by example."""
    key = lc.SecretKey.from_bytes(bytes(range(32)))
    trainer = hf.make_trainer(kind, tmp_path / "out", lora=lora, key=key)
    start = hf.weights(trainer.model)
    hf.fix_id(trainer, "one")
    result = trainer.train()
    assert result.global_step == trainer.plan.steps == trainer.private.steps_taken
    twin = hf.make_model(kind, lora=lora)
    hf.assert_same(start, hf.weights(twin))
    hf.train_by_hand(twin, kind, trainer.plan, key, "one")
    hf.assert_same(hf.weights(trainer.model), hf.weights(twin), tolerance=2e-5)
    moved = [name for name, value in hf.weights(trainer.model).items() if not torch.equal(value, start[name])]
    assert moved
    assert not lora or all("lora_" in name or "classifier" in name for name in moved)
