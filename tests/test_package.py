"""What holds for the package as a whole: imports, doctests, exports."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lambdacgd as lc

MODULES = sorted(module.name for module in pkgutil.walk_packages(lc.__path__, "lambdacgd."))


def test_every_public_name_loads():
    assert all(getattr(lc, name) is not None for name in lc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lc.nonsense


def test_planning_does_not_import_torch():
    asked = (
        "import lambdacgd",
        "import lambdacgd as lc; lc.plan(1000, 10, epochs=2, epsilon=1.0, delta=1e-5, sampling=lc.Cyclic())",
        "import lambdacgd.cli.app",
        "import lambdacgd.sampling, lambdacgd.accounting, lambdacgd.choosing, lambdacgd.keys",
    )
    program = f"import sys\nfor code in {asked!r}:\n    exec(code); assert 'torch' not in sys.modules, code"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import lambdacgd as lc
from lambdacgd.cli import main

small = {{"examples": 100, "batch_size": 20, "epochs": 2, "delta": 1e-3, "epsilon": 2.0}}
for mechanism, sampling in {plans}:
    plan = lc.plan(**small, mechanism=mechanism, sampling=sampling)
    assert lc.Plan.from_json(plan.to_json()) == plan
    assert sum(len(batch) for batch in plan.sampling.batches(lc.SecretKey.from_bytes(bytes(32)))) > 100
assert main(["plan", "--examples", "100", "--batch-size", "20", "--epochs", "2", "--epsilon", "2", "--delta", "1e-3",
             "--sampling", "cyclic", "--json"]) == 0
assert main(["compare", "--examples", "100", "--batch-size", "20", "--epochs", "2", "--epsilon", "2", "--delta", "1e-3",
             "--sampling", "cyclic"]) == 0
assert not {missing!r} & set(sys.modules)
"""
PLANS = """[
    (None, lc.Cyclic()), (lc.BLT(1), lc.Cyclic()), (lc.Identity(), lc.Poisson()), (lc.LambdaCGD(0.5), None),
    (lc.LambdaCGD(0.5), lc.BallsInBins('fixed')), (lc.BSR(2), lc.BallsInBins('fixed')),
]"""


def test_planning_works_without_what_it_does_not_need(tmp_path):
    """Windows has no fcntl, and torch is needed by training alone."""
    code = BLOCKED.format(missing={"torch", "fcntl"}, plans=PLANS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env=os.environ | {"LAMBDACGD_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # an optional dependency: Triton, which only CUDA builds of torch bring
        if (error.name or "").split(".")[0] != "triton":
            raise
        pytest.skip(f"needs {error.name}")
    failures, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


@pytest.mark.parametrize("name", [name for name in lc.__all__ if name[0] != "_"])
def test_public_names_are_described(name):
    thing = getattr(lc, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        own = {k: v for k, v in vars(thing).items() if k[0] != "_" and (callable(v) or isinstance(v, property))}
        silent = [k for k, v in own.items() if not inspect.getdoc(getattr(thing, k) if callable(v) else v.fget)]
        assert not silent, f"{name}.{', '.join(silent)} has no docstring"


def test_the_wheel_holds_the_library_and_nothing_else(tmp_path):
    root = Path(__file__).parent.parent
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    for name in ("src", "reproduce", "benchmarks"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"lambdacgd", f"lambdacgd-{lc.__version__}.dist-info"}
    assert {"lambdacgd/digits.npz", "lambdacgd/py.typed", "lambdacgd/cli/demo.py"} <= names
    written = {str(path.relative_to(root / "src")) for path in (root / "src" / "lambdacgd").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == written
    # Installed, it plans without the checkout.
    place = tmp_path / "installed"
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(place), str(wheel)]
    done = subprocess.run([sys.executable, *install], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ask = ["epsilon", "--sampling-rate", "0.05", "--steps", "50", "--noise-multiplier", "1", "--delta", "1e-5"]
    done = subprocess.run(
        [sys.executable, place / "bin" / "lambdacgd", *ask],
        cwd=place, env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("ε = 2.67"), done.stderr
