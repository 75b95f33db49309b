"""What holds for the package as a whole: imports, doctests, exports."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import lambdacgd as lc

MODULES = sorted(module.name for module in pkgutil.walk_packages(lc.__path__, "lambdacgd."))


def test_every_public_name_loads():
    assert all(getattr(lc, name) is not None for name in lc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lc.nonsense


@pytest.mark.parametrize(
    "code",
    [
        "import lambdacgd",
        "import lambdacgd as lc; lc.plan(1000, 10, epochs=2, epsilon=1.0, delta=1e-5, sampling='cyclic')",
        "import lambdacgd.cli.app",
        "import lambdacgd.sampling, lambdacgd.accounting, lambdacgd.choosing, lambdacgd.keys",
    ],
)
def test_planning_does_not_import_torch(code):
    check = f"{code}\nimport sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
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
