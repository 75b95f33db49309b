"""Regenerated noise: what is added, that it is the same wherever and whenever asked, and what is refused."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy
from lambdacgd.noise import BufferedNoise, Layout, LayoutError, NoiseError, NonFiniteSum, RegeneratedNoise

from .helpers import SHAPES, expected, field, released, tensors

LAMBDA = BandedInverse((1.0, -0.9))
# For each kind a recurrence, and the first coefficients of the C⁻¹ that it stands for.
BOTH = {
    RegeneratedNoise: (LAMBDA, (1.0, -0.9)),
    BufferedNoise: (BandedStrategy((1.0, 0.5)), (1.0, -0.5, 0.25, -0.125)),
}


def stage(
    recurrence: BandedInverse = LAMBDA, *, sigma: float = 1.5, clip: float = 2.0, **more: object
) -> RegeneratedNoise:
    terms = {
        "sigma": sigma,
        "clip": clip,
        "horizon": 100,
        "fineness": 40,
    } | more  # a lattice too fine to matter
    return RegeneratedNoise(field(), recurrence, **terms)  # type: ignore[arg-type]


def added(noise: RegeneratedNoise, step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    sums = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    noise.add_(sums, step)
    return sums


@pytest.mark.parametrize("coefficients", [(1.0,), (1.0, -0.9), (1.0, -0.5, -0.125, -0.0625)])
@pytest.mark.parametrize("step", [1, 2, 3, 50])
def test_adds_the_banded_sum(coefficients: tuple[float, ...], step: int) -> None:
    noise = stage(BandedInverse(coefficients))
    before = tensors(dtype=torch.float64)
    sums = {name: value.clone() for name, value in before.items()}
    noise.add_(sums, step)
    bands = [(step - j, a) for j, a in enumerate(coefficients) if step - j >= 1]
    for name, value in sums.items():
        want = before[name].numpy() + 3.0 * expected(noise.field.layout, name, bands)
        assert np.abs(value.numpy() - want).max(initial=0.0) < 1e-11


def test_float32_sums_agree_to_rounding() -> None:
    wide, narrow = added(stage(), 9), added(stage(), 9, torch.float32)
    for name, value in wide.items():
        assert torch.equal(narrow[name], value.to(torch.float32))


def test_column_scales_multiply_the_step() -> None:
    scales = np.linspace(0.5, 2.0, 100)
    plain, scaled = added(stage(), 7), added(stage(column_scales=scales), 7)
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value * scales[6], rtol=0, atol=1e-11)


def test_restarts_cut_the_correlation_and_index_the_scales() -> None:
    scales = (1.0, 2.0, 3.0, 4.0, 5.0)
    noise = stage(BandedInverse((1.0, -0.9, 0.3)), restart_every=5, column_scales=scales)
    for step, bands in (
        (5, [(5, 1.0), (4, -0.9), (3, 0.3)]),
        (6, [(6, 1.0)]),
        (7, [(7, 1.0), (6, -0.9)]),
        (11, [(11, 1.0)]),
    ):
        value = added(noise, step)["big"]
        want = 3.0 * scales[(step - 1) % 5] * expected(noise.field.layout, "big", bands)
        assert np.abs(value.numpy() - want).max() < 3e-11


def test_a_cancelled_share_is_what_was_added() -> None:
    """λCGD: with λ = 1 the sum of all steps' noise is the last z alone: all the rest was taken back exactly."""
    noise = stage(BandedInverse((1.0, -1.0)))
    total = sum(added(noise, step)["linear.weight"] for step in range(1, 21))
    assert isinstance(total, torch.Tensor)
    assert np.abs(total.numpy() - 3.0 * expected(noise.field.layout, "linear.weight", [(20, 1.0)])).max() < 3e-11


def test_joint_law_of_two_steps_has_covariance_minus_lambda() -> None:
    lam, n = 0.8, 1_000_000
    noise = RegeneratedNoise(field({"w": (n,)}, "joint"), BandedInverse((1.0, -lam)), sigma=1.0, clip=1.0, horizon=10)
    x = []
    for step in (4, 5, 6):
        sums = {"w": torch.zeros(n)}
        noise.add_(sums, step)
        x.append(sums["w"].double())
    # Each mean has standard deviation below 3/√n: six of them beyond 5 sd with probability below 4e-6.
    bound = 5 * 3 / math.sqrt(n)
    assert abs((x[0] * x[1]).mean() + lam) < bound
    assert abs((x[1] * x[2]).mean() + lam) < bound
    assert abs((x[0] * x[2]).mean()) < bound
    for value in x:
        assert abs((value**2).mean() - 1 - lam**2) < bound


@given(st.data())
def test_any_split_into_shards_gives_the_same_noise(data: st.DataObject) -> None:
    whole = added(stage(), 3)
    cuts = {}
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        cuts[name] = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=3))})
    for part in range(4):
        shards, offsets = {}, {}
        for name, cut in cuts.items():
            begin, end = (cut[part], cut[part + 1]) if part + 1 < len(cut) else (0, 0)
            shards[name] = torch.zeros(end - begin, dtype=torch.float64)
            offsets[name] = begin
        stage().add_(shards, 3, offsets=offsets)
        for name, shard in shards.items():
            assert torch.equal(shard, whole[name].view(-1)[offsets[name] : offsets[name] + len(shard)])


def test_a_shard_of_rows_keeps_its_shape() -> None:
    whole = added(stage(), 3)
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} | {
        "big": torch.zeros(20, 1000, dtype=torch.float64)
    }
    stage().add_(sums, 3, offsets={"big": 7000})
    assert torch.equal(sums["big"], whole["big"][7:27])


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_non_contiguous_sums(rows: int) -> None:
    shapes = {"w": (rows, 40, 9, 9)}
    noise = RegeneratedNoise(field(shapes), LAMBDA, sigma=1.0, clip=1.0, horizon=5)
    plain = torch.randn(shapes["w"], generator=torch.Generator().manual_seed(3))
    views = [
        plain.clone().to(memory_format=torch.channels_last),
        plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.zeros(rows, 40, 9, 18)[..., ::2].copy_(plain),
    ]
    noise.add_({"w": plain}, 2)
    for view in views:
        stride = view.stride()
        noise.add_({"w": view}, 2)
        assert torch.equal(view, plain)
        assert view.stride() == stride


@pytest.mark.parametrize("kind", [RegeneratedNoise, BufferedNoise])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_lattice_points_leave(kind: type, dtype: torch.dtype) -> None:
    """Sum plus noise as a multiple of Δ, whatever the bits of the sum, and equal to the reference's rounding."""
    scales = np.linspace(0.5, 2.0, 5)
    recurrence, coefficients = BOTH[kind]
    noise = kind(field(), recurrence, sigma=1.5, clip=2.0, horizon=5, column_scales=scales)
    for step in (1, 4):
        sums = tensors(dtype=dtype)
        noise.add_(sums, step)
        scale = 3.0 * scales[step - 1]
        quantum = 2.0 ** (math.frexp(scale)[1] - 10)
        assert 2.0**-10 <= quantum / scale <= 2.0**-9
        for name, value in sums.items():
            assert torch.equal((value.double() / quantum).round() * quantum, value.double())
            bands = [(step - j, a) for j, a in enumerate(coefficients) if step - j >= 1]
            field_noise = expected(noise.field.layout, name, bands)
            want = released(tensors(dtype=dtype)[name].double().numpy(), field_noise, scale, 10)
            assert np.array_equal(value.double().numpy(), want)


@pytest.mark.parametrize("kind", [RegeneratedNoise, BufferedNoise])
@pytest.mark.parametrize(("dtype", "clip"), [(torch.float32, math.inf), (torch.float64, 1.0)])
def test_without_noise_every_bit_of_the_sums_stays(kind: type, dtype: torch.dtype, clip: float) -> None:
    sums, kept = tensors(dtype=dtype), tensors(dtype=dtype)
    kind(field(), BOTH[kind][0], sigma=0.0, clip=clip, horizon=5).add_(sums, 4)
    assert all(torch.equal(sums[name], kept[name]) for name in sums)


def test_a_sum_far_above_the_noise_is_rounded_by_float32_alone() -> None:
    sums = {"w": torch.tensor([3e38, -1e20, 12345678.0, 1e9])}
    RegeneratedNoise(field({"w": (4,)}), LAMBDA, sigma=1e-3, clip=1.0, horizon=5).add_(sums, 1)
    assert torch.equal(sums["w"], torch.tensor([3e38, -1e20, 12345678.0, 1e9]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["scale", "big"])
def test_a_sum_that_is_not_finite_is_refused(name: str, value: float) -> None:
    noise = stage()
    sums = tensors()
    sums[name].view(-1)[-1] = value
    with pytest.raises(NonFiniteSum, match="refused"):
        noise.add_(sums, 1)
    noise.add_(tensors(), 1)  # the flag does not stick
    sums = tensors()
    sums[name].view(-1)[0] = value
    noise.add_(sums, 2, check=False)
    with pytest.raises(NonFiniteSum):
        noise.check()
    noise.check()


def drop(sums: dict[str, torch.Tensor]) -> None:
    del sums["big"]


def extra(sums: dict[str, torch.Tensor]) -> None:
    sums["more"] = torch.zeros(3)


def reshaped(sums: dict[str, torch.Tensor]) -> None:
    sums["big"] = sums["big"].t()


def half(sums: dict[str, torch.Tensor]) -> None:
    sums["big"] = sums["big"].to(torch.bfloat16)


def integer(sums: dict[str, torch.Tensor]) -> None:
    sums["big"] = sums["big"].long()


def sparse(sums: dict[str, torch.Tensor]) -> None:
    sums["big"] = sums["big"].to_sparse()


def expanded(sums: dict[str, torch.Tensor]) -> None:
    sums["big"] = torch.zeros(1, 1000).expand(41, 1000)


def doubled(sums: dict[str, torch.Tensor]) -> None:
    sums["module.big"] = sums["big"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop, LayoutError, "lack 'big'"),
        (extra, LayoutError, "'more', which is not in the layout"),
        (reshaped, LayoutError, r"shape \(1000, 41\), the layout \(41, 1000\)"),
        (half, TypeError, "torch.bfloat16; allowed are torch.float32"),
        (integer, TypeError, "torch.int64"),
        (sparse, TypeError, "to_dense"),
        (expanded, LayoutError, "contiguous"),
        (doubled, LayoutError, "same name"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_untouched(change: object, error: type[Exception], message: str) -> None:
    sums = tensors()
    change(sums)  # type: ignore[operator]
    kept = {name: value.clone() for name, value in sums.items()}
    with pytest.raises(error, match=message):
        stage().add_(sums, 1)
    assert all(torch.equal(sums[n].to_dense(), kept[n].to_dense()) for n in sums)


@pytest.mark.parametrize(
    ("step", "error"), [(0, NoiseError), (101, NoiseError), (-1, NoiseError), (1.0, TypeError), (True, TypeError)]
)
def test_a_step_outside_the_run_is_refused(step: object, error: type[Exception]) -> None:
    sums = tensors()
    with pytest.raises(error, match="step"):
        stage().add_(sums, step)  # type: ignore[arg-type]
    assert all(torch.equal(sums[name], value) for name, value in tensors().items())


@pytest.mark.parametrize(
    "other",
    [
        {"sigma": 2.0},
        {"clip": 1.0},
        {"horizon": 200},
        {"restart_every": 10},
        {"recurrence": BandedInverse((1.0, -0.8))},
        {"column_scales": np.full(100, 2.0)},
    ],
)
def test_one_field_serves_one_set_of_terms(other: dict[str, object]) -> None:
    shared = field()
    first = RegeneratedNoise(shared, LAMBDA, sigma=1.5, clip=2.0, horizon=100)
    first.add_(tensors(), 1)
    terms = {"recurrence": LAMBDA, "sigma": 1.5, "clip": 2.0, "horizon": 100} | other
    second = RegeneratedNoise(shared, **terms)  # type: ignore[arg-type]
    sums = tensors()
    with pytest.raises(NoiseError, match="already in use"):
        second.add_(sums, 1)
    assert all(torch.equal(sums[name], value) for name, value in tensors().items())
    RegeneratedNoise(shared, LAMBDA, sigma=1.5, clip=2.0, horizon=100).add_(sums, 1)  # the same terms are fine


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"sigma": -1.0}, "sigma"),
        ({"sigma": math.nan}, "sigma"),
        ({"sigma": math.inf}, "sigma"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.inf}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"horizon": 0}, "horizon"),
        ({"horizon": 2.5}, "horizon"),
        ({"restart_every": 0}, "restart_every"),
        ({"column_scales": [1.0] * 99}, "99 column scales for 100 steps"),
        ({"column_scales": [0.0] * 100}, "positive"),
        ({"column_scales": [1.0] * 99 + [1e-320]}, "a step's noise"),  # its lattice would vanish on a GPU
        ({"column_scales": [1.0] * 99 + [1e300]}, "a step's noise"),
    ],
)
def test_bad_terms(terms: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage(**terms)  # type: ignore[arg-type]


def test_a_recurrence_with_memory_is_sent_to_the_buffers() -> None:
    with pytest.raises(TypeError, match="BufferedNoise"):
        RegeneratedNoise(field(), BandedStrategy((1.0, 0.5)), sigma=1.0, clip=1.0, horizon=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [-1, 40_001, True, 1.5])
def test_a_shard_must_fit(offset: object) -> None:
    sums = tensors() | {"big": torch.zeros(1000)}
    with pytest.raises(LayoutError, match="does not fit"):
        stage().add_(sums, 1, offsets={"big": offset})  # type: ignore[dict-item]


def test_offsets_of_unknown_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match="offsets"):
        stage().add_(tensors(), 1, offsets={"nothing": 0})


def test_works_beside_autograd_and_other_devices_are_told_apart() -> None:
    layout = Layout.of(SHAPES)
    assert layout.elements == sum(math.prod(s) for s in SHAPES.values())
    sums = tensors()
    for value in sums.values():
        value.requires_grad_(True)
    stage().add_(sums, 1)


@pytest.mark.parametrize("kind", [RegeneratedNoise, BufferedNoise])
def test_a_forked_copy_of_a_run_gets_no_noise(kind: type) -> None:
    noise = kind(field({"w": (3,)}), BOTH[kind][0], sigma=1.0, clip=1.0, horizon=5)
    noise.add_({"w": torch.zeros(3)}, 1)
    child = os.fork()
    if child == 0:
        code, sums = 1, {"w": torch.ones(3)}
        try:
            noise.add_(sums, 2)
        except NoiseError:
            code = 0 if bool((sums["w"] == 1).all()) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    noise.add_({"w": torch.zeros(3)}, 2)
