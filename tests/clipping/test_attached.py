"""What an attached model does and keeps: the same sums in any split, no trace of the probe, and the way back."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lambdacgd.clipping import ClippingError, attach
from reproduce.bench_models import ViT
from tests.clipping.small import mlp, step, total_norm

pytestmark = pytest.mark.usefixtures("seeded")


def test_any_split_gives_the_same_sum_and_take_starts_anew() -> None:
    model, x = ViT(16, 1, 2, patch=4, image=8), torch.randn(7, 3, 8, 8)
    clipper = attach(model, 0.3)
    results = []
    for sizes in ([7], [1] * 7, [3, 4]):
        for part in x.split(sizes):
            step(model, part)
        assert clipper.norms.shape == (7,)
        results.append({n: t.clone() for n, t in clipper.take().items()})
    for other in results[1:]:
        for name in other:
            torch.testing.assert_close(other[name], results[0][name], rtol=1e-4, atol=1e-6)
    assert clipper.sums == {}
    assert total_norm(clipper.take()) == 0.0


class Positions(nn.Module):
    """Three tables without a batch dimension, each of as many rows as there are examples."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(9, 4), nn.Embedding(size, 4), nn.Linear(4, 2)
        self.shift, self.mix = nn.Parameter(torch.randn(size, 4)), nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1])) + self.shift.tanh()
        return self.head(h + self.mix @ h).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_size_that_equals_the_batch_by_chance_is_not_taken_for_it(oracle: Any, size: int) -> None:
    oracle(Positions(size), torch.randint(0, 9, (size, size)), size)


class Held:
    """A batch in a container that cannot be cut."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids


@pytest.mark.parametrize("second", [True, False])
def test_a_size_that_equals_the_batch_where_the_batch_is_not_first_or_in_an_object(second: bool) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Positions(5)

        def forward(self, x: Any) -> Tensor:
            return self.net(x.t() if second else x.ids)  # type: ignore[no-any-return]

    model, ids = Around(), torch.randint(0, 9, (5, 5))
    expected = []
    for i in range(5):
        loss = model.net(ids[i : i + 1]).square().sum()
        expected.append(torch.autograd.grad(loss, list(model.parameters())))
    clipper = attach(model, math.inf, batch_of=lambda args, _: args[0].shape[1] if second else len(args[0].ids))
    step(model, ids.t() if second else Held(ids))  # type: ignore[arg-type]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in e)) for e in expected]
    torch.testing.assert_close(clipper.norms, torch.tensor(norms), rtol=1e-3, atol=1e-3)


def test_the_probe_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = torch.randn(6, 4)
    torch.manual_seed(3)
    plain = model(x)
    attach(model)
    torch.manual_seed(3)
    torch.testing.assert_close(model(x), plain)

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(6, 4))  # type: ignore[no-any-return]

    fixed = Fixed()
    clipper = attach(fixed)
    with pytest.raises(ClippingError, match="allow_probe"):
        step(fixed, x)
    clipper.detach()
    attach(fixed).allow_probe(False)
    step(fixed, x)


def test_detach_gives_the_model_back() -> None:
    model, x = mlp(), torch.randn(3, 4)
    keys, before = list(model.state_dict()), model(x)
    clipper = attach(model)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(model(x), before)
    step(model, x)
    clipper.detach()
    clipper.detach()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    step(twin, x)
    assert all(p.grad is not None for p in twin.parameters())


def test_checkpointing() -> None:
    class Checked(nn.Module):
        def __init__(self, reentrant: bool | None) -> None:
            super().__init__()
            self.first, self.block, self.reentrant = (
                nn.Linear(4, 6),
                nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()),
                reentrant,
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if self.reentrant is None:
                return self.block(h)  # type: ignore[no-any-return]
            return checkpoint(self.block, h, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    model, x = Checked(None), torch.randn(5, 3, 4)
    clipper = attach(model, 0.1)
    step(model, x)
    wanted = {n: t.clone() for n, t in clipper.take().items()}
    model.reentrant = False
    step(model, x)
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])
    model.reentrant = True
    with pytest.raises(ClippingError, match="use_reentrant=False"):
        step(model, x)


def test_compiled_models_agree() -> None:
    model, x = ViT(16, 1, 2, patch=4, image=8), torch.randn(3, 3, 8, 8)
    clipper = attach(model, 0.1)
    step(model, x)
    wanted = {n: t.clone() for n, t in clipper.take().items()}
    step(torch.compile(model, backend="eager"), x)  # type: ignore[arg-type]
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])


def test_the_probe_takes_its_changes_of_buffers_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mask = torch.ones(len(x))
            return self.layer(x)  # type: ignore[no-any-return]

    model, x = Counts(), torch.randn(9, 4)
    plain = copy.deepcopy(model)
    plain(x)
    clipper = attach(model)
    step(model, x)
    clipper.detach()
    for name, value in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], value)


def test_a_forward_pass_that_fails_after_the_probe_is_probed_again() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x)  # type: ignore[no-any-return]

    model, x = Counts(), torch.randn(9, 4)
    clipper = attach(model)
    interrupt = model.register_forward_hook(lambda m, args, y: y / (len(y) < 9 or 1 // 0))  # the probe has eight
    with pytest.raises(ZeroDivisionError):
        step(model, x)
    interrupt.remove()
    step(model, x)
    assert int(model.calls) == 2
    assert clipper.norms.numel() == 9


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(3, 4, 2)], ids=["linear", "conv"])
def test_a_forward_of_somebodys_own_on_a_layer_is_followed(layer: nn.Module) -> None:
    """Libraries put forwards on instances (accelerate's hooks, say); the layer's rule would compute something else."""
    original = layer.forward
    layer.forward = lambda x: 3 * original(2 * x)  # type: ignore[method-assign]
    model, x = nn.Sequential(layer), torch.randn(5, 3, 4)
    expected = []
    for i in range(5):
        model.zero_grad()
        step(model, x[i : i + 1])
        expected.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    clipper = attach(model, math.inf)
    step(model, x)
    for k, total in enumerate(clipper.take().values()):
        torch.testing.assert_close(total, sum(e[k] for e in expected), rtol=1e-4, atol=1e-4)


def test_a_deep_copy_of_an_attached_model_is_a_plain_model() -> None:
    model, x = mlp(), torch.randn(5, 4)
    clipper = attach(model)
    step(model, x)
    norms = clipper.norms.numel()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert not twin(x).any(), "a copy computes with its own weights"
    step(twin, x)
    assert clipper.norms.numel() == norms, "and nothing of it is clipped and added"
    assert all(p.grad is not None for p in twin.parameters())
    clipper.detach()
    assert "forward" not in model[0].__dict__


def test_nothing_of_a_pass_stays_behind_not_even_of_the_probe() -> None:
    """Activations are freed without the garbage collector, and no node ties the next pass to this one's stream."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))  # Tanh keeps its own output
    clipper = attach(model, 1.0)
    outputs: list[weakref.ref[Tensor]] = []
    model[1].register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out)))
    anchor = torch.autograd.graph.get_gradient_edge
    gc.disable()
    try:
        for _ in range(2):
            loss = model(torch.randn(5, 3)).square().mean()
            anchor(clipper.anchor).node.metadata["seen"] = True
            loss.backward()
            del loss
            clipper.take()
            assert not anchor(clipper.anchor).node.metadata
    finally:
        gc.enable()
    assert len(outputs) > 2 + 2 * 3  # the probes' are among them
    assert all(output() is None for output in outputs)


def test_layers_left_out_at_random_take_no_more_memory_with_every_batch() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.used = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), range(6)

        def forward(self, x: Tensor) -> Tensor:
            for k in self.used:
                x = x + self.layers[k](x)
            return x

    model, x = Drops(), torch.randn(5, 4)
    subsets = [[k for k in range(6) if n >> k & 1] for n in range(1, 64)]
    clipper = attach(model, 0.1)
    clipper.allow_probe(False)
    seen = []
    for subset in subsets:
        model.used = subset  # type: ignore[assignment]
        step(model, x)
        seen.append({n: t.clone() for n, t in clipper.take().items()})
    kept = [
        *clipper.totals._buffers.values(),
        *(whole for whole, _ in clipper.totals._packs.values()),
    ]
    assert sum(t.numel() for t in kept) <= 5 * sum(p.numel() for p in model.parameters())
    for subset, found in list(zip(subsets, seen, strict=True))[-5:]:  # and the sums are those of a clipper of their own
        model.used = subset  # type: ignore[assignment]
        clipper.detach()
        clipper = attach(model, 0.1)
        clipper.allow_probe(False)
        step(model, x)
        for name, total in clipper.take().items():
            torch.testing.assert_close(total, found[name])
    for subset in (subsets[-1], subsets[20], subsets[41]):  # parts of one sum
        model.used = subset  # type: ignore[assignment]
        step(model, x)
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, seen[-1][name] + seen[20][name] + seen[41][name])


@pytest.mark.parametrize(("written", "norm"), [(5.0, 0.1), (0.5, 0.05), (-3.0, 0.0), (math.nan, 0.0)])
def test_weights_written_to_after_they_were_given_stay_within_one(written: float, norm: float) -> None:
    model, x = mlp(), torch.randn(4, 4)
    clipper = attach(model, 0.1)
    step(model, x)
    clipper.take()
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0])
    clipper.weigh(weights)
    weights[0] = written
    step(model, x)
    assert total_norm(clipper.take()) == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_the_gradient_of_an_example_is_the_mean_over_its_views(loss_reduction: Any) -> None:
    """A loss that adds rows up has a term for every view; one that takes the mean does not grow with them."""
    model, x = mlp(), torch.randn(3, 4)
    sums = []
    for views in (1, 2):
        clipper = attach(model, 0.5, loss_reduction=loss_reduction)
        clipper.expect_views(views)
        loss = model(x.repeat_interleave(views, 0)).square().sum(1)
        (loss.mean() if loss_reduction == "mean" else loss.sum()).backward()
        sums.append({name: total.clone() for name, total in clipper.take().items()})
        clipper.detach()
    for name, total in sums[0].items():
        torch.testing.assert_close(sums[1][name], total)


def test_saving_an_attached_model_says_what_to_save_instead() -> None:
    """It was a bare PicklingError about a function of ours."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    clipper = attach(model, 1.0)
    for what in (model, model[0], {"model": model}):
        with pytest.raises(ClippingError, match=r"Save model\.state_dict\(\), or use private\.save or lc\.export"):
            torch.save(what, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())
    copied = copy.deepcopy(model)
    assert torch.equal(copied[0].weight, model[0].weight)
    clipper.detach()
    torch.save(model, io.BytesIO())
