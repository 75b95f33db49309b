"""What several commands read the same way: flags, and the mechanisms and samplings that they name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from lambdacgd.errors import InvalidInput

FLAGS = {"lam": "--lambda", "name": "NAME", "task": "TASK", "factory": "FACTORY", "source": "SOURCE", "plan": "PLAN"}
"""Parameters whose flag is not simply their name with dashes."""


def flag_of(parameter: str) -> str:
    """How the command line calls a parameter."""
    return FLAGS.get(parameter, "--" + parameter.replace("_", "-"))


def flag(name: str, *, help: str, **how: Any) -> Any:
    """An option without a value: help must not say <bool> behind it, as if one were to follow."""
    return typer.Option(name, help=help, metavar="", **how)


def place_for(parameter: str, path: Path | None) -> None:
    """Refuse a place where a file is to be written, before the work rather than after it."""
    if path is not None and path.is_dir():
        raise InvalidInput(parameter, str(path), "it is a folder; name a file")
    if path is not None and not path.parent.is_dir():
        raise InvalidInput(parameter, str(path), f"there is no folder {path.parent}; make it first")


def number_or_auto(parameter: str, text: str | None) -> float | str | None:
    """The value of --lambda, --gamma or --bands: a number, ``auto``, or nothing."""
    if text is None or text == "auto":
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InvalidInput(parameter, text, "it must be a number or auto") from None


def parameters_of(classes: Iterable[type[Any]]) -> dict[str, Field[Any]]:
    """The parameters of mechanisms or samplings that have a flag: the fields whose metadata has a ``"help"``."""
    return {field.name: field for cls in classes for field in fields(cls) if "help" in field.metadata}


def plan_flags() -> dict[str, Any]:
    """The flags that describe a mechanism and a sampling, as annotations by parameter: read off the dataclasses."""
    from lambdacgd.mechanisms import MECHANISMS, LambdaCGD, Workload
    from lambdacgd.sampling import SAMPLINGS, BallsInBins

    named = {
        "mechanism": f"{', '.join(MECHANISMS)} (default {LambdaCGD.name}).",
        "sampling": f"{', '.join(SAMPLINGS)} (default {BallsInBins.name}; cyclic has no amplification).",
    }
    options: dict[str, Any] = {name: Annotated[str | None, typer.Option(help=help)] for name, help in named.items()}
    for name, field in parameters_of([*MECHANISMS.values(), *SAMPLINGS.values(), Workload]).items():
        switch = isinstance(field.default, bool)
        kind = bool if switch else {"int": int, "float": float}.get(str(field.type), str)
        option = flag if switch else typer.Option
        options[name] = Annotated[kind | None, option(flag_of(name), help=field.metadata["help"])]
    return options


def with_flags(command: Callable[..., None], flags: dict[str, Any]) -> Callable[..., None]:
    """Give a command more options, which it gets by keyword: None where one that may be left out is not given."""

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(**given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, annotation in flags.items():
        default = None if type(None) in get_args(annotation.__origin__) else inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def plan_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """Turn names into objects: what a command line or a file says about a plan into arguments of ``lc.plan``.

    ``request`` holds ``mechanism`` and ``sampling`` by name, the parameters of both (``lam``, ``bands``, ``bins``, …;
    None counts as not given), and any other arguments of ``lc.plan``, which are passed on.
    """
    from lambdacgd.mechanisms import MECHANISMS, LambdaCGD, Workload
    from lambdacgd.sampling import SAMPLINGS, BallsInBins

    given = {name: value for name, value in request.items() if value is not None}
    if used := {name: given.pop(name) for name in parameters_of([Workload]) if name in given}:
        given["workload"] = Workload(**used)
    kinds = (("mechanism", MECHANISMS, LambdaCGD.name), ("sampling", SAMPLINGS, BallsInBins.name))
    for parameter, classes, default in kinds:
        if {parameter, *parameters_of(classes.values())} & set(given):  # else it is the default of ``lc.plan``
            given[parameter] = _named(parameter, given, classes, default)
    return given


def _named(parameter: str, given: dict[str, Any], classes: dict[str, type[Any]], default: str) -> Any:
    """Take a name and the parameters that go with it out of ``given``, and make what they describe."""
    name = given.pop(parameter, default)
    if name not in classes:
        raise InvalidInput(parameter, name, f"it must be one of {', '.join(classes)}")
    values = {key: given.pop(key) for key in parameters_of(classes.values()) if key in given}
    takes = parameters_of([classes[name]])
    for key, value in values.items():
        if key not in takes:
            owners = [other for other, cls in classes.items() if key in parameters_of([cls])]
            raise InvalidInput(key, value, f"it applies to {', '.join(owners)}, not to {name}; leave it out")
        if isinstance(value, str) and (takes[key].default == "auto" or isinstance(takes[key].default, int)):
            values[key] = number_or_auto(key, value)
    return classes[name](**values)
