"""The CUDA kernel in Triton's interpreter, against the reference: no GPU is needed, but Triton is.

The interpreter reads ``TRITON_INTERPRET`` when the kernel is imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import numpy as np
import torch
from lambdacgd.noise import cuda
from lambdacgd.noise.cuda import CudaBackend
from lambdacgd.noise.layout import Combination, Job, Layout, match
from lambdacgd.noise.reference import normals
from tests.noise.helpers import SUBKEY, expected, tensors

cpu = torch.device("cpu")
UNIT = Combination((1.0,), 1.0, 1 << 40)


def noise(jobs, combination, step, turns=None, read=True):
    backend = CudaBackend(SUBKEY, cpu)
    cuda.turns_of = lambda jobs: turns or 1
    backend.launch(backend.prepare(jobs), combination, step, read=read)
    return backend.read_flags()


# Every tensor of the layout, in one turn and in several.
shapes = {"a": (3, 5), "b": (1001,), "c": (2, 3, 5, 7), "scale": (), "empty": (0, 4)}
layout = Layout.of(shapes)
for turns in (1, 2, 4):
    z = tensors(shapes, dtype=torch.float64)
    assert noise(match(layout, z), UNIT, 7, turns, read=False) == 0
    for name, value in z.items():
        if value.numel():
            assert np.abs(value.numpy() - expected(layout, name, [(7, 1.0)])).max() < 1e-13, name

# A shard that starts inside a group, two bands with a restart, sums read, the lattice, and a sum that is not finite.
combination = Combination((1.0, -0.9), 3.0, 100, tuple(np.linspace(1.0, 2.0, 10)), 10)
entry = layout.by_name["b"]
sums = torch.randn(500, generator=torch.Generator().manual_seed(1))
for step in (11, 12):
    out = sums.clone()
    assert noise([Job(entry, out, 333)], combination, step, 2) == 0
    bands = combination.bands(step)
    wanted = expected(layout, "b", bands)[333:833] * combination.scale_at(step) + sums.double().numpy()
    quantum = combination.lattice_at(step) / (1.5 * 2.0**52)
    assert np.array_equal(out.double().numpy(), np.rint(wanted / quantum) * quantum)
sums[-1] = float("inf")
assert noise([Job(entry, sums.clone(), 333)], combination, 12) == 1
out = sums[:4].clone()
assert noise([Job(entry, out, 333)], combination, 101) == 2 and out.isnan().all()

# Radii that take more bits: elements that the reference says have one, near 0 and far out.
index = np.arange(384 * 40)
one = Layout.of({"w": (len(index),)})
found = normals(SUBKEY, one.by_name["w"], 3, index)
pairs = found.reshape(-1, 2, 192)
radius = np.sqrt((pairs**2).sum(axis=1))
rare = (radius < 0.0078) | (radius > 4.56)
assert rare.any()
group = int(np.nonzero(rare.any(axis=1))[0][0])
z = torch.empty(384, dtype=torch.float64)
noise([Job(one.by_name["w"], z, 384 * group)], UNIT, 3, read=False)
assert np.abs(z.numpy() - pairs[group].ravel()).max() < 1e-13
print("passed")
"""


def test_the_kernel_equals_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=root, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in ran.stderr:
        pytest.skip("the interpreter of this Triton (3.6) does not know this NumPy (2.4)")
    assert ran.stdout.strip() == "passed", ran.stderr
