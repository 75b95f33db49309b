"""One training run as data: what is trained, with what, and what came out. Results are kept by the run's digest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lambdacgd.validation import InvalidInput, integer, number
from lambdacgd.version import __version__
from reproduce.json_lines import append, records
from reproduce.machine import machine
from reproduce.methods import method

Split = Literal["validation", "test"]
Schedule = Literal["constant", "linear"]
Result = dict[str, Any]
DELTA = 1e-5
REVISION = 1  # of the way a run is trained; a change makes older results count for nothing


@dataclass(frozen=True)
class TrainingRun:
    """A run of one method. ``split`` "validation" trains on four fifths of the training set, "test" on all of it.

    ``schedule`` is "constant" or "linear" (to a twentieth). ``examples`` limits the training examples (quick versions;
    None is all). Runs that differ in ``seed`` differ in their initial weights; noise and batches are new in any case.
    """

    task: str
    model: str
    method: str
    epsilon: float
    batch_size: int
    epochs: int
    learning_rate: float
    max_grad_norm: float
    lam: float | None = None
    schedule: Schedule = "constant"
    seed: int = 0
    split: Split = "validation"
    examples: int | None = None

    def __post_init__(self) -> None:
        method(self.method).request(self.lam)
        number("epsilon", self.epsilon, above=0)
        number("learning_rate", self.learning_rate, above=0)
        number("max_grad_norm", self.max_grad_norm, above=0)
        integer("batch_size", self.batch_size)
        integer("epochs", self.epochs)
        if self.split not in ("validation", "test"):
            raise InvalidInput("split", self.split, "it must be validation or test")
        if self.schedule not in ("constant", "linear"):
            raise InvalidInput("schedule", self.schedule, "it must be constant or linear")

    @property
    def digest(self) -> str:
        """What the run's result is found by."""
        text = json.dumps({"run": asdict(self), "revision": REVISION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def plan_request(self, training_examples: int) -> dict[str, Any]:
        """Keyword arguments for ``lc.plan``, given how many examples the split trains on."""
        return {
            "examples": training_examples,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "epsilon": self.epsilon,
            "delta": DELTA,
        } | method(self.method).request(self.lam)

    def __str__(self) -> str:
        lam = "" if self.lam is None else f" λ={self.lam:g}"
        return (
            f"{self.task} {self.method}{lam} ε={self.epsilon:g} B={self.batch_size} k={self.epochs} "
            f"lr={self.learning_rate:.3g} ζ={self.max_grad_norm:g} {self.schedule} {self.split} seed {self.seed}"
        )


class RunStore:
    """Results of runs in a file of JSON lines, one appended at once when a run ends; several files are read as one."""

    def __init__(self, path: Path | None, *, read: list[Path] | None = None) -> None:
        self.path = path
        self._found: dict[str, dict[str, Any]] = {}
        for source in [*(read or []), *([path] if path is not None else [])]:
            for record in _records(source):
                self._found[record["digest"]] = record

    def __len__(self) -> int:
        return len(self._found)

    def get(self, run: TrainingRun) -> Result | None:
        """The run's result, if it is there."""
        record = self.record(run)
        return None if record is None else dict(record["result"])

    def record(self, run: TrainingRun) -> dict[str, Any] | None:
        """The run's whole record, with machine and date, if it is there."""
        return self._found.get(run.digest)

    def add(self, run: TrainingRun, result: Result, *, where: dict[str, Any] | None = None) -> None:
        """Keep a result; on disk before this returns."""
        record = {"digest": run.digest, "run": asdict(run), "result": result, "machine": where or machine()}
        record |= {"version": __version__, "date": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())}
        self._found[run.digest] = record
        if self.path is not None:
            append(self.path, record)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for record in records(path):
        try:
            run = TrainingRun(**record["run"])
        except (ValueError, KeyError, TypeError):  # of another version
            continue
        if record.get("digest") == run.digest and isinstance(record.get("result"), dict):
            yield record
