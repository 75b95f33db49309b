"""CUDA kernels against their slow twins, and the clip factor's safety in TF32 and bfloat16 on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lambdacgd.clipping import attach, convert, gpu
from lambdacgd.clipping.backward import outer
from reproduce.bench_models import CNN, ViT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SEED = 20


@pytest.fixture(autouse=True)
def _tf32() -> object:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    yield None
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inner", "outward"), [(197, 768, 2304), (64, 96, 32), (5, 24, 40), (256, 128, 128)])
def test_gram_kernel_agrees_with_its_twin(dtype: torch.dtype, tokens: int, inner: int, outward: int) -> None:
    records = []
    for _ in range(3):
        a = torch.randn(4, tokens, inner, device="cuda").to(dtype)
        b = torch.randn(4, tokens, outward, device="cuda").to(dtype)
        records.append(outer("w", a, b, torch.Size((outward, inner))))
    ((members, grams, rounding),) = gpu.gram_norms([(r.a, r.b) for r in records])
    block = gpu.norm_of(grams, rounding)
    assert members == [0, 1, 2]
    assert (block.gamma, block.kappa, block.fold_a) == rounding
    for k, record in enumerate(records):
        slow = record.norm()
        truth = torch.einsum("bti,bto->boi", record.a.double(), record.b.double()).flatten(1).norm(dim=1).square()
        size = slow.trace_a * slow.trace_b / tokens
        for name in ("square", "trace_a", "trace_b", "gram_a", "gram_b"):
            torch.testing.assert_close(
                getattr(block, name)[k], getattr(slow, name), rtol=4e-3, atol=float(size.max()) * 4e-3
            )
        assert ((block.square[k] - truth).abs() <= 4e-3 * size).all()


GEOMETRIES = [  # B, C, O, H, W, kernel, stride, padding, dilation
    (9, 3, 32, 32, 32, (3, 3), (1, 1), (1, 1), (1, 1)),
    (5, 64, 130, 16, 16, (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 5, 7, 9, 11, (3, 2), (2, 1), (1, 0), (1, 2)),
    (1, 2, 3, 12, 4, (5, 5), (1, 2), (2, 2), (1, 1)),
    (4, 256, 64, 8, 8, (1, 1), (2, 2), (0, 0), (1, 1)),
    (6, 1, 8, 12, 12, (5, 5), (1, 1), (0, 0), (1, 1)),
    (6, 1, 8, 12, 12, (3, 3), (2, 2), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("views", [1, 3])
def test_gradients_of_convolutions_agree_with_autograd(
    dtype: torch.dtype, case: tuple, layout: torch.memory_format, views: int
) -> None:
    examples, inner, outward, height, width, kernel, stride, padding, dilation = case
    x = torch.randn(examples * views, inner, height, width, device="cuda").to(dtype).to(memory_format=layout)
    weight = torch.randn(outward, inner, *kernel, device="cuda").double()
    response = torch.randn_like(F.conv2d(x.double(), weight, None, stride, padding, dilation)).to(dtype)
    geometry = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    found = gpu.patch_gradients(x, response, geometry, views)
    assert found is not None
    for i in range(examples):
        rows = slice(views * i, views * (i + 1))
        truth = torch.nn.grad.conv2d_weight(
            x[rows].double(), weight.shape, response[rows].double(), stride, padding, dilation
        ).flatten()
        assert (found[0][i].flatten() - truth).norm() <= 2e-3 * truth.norm()
        square = found[1][:, i].sum()
        assert abs(square - found[0][i].double().square().sum()) <= 1e-5 * square


@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 24, 7), (1, 8, 3, 5, 4), (5, 64, 33, 33), (2, 4)])
def test_group_norm_sums_agree(shape: tuple[int, ...]) -> None:
    x, b = torch.randn(shape, device="cuda") * 3 + 1, torch.randn(shape, device="cuda")
    sizes = (shape[0], shape[1], x[0, 0].numel(), 4)
    _, mean, rstd = torch.native_group_norm(x, None, None, *sizes, 1e-5)
    found = gpu.group_norm_sums(x, b, mean, rstd)
    assert found is not None
    product = (b * F.group_norm(x, 4)).reshape(shape[0], shape[1], -1).sum(2)
    torch.testing.assert_close(found[0], product, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[1], b.reshape(shape[0], shape[1], -1).sum(2), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_weighted_sum_of_all(fresh: bool) -> None:
    gradients, factor = torch.randn(37, 5, 60, device="cuda"), torch.rand(37, device="cuda")
    total = torch.ones(5, 60, device="cuda")
    assert gpu.weighted_sum(total, gradients, factor, None, fresh=fresh)
    wanted = torch.einsum("i,ijk->jk", factor.double(), gradients.double()) + (0 if fresh else 1)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("examples", "size"), [(1, 1), (37, 300), (152, 9216)])
def test_weighted_sums_leave_out_what_is_not_kept(examples: int, size: int, fresh: bool) -> None:
    gradients, factor = torch.randn(examples, size, device="cuda"), torch.rand(examples, device="cuda")
    keep = torch.rand(examples, device="cuda") < 0.7
    factor[~keep], gradients[~keep] = 0.0, float("nan")
    total = torch.full((size,), float("nan"), device="cuda") if fresh else torch.randn(size, device="cuda")
    before = total.double()
    assert gpu.weighted_sum(total, gradients, factor, keep, fresh=fresh)
    wanted = (factor[keep, None].double() * gradients[keep].double()).sum(0) + (0 if fresh else before)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_weighted_sums_of_many_layers_are_those_of_each(fresh: bool, masked: bool) -> None:
    keep = torch.rand(37, device="cuda") < 0.7
    layers = [torch.randn(37, size, device="cuda") for size in (1, 128, 9217)]
    factors = [torch.rand(37, device="cuda").masked_fill(~keep, 0.0) for _ in layers]
    if masked:
        for gradients in layers:
            gradients[~keep] = float("nan")
    totals = [torch.randn_like(gradients[0]) for gradients in layers]
    alone = [total.clone() for total in totals]
    chosen = keep if masked else None
    assert all(map(gpu.may_sum_together, totals, layers, factors))
    gpu.weighted_sums(list(zip(totals, layers, factors, strict=True)), chosen, fresh=fresh)
    for total, gradients, factor in zip(alone, layers, factors, strict=True):
        assert gpu.weighted_sum(total, gradients, factor, chosen, fresh=fresh)
    torch.testing.assert_close(totals, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_sums_agree(dtype: torch.dtype) -> None:
    gradients = [torch.randn(3, t, d, device="cuda").to(dtype) for t, d in ((7, 130), (33, 64), (1, 10), (40, 1))]
    sums = gpu.column_sums(gradients)
    assert sums is not None
    for g, s in zip(gradients, sums, strict=True):
        torch.testing.assert_close(s, g.float().sum(1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 17, 200), (2, 4, 5, 768), (5, 33)])
def test_layer_norm_sums_agree(shape: tuple[int, ...]) -> None:
    x, b = torch.randn(shape, device="cuda") * 3 + 1, torch.randn(shape, device="cuda")
    _, mean, rstd = torch.native_layer_norm(x, shape[-1:], None, None, 1e-5)
    found = gpu.layer_norm_sums(x, b, mean, rstd, shape[-1])
    assert found is not None
    product = (b * F.layer_norm(x, shape[-1:])).reshape(shape[0], -1, shape[-1]).sum(1)
    torch.testing.assert_close(found[0], product, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], b.reshape(shape[0], -1, shape[-1]).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("make", [lambda: ViT(128, 3, 4, patch=4, image=32), CNN], ids=["vit", "cnn"])
def test_no_contribution_exceeds_the_clipping_norm(low: bool, make: Callable[[], nn.Module]) -> None:
    """Every example alone (weights 0 and 1): what is really added has norm at most ζ(1 + tol), and nearly reaches
    it.
    """
    model = make().cuda()
    x, y = torch.randn(8, 3, 32, 32, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    clipper = attach(model, 1e-3)
    for i in range(8):
        weights = torch.zeros(8, device="cuda")
        weights[i] = 1
        clipper.weigh(weights)
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        sums = clipper.take()
        norm = sum(s.double().square().sum() for s in sums.values()) ** 0.5
        assert norm <= 1e-3 * (1 + clipper.sensitivity_tolerance)
        assert norm >= 0.95e-3


@pytest.mark.parametrize("low", [False, True])
def test_convolutions_without_patches_give_the_same_sums(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CNN().cuda()
    x, y = torch.randn(6, 3, 32, 32, device="cuda"), torch.randint(0, 10, (6,), device="cuda")
    results = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(gpu, "kernels", lambda: None)
        clipper = attach(model, 0.5)
        clipper.weigh(torch.tensor([1.0, 1.0, 0.0, 0.5, 1.0, 1.0], device="cuda"))
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        results.append({name: total.clone() for name, total in clipper.take().items()})
        clipper.detach()
    for name, total in results[1].items():
        assert (results[0][name] - total).norm() <= (1e-2 if low else 2e-3) * total.norm(), name


@pytest.mark.parametrize("low", [False, True])
def test_the_sum_agrees_with_float32_on_the_cpu(low: bool) -> None:
    model = ViT(64, 2, 4, patch=4, image=16)
    x, y = torch.randn(6, 3, 16, 16), torch.randint(0, 10, (6,))
    results = []
    for device in ("cpu", "cuda"):
        model.to(device)
        clipper = attach(model, 0.5)
        with torch.autocast("cuda", torch.bfloat16, enabled=low and device == "cuda"):
            loss = F.cross_entropy(model(x.to(device)).float(), y.to(device))
        loss.backward()
        results.append({k: v.cpu() for k, v in clipper.take().items()})
        clipper.detach()
    close = sum((results[0][k] - results[1][k]).square().sum() for k in results[0]) ** 0.5
    size = sum(v.square().sum() for v in results[0].values()) ** 0.5
    assert close <= (0.05 if low else 0.01) * size


class Rows(nn.Module):
    """An LSTM over the rows of an image, one colour after another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, bidirectional=True, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.flatten(1, 2))[0].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [lambda: ViT(64, 2, 4, patch=4, image=32), CNN, lambda: convert(Rows())],
    ids=["vit", "cnn", "lstm"],
)
def test_a_captured_step_gives_the_same_sums(make: Callable[[], nn.Module]) -> None:
    """Forward, backward, clipping and padding by weightless examples inside one CUDA graph, replayed on other data."""
    model = make().cuda()
    x, y = torch.randn(6, 3, 32, 32, device="cuda"), torch.randint(0, 10, (6,), device="cuda")
    weights = torch.ones(6, device="cuda")
    clipper = attach(model, 0.5)

    def step() -> dict[str, torch.Tensor]:
        clipper.weigh(weights)
        F.cross_entropy(model(x), y).backward()
        return clipper.take()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    x[5] = float("nan")
    weights[5] = 0
    graph.replay()
    found = {n: t.clone() for n, t in captured.items()}
    for name, total in step().items():
        torch.testing.assert_close(found[name], total, rtol=0.02, atol=1e-3)


def test_weights_cast_together_give_the_same_outputs() -> None:
    """Weights cast in one launch give what autocast's own casts give."""
    model = ViT(64, 2, 4, patch=4, image=16).cuda()
    x = torch.randn(4, 3, 16, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        plain = model(x)
        clipper = attach(model, 0.5)
        seen = model(x)
    torch.testing.assert_close(seen, plain, rtol=2e-2, atol=2e-2)
    clipper.detach()
