"""What every integration needs: the library beneath it checked, a place for the key, logical batches."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lambdacgd.errors import InvalidInput
from lambdacgd.keys import SecretKey
from lambdacgd.training import Private, TrainingError
from lambdacgd.training.data import generators, set_generators
from lambdacgd.training.loop import Phase

# --- the library beneath an integration ------------------------------------------------------------------------------


def need(extra: str, *packages: str) -> None:
    """Refuse to go on without ``packages``, naming the extra that installs them.

    Raises:
        ImportError: One of them is not installed.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{', '.join(missing)} is not installed. The extra {extra} has it: pip install '.[{extra}]' in a checkout"
        )


Version = tuple[int, int]
#: What an integration replaces or calls of other libraries' classes: by name, the first parameters after ``self``, in
#: order; None for a property.
Internals = Mapping[type, Mapping[str, str | None]]


def check_internals(package: str, extra: str, known: tuple[Version, Version], used: Internals) -> None:
    """Refuse a version of ``package`` that the integration was not tested with, or whose internals are others.

    An override of a method that nobody calls any more would leave gradients without noise, or weights without an
    entry in the ledger, and no test of ours would run at the user's.

    Raises:
        ImportError: The version is not from the first to the last of ``known``, or something in ``used`` is missing or
            takes other arguments.
    """
    version = importlib.metadata.version(package)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    problems = [] if known[0] <= numbers <= known[1] else ["its version was not tested"]
    for owner, members in used.items():
        for name, parameters in members.items():
            there = inspect.getattr_static(owner, name, None)
            if parameters is None:
                as_before = isinstance(there, property)
            else:
                wanted = parameters.split()
                taken = list(inspect.signature(there).parameters) if callable(there) else []
                as_before = callable(there) and taken[1 : len(wanted) + 1] == wanted
            if not as_before:
                problems.append(f"{owner.__name__}.{name} is gone or takes other arguments")
    if problems:
        first, last = (".".join(map(str, each)) for each in known)
        raise ImportError(
            f"{package} {version} is not one that this integration knows: {'; '.join(problems)}. Training might not be "
            f"private. It is known to work with {package} {first} to {last}: pip install '.[{extra}]' in a checkout"
        )


# --- the plan and the run --------------------------------------------------------------------------------------------


def refuse_second_run(private: Private | None, how: str) -> None:
    """Refuse to begin a run where another one has taken steps; ``how`` goes on with that."""
    if private is not None and private.steps_taken:
        raise TrainingError(
            f"this run has taken {private.steps_taken} of {private.plan.steps} steps. Go on with {how}, or make all "
            "anew for a new run, which costs its own (ε, δ)"
        )


def logged_claim(private: Private) -> dict[str, float]:
    """The plan's (ε, δ), for logs beside the loss. Where nothing is claimed, ε is inf."""
    epsilon = private.plan.epsilon if private.spent().private else math.inf
    return {"privacy_epsilon": epsilon, "privacy_delta": private.plan.delta}


# --- the key ---------------------------------------------------------------------------------------------------------
# An output folder is copied, archived and uploaded as a whole, and the key must not travel with it. The default place
# is therefore ``<output_dir>.private/run.key``, and a place inside the output folder is refused.

KeyLike = SecretKey | str | os.PathLike[str] | None


def default_key_path(output_dir: str | os.PathLike[str]) -> Path:
    """``runs/first`` -> ``runs/first.private/run.key``."""
    folder = Path(os.path.abspath(output_dir))  # "runs/.." too has a name then
    return folder.with_name(folder.name + ".private") / "run.key"


def find_key(key: KeyLike, output_dir: str | os.PathLike[str]) -> SecretKey:
    """The key given, or that of the file given, or of the output folder's own file, which is made if there is none."""
    if key is None:
        key = default_key_path(output_dir)
    path = key.path if isinstance(key, SecretKey) else key
    if isinstance(path, (str, os.PathLike)) and Path(path).resolve().is_relative_to(Path(output_dir).resolve()):
        wrong = f"it must lie outside the output folder, which is copied: {default_key_path(output_dir)}, say"
        raise InvalidInput("key", str(path), wrong)
    return load_or_make(key)


def load_or_make(key: KeyLike) -> SecretKey:
    """The key given, or that of the file given, which is made if there is none."""
    check_key(key)
    if isinstance(key, SecretKey):
        return key
    path = Path(os.fspath(key))  # type: ignore[arg-type]  # checked
    if path.exists():
        return SecretKey.load(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = SecretKey.generate()
    made.save(path)
    return made


def check_key(key: object) -> None:
    if not isinstance(key, (SecretKey, str, os.PathLike)):
        raise InvalidInput.of_type("key", key, "a SecretKey or the path of a key file")


# --- random numbers --------------------------------------------------------------------------------------------------


class TrainingRandomness:
    """Training's random numbers (dropout), apart from those that evaluation, workers and callbacks draw in between.

    A resumed run does not evaluate again what the broken one evaluated after its last checkpoint. For both to end with
    the same bits, training goes on with the generators as its own last step left them. ``state`` is that of all
    generators after the last training step, None before the first.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def keep(self) -> None:
        """Go on from the generators as they are now: a checkpoint has just been loaded."""
        self.state = generators()

    def put_back(self) -> None:
        """The generators as training left them: a checkpoint is about to be saved."""
        if self.state is not None:
            set_generators(self.state)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step's computations."""
        self.put_back()
        yield
        self.keep()


# --- logical batches -------------------------------------------------------------------------------------------------
# Trainers of other libraries take one optimizer step, one scheduler step and one tick of every counter per item that
# their loader yields. So the loader yields logical batches, and the physical ones are read inside the training step.
# Evaluation, checkpoints, schedulers and callbacks then always fall between logical steps.


class LogicalBatch:
    """The physical batches of one logical step, read when they are asked for, once."""

    def __init__(self, private: Private, data: Iterator[Any]) -> None:
        self._private, self._data, self._used = private, data, False

    def parts(self) -> Iterator[tuple[Any, bool]]:
        """Every physical batch, and whether it is the last: then ``optimizer.step()`` acts."""
        if self._used:
            raise TrainingError("the examples of this logical step were already read once: they take part once")
        self._used, last = True, False
        while not last:
            part = next(self._data)
            last = self._private.cycle.phase is Phase.WHOLE
            yield part, last


class LogicalLoader:
    """The plan's logical batches, an epoch an iteration, from where the run of a Trainer or strategy stands."""

    def __init__(self, owner: Any, dataset: Any) -> None:
        """``owner`` has a ``plan`` and, once it trains, a run: ``private``."""
        self._owner, self.dataset = owner, dataset

    def __len__(self) -> int:
        """Logical steps in an epoch."""
        return int(self._owner.plan.steps_per_epoch)

    def __iter__(self) -> Iterator[LogicalBatch]:
        private: Private | None = self._owner.private
        if private is None:
            raise TrainingError("the plan's batches exist once training has bound the plan to the model")
        if private.finished:
            return
        end = (private.steps_taken // len(self) + 1) * len(self)
        data = private.loader.until(end)
        while private.steps_taken < end:
            yield LogicalBatch(private, data)
