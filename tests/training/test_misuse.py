"""A loop that is not as it should be, or that something happens to: a clear error, nothing lost or noised twice."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from lambdacgd.clipping import ClippingError
from lambdacgd.clipping.backward import Totals
from lambdacgd.training import TrainingError, privatize
from tests.training import oracle
from tests.training.disturbed import backward, check_same_end, start

# --- a loop that is not as it should be: a clear error each, nothing lost, nothing noised twice ----------------------


def test_a_step_twice():
    private, module, optimizer = start()
    backward(module, next(iter(private.loader)))
    optimizer.step()
    before = oracle.weights(module)
    with pytest.raises(TrainingError, match=r"same gradients are never used twice\. Call it once for each batch"):
        optimizer.step()
    assert all(torch.equal(v, before[n]) for n, v in oracle.weights(module).items())
    assert private.steps_taken == 1
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)


def test_a_step_before_any_batch():
    _, _, optimizer = start()
    with pytest.raises(TrainingError, match=r"no batch was taken.*, not from a DataLoader of your own"):
        optimizer.step()


def test_a_batch_taken_without_stepping():
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    with pytest.raises(TrainingError, match="step\\(\\) was not called"):
        next(batches)
    check_same_end(private, module, optimizer)


def test_zero_grad_forgotten():
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    optimizer.step()
    backward(module, next(batches))
    with pytest.raises(TrainingError, match=r"that of step 1, call optimizer\.zero_grad\(\) after every step"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert private.steps_taken == 2
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)


@pytest.mark.parametrize("physical", [None, 5])
def test_zero_grad_to_none_or_zeros_before_or_after(physical):
    ends = []
    for to_none in (True, False):
        for first in (True, False):
            module = oracle.model()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
            private, module, optimizer = start(module, max_physical_batch_size=physical, optimizer=optimizer)
            for batch in private.loader:
                if first:
                    optimizer.zero_grad(set_to_none=to_none)
                backward(module, batch)
                optimizer.step()
                if not first:
                    optimizer.zero_grad(set_to_none=to_none)
            ends.append(oracle.weights(module))
    for end in ends[1:]:
        assert all(torch.equal(v, end[n]) for n, v in ends[0].items())


def test_gradients_written_by_hand():
    private, module, optimizer = start()
    backward(module, next(iter(private.loader)))
    module[0].weight.grad = torch.ones_like(module[0].weight)
    with pytest.raises(TrainingError, match="written by something other"):
        optimizer.step()


def test_a_second_backward_through_the_same_forward():
    private, module, optimizer = start()
    x, y = next(iter(private.loader))
    loss = F.cross_entropy(module(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(ClippingError, match="second backward"):
        loss.backward()
    check_same_end(private, module, optimizer)


def test_two_forward_and_backward_passes_on_one_batch():
    private, module, optimizer = start()
    batch = next(iter(private.loader))
    backward(module, batch)
    backward(module, batch)
    with pytest.raises(TrainingError, match="called 2 times on one physical batch"):
        optimizer.step()
    assert private.steps_taken == 0
    check_same_end(private, module, optimizer)


def test_a_backward_pass_left_out():
    private, module, optimizer = start(max_physical_batch_size=5)
    batches = iter(private.loader)
    backward(module, next(batches))
    optimizer.step()
    next(batches)
    with pytest.raises(TrainingError, match="backward\\(\\) was not called"):
        optimizer.step()
    check_same_end(private, module, optimizer, max_physical_batch_size=5)


def test_other_data_in_the_backward_pass():
    private, module, optimizer = start()
    backward(module, next(iter(private.loader)))
    backward(module, (torch.randn(5, 5), torch.zeros(5, dtype=torch.long)))
    with pytest.raises(TrainingError, match="covered 17 rows for a batch of 12"):
        optimizer.step()
    check_same_end(private, module, optimizer)


def test_an_item_that_is_not_one_row():
    private, module, optimizer = start(
        collate_fn=lambda items: (
            torch.stack([x for x, _ in items for _ in (0, 1)]),
            torch.tensor([int(y) for _, y in items for _ in (0, 1)]),
        )
    )
    backward(module, next(iter(private.loader)))
    with pytest.raises(TrainingError, match=r"2 times"):
        optimizer.step()


def test_a_closure():
    private, module, optimizer = start()
    batch = next(iter(private.loader))
    backward(module, batch)
    for call in (lambda c: optimizer.step(c), lambda c: optimizer.step(closure=c)):
        with pytest.raises(TrainingError, match="closure"):
            call(lambda: F.cross_entropy(module(batch[0]), batch[1]))
    optimizer.step()
    assert private.steps_taken == 1


def test_a_parameter_frozen_mid_run():
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    optimizer.step()
    optimizer.zero_grad()
    module[0].weight.requires_grad_(False)
    with pytest.raises(ClippingError, match="was frozen"):
        backward(module, next(batches))
    module[0].weight.requires_grad_(True)
    check_same_end(private, module, optimizer)


def test_a_parameter_unfrozen_mid_run():
    module = oracle.model()
    module[0].bias.requires_grad_(False)
    private, module, optimizer = start(module)
    x, y = next(iter(private.loader))
    loss = F.cross_entropy(module(x), y)
    module[0].bias.requires_grad_(True)
    with pytest.raises(ClippingError, match="unfrozen"):
        module(x)
    loss.backward()
    with pytest.raises(TrainingError, match="unfrozen after privatize"):
        optimizer.step()
    assert private.steps_taken == 0


def test_a_shape_changed_mid_run():
    private, module, _ = start()
    x, _ = next(iter(private.loader))
    module[2].weight.data = torch.zeros(4, 6)
    module[2].bias.data = torch.zeros(4)
    with pytest.raises(ClippingError, match="changed its shape"):
        module(x)


def test_a_parameter_group_added_mid_run():
    private, module, optimizer = start()
    backward(module, next(iter(private.loader)))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(TrainingError, match="added or unfrozen"):
        optimizer.step()


def test_a_dataset_that_grows_mid_run():
    class Growing(list):
        pass

    items = Growing(tuple(oracle.data()[i]) for i in range(48))
    private, _, _ = start(dataset=items)
    items.append(items[0])
    with pytest.raises(TrainingError, match="now has 49 examples"):
        next(iter(private.loader))


def test_the_horizon_is_fixed():
    private, module, optimizer = start()
    oracle.loop(private, module, optimizer)
    with pytest.raises(TrainingError, match=r"horizon is fixed.*to train longer"):
        next(iter(private.loader))
    with pytest.raises(TrainingError, match="to train longer, make a plan with more epochs"):
        optimizer.step()


def test_the_position_goes_back_by_a_checkpoint_only():
    private, module, optimizer = start()
    backward(module, next(iter(private.loader)))
    with pytest.raises(TrainingError, match="only a checkpoint leads back"):
        private.stand_at(0)  # in the middle of a batch
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(TrainingError, match="stands after step 1"):
        private.stand_at(0)
    check_same_end(private, module, optimizer)


@pytest.mark.parametrize("what", ["plan", "max_grad_norm", "clipper.max_grad_norm"])
def test_nothing_that_noise_rests_on_changes_mid_run(what):
    private, module, optimizer = start()
    owner, name = (private.clipper, "max_grad_norm") if "." in what else (private, what)
    with pytest.raises(AttributeError, match=name):
        setattr(owner, name, getattr(owner, name))
    check_same_end(private, module, optimizer)


def test_two_iterations_at_once():
    private, module, _ = start()
    one, two = iter(private.loader), iter(private.loader)
    backward(module, next(two))
    with pytest.raises(TrainingError, match="another iteration"):
        next(one)


def test_a_loop_left_in_the_middle_of_a_logical_batch():
    private, module, optimizer = start(max_physical_batch_size=5)
    for i, batch in enumerate(private.loader):
        backward(module, batch)
        optimizer.step()
        optimizer.zero_grad()
        if i == 1:
            break
    assert private.steps_taken == 0
    check_same_end(private, module, optimizer, max_physical_batch_size=5)


def test_an_interrupt_while_a_batch_is_handed_out():
    """What was read and not handed out is read again."""
    private, module, optimizer = start(max_physical_batch_size=5)
    interrupted = mock.patch.object(private, "hand_out", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        next(iter(private.loader))
    check_same_end(private, module, optimizer, max_physical_batch_size=5)


def test_an_earlier_batch_is_none_in_place_of_one_whose_handing_out_was_interrupted():
    private, module, optimizer = start(max_physical_batch_size=4)
    batches = iter(private.loader)
    backward(module, earlier := next(batches))
    optimizer.step()
    interrupted = mock.patch.object(private.clipper, "begin_batch", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        next(batches)
    with pytest.raises(TrainingError, match="handing it out was interrupted"):
        backward(module, earlier)
    with pytest.raises(TrainingError, match="handing it out was interrupted"):
        optimizer.step()
    check_same_end(private, module, optimizer, max_physical_batch_size=4)


def test_a_gradient_left_over_is_no_way_to_the_sums():
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    optimizer.step()  # no zero_grad
    backward(module, next(batches))
    for p in module.parameters():
        p.grad.mul_(1e6)
    with pytest.raises(TrainingError, match=r"call optimizer\.zero_grad\(\) after every step"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)


def test_a_backward_pass_outside_any_batch_counts_for_nothing():
    private, module, optimizer = start()
    batches = iter(private.loader)
    backward(module, next(batches))
    optimizer.step()
    optimizer.zero_grad()
    backward(module, (torch.ones(12, 5), torch.zeros(12, dtype=torch.int64)))
    batch = next(batches)
    with pytest.raises(TrainingError, match=r"backward\(\) was not called"):
        optimizer.step()
    backward(module, batch)
    optimizer.step()
    optimizer.zero_grad()
    check_same_end(private, module, optimizer)


def test_a_deep_copy_of_a_private_model_is_a_plain_model():
    private, module, _ = start(augmentations=2)
    twin = copy.deepcopy(module)
    x, _ = next(iter(private.loader))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert not twin(x).any()
        assert module(x).any()


# --- a batch is what was handed out, whatever goes wrong between that and the step -----------------------------------


def loss(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def begin(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), oracle.plan(), max_grad_norm=0.1, key=oracle.key(), **options)
    return private, optimizer, iter(private.loader)


def clipped(private):
    """The sum of the first step's own examples, computed one by one."""
    own = next(private.private_step.batches(1))
    x, y = (tensor[own] for tensor in oracle.data().tensors)
    return oracle.clipped_sum(oracle.per_example(oracle.model(), x, y), 0.1), len(own)


def assert_own_examples_alone(private, rows):
    expected, own = clipped(private)
    assert rows > own
    for name, total in private.clipper.sums.items():
        torch.testing.assert_close(total, expected[name], rtol=2e-3, atol=1e-5)


def test_padding_weighs_nothing_when_a_backward_pass_is_made_again():
    """Out of memory, caught, and tried again: with weight one an example that fills up would count many times."""
    private, _, batches = begin(module := oracle.model(), pad_batches=40)
    batch = next(batches)
    with (
        mock.patch.object(Totals, "add_pack", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loss(module, batch).backward()
    loss(module, batch).backward()
    assert_own_examples_alone(private, len(batch[0]))


def test_trying_again_does_not_replace_the_parts_that_a_failure_took_along():
    """The sums of both parts are lost. Two passes over the second are as many rows, but each example counts twice."""
    private, module, optimizer = start(max_physical_batch_size=4)
    batches = iter(private.loader)
    while private.cycle.before_last != 4:  # the second part of a logical batch, as large as the first
        batch = next(batches)
        if private.cycle.handed_out == 8:
            break
        backward(module, batch)
        optimizer.step()
        optimizer.zero_grad()
    failing = mock.patch.object(Totals, "finish", side_effect=KeyboardInterrupt)
    with failing, pytest.raises(KeyboardInterrupt):
        backward(module, batch)
    for _ in range(2):
        with pytest.raises(TrainingError, match="was lost"):
            backward(module, batch)
        with pytest.raises(TrainingError, match="was lost"):
            optimizer.step()
    check_same_end(private, module, optimizer, max_physical_batch_size=4)


def test_padding_weighs_nothing_after_a_look_at_the_loss():
    private, _, batches = begin(module := oracle.model(), pad_batches=40)
    batch = next(batches)
    data = oracle.data()
    private.check_loss(loss, [data[i] for i in range(len(batch[0]))], default_collate)
    loss(module, batch).backward()
    assert_own_examples_alone(private, len(batch[0]))


def test_a_forward_pass_of_an_earlier_batch_is_refused():
    """Of a single layer autograd needs no weights, so it does not see that they have changed."""
    private, optimizer, batches = begin(module := nn.Linear(5, 3), pad_batches=40)
    batch = next(batches)
    stale = loss(module, batch)
    loss(module, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    next(batches)
    with pytest.raises(ClippingError, match="saw an earlier one"):
        stale.backward()
    assert private.clipper.examples == 0


def sent(p):
    """The gradient as another process sees it, to which torch.multiprocessing sent it."""
    storage = p.grad.untyped_storage()
    there = torch.UntypedStorage._new_shared_filename_cpu(*storage._share_filename_cpu_())
    return torch.empty(0).set_(there, p.grad.storage_offset(), p.shape, p.stride())


@pytest.mark.parametrize("keep", [lambda p: p.grad, lambda p: p.grad.detach().view(-1), lambda p: p.grad.numpy(), sent])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_somebody_keeps_never_shows_sums_without_noise(keep, to_none):
    """An optimizer in its state, a logger: the next backward pass wrote its sums into what they kept."""
    _, optimizer, batches = begin(module := oracle.model())
    loss(module, next(batches)).backward()
    optimizer.step()
    kept = [keep(p) for p in module.parameters()]
    before = [np.array(x, copy=True) for x in kept]
    if to_none:
        optimizer.zero_grad()
    for _ in range(2):
        loss(module, next(batches)).backward()
        assert all(np.array_equal(x, y) for x, y in zip(kept, before, strict=True))
        optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert all(np.array_equal(x, y) for x, y in zip(kept, before, strict=True))


def test_gradients_that_nobody_keeps_lie_where_they_lay():
    """Buffers stay: nothing is allocated from step to step."""
    private, optimizer, batches = begin(module := oracle.model())
    places = set()
    for _ in range(4):
        loss(module, next(batches)).backward()
        places.add(tuple(private.clipper.totals.memory))
        optimizer.step()
        optimizer.zero_grad()
    assert len(places) == 1


# --- loops over epochs that would never end, or that are left --------------------------------------------------------


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


# --- losses that are scaled, and losses that are not numbers ---------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True], ids=["", "unscaled before"])
def test_a_gradient_scaler(fused, unscaled):
    def sgd(module):
        return torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)

    module = oracle.model()
    private, module, optimizer = start(module, optimizer=sgd(module))
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(private.loader))
    scaler.scale(F.cross_entropy(module(x), y)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    before = oracle.weights(module)
    with pytest.raises(TrainingError, match="GradScaler does not fit"):
        scaler.step(optimizer)
    assert all(torch.equal(v, before[n]) for n, v in oracle.weights(module).items())
    assert private.steps_taken == 0
    oracle.loop(private, module, optimizer)
    other = oracle.model()
    again, other, second = start(other, optimizer=sgd(other))
    oracle.loop(again, other, second)
    for name, value in oracle.weights(module).items():
        assert torch.equal(value, oracle.weights(other)[name]), name


def test_a_gradient_scaler_that_is_off():
    private, module, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = next(iter(private.loader))
    scaler.scale(F.cross_entropy(module(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert private.steps_taken == 1


@pytest.mark.parametrize("fused", [False, True])
def test_scalers_work_again_once_detached(fused):
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)
    asked = vars(optimizer).get("_step_supports_amp_scaling")
    private, module, optimizer = start(module, optimizer=optimizer)
    private.detach()
    assert vars(optimizer).get("_step_supports_amp_scaling") == asked
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(4, oracle.data()[0][0].numel())
    before = oracle.weights(module)
    scaler.scale(module(x).square().sum()).backward()
    scaler.step(optimizer)
    assert any(not torch.equal(v, before[n]) for n, v in oracle.weights(module).items())


def test_a_loss_that_is_nan_for_all_and_for_one():
    private, module, optimizer = start()
    batches = iter(private.loader)
    x, y = next(batches)
    (F.cross_entropy(module(x), y) * float("nan")).backward()
    assert private.clipper.dropped == len(x)
    with pytest.warns(UserWarning, match=f"{len(x)} of the {len(x)} examples of step 1 have no finite gradient"):
        optimizer.step()
    assert all(torch.isfinite(w).all() for w in module.parameters())
    private, module, optimizer = start()
    x, y = next(iter(private.loader))
    assert len(x) > 1
    losses = F.cross_entropy(module(x), y, reduction="none")
    (losses * torch.where(torch.arange(len(x)) == 0, float("nan"), 1.0)).mean().backward()
    with pytest.warns(UserWarning, match=f"1 of the {len(x)} examples of step 1 have no finite gradient"):
        optimizer.step()
    assert all(torch.isfinite(w).all() for w in module.parameters())


def test_a_step_without_the_example_that_is_not_finite_is_that_of_the_others():
    """Sums are formed, and noised, before it is known that they do not stand; then both are done again."""
    ends = []
    for factor in (float("nan"), 0.0):
        private, module, optimizer = start()
        private.run._id = "one"
        batches = iter(private.loader)
        for _ in range(2):
            x, y = next(batches)
            losses = F.cross_entropy(module(x), y, reduction="none")
            (losses * torch.where(torch.arange(len(x)) == 0, factor, 1.0)).mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            optimizer.zero_grad()
        ends.append(oracle.weights(module))
    assert all(torch.equal(w, ends[1][name]) for name, w in ends[0].items())
