"""What must never happen: a contribution above ζ, a gradient counted twice or missed, a non-finite example that
leaks.
"""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lambdacgd.clipping import ClippingError, attach, check_model, convert
from lambdacgd.clipping.benchmark_models import ViT
from lambdacgd.clipping.factors import clip_factors
from lambdacgd.clipping.layers.embedding import Rows, Tied
from lambdacgd.clipping.records import outer

SEED = 12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().flatten(1).sum(1).mean().backward()


def total_norm(sums: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(s.double().square().sum()) for s in sums.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trial", range(6))
def test_rounded_contributions_stay_below_the_norm(dtype: torch.dtype, trial: int) -> None:
    """Tokens that cancel: Σ_t b_t a_tᵀ is tiny beside its terms, where norms from Gram matrices lose all their digits.

    The contribution is recomputed in float64 from the operands as they are rounded in the sum.
    """
    tokens, inner, width = 64, 40, 200
    a, b = torch.randn(2, tokens // 2, inner), torch.randn(2, tokens // 2, width)
    wobble = 10.0 ** -(trial + 1)
    a = torch.cat([a, a + wobble * torch.randn_like(a)], 1).to(dtype)
    b = torch.cat([b, -b], 1).to(dtype)
    record = outer("w", a, b, torch.Size((width, inner)))
    factors = clip_factors([[record.norm()]], max_grad_norm=1e-3, mode="flat", scale=1.0, weights=None)
    for i in range(2):
        alone = torch.zeros(2)
        alone[i] = factors.weight[0, i]
        total = torch.empty(width, inner)
        record.add(total, alone, None, fresh=True)
        folded = (a[i].float() * alone[i]).to(dtype) if inner < width else a[i]
        true = torch.einsum("ti,to->oi", folded.double(), b[i].double())
        assert float(true.norm()) <= 1e-3 * (1 + 2**-10)
        assert float(total.double().norm()) <= 1e-3 * (1 + 2**-10)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_tied_weights_that_cancel_stay_below_the_norm(scale: float) -> None:
    """The embedding's gradient is minus the output layer's, up to ``scale``: only their inner product sees it."""
    tokens, vocabulary, width = 6, 9, 8
    index = torch.randint(0, vocabulary, (3, tokens))
    inputs, outputs = torch.randn(3, tokens, width), F.one_hot(index, vocabulary).float()
    rows = Rows("w", index, -inputs + scale * torch.randn_like(inputs), torch.Size((vocabulary, width)))
    head = outer("w", inputs, outputs, torch.Size((vocabulary, width)))
    tied = rows.merge(head)
    assert isinstance(tied, Tied)
    factors = clip_factors([[tied.norm()]], max_grad_norm=1e-5, mode="flat", scale=1.0, weights=None)
    exact = tied.materialise(slice(0, 3)).double().flatten(1).norm(dim=1)
    assert (factors.weight[0].double() * exact <= 1e-5 * (1 + 2**-10)).all()
    if scale == 1.0:  # where little cancels, little is given away
        assert (factors.weight[0].double() * exact >= 0.9e-5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_equal_tokens_that_cancel_stay_below_the_norm(dtype: torch.dtype, scale: float) -> None:
    """Each token comes twice with opposite gradients, up to ``scale``; both ways to the norm, padding among them."""
    half = torch.randint(-1, 5, (4, 20))
    b = torch.randn(4, 20, 3)
    b = torch.cat([b, scale * torch.randn_like(b) - b], 1).to(dtype)
    rows = Rows("w", torch.cat([half, half], 1), b, torch.Size((5, 3)))
    exact = rows.materialise(slice(0, 4)).double().flatten(1).norm(dim=1)
    for parts in (rows._from_rows(slice(0, 4)), rows._from_gram(rows.index, b)):
        rounding = 1e-12 if dtype == torch.float64 else 1e-4
        assert torch.allclose(parts[0].double(), exact.square(), rtol=rounding, atol=rounding)
        assert (parts[3] <= parts[1] * (1 + 1e-6)).all()  # Frobenius norms of Gram matrices are below their traces
        assert (parts[4] <= parts[2] * (1 + 1e-6)).all()
    factors = clip_factors([[rows.norm()]], max_grad_norm=1e-5, mode="flat", scale=1.0, weights=None)
    contribution = factors.weight[0].double() * exact
    assert (contribution <= 1e-5 * (1 + 2**-10)).all()
    assert (contribution >= 0.9e-5).all() or scale < 1  # where little cancels, little is given away


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("mode", ["flat", "per-layer", "automatic"])
def test_each_example_alone_stays_below_the_norm(low: bool, mode: Any) -> None:
    model, x, y = ViT(32, 2, 4, patch=4, image=16), torch.randn(5, 3, 16, 16), torch.tensor([0, 1, 2, 3, 4])
    clipper = attach(model, 1e-2, mode=mode)
    for i in range(5):
        clipper.weigh(F.one_hot(torch.tensor(i), 5).float())
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = total_norm(clipper.take())
        assert norm <= 1e-2 * (1 + clipper.sensitivity_tolerance)
        assert norm >= 0.9e-2 or mode == "per-layer"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_and_weightless_examples_contribute_exactly_zero(bad: float) -> None:
    model, x = (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(9, 2)),
        torch.randn(4, 2, 4),
    )
    clipper = attach(model, 0.1)
    step(model, x[[0, 3]])
    wanted = {n: t.clone() for n, t in clipper.take().items()}
    spoiled = x.clone()
    spoiled[1:3] = bad
    step(model, spoiled)
    assert clipper.dropped == 2
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])
    clipper.weigh(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    step(model, spoiled)
    assert clipper.dropped == 0
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])
    clipper.weigh(torch.zeros(4))
    step(model, spoiled)
    assert total_norm(clipper.take()) == 0.0
    clipper.detach()
    clipper = attach(model, 0.1, nonfinite="raise")
    with pytest.raises(ClippingError, match="non-finite"):
        step(model, spoiled)


def test_infinite_norm_is_the_plain_gradient() -> None:
    model, x = mlp(), torch.randn(7, 4)
    step(model, x)
    wanted = {n: 7 * p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    clipper = attach(model, math.inf)
    step(model, x)
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])


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


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) @ self.inner.weight


def test_a_parameter_used_outside_its_module_is_refused() -> None:
    model = Stray()
    attach(model)
    with pytest.raises(ClippingError, match=r"inner.weight.*not clipped"):
        step(model, torch.randn(3, 4))
    assert all(p.grad is None for p in model.parameters())


def test_a_penalty_on_weights_is_refused() -> None:
    model = mlp()
    attach(model)
    with pytest.raises(ClippingError, match="weight_decay"):
        (model(torch.randn(3, 4)).sum(1).mean() + model[0].weight.square().sum()).backward()


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        (nn.BatchNorm1d(4), "GroupNorm"),
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


def test_batch_folded_into_another_dimension_is_refused() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).reshape(-1, 4)).reshape(len(x), -1)

    model = Folded()
    attach(model)
    with pytest.raises(ClippingError, match="batch"):
        step(model, torch.randn(3, 5, 4))
    model.first = nn.Linear(4, 4)
    flat = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 2), nn.Unflatten(0, (3, 5)))
    attach(flat)
    with pytest.raises(ClippingError, match="batch"):
        step(flat, torch.randn(3, 5, 4))


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


def test_time_first_is_refused_even_where_the_sizes_agree() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer((2 * x).transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]

    model = TimeFirst()
    attach(model)
    with pytest.raises(ClippingError, match="batch"):
        step(model, torch.randn(5, 5, 4))


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
    with pytest.raises(ClippingError, match="probe=False"):
        step(fixed, x)
    clipper.detach()
    attach(fixed, probe=False)
    step(fixed, x)


def test_bad_arguments() -> None:
    for options in (
        {"max_grad_norm": 0},
        {"max_grad_norm": math.nan},
        {"loss_reduction": "avg"},
        {"mode": "x"},
        {"nonfinite": "x"},
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


def test_loss_scale_is_taken_out() -> None:
    model, x = mlp(), torch.randn(4, 4)
    clipper = attach(model, 0.1)
    step(model, x)
    wanted = {n: t.clone() for n, t in clipper.take().items()}
    clipper.loss_scale = 1024.0
    (1024.0 * model(x).square().flatten(1).sum(1).mean()).backward()
    for name, total in clipper.take().items():
        torch.testing.assert_close(total, wanted[name])


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

    with pytest.raises(ClippingError, match=r"'layer.weight'"):
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
