"""`check_model` finds what has no per-example gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import ClippingError, Totals, attach, check_model
from tests.clipping.small import mlp

pytestmark = pytest.mark.usefixtures("seeded")


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h - h.mean(0, keepdim=True) if len(x) > 1 else h


def test_check_model_finds_mixing_losses_and_buffers() -> None:
    x = torch.randn(4, 4)

    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1).mean()

    with pytest.raises(ClippingError, match=r"'layer'.*mixes"):
        check_model(Mixing(), x, loss=mean)
    with pytest.raises(ClippingError, match="4 times too large"):
        check_model(mlp(), x, loss=lambda m, b: m(b).square().sum(), loss_reduction="mean")
    check_model(mlp(), x, loss=lambda m, b: m(b).square().sum(), loss_reduction="sum")

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.average += x.detach().mean(0)
            return self.layer(x)  # type: ignore[no-any-return]

    with pytest.raises(ClippingError, match="average"):
        check_model(Counting(), x, loss=mean)


def test_check_model_with_float32_tensors_of_the_loss() -> None:
    """Class weights do not compute with float64 logits: the comparison is then in float32, and as strict in kind."""
    batch, weights = (torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])), torch.tensor([1.0, 2.0, 0.5])

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="none").mean()

    report = check_model(mlp(), batch, loss=weighted)
    assert report.dtype == torch.float32
    assert "float32" in str(report)
    assert max(report.differences.values()) < 1e-5
    with pytest.raises(ClippingError, match="differ"):  # divides by the weights of the batch
        check_model(mlp(), batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weights))
    with pytest.raises(ClippingError, match="5 times too large"):
        check_model(mlp(), batch, loss=lambda m, b: weighted(m, b) * len(b[0]))
    assert check_model(mlp(), batch, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1])).dtype == torch.float64


def test_check_model_with_counters_and_power_iterations() -> None:
    """What training accepts, `check_model` does, too."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.layer(x) / (1 + self.steps)  # type: ignore[no-any-return]

    report = check_model(Counting(), torch.randn(5, 4), loss=lambda m, x: m(x).square().sum(1).mean())
    assert max(report.differences.values()) < 1e-9


def test_check_model_hands_on_errors_of_the_loss() -> None:
    with pytest.raises(RuntimeError, match="size"):
        check_model(mlp(), torch.randn(3, 4), loss=lambda m, b: (m(b) + torch.ones(7)).sum(1).mean())


def test_a_layer_that_mixes_examples_is_named_before_it_fails_on_one():
    """BatchNorm cannot train on one example; torch's words for that say nothing of what to do."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(ClippingError, match=r"BatchNorm1d.*convert\(model\)"):
        check_model(model, torch.randn(4, 8), loss=lambda model, x: model(x).square().mean())


@pytest.mark.parametrize("criterion", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_a_criterion_in_place_of_the_loss(criterion):
    with pytest.raises(ClippingError, match=r"loss\(model, batch\)"):
        check_model(nn.Linear(8, 2), (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)), loss=criterion)


# --- through the loss -------------------------------------------------------------------------------------------------

LOSSES = {
    "mean": (lambda h: h.square().sum(1).mean(), "mean"),
    "sum": (lambda h: h.square().sum(1).sum(), "sum"),
    "root of the mean": (lambda h: h.square().mean().sqrt(), None),
    "square": (lambda h: h.square().mean() ** 2, None),
    "relative": (lambda h: (v := h.square().mean()) / v.detach(), None),
    "contrast": (lambda h: torch.logsumexp(h @ h.t(), 1).mean(), None),
}


def _collate(items: list[Any]) -> Tensor:
    return torch.stack(items)


@pytest.mark.parametrize("name", LOSSES)
def test_check_loss_finds_losses_that_are_no_sum_over_examples(name: str) -> None:
    run, reduction = LOSSES[name]
    model, items = mlp(), [torch.randn(4) for _ in range(5)]
    clipper = attach(model, loss_reduction=reduction or "mean")  # type: ignore[arg-type]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return run(m(x))

    if reduction:
        clipper.check_loss(loss, items, _collate)
        clipper.detach()
        with pytest.raises(ClippingError, match="loss_reduction does not describe"):
            attach(model, loss_reduction="sum" if reduction == "mean" else "mean").check_loss(loss, items, _collate)
    else:
        with pytest.raises(ClippingError, match="depends on the other"):
            clipper.check_loss(loss, items, _collate)
    assert clipper.norms.numel() == 0
    assert not clipper.sums


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids)).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("within", [True, False])
def test_padding_and_a_mean_over_tokens(within: bool) -> None:
    """Each example in a batch of its own has its own mean; together, the longer one counts for more."""
    items = [torch.randint(1, 9, (n,)) for n in (2, 7, 4, 3)]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        values, used = model(ids).square().sum(2), (ids > 0).float()
        return ((values * used).sum(1) / used.sum(1)).mean() if within else (values * used).sum() / used.sum()

    def collate(items: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(items, batch_first=True)

    def loss_and_check() -> None:
        attach(Tagger()).check_loss(loss, items, collate)

    def model_check() -> None:
        check_model(Tagger(), items, loss=loss, collate_fn=collate)

    for check in (loss_and_check, model_check):
        if within:
            check()
        else:
            with pytest.raises(ClippingError, match="tokens"):
                check()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("within", [True, False])
def test_a_collate_fn_that_sorts_by_length(within: bool, dropout: float) -> None:
    """As packed sequences ask for: an example has another row where lengths are exchanged."""
    items = [torch.randint(1, 9, (n,)) for n in (2, 7, 4, 3, 5)]
    model = Tagger()
    model.last = nn.Sequential(nn.Dropout(dropout), model.last)  # type: ignore[assignment]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        values, used = model(ids).square().sum(2), (ids > 0).float()
        return ((values * used).sum(1) / used.sum(1)).mean() if within else (values * used).sum() / used.sum()

    def collate(items: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(sorted(items, key=lambda x: -len(x)), batch_first=True)

    with contextlib.nullcontext() if within else pytest.raises(ClippingError, match="tokens"):
        attach(model).check_loss(loss, items, collate)
    assert model.training


def test_padding_that_every_batch_of_several_has() -> None:
    """Two examples are the longest: only alone are the others without padding, which a maximum takes part in."""
    items = [torch.randint(1, 9, (n,)) for n in (5, 2, 5, 3)]
    model = Tagger()
    nn.init.constant_(model.table.weight, 0.1)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).amax(1).sum(1).mean()  # type: ignore[no-any-return]

    with pytest.raises(ClippingError, match="depends on the other"):
        attach(model).check_loss(loss, items, lambda items: nn.utils.rnn.pad_sequence(items, batch_first=True))


def test_the_loss_of_a_sharded_model_is_not_looked_at() -> None:
    clipper = attach(mlp())
    clipper.keep_sums_in(Totals())  # as for sharded parameters
    with pytest.raises(ClippingError, match="sharded"):
        clipper.check_loss(lambda m, x: m(x).square().sum(1).mean(), [torch.randn(4) for _ in range(4)], _collate)


def test_check_loss_with_dropout_and_random_collating() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    clipper, items = attach(model), [torch.randn(4) for _ in range(4)]
    state = torch.get_rng_state()

    def noisy(items: list[Tensor]) -> Tensor:
        x = torch.stack(items)
        return x + torch.randn_like(x)

    def mixup(items: list[Tensor]) -> Tensor:
        x = torch.stack(items)
        return 0.6 * x + 0.4 * x[torch.randperm(len(x))]

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().sum(1).mean()

    clipper.check_loss(loss, items, noisy)
    with pytest.raises(ClippingError, match="depends on the other"):
        clipper.check_loss(loss, items, mixup)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    model(torch.randn(3, 4)).square().sum(1).mean().backward()
    assert clipper.norms.numel() == 3
