"""Loops over epochs that would never end, or that are left."""

from __future__ import annotations

import pytest

from lambdacgd.training import TrainingError
from tests.training.disturbed import backward, check_same_end, start


def test_epochs_passed_over():
    """They would be handed out for ever."""
    private, module, optimizer = start()
    with pytest.raises(TrainingError, match="epoch 1 was passed over"):
        list(private.epochs())
    check_same_end(private, module, optimizer)


def test_the_loader_after_epochs_that_were_left():
    private, module, optimizer = start()
    for epoch in private.epochs():
        backward(module, next(iter(epoch)))
        optimizer.step()
        optimizer.zero_grad()
        break
    for _ in private.epochs():
        break
    check_same_end(private, module, optimizer)


def test_epochs_whose_steps_are_taken_by_other_means():
    """A captured step asks no loader for batches."""
    private, module, optimizer = start()
    numbers = []
    for epoch in private.epochs():
        numbers.append(epoch.number)
        goal = private.plan.steps_per_epoch * epoch.number
        for batch in private.loader.until(goal):
            backward(module, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert numbers == list(range(1, private.plan.epochs + 1))
