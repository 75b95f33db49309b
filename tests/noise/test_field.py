"""The field as a format: golden values, its law, and what does not change it."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import time

import numpy as np
import pytest
import torch
from scipy import special, stats

from lambdacgd.keys import SecretKey
from lambdacgd.noise import Layout, NoiseField
from lambdacgd.noise import field as noise_field
from lambdacgd.noise.layout import FORMAT, Combination, Entry, match
from lambdacgd.noise.reference import normals, radii

from .helpers import KEY, SHAPES, SUBKEY, expected, field, fill, law_of_normals, tensors

# The field is a format: these numbers change only together with its name, which checkpoints hold. Key
# bytes(range(32)), run id "test". They were computed in 300-bit arithmetic (python-flint) from OpenSSL's keystream. The
# last four take bits from a second block.
GOLDEN = {
    ("big", 1, 0): -0.5938333461148178,
    ("big", 1, 1): 1.2834218394408023,
    ("big", 1, 31): 0.09600916900518422,
    ("big", 1, 32): -0.6898507547568418,
    ("big", 1, 300): -0.9538263495305931,
    ("big", 2, 40999): 0.8420734573772104,
    ("conv.bias", 1, 5): 0.12089808153653718,
    ("linear.weight", 3, 2169): 0.8125774791179126,
    ("scale", 4294967301, 0): -1.2183770007805095,
    ("big", 1, 1343): -4.961783475736749,
    ("big", 1, 1535): 2.2547852569732956,
    ("big", 1, 23524): -0.0017117107081506052,
    ("big", 1, 23716): 0.0008611931570583453,
}


def test_golden_values() -> None:
    assert FORMAT == "2.1"
    layout = Layout.of(SHAPES)
    for (name, step, index), value in GOLDEN.items():
        assert normals(SUBKEY, layout.by_name[name], step, np.array([index]))[0] == pytest.approx(value, abs=1e-13)


def test_cpu_equals_the_reference_for_every_tensor() -> None:
    f = field()
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2.0**-24 * 8)):
        z = tensors(dtype=dtype)
        fill(f, z, 7)
        for name, value in z.items():
            error = np.abs(value.double().numpy() - expected(f.layout, name, [(7, 1.0)]))
            assert error.size == 0 or error.max() <= tolerance


def test_a_block_run_across_the_32_bit_counter() -> None:
    entry = Entry("far", (4096,), (1 << 32) - 64)
    ours = noise_field.combined(SUBKEY, entry.first_block // 32, 4, [(5, 1.0)], 1.0)
    assert np.abs(ours.numpy() - normals(SUBKEY, entry, 5, np.arange(1536))).max() < 1e-13


def test_large_steps_and_blocks_do_not_repeat() -> None:
    index = np.arange(384)
    seen = [
        normals(SUBKEY, Entry("a", (384,), block), step, index)
        for block in (0, 32, 1 << 32, 1 << 40)
        for step in (1, 2, 1 << 32, (1 << 32) + 1)
    ]
    assert len({row.tobytes() for row in seen}) == 16
    assert len(np.unique(np.concatenate(seen))) == 16 * 384


def test_the_tail_reaches_beyond_fourteen_sigma() -> None:
    """The least u is half of 2⁻¹⁶⁰; the largest leaves a radius of 2⁻⁸⁰."""
    low, high = np.full((1, 16), 1 << 31, np.uint32), np.full((1, 16), (1 << 31) - 1, np.uint32)
    more = np.zeros((1, 6, 4), np.uint32)
    assert radii(low, more)[0] == pytest.approx(np.full(6, math.sqrt(2 * 161 * math.log(2))))
    assert radii(high, more)[0] == pytest.approx(np.full(6, 2.0**-80), rel=1e-12)
    assert math.sqrt(2 * 161 * math.log(2)) > 14.9


def test_no_lattice_near_zero_in_float32() -> None:
    """Few of 2²² float32 values near zero coincide: 0.1 pairs by chance, hundreds on the lattice of a 24-bit angle."""
    z = torch.empty(1 << 22)
    fill(field({"w": (1 << 22,)}), {"w": z}, 1)
    near = z[z.abs() < 1e-3]
    assert 3000 < len(near) < 3700  # mean 3347, sd 58: false alarm below 1e-8
    assert len(near.unique()) > len(near) - 5  # Poisson with mean 0.11: false alarm below 2e-7
    assert near.abs().min() > 0


def test_runs_keys_steps_and_tensors_are_different_noise() -> None:
    shapes = {"a": (512,), "b": (512,)}
    rows = []
    for key, run in ((KEY, "test"), (KEY, "other"), (SecretKey.from_bytes(bytes(32)), "test")):
        for step in (1, 2):
            z = {name: torch.zeros(512, dtype=torch.float64) for name in shapes}
            fill(NoiseField(key, Layout.of(shapes), run_id=run), z, step)
            rows += [z["a"], z["b"]]
    matrix = torch.corrcoef(torch.stack(rows)) - torch.eye(12)
    assert matrix.abs().max() < 0.3  # 66 correlations of sd 0.044: false alarm below 1e-8


def test_order_prefixes_and_memory_format_do_not_change_the_noise() -> None:
    plain = tensors()
    fill(field(), plain, 3)
    wrapped = {f"module._orig_mod.{name}": torch.empty(SHAPES[name]) for name in reversed(SHAPES)}
    wrapped["module._orig_mod.conv.weight"] = torch.empty(6, 5, 3, 3).to(memory_format=torch.channels_last)
    fill(field(), wrapped, 3)
    for name, value in plain.items():
        assert torch.equal(value, wrapped[f"module._orig_mod.{name}"])


def test_repeated_calls_and_thread_counts_give_the_same_bits() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            z = tensors({"w": (300_000,), "v": (17, 1000)})
            fill(field({"w": (300_000,), "v": (17, 1000)}), z, 2)
            results.append(z)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_the_field_keeps_its_key_to_itself() -> None:
    f = field()
    shown = repr(f) + str(f)
    for secret in (bytes(range(32)), SUBKEY):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
    for attempt in (lambda: pickle.dumps(f), lambda: copy.deepcopy(f), lambda: copy.copy(f)):
        with pytest.raises(TypeError, match="cannot be pickled"):
            attempt()


@pytest.mark.parametrize("run_id", ["", 3, None])
def test_a_field_needs_a_run_id(run_id: object) -> None:
    with pytest.raises(ValueError, match="run_id"):
        NoiseField(KEY, Layout.of({"a": (1,)}), run_id=run_id)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    """10⁷ values: two steps of two tensors."""
    shapes = {"a": (1250, 2000), "b": (2_500_000,)}
    f = field(shapes, run_id="distribution")
    rows = []
    for step in (1, 2):
        z = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
        fill(f, z, step)
        rows.append(torch.cat([z["a"].view(-1), z["b"]]).numpy())
    return np.stack(rows)


# Each test below alarms falsely with probability 1e-6 at most (two-sided 4.9 sd, or a p-value).
def test_moments(sample: np.ndarray) -> None:
    power = np.ones_like(sample)
    for mean, variance in ((0, 1), (1, 2), (0, 15), (3, 96), (0, 945), (15, 10395 - 225)):
        power *= sample
        assert abs(power.mean() - mean) < 4.9 * math.sqrt(variance / sample.size), (mean, variance)


def test_kolmogorov_smirnov(sample: np.ndarray) -> None:
    below, n = special.ndtr(np.sort(sample, axis=None)), sample.size
    place = np.arange(n + 1) / n
    assert max((below - place[:-1]).max(), (place[1:] - below).max()) < stats.kstwobign.isf(1e-6) / math.sqrt(n)


def test_tail_counts(sample: np.ndarray) -> None:
    for bound in (2.0, 3.0, 4.0, 5.0):
        mean = 2 * special.ndtr(-bound) * sample.size
        count = int((np.abs(sample) > bound).sum())
        low, high = stats.poisson.ppf([5e-7, 1 - 5e-7], mean)
        assert low <= count <= high, bound


def test_no_correlation_at_any_lag_the_construction_could_have(sample: np.ndarray) -> None:
    bound = 5.6 / math.sqrt(sample.shape[1] - 4096)  # about 40 correlations: 4.9 sd each, widened for their number
    for row in sample:
        for lag in (1, 2, 10, 31, 32, 33, 64, 192, 384, 2048):
            assert abs(np.mean(row[:-lag] * row[lag:])) < bound, lag
            squares = (row[:-lag] ** 2 - 1) * (row[lag:] ** 2 - 1) / 2
            assert abs(np.mean(squares)) < bound, lag
    assert abs(np.mean(sample[0] * sample[1])) < bound
    assert abs(np.mean(sample[0][:2_500_000] * sample[0][2_500_000:])) < 5.6 / math.sqrt(2_500_000)


def test_pairs_are_isotropic(sample: np.ndarray) -> None:
    """x and y of one Box–Muller pair lie 192 elements apart: their angle is uniform and independent of the radius."""
    groups = sample[0, : 2_500_000 // 384 * 384].reshape(-1, 2, 192)
    x, y = groups[:, 0].ravel(), groups[:, 1].ravel()
    angle = np.arctan2(y, x) / (2 * np.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 1e-6
    assert stats.kstest(np.exp(-(x**2 + y**2) / 2), "uniform").pvalue > 1e-6
    table = np.histogram2d(angle, np.exp(-(x**2 + y**2) / 2), bins=16)[0]
    assert stats.chi2_contingency(table).pvalue > 1e-6


def test_a_device_without_a_kernel_gets_the_cpu_noise_by_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another device type runs, exercised on the CPU."""
    f, direct, copied = field(), tensors(), tensors()
    is_direct, far = noise_field.is_direct, {id(value) for value in copied.values()}
    combination = Combination((1.0, -0.5), 3.0, 10)
    f.apply(match(f.layout, direct), combination, 2)
    monkeypatch.setattr(noise_field, "is_direct", lambda job: id(job.tensor) not in far and is_direct(job))
    f.apply(match(f.layout, copied), combination, 2)
    assert all(torch.equal(direct[name], copied[name]) for name in direct)


@pytest.mark.slow
def test_a_billion_values_have_the_law_of_normals() -> None:
    """2³⁰ values, as `test_cuda` asks of a GPU: minutes on one core."""
    law_of_normals("cpu", 1 << 24, 64)


def test_an_interrupt_leaves_no_thread_that_writes_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the noise: who drops the sums then must not find them written afterwards."""
    sums, first = torch.zeros(4 * 61_440), threading.Lock()
    add = noise_field._add_part

    def slow(*args: object) -> bool:
        if first.acquire(blocking=False):
            raise KeyboardInterrupt
        time.sleep(0.2)
        return add(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(noise_field, "_add_part", slow)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            fill(field({"w": (len(sums),)}), {"w": sums}, 1)
        sums.zero_()
        time.sleep(0.5)
    finally:
        torch.set_num_threads(threads)
    assert not sums.any()
