"""What the integrations replace of other libraries is checked when they are imported, and nothing is left out."""

from __future__ import annotations

import inspect

import pytest

from lambdacgd.integrations.shared import check_internals, internals, need


class Theirs:
    def step(self, model, batch, *, more=None):
        pass

    @property
    def setting(self):
        return 1

    number = 3


def test_what_is_as_it_was_passes():
    check_internals("pytest", "hf", "1 to 2", internals(Theirs, step="model batch", setting=None))
    check_internals("pytest", "hf", "1 to 2", internals(Theirs, step="model"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gone": "model"}, "Theirs.gone does not exist"),
        ({"step": "batch"}, r"Theirs.step takes \(model\)"),
        ({"step": "model batch more rest"}, r"Theirs.step takes \(model, batch, more\)"),
        ({"step": None}, "Theirs.step is no property"),
        ({"number": ""}, "Theirs.number is no method"),
    ],
)
def test_what_has_changed_is_refused_with_the_version_and_the_bound(given, says):
    with pytest.raises(ImportError, match=says) as caught:
        check_internals("pytest", "hf", "1 to 2", internals(Theirs, **given))
    assert f"pytest {pytest.__version__} is not one" in str(caught.value)
    assert "known to work with pytest 1 to 2: pip install 'lambdacgd[hf]'" in str(caught.value)


def test_what_is_missing_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"no_such_library is not installed.*lambdacgd\[hf\]"):
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
    from lambdacgd.integrations.huggingface.trainer import INTERNALS, LambdaCGDTrainer

    listed = {item.name for item in INTERNALS if item.owner is transformers.Trainer}
    assert _replaced(LambdaCGDTrainer, transformers.Trainer) <= listed


def test_every_override_of_the_strategies_is_listed():
    pytest.importorskip("lightning")
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from lambdacgd.integrations.lightning import INTERNALS, LambdaCGDDDPStrategy, LambdaCGDStrategy

    listed = {item.name for item in INTERNALS}
    pairs = ((LambdaCGDStrategy, SingleDeviceStrategy), (LambdaCGDDDPStrategy, DDPStrategy))
    for ours, theirs in pairs:
        assert _replaced(ours, theirs) <= listed
