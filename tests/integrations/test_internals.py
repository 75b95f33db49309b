"""What the integrations replace of other libraries is checked when they are imported, and nothing is left out."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from lambdacgd.integrations.shared import check_internals, need

ROOT = Path(__file__).parents[2]
KNOWN = ((1, 0), (99, 0))


class Theirs:
    def step(self, model, batch, *, more=None):
        pass

    @property
    def setting(self):
        return 1

    number = 3


def test_what_is_as_it_was_passes():
    check_internals("pytest", "hf", KNOWN, {Theirs: {"step": "model batch", "setting": None}})
    check_internals("pytest", "hf", KNOWN, {Theirs: {"step": "model"}})


@pytest.mark.parametrize(
    "given", [{"gone": "model"}, {"step": "batch"}, {"step": "model batch more rest"}, {"step": None}, {"number": ""}]
)
def test_what_has_changed_is_refused_with_the_version_and_the_bound(given):
    with pytest.raises(ImportError, match=rf"Theirs.{next(iter(given))} is gone or takes other arguments") as caught:
        check_internals("pytest", "hf", KNOWN, {Theirs: given})
    assert f"pytest {pytest.__version__} is not one" in str(caught.value)
    assert "known to work with pytest 1.0 to 99.0: pip install '.[hf]' in a checkout" in str(caught.value)


@pytest.mark.parametrize("known", [((1, 0), (2, 6)), ((98, 0), (99, 0))])
def test_a_version_that_was_not_tested_is_refused(known):
    """Its methods may look the same and be called by nobody."""
    with pytest.raises(ImportError, match=r"its version was not tested.*Training might not be private"):
        check_internals("pytest", "hf", known, {Theirs: {"step": "model"}})


@pytest.mark.parametrize(("package", "module"), [("lightning", "lightning"), ("transformers", "huggingface")])
def test_importing_an_integration_checks_the_library_beneath(package, module, monkeypatch):
    pytest.importorskip(package)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0" if name == package else real(name))
    with pytest.raises(ImportError, match=f"{package} 99.0 is not one that this integration knows"):
        runpy.run_path(str(ROOT / "src" / "lambdacgd" / "integrations" / f"{module}.py"))


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_the_package_asks_for_the_versions_that_are_checked(package):
    pytest.importorskip(package)
    module = "lightning" if package == "lightning" else "huggingface"
    source = (ROOT / "src" / "lambdacgd" / "integrations" / f"{module}.py").read_text(encoding="utf-8")
    call = re.search(rf'check_internals\("{package}", "\w+", \(\((\d+), (\d+)\), \((\d+), (\d+)\)\)', source)
    first, last = (int(call[1]), int(call[2])), (int(call[3]), int(call[4]))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = f"{package}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert wanted in [requirement for extra in extras.values() for requirement in extra]


def test_what_is_missing_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"no_such_library is not installed.*pip install .*hf"):
        need("hf", "no_such_library")


def _replaced(ours, theirs):
    own = [name for base in ours.__mro__ if base.__module__.startswith("lambdacgd") for name in vars(base)]
    return {
        name
        for name in own
        if not name.startswith(("__", "_abc_")) and inspect.getattr_static(theirs, name, None) is not None
    }


def test_every_override_of_the_trainer_is_listed():
    transformers = pytest.importorskip("transformers")
    from lambdacgd.integrations.huggingface import INTERNALS, LambdaCGDTrainer

    assert _replaced(LambdaCGDTrainer, transformers.Trainer) <= INTERNALS[transformers.Trainer].keys()


def test_every_override_of_the_strategies_is_listed():
    pytest.importorskip("lightning")
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from lambdacgd.integrations.lightning import INTERNALS, LambdaCGDDDPStrategy, LambdaCGDStrategy

    listed = {name for members in INTERNALS.values() for name in members}
    pairs = ((LambdaCGDStrategy, SingleDeviceStrategy), (LambdaCGDDDPStrategy, DDPStrategy))
    for ours, theirs in pairs:
        assert _replaced(ours, theirs) <= listed
