"""A training run's settings: defaults of the task, then a TOML file, then the command line; written out as resolved."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lambdacgd.errors import InvalidInput, integer, number
from lambdacgd.training.tasks import TASKS, Task


@dataclass(frozen=True)
class Config:
    """All that ``lambdacgd train`` needs to know. Everything here is public."""

    task: str
    epsilon: float
    delta: float
    epochs: int
    batch_size: int
    lr: float
    clip: float
    mechanism: str = "lambda-cgd"
    sampling: str = "balls-in-bins"
    bins: str | None = None
    lam: float | str | None = None
    bands: int | None = None
    optimizer: str = "sgd"
    ema: float = 0.0
    physical_batch_size: int | None = None
    workers: int = 0
    device: str = "cpu"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        for name in ("epsilon", "lr", "clip"):
            object.__setattr__(self, name, number(name, _float(getattr(self, name)), above=0, include=_infinite(name)))
        number("delta", self.delta, above=0, below=1)
        number("ema", self.ema, above=0, below=1, include=(0,))
        for name in ("epochs", "batch_size"):
            integer(name, getattr(self, name))
        integer("workers", self.workers, minimum=0)
        integer("seed", self.seed, minimum=0)
        if self.physical_batch_size is not None:
            integer("physical_batch_size", self.physical_batch_size)
        if not isinstance(self.data, (str, type(None))):
            raise InvalidInput("data", self.data, "it must be a folder")
        if self.bins not in (None, "fresh", "fixed"):
            raise InvalidInput("bins", self.bins, "it must be fresh or fixed")
        if self.optimizer not in ("sgd", "adamw"):
            raise InvalidInput("optimizer", self.optimizer, "it must be sgd or adamw")
        if isinstance(self.lam, str) and self.lam != "auto":
            raise InvalidInput("lam", self.lam, "it must be a number in [0, 1) or auto")

    @property
    def described(self) -> Task:
        return TASKS[self.task]


def _infinite(name: str) -> tuple[float, ...]:
    return (math.inf,) if name == "epsilon" else ()


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def resolve(task: str | None, file: Path | None, given: dict[str, Any]) -> Config:
    """The settings of a run: the task's defaults, overridden by ``file``, overridden by what was ``given``."""
    written = read(file) if file else {}
    settings = written | {name: value for name, value in given.items() if value is not None}
    task = task or settings.get("task") or "digits"
    if not isinstance(task, str) or task not in TASKS:
        raise InvalidInput("task", task, f"it must be one of {', '.join(TASKS)}")
    if "epsilon" not in settings:
        raise InvalidInput("epsilon", None, "give the privacy budget: --epsilon 8, say")
    known = TASKS[task]
    defaults = {
        "delta": known.delta,
        "epochs": known.epochs,
        "batch_size": known.batch_size,
        "lr": known.learning_rate,
        "clip": known.max_grad_norm,
    }
    return Config(**(defaults | settings | {"task": task}))


def read(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; unknown ones are an error."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # as Windows editors save it
    except FileNotFoundError:
        raise InvalidInput("config", str(path), "there is no such file") from None
    except OSError as error:
        raise InvalidInput("config", str(path), f"it must be a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(
            "config",
            str(path),
            f"a TOML file is UTF-8 text, and byte {error.start} of this one is not: save it as UTF-8",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput("config", str(path), f"it must be a TOML file ({error})") from None
    allowed = [field.name for field in fields(Config)]
    if unknown := sorted(set(content) - set(allowed)):
        raise InvalidInput("config", f"{path} with {', '.join(unknown)}", f"it may set {', '.join(allowed)}")
    return content


def write(config: Config, path: Path) -> None:
    """Write the resolved settings, as ``read`` reads them."""
    lines = ["# The resolved settings of this run, as lambdacgd train --config reads them."]
    for name, value in asdict(config).items():
        if value is not None:
            lines.append(f"{name} = {_toml(value)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return json.dumps(value, ensure_ascii=False)  # TOML's strings, integers and floats are written as JSON's
