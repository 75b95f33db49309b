"""Loops written for accelerate, in either order of ``prepare`` and ``privatize``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import lambdacgd as lc
from lambdacgd.training import privatize
from tests.training import oracle

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _anew():
    """Accelerate keeps one state for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def train(order, **options):
    model = oracle.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    settings = {"max_grad_norm": 1.0, "max_physical_batch_size": 5, "key": oracle.key()}
    wrapped, accelerated = model, optimizer
    if order == "prepare first":
        wrapped, accelerated, schedule = accelerator.prepare(model, optimizer, schedule)
    private = privatize(wrapped, accelerated, oracle.data(), oracle.plan(), **settings)
    private.run._id = "one"
    if order == "privatize first":
        wrapped, accelerated, schedule = accelerator.prepare(model, optimizer, schedule)
    for x, y in private.loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(F.cross_entropy(wrapped(x), y))
            accelerated.step()
            if private.between_steps:
                schedule.step()
            accelerated.zero_grad()
    private.detach()
    return oracle.weights(model)


def test_the_order_of_prepare_and_privatize_does_not_matter():
    first, second, plain = (train(order) for order in ("privatize first", "prepare first", "no prepare"))
    for name, value in plain.items():
        assert torch.equal(value, first[name])
        assert torch.equal(value, second[name])


def test_bfloat16_by_accelerate_trains():
    found = train("privatize first", mixed_precision="bf16")
    assert all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in found.values())


def test_accumulation_by_accelerate_is_refused():
    """It leaves steps out, and with them logical batches."""
    with pytest.raises(lc.TrainingError, match=r"optimizer\.step\(\) was not called"):
        train("privatize first", gradient_accumulation_steps=2)


def test_resuming_by_accelerate_is_refused(tmp_path):
    """It knows nothing of the run: all of the plan's steps would come again, at their own cost."""

    def begin():
        model = oracle.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        private = privatize(model, optimizer, oracle.data(), oracle.plan(), max_grad_norm=1.0, key=oracle.key())
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, private, *accelerator.prepare(model, optimizer)

    accelerator, private, model, optimizer = begin()
    x, y = next(iter(private.loader))
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    accelerator.save_state(tmp_path)
    private.detach()
    accelerator, private, _, _ = begin()
    with pytest.raises(lc.TrainingError, match=r"private\.resume"):
        accelerator.load_state(tmp_path)
    private.detach()
