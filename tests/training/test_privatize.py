"""What `privatize` does: the noise and the sums of the plan, and what it returns."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc
from lambdacgd.training import NotPrivateWarning, privatize
from tests.training import oracle
from tests.training.trained import ZETA, same, train

# --- the private loop against its slow twin, plain PyTorch and Opacus ------------------------------------------------


@pytest.mark.parametrize(
    "mechanism",
    [
        lc.Identity(),
        lc.LambdaCGD(0.6),
        lc.LambdaCGD(0.6, normalized=True),
        lc.BISR(3),
        lc.BSR(3),
        lc.BLT(1),
        lc.BandInvMF(3, normalized=True),
    ],
    ids=lambda m: type(m).__name__ + str(getattr(m, "normalized", "")),
)
@pytest.mark.parametrize("bins", [None, "fixed", "fresh"])
def test_equals_one_example_at_a_time(mechanism, bins):
    p = oracle.binned_plan(48, 12, 2, mechanism=mechanism, bins=bins) if bins else oracle.plan(mechanism=mechanism)
    fast, slow = oracle.model(), oracle.model()
    private = train(fast, p)
    effective = private.clipper.max_grad_norm
    optimizer = torch.optim.SGD(slow.parameters(), lr=0.5)
    # The slow twin clips where the fast one does, a little below ζ; its noise is that of ζ.
    noise = oracle.correlated_noise(p, private.run.key, private.run.id, slow, ZETA)
    for t, indices in enumerate(p.sampling.batches(private.run.key, run=private.run.id)):
        x, y = (tensor[indices] for tensor in oracle.data(p.examples).tensors)
        total = oracle.clipped_sum(oracle.per_example(slow, x, y), effective)
        for name, q in slow.named_parameters():
            q.grad = ((total[name].double() + noise[t][name]) / p.batch_size).float()
        optimizer.step()
    assert ZETA / (1 + 2**-9) < effective < ZETA
    same(fast, slow, 2e-4)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_without_noise_and_clipping_is_plain_training(kind):
    p = oracle.plan(epsilon=math.inf)
    fast, plain = oracle.model(dtype=torch.float64), oracle.model(dtype=torch.float64)
    features, labels = oracle.data(p.examples).tensors
    dataset = torch.utils.data.TensorDataset(features.double(), labels)
    options = {"lr": 0.05, "weight_decay": 0.01} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    optimizer = kind(fast.parameters(), **options)
    with pytest.warns(NotPrivateWarning, match="NOT PRIVATE"):
        private = train(fast, p, optimizer=optimizer, dataset=dataset)
    reference = kind(plain.parameters(), **options)
    for indices in p.sampling.batches(private.run.key, run=private.run.id):
        reference.zero_grad()
        F.cross_entropy(plain(features.double()[indices]), labels[indices]).backward()
        reference.step()
    same(fast, plain, 1e-12)
    assert "NOT PRIVATE" in str(private.spent())


def test_clipped_sums_equal_opacus():
    opacus = pytest.importorskip("opacus")
    p = oracle.plan(mechanism=lc.LambdaCGD(0.0))
    module, dataset = oracle.model(), oracle.data(p.examples)
    twin = opacus.GradSampleModule(copy.deepcopy(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, dataset, p, max_grad_norm=ZETA, key=oracle.key())
    theirs = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(twin.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=private.clipper.max_grad_norm,
        expected_batch_size=p.batch_size,
        loss_reduction="mean",
    )
    x, y = next(iter(private.loader))
    F.cross_entropy(module(x), y).backward()
    sums = {name: value.clone() for name, value in private.clipper.sums.items()}
    F.cross_entropy(twin(x), y).backward()
    theirs.clip_and_accumulate()
    for name, q in twin.named_parameters():
        # Opacus divides by norm + 1e-6, and our norms are rounded up.
        torch.testing.assert_close(sums[name.removeprefix("_module.")], q.summed_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 64, None])
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_physical_batch_size_changes_nothing(size, bins):
    p = oracle.binned_plan(60, 15, 2, bins=bins)
    dataset = oracle.data(60)
    runs = []
    for physical in (None, size):
        module = oracle.model(dtype=torch.float64)
        x, y = dataset.tensors
        doubles = torch.utils.data.TensorDataset(x.double(), y)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        private = privatize(
            module, optimizer, doubles, p, max_grad_norm=ZETA, key=oracle.key(), max_physical_batch_size=physical
        )
        private.run._id = "one"  # the same run twice: only a test may do this
        oracle.loop(private, module, optimizer)
        assert private.finished
        runs.append(module)
    same(*runs, 1e-9)


def applied_noise(p, run):
    """The noise that reached the weights, step by step, from the weights alone: every bin's gradient is zero."""
    module = nn.Linear(2000, 1, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    dataset = torch.utils.data.TensorDataset(torch.zeros(p.examples, 2000))
    private = privatize(module, optimizer, dataset, p, max_grad_norm=ZETA, key=oracle.key(), max_physical_batch_size=3)
    private.run._id = run
    trail = [module.weight.detach().clone()]
    for (x,) in private.loader:
        module(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if private.cycle.phase.name == "IDLE":
            trail.append(module.weight.detach().clone())
    private.detach()
    return -torch.cat(trail).diff(dim=0).double().numpy()


@pytest.mark.parametrize(
    "mechanism", [lc.LambdaCGD(0.8), lc.LambdaCGD(0.8, normalized=True), lc.BISR(3), lc.BSR(2)], ids=str
)
@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_covariance_of_the_applied_noise(mechanism, bins):
    """σ²ζ²/B²·C⁻¹C⁻ᵀ for n = 6, from 2 000·8 = 16 000 draws: all 21 entries within 5 standard errors.

    With fresh bins C⁻¹ is two blocks of 3: nothing of one epoch's noise is in the other's. False alarms: 21 entries,
    5 σ each (normal to a good approximation at 16 000 draws): about 1.2e-5.
    """
    p = oracle.binned_plan(12, 4, 2, sigma=0.9, mechanism=mechanism, bins=bins)
    draws = np.concatenate([applied_noise(p, f"run {i}") for i in range(8)], axis=1)
    n, count = draws.shape
    assert (n, count) == (6, 16_000)
    inverse = np.zeros((n, n))
    block = {"fixed": 6, "fresh": 3}[bins]
    coefficients = mechanism.noising(block)
    scales = mechanism.column_scales(block) if mechanism.column_scales(block) is not None else np.ones(block)
    for t in range(n):
        for j, a in enumerate(coefficients[: t % block + 1]):
            inverse[t, t - j] = scales[t % block] * a
    expected = (p.sigma * ZETA / p.batch_size) ** 2 * inverse @ inverse.T
    error = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / count)
    assert (np.abs(draws @ draws.T / count - expected) < 5 * error).all()


@pytest.mark.parametrize("bins", ["fixed", "fresh"])
def test_empty_bins_step_with_noise_alone(bins):
    p = oracle.binned_plan(8, 1, 3, bins=bins)  # 8 bins for 8 examples: about a third stay empty
    module, dataset = oracle.model(), oracle.data(8)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    private = privatize(module, optimizer, dataset, p, max_grad_norm=ZETA, key=oracle.key())
    sizes = [len(i) for i in p.sampling.batches(private.run.key, run=private.run.id)]
    noise = oracle.correlated_noise(p, private.run.key, private.run.id, module, ZETA)
    assert 0 in sizes
    for t, (x, y) in enumerate(private.loader):
        before = oracle.weights(module)
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if sizes[t] == 0:
            assert len(x) == 1
            for name, value in oracle.weights(module).items():
                error = oracle.lattice(p, ZETA) / p.batch_size
                torch.testing.assert_close(
                    before[name] - value, noise[t][name].float() / p.batch_size, atol=error + 1e-6, rtol=1e-4
                )
    assert private.finished


def test_bfloat16_weights_get_gradients_rounded_once():
    p = oracle.plan()
    module = oracle.model().to(torch.bfloat16)
    x, y = oracle.data(p.examples).tensors
    dataset = torch.utils.data.TensorDataset(x.bfloat16(), y)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, dataset, p, max_grad_norm=ZETA, key=oracle.key())
    x, y = next(iter(private.loader))
    F.cross_entropy(module(x), y).backward()
    sums = {name: value.clone() for name, value in private.clipper.sums.items()}
    assert {value.dtype for value in sums.values()} == {torch.float32}
    noise = oracle.correlated_noise(p, private.run.key, private.run.id, module, ZETA)[0]
    optimizer.step()
    for name, q in module.named_parameters():
        assert q.grad.dtype == torch.bfloat16
        exact = (sums[name].double() + noise[name]) / p.batch_size
        error = (q.grad.double() - exact).abs()
        lattice = oracle.lattice(p, ZETA) / p.batch_size
        assert bool((error <= exact.abs() * 2.0**-8 + 1.01 * lattice).all())  # half a unit of bfloat16, and half of Δ


def _cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def _root_of_the_mean(model, batch):
    return (model(batch[0]) - batch[1].unsqueeze(1)).square().mean().sqrt()


def _mixup(items):
    x, y = torch.utils.data.default_collate(items)
    return 0.5 * x + 0.5 * x[torch.randperm(len(x))], y


@pytest.mark.parametrize(
    ("loss", "collate", "says"),
    [
        (None, None, "not checked"),
        (_cross_entropy, None, "checked on a few examples"),
        (_root_of_the_mean, None, "depends on the other examples"),
        (_cross_entropy, _mixup, "depends on the other examples"),
    ],
)
def test_a_loss_is_looked_at_before_the_first_step(loss, collate, says):
    """Through dataset, collate_fn and loss; nothing is added, and no random number is used up."""
    model, dataset = oracle.model(), oracle.data()
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), torch.get_rng_state()
    options = {"max_grad_norm": 1.0, "key": oracle.key(), "loss": loss, "collate_fn": collate}
    if says.startswith("depends"):
        with pytest.raises(lc.ClippingError, match=says):
            privatize(model, optimizer, dataset, oracle.plan(), **options)
        model(torch.randn(3, 5)).sum().backward()  # as it was
        return
    private = privatize(model, optimizer, dataset, oracle.plan(), **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert private.card()["objective"].startswith(says)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in private.loader:
            _cross_entropy(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert private.finished
    told = [warning for warning in caught if "privatize(…, loss=loss)" in str(warning.message)]
    assert len(told) == (1 if loss is None else 0)  # by the first step
    assert all(warning.filename == __file__ for warning in told)


def test_a_loss_that_nothing_could_be_compared_of_is_not_called_checked():
    """One example; or random numbers that depend on the examples, and that eval mode does not leave out."""
    model, dataset = oracle.model(), oracle.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, dataset, oracle.plan(), max_grad_norm=1.0, key=oracle.key())
    few = [dataset[i] for i in range(4)]

    def noisy(model, batch):
        torch.rand(int(batch[0].sum().abs() * 1e4))
        return _cross_entropy(model, batch)

    for loss, items in ((_root_of_the_mean, few[:1]), (noisy, few)):
        private.check_loss(loss, items, torch.utils.data.default_collate)
        assert private.card()["objective"].startswith("not checked")
    private.check_loss(_cross_entropy, few, torch.utils.data.default_collate)
    assert private.card()["objective"].startswith("checked")


# --- what `privatize` returns: the loop as it is, groups, epochs, what was spent, and the way back -------------------


def test_the_loop_is_the_loop():
    """One function, no line of it about privacy, trains from a DataLoader and from the private loader."""

    def train_on(loader, module, optimizer):
        for x, y in loader:
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    module, dataset = oracle.model(), oracle.data()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train_on(torch.utils.data.DataLoader(dataset, batch_size=12), module, optimizer)
    private = privatize(module, optimizer, dataset, oracle.plan(), max_grad_norm=1.0, max_physical_batch_size=8)
    train_on(private.loader, module, optimizer)
    assert private.finished
    private.detach()
    train_on(torch.utils.data.DataLoader(dataset, batch_size=12), module, optimizer)


def test_several_parameter_groups_and_frozen_parts():
    p = oracle.plan()
    module = oracle.model()
    module[0].bias.requires_grad_(False)
    frozen = module[0].bias.detach().clone()
    optimizer = torch.optim.AdamW(
        [
            {"params": module[0].parameters(), "lr": 0.01},
            {"params": module[2].parameters(), "lr": 0.0, "weight_decay": 0.0},
        ]
    )
    before = oracle.weights(module)
    train(module, p, optimizer=optimizer)
    after = oracle.weights(module)
    assert torch.equal(after["0.bias"], frozen)
    assert torch.equal(after["2.weight"], before["2.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_two_private_models_in_one_process_do_not_meet():
    p = oracle.plan()
    alone = oracle.model()
    first = privatize(
        alone, a := torch.optim.SGD(alone.parameters(), lr=0.5), oracle.data(), p, max_grad_norm=1.0, key=oracle.key()
    )
    first.run._id = "one"
    oracle.loop(first, alone, a)
    one, two = oracle.model(), oracle.model(seed=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (one, two)]
    both = [
        privatize(m, o, oracle.data(), p, max_grad_norm=1.0, key=oracle.key())
        for m, o in zip((one, two), optimizers, strict=True)
    ]
    both[0].run._id = "one"
    for batches in zip(both[0].loader, both[1].loader, strict=True):
        for m, o, (x, y) in zip((one, two), optimizers, batches, strict=True):
            F.cross_entropy(m(x), y).backward()
            o.step()
            o.zero_grad()
    same(alone, one, 0)


def test_the_optimizer_and_the_model_come_back_plain():
    p = oracle.plan()
    module, dataset = oracle.model(), oracle.data()
    keys, hooks = list(module.state_dict()), len(module._forward_hooks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, dataset, p, max_grad_norm=1.0)
    assert list(module.state_dict()) == keys
    x, y = next(iter(private.loader))
    F.cross_entropy(module(x), y).backward()
    private.detach()
    private.detach()
    assert all(q.grad is None for q in module.parameters())
    assert len(module._forward_hooks) == hooks
    F.cross_entropy(module(x), y).backward()
    assert all(q.grad is not None for q in module.parameters())
    optimizer.step()
    copy.deepcopy(module)
    with pytest.raises(RuntimeError, match="detached"):
        next(iter(private.loader))


def test_what_was_spent():
    p = oracle.plan(epochs=3, mechanism=lc.LambdaCGD(0.9))
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0)
    assert private.spent().share == 0
    for epoch in private.epochs():
        assert len(epoch) == p.steps_per_epoch
        for x, y in epoch:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    spent = private.spent(after_epochs=True)
    assert (spent.epsilon, spent.delta, spent.certificate) == (p.epsilon, p.delta, p.certificate)
    assert (spent.steps_taken, spent.share, spent.private) == (p.steps_per_epoch, 1 / 3, True)
    assert spent.after_epochs[-1] == p.epsilon
    assert spent.after_epochs[0] < spent.after_epochs[1] < spent.after_epochs[2]
    one = lc.plan(
        48, 12, epochs=1, epsilon=spent.after_epochs[0], delta=1e-5, mechanism=lc.LambdaCGD(0.9), sampling=lc.Cyclic()
    )
    assert one.sigma == pytest.approx(p.sigma, rel=2e-3)


def test_what_fresh_bins_spend_epoch_by_epoch():
    """Epochs compose: ε after e of them is that of a plan for e epochs with the same σ."""
    small = {"batch_size": 12, "delta": 1e-4, "mechanism": lc.LambdaCGD(0.5), "sampling": lc.BallsInBins("fresh")}
    p = lc.plan(48, epochs=3, epsilon=4.0, **small)
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0)
    after = private.spent(after_epochs=True).after_epochs
    assert after[0] < after[1] < after[2] == p.epsilon
    assert lc.plan(48, epochs=2, epsilon=after[1], **small).sigma == pytest.approx(p.sigma, rel=3e-3)


def test_epochs_go_on_where_the_run_stands():
    p = oracle.plan(epochs=2)
    module = oracle.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    private = privatize(module, optimizer, oracle.data(), p, max_grad_norm=1.0)
    numbers = []
    for epoch in private.epochs():
        numbers.append((epoch.number, len(epoch)))
        for i, (x, y) in enumerate(epoch):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 2:
                break
    assert numbers == [(1, 4), (1, 1), (2, 4), (2, 1)]
    assert private.finished


# --- gradients have their parameters' strides: fused optimizers walk both through memory side by side ----------------


def test_a_fused_optimizer_trains_a_channels_last_model():
    """On CUDA torch raises where strides differ; on the CPU it updates the wrong elements in silence."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(memory_format=torch.channels_last)
    p = oracle.plan()
    dataset = TensorDataset(torch.randn(p.examples, 3, 4, 4), torch.randint(3, (p.examples,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    private = privatize(model, optimizer, dataset, p, max_grad_norm=1.0, key=oracle.key())
    for x, y in private.loader:
        before = [q.detach().clone() for q in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for q, old in zip(model.parameters(), before, strict=True):
            assert q.grad.stride() == q.stride()
            torch.testing.assert_close(q.detach(), old - 0.1 * q.grad)
        optimizer.zero_grad()
