"""Models, layers and calls whose examples clipping could miss, mix or count twice are refused, with advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import ClippingError, attach, convert
from tests.clipping.small import mlp, step

pytestmark = pytest.mark.usefixtures("seeded")


def test_second_backward_is_refused() -> None:
    model, x = mlp(), torch.randn(3, 4)
    attach(model)
    loss = model(x).sum(1).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(ClippingError, match="second backward"):
        loss.backward()
    out = model(x)
    out[:, 0].mean().backward(retain_graph=True)
    with pytest.raises(ClippingError, match=r"backward"):
        out[:, 1].mean().backward()
    with pytest.raises(ClippingError, match="create_graph"):
        model(x).square().sum(1).mean().backward(create_graph=True)
    step(model, x)  # and it goes on


def test_a_penalty_on_weights_is_refused() -> None:
    model = mlp()
    attach(model)
    with pytest.raises(ClippingError, match="weight_decay"):
        (model(torch.randn(3, 4)).sum(1).mean() + model[0].weight.square().sum()).backward()


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        (nn.BatchNorm1d(4), "GroupNorm"),
        (nn.BatchNorm1d(4, affine=False, track_running_stats=False).eval(), "GroupNorm"),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "track_running_stats=False"),
        (nn.LSTM(4, 4), "convert"),
        (nn.MultiheadAttention(4, 2), "convert"),
        (nn.DataParallel(nn.Linear(2, 2)), "DistributedDataParallel"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_modules_that_are_refused(module: nn.Module, fix: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), module)
    with pytest.raises(ClippingError, match=fix):
        attach(model)
    assert not any("forward" in m.__dict__ for m in model.modules())
    if fix in ("GroupNorm", "convert", "track_running_stats=False"):
        attach(convert(model)).detach()


def test_frozen_batch_norm_in_eval_mode_is_allowed_until_it_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval().requires_grad_(False)
    attach(model)
    step(model, torch.randn(3, 4))
    model.train()
    with pytest.raises(ClippingError, match="mixes the examples"):
        model(torch.randn(3, 4))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embedding_options_that_depend_on_the_batch(options: dict[str, Any]) -> None:
    model = nn.Embedding(5, 3, **options)
    attach(model)
    with pytest.raises(ClippingError, match=r"max_norm|scale_grad_by_freq"):
        model(torch.tensor([[1, 2]]))


def test_bad_arguments() -> None:
    for options in (
        {"max_grad_norm": 0},
        {"max_grad_norm": 1e-24},
        {"max_grad_norm": math.nan},
        {"loss_reduction": "avg"},
        {"mode": "x"},
    ):
        with pytest.raises(ClippingError):
            attach(mlp(), **options)  # type: ignore[arg-type]
    with pytest.raises(ClippingError, match="no trainable"):
        attach(mlp().requires_grad_(False))
    clipper = attach(mlp())
    with pytest.raises(ClippingError, match=r"\[0, 1\]"):
        clipper.weigh(torch.tensor([2.0]))
    clipper.weigh(torch.ones(2))
    with pytest.raises(ClippingError, match="2 weights"):
        step(clipper.model, torch.randn(3, 4))


def test_freezing_after_attaching_is_refused() -> None:
    model = mlp()
    attach(model)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ClippingError, match="frozen"):
        model(torch.randn(2, 4))


def test_buffers_that_hold_statistics_of_examples_are_refused() -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.average = 0.999 * self.average + 0.001 * x.detach().mean(0)
            return self.layer(x)  # type: ignore[no-any-return]

    model = Averages()
    attach(model)
    for _ in range(2):
        with pytest.raises(ClippingError, match="'average'"):
            step(model, torch.randn(64, 4))


class Late(nn.Module):
    """Writes its buffer from the ``first`` call on, in passes with or without gradients: ``what`` of the examples."""

    def __init__(self, first: int, what: Callable[[Tensor], Tensor], *, grad: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.first, self.what, self.grad, self.calls = first, what, grad, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= self.first and torch.is_grad_enabled() == self.grad:
            self.seen.copy_(self.what(x.detach()))
        return self.layer(x)  # type: ignore[no-any-return]


def test_buffers_that_begin_to_hold_examples_later_are_refused() -> None:
    """After a warm-up, say: the probe of the first batch saw nothing."""
    model = Late(6, lambda x: x.mean(0))
    attach(model)
    while not model.seen.any():
        step(model, torch.randn(6, 4))
    for _ in range(2):
        with pytest.raises(ClippingError, match="'seen'"):
            step(model, torch.randn(6, 4))


def test_buffers_that_begin_to_count_later_are_taken() -> None:
    model = Late(6, lambda x: torch.ones(4))
    attach(model)
    for _ in range(12):
        step(model, torch.randn(6, 4))
        with torch.no_grad():
            model(torch.randn(6, 4))
    # Probed at the first batch and at the one after the first write: a probe is a call more, of fewer examples.
    assert model.calls <= 12 * 2 + 2 * 3


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_buffers_that_only_passes_without_gradients_write_are_refused(quiet: Callable[[], Any]) -> None:
    model = Late(0, lambda x: x[0], grad=False)
    attach(model)
    step(model, torch.randn(6, 4))
    with pytest.raises(ClippingError, match="without gradients wrote the buffer 'seen'"), quiet():
        model(torch.randn(6, 4))
    with pytest.raises(ClippingError, match="without gradients wrote the buffer 'seen'"):  # it still holds them
        step(model, torch.randn(6, 4))


def test_so_are_those_written_before_the_first_batch() -> None:
    """By a check of the data, say, before training: at the first batch no probe has said yet what is written."""
    model = Late(0, lambda x: x[0], grad=False)
    attach(model)
    with torch.no_grad():
        model(torch.randn(6, 4))
    for _ in range(2):
        with pytest.raises(ClippingError, match="without gradients wrote the buffer 'seen'"):
            step(model, torch.randn(6, 4))


def test_batch_norm_in_train_mode_without_gradients_is_refused() -> None:
    """In eval mode it is allowed, and its statistics are fixed; this would have filled them with examples."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()
    model[1].requires_grad_(False)
    attach(model)
    step(model, torch.randn(6, 4))
    with torch.no_grad():
        model(torch.randn(6, 4))
    before = model[1].running_mean.clone()
    with pytest.raises(ClippingError, match="statistics of '1'"), torch.no_grad():
        model.train()(torch.randn(6, 4))
    assert torch.equal(model[1].running_mean, before)


class Centred(nn.Module):
    """A normalisation of one's own, which mixes the examples of a batch in train mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def test_a_model_that_mixes_examples_in_train_mode_only_is_refused() -> None:
    """Loaded models are in eval mode: the first batches may be, too, and the probe saw nothing."""
    model = nn.Sequential(nn.Linear(4, 3), Centred(), nn.Linear(3, 2)).eval()
    attach(model)
    step(model, torch.randn(6, 4))
    model.train()
    for _ in range(2):
        with pytest.raises(ClippingError, match="mixes the examples"):
            step(model, torch.randn(6, 4))
    step(model.eval(), torch.randn(6, 4))


def test_every_mode_is_probed_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    calls = []
    model[2].register_forward_pre_hook(lambda *_: calls.append(model.training))
    attach(model)
    for _ in range(5):
        for mode in (True, False):
            step(model.train(mode), torch.randn(6, 4))
    first = len(calls)
    for _ in range(6):  # passes 11 to 15, and 16: a probe again
        step(model, torch.randn(6, 4))
    assert len(calls) - first == 6 + 2 + 1 + 6 + 2 + 4  # learning; all six; one exchanged; halved; behind others


def test_functional_batch_norm_is_refused() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, self.scale, training=True)

    model = Functional()
    attach(model)
    with pytest.raises(ClippingError, match="mixes the examples"):
        step(model, torch.randn(5, 4))


def test_bags_that_are_not_the_batch_are_refused() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode="sum")
            self.register_buffer("of", torch.randint(9, (6, 3)))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bag(self.of)  # type: ignore[no-any-return]

    model = Bags()
    attach(model)
    with pytest.raises(ClippingError, match="bags are not the examples"):
        step(model, torch.randn(6, 6, 4))  # six bags look like six examples


@pytest.mark.parametrize("gradients", [True, False])
def test_running_statistics_are_not_written_by_any_pass(gradients: bool) -> None:
    """Frozen when clipping was attached; then somebody calls train()."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False).eval(), nn.Linear(4, 2))
    attach(model)
    step(model, torch.randn(6, 4))
    model.train()
    with pytest.raises(ClippingError, match=r"'1' \(BatchNorm1d\)"), torch.set_grad_enabled(gradients):
        model(torch.randn(6, 4))
    assert not model[1].running_mean.any()
