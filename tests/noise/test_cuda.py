"""The CUDA backend: the same field as the CPU's, one pass, no extra memory. Skipped without a CUDA device."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lambdacgd.keys import SecretKey
from lambdacgd.mechanisms.base import BandedInverse, BandedStrategy, BufferedToeplitz
from lambdacgd.noise import BufferedNoise, LayoutError, NoiseError, NonFiniteSum, RegeneratedNoise

from .helpers import field, fill, law_of_normals, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BANDS = BandedInverse((1.0, -0.9, 0.3))


def on_cuda(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in values.items()}


def stage(run_id: str = "test", recurrence: BandedInverse = BANDS, **more: object) -> RegeneratedNoise:
    terms = {"sigma": 1.5, "clip": 2.0, "horizon": 100, "fineness": 40} | more  # a lattice too fine to matter
    return RegeneratedNoise(field(run_id=run_id), recurrence, **terms)  # type: ignore[arg-type]


def close(ours: torch.Tensor, oracle: torch.Tensor, scale: float = 3.0) -> bool:
    """Within a few float32 roundings of noise of this scale (three terms of up to six scales each)."""
    return ours.numel() == 0 or float((ours.cpu().double() - oracle.double()).abs().max()) < 2.0**-18 * scale


def test_rfc_8439_block_function() -> None:
    from .block_kernel import block_kernel

    # RFC 8439, section 2.3.2: key 00 01 … 1f, counter 1, nonce 00:00:00:09:00:00:00:4a:00:00:00:00.
    key = torch.from_numpy(np.append(np.frombuffer(bytes(range(32)), dtype="<i4"), np.int32(1))).cuda()
    tail = np.frombuffer(bytes.fromhex("01000000 000000090000004a00000000"), dtype="<i4").copy()
    # Appendix A.1, vectors 1 and 2 use the zero key; here their tails under this key only pad the launch.
    tails = torch.from_numpy(np.stack([tail, tail, tail, tail])).cuda()
    out = torch.empty(4, 16, dtype=torch.int32, device="cuda")
    block_kernel[(1,)](key, tails, out, ROWS=4)
    block = out[3].cpu().numpy().astype("<i4").tobytes()
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    zero = torch.tensor([0] * 8 + [1], dtype=torch.int32, device="cuda")
    tails = torch.zeros(2, 4, dtype=torch.int32, device="cuda")
    tails[1, 0] = 1
    block_kernel[(1,)](zero, tails, out[:2], ROWS=2)
    blocks = out[:2].cpu().numpy().astype("<i4").tobytes().hex()
    assert blocks.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")  # A.1, vector 1
    assert blocks[128:].startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed")  # A.1, vector 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 2, 77])
def test_equals_the_cpu(dtype: torch.dtype, step: int) -> None:
    ours, oracle = on_cuda(tensors(dtype=dtype)), tensors(dtype=torch.float64)
    if dtype == torch.float32:
        oracle = {name: value.float().double() for name, value in tensors().items()}
    stage().add_(ours, step)
    stage().add_(oracle, step)
    for name in ours:
        assert close(ours[name], oracle[name]), name


def test_every_normal_is_within_the_bound_of_the_proof() -> None:
    """CPU and CUDA are each within 2⁻⁴⁹r + 2⁻⁵⁰/r of the exact normal, r the radius of its pair; see noise-proof.md."""
    count = 384 << 15
    shape = {"w": (count,)}
    ours = {"w": torch.empty(count, dtype=torch.float64, device="cuda")}
    oracle = {"w": torch.empty(count, dtype=torch.float64)}
    fill(field(shape), ours, 5)
    fill(field(shape), oracle, 5)
    difference = (ours["w"].cpu() - oracle["w"]).view(-1, 2, 192)
    radius = oracle["w"].view(-1, 2, 192).norm(dim=1)
    assert float((difference.norm(dim=1) / (radius + 0.5 / radius)).max()) < 2.0**-48


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpu_and_cuda_release_the_same_numbers(dtype: torch.dtype) -> None:
    """They may differ by one Δ where a sum lies within 2⁻⁴⁵ of a rounding boundary: 10⁻⁴ of such in 10⁷ numbers."""
    count = 10_000_000
    oracle = torch.randn(count, generator=torch.Generator().manual_seed(3), dtype=dtype)
    ours = oracle.cuda()
    noise = {"sigma": 1.5, "clip": 2.0, "horizon": 100}
    for value in (ours, oracle):
        RegeneratedNoise(field({"w": (count,)}), BANDS, **noise).add_({"w": value}, 9)  # type: ignore[arg-type]
    assert torch.equal(ours.cpu(), oracle)


def test_small_values_keep_their_relative_accuracy() -> None:
    shape = {"w": (1 << 24,)}
    ours = {"w": torch.empty(1 << 24, dtype=torch.float64, device="cuda")}
    oracle = {"w": torch.empty(1 << 24, dtype=torch.float64)}
    fill(field(shape), ours, 6)
    fill(field(shape), oracle, 6)
    near = oracle["w"].abs() < 1e-3
    error = (ours["w"].cpu().double()[near] - oracle["w"][near]).abs() / oracle["w"][near].abs()
    assert float(error.max()) < 1e-6
    assert len(ours["w"].cpu()[near].unique()) > 0.99 * int(near.sum())


def test_repeated_calls_give_the_same_bits() -> None:
    first, second = on_cuda(tensors()), on_cuda(tensors())
    stage().add_(first, 8)
    stage().add_(second, 8)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_any_split_into_shards_gives_the_same_bits() -> None:
    whole = on_cuda(tensors())
    stage().add_(whole, 3)
    start = on_cuda(tensors())
    for part in range(5):
        shards, offsets = {}, {}
        for name, value in start.items():
            cut = [value.numel() * k // 5 for k in range(6)]
            shards[name] = value.view(-1)[cut[part] : cut[part + 1]].clone()
            offsets[name] = cut[part]
        stage().add_(shards, 3, offsets=offsets)
        for name, shard in shards.items():
            assert torch.equal(shard, whole[name].view(-1)[offsets[name] : offsets[name] + len(shard)]), name


def test_non_contiguous_sums_give_the_same_bits() -> None:
    shapes = {"w": (64, 40, 9, 9)}
    noise = RegeneratedNoise(field(shapes), BANDS, sigma=1.0, clip=1.0, horizon=5)
    plain = torch.randn(shapes["w"], generator=torch.Generator().manual_seed(3)).cuda()
    views = [
        plain.clone().to(memory_format=torch.channels_last),
        plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.zeros(64, 40, 9, 18, device="cuda")[..., ::2].copy_(plain),
    ]
    noise.add_({"w": plain}, 2)
    for view in views:
        stride = view.stride()
        noise.add_({"w": view}, 2)
        assert torch.equal(view, plain)
        assert view.stride() == stride


def test_mixed_dtypes_restarts_and_column_scales() -> None:
    more = {"restart_every": 10, "column_scales": np.linspace(1.0, 2.0, 10)}
    ours, oracle = on_cuda(tensors()), tensors(dtype=torch.float64)
    ours["big"] = tensors(dtype=torch.float64)["big"].cuda()
    oracle = {name: value.cpu().double() for name, value in ours.items()}
    for step in (11, 12, 29):
        stage(**more).add_(ours, step)
        stage(**more).add_(oracle, step)
    for name in ours:
        assert close(ours[name], oracle[name], scale=18.0), name


@pytest.mark.parametrize("more", [{}, {"restart_every": 10, "column_scales": np.linspace(1.0, 2.0, 10)}])
def test_step_in_device_memory_and_graph_capture(more: dict[str, object]) -> None:
    noise = stage(**more)
    sums = on_cuda(tensors())
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.fill_(1)
        noise.add_(sums, step, check=False)
    torch.cuda.current_stream().wait_stream(side)
    for name, value in tensors().items():
        sums[name].copy_(value)
    step.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step += 1
        noise.add_(sums, step, check=False)
    oracle = {name: value.double() for name, value in tensors().items()}
    for t in range(1, 14):
        graph.replay()
        stage(**more).add_(oracle, t)
    noise.check()
    assert int(step) == 13
    for name in sums:
        assert close(sums[name], oracle[name], scale=60.0), name


def test_a_captured_step_on_tensors_of_its_own() -> None:
    """Tensors born inside the capture have new addresses: the table travels with the graph."""
    noise = stage()
    start = on_cuda(tensors())
    noise.add_({name: value.clone() for name, value in start.items()}, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = {name: value.clone() for name, value in start.items()}
        noise.add_(sums, 5, check=False)
    for _ in range(2):
        graph.replay()
    other = on_cuda(tensors(seed=1))
    noise.add_(other, 6)  # a later launch must not disturb the graph's table
    graph.replay()
    oracle = {name: value.double() for name, value in tensors().items()}
    stage().add_(oracle, 5)
    for name in sums:
        assert close(sums[name], oracle[name]), name


def test_a_graph_keeps_its_table_when_other_tensors_come_later() -> None:
    """The captured launch uses tensors that were noised before; later tensors must not take over their table."""
    noise = stage()
    sums = on_cuda(tensors())
    noise.add_(sums, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        noise.add_(sums, 5, check=False)
    others = [on_cuda(tensors(seed=seed)) for seed in range(1, 9)]
    for other in others:
        noise.add_(other, 6)
    size = next(iter(noise.field._devices.values()))._tables
    assert all(any(table.captured for table in tables) for tables in size.values())  # kept: its memory is not reused
    for name, value in tensors().items():
        sums[name].copy_(value)
    graph.replay()
    oracle = {name: value.double() for name, value in tensors().items()}
    stage().add_(oracle, 5)
    for name in sums:
        assert close(sums[name], oracle[name]), name


def test_tensors_that_changed_in_place_are_seen() -> None:
    noise = stage()
    sums = on_cuda(tensors())
    noise.add_(sums, 1)
    sums["linear.weight"].transpose_(0, 1)  # the same memory, another shape
    with pytest.raises(LayoutError, match=r"shape \(70, 31\)"):
        noise.add_(sums, 2)
    sums["linear.weight"].transpose_(0, 1)
    before = sums["linear.weight"].data_ptr()
    noise.add_(sums, 2)
    sums["linear.weight"].data = sums["linear.weight"].clone()
    assert sums["linear.weight"].data_ptr() != before
    oracle = {name: value.cpu().double() for name, value in sums.items()}
    noise.add_(sums, 3)
    stage().add_(oracle, 3)
    for name in sums:
        assert close(sums[name], oracle[name]), name


def test_nothing_keeps_the_sums_alive() -> None:
    noise = stage()
    sums = on_cuda(tensors())
    noise.add_(sums, 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    size = sum(value.numel() * 4 for value in sums.values())
    del sums
    assert torch.cuda.memory_allocated() <= before - size


def test_a_device_step_outside_the_run_gives_nan_and_an_error() -> None:
    for t in (0, 101):
        sums = on_cuda(tensors())
        with pytest.raises(NoiseError, match="left the run"):
            stage().add_(sums, torch.tensor([t], device="cuda"))
        assert all(bool(value.isnan().all()) for value in sums.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["scale", "big"])
def test_a_sum_that_is_not_finite_is_refused(name: str, value: float) -> None:
    noise = stage()
    sums = on_cuda(tensors())
    sums[name].view(-1)[-1] = value
    with pytest.raises(NonFiniteSum):
        noise.add_(sums, 1)
    noise.add_(on_cuda(tensors()), 1)


def test_moving_tensors_and_many_of_them() -> None:
    shapes = {f"layer{k}": (k % 7 + 1, 13 * (k % 5) + 1) for k in range(600)}
    noise = RegeneratedNoise(field(shapes), BANDS, sigma=1.0, clip=1.0, horizon=50)
    for step in range(1, 12):
        ours = on_cuda(tensors(shapes, seed=step))
        noise.add_(ours, step)
        oracle = {name: value.double() for name, value in tensors(shapes, seed=step).items()}
        wide = RegeneratedNoise(field(shapes), BANDS, sigma=1.0, clip=1.0, horizon=50)
        wide.add_(oracle, step)
        assert all(close(ours[name], oracle[name]) for name in ours), step


def test_extra_memory_is_below_one_mebibyte() -> None:
    shapes = {f"layer{k}": (512, 2048) for k in range(100)}
    noise = RegeneratedNoise(field(shapes), BANDS, sigma=1.0, clip=1.0, horizon=50)
    sums = {name: torch.zeros(shape, device="cuda") for name, shape in shapes.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for step in (1, 2, 3):
        noise.add_(sums, step)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.parametrize(
    "recurrence", [BandedStrategy((1.0, 0.5, 0.375)), BufferedToeplitz((0.99, 0.6), (0.13, 0.3))], ids=str
)
def test_buffered_equals_the_cpu(recurrence: object) -> None:
    terms = {"sigma": 1.5, "clip": 2.0, "horizon": 30, "restart_every": 6}
    ours = BufferedNoise(field(), recurrence, **terms)  # type: ignore[arg-type]
    oracle = BufferedNoise(field(), recurrence, **terms)  # type: ignore[arg-type]
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        one, two = on_cuda(tensors()), tensors()
        ours.add_(one, step)
        oracle.add_(two, step)
        for name in one:
            assert close(one[name], two[name], scale=6.0), (name, step)


def test_the_key_is_data_and_never_compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that Triton keeps on disk holds the key or the sub-key, as bytes, words or text."""
    import subprocess
    import sys

    secret = bytes.fromhex("9e3779b97f4a7c15f39cc0605cedc8341082276bf3a27251f86c6a11d0c18e95")
    program = (
        "import torch\n"
        "from lambdacgd.keys import SecretKey\n"
        "from lambdacgd.noise import Layout, NoiseField\n"
        "from lambdacgd.noise.field import UNIT\n"
        "from lambdacgd.noise.layout import match\n"
        f"key = SecretKey.from_bytes(bytes.fromhex('{secret.hex()}'))\n"
        "f = NoiseField(key, Layout.of({'w': (5000,)}), run_id='cache')\n"
        "z = {'w': torch.empty(5000, device='cuda')}\n"
        "f.apply(match(f.layout, z), UNIT, 1, read=False)\n"
        "print(float(z['w'].std()))\n"
    )
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert 0.9 < float(ran.stdout) < 1.1
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(kept) > 10_000
    for value in (secret, SecretKey.from_bytes(secret).derive("run", "cache", "noise")):
        words = np.frombuffer(value, dtype="<u4")
        for word in words:
            signed = word.view(np.int32)
            for form in (word.tobytes(), str(int(word)).encode(), str(int(signed)).encode(), f"{int(word):x}".encode()):
                assert form not in kept


def test_a_billion_values_have_the_law_of_normals() -> None:
    law_of_normals("cuda", 1 << 27, 8)
