"""How far a reader walks: functions, files and hops between files that one operation visits in this library.

    python -m benchmarks.walk [--files] [--write]

``--files`` names the files that each operation visits, ``--write`` puts the table into docs/design.md. Each operation
is run once to warm up and once under ``sys.setprofile``. Only calls into ``lambdacgd`` count. A *hop* is a call or a
return that leads from one of its files to another. Generators count when they are resumed, too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lambdacgd as lc

PACKAGE = str(Path(lc.__file__).parent) + os.sep
PAGE = Path(__file__).parents[1] / "docs" / "design.md"
BEGIN, END = "<!-- walk -->\n", "<!-- end walk -->"

#: The most files that an operation may visit: `tests/test_walk.py` holds the package to it, docs/design.md shows it.
MOST_FILES = {
    "plan, uncached": 16,
    "plan, cached": 11,
    "privatize": 25,
    "a training step": 12,
    "save": 12,
    "resume": 14,
}


@dataclass
class Walk:
    """What one operation visited."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    files: list[str] = field(default_factory=list)
    hops: int = 0

    def row(self) -> tuple[int, int, int]:
        return len(self.functions), len(set(self.files)), self.hops


@contextlib.contextmanager
def walking() -> Iterator[Walk]:
    """Trace the block. The package's frames form a stack; a hop is a change of file at its top."""
    walk, stack = Walk(), [""]

    def visit(name: str) -> None:
        if walk.files and walk.files[-1] != name:
            walk.hops += 1
        walk.files.append(name)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return
        name = code.co_filename[len(PACKAGE) :]
        if event == "call":
            walk.functions.add((name, code.co_qualname))
            visit(name)
            stack.append(name)
        elif event == "return" and len(stack) > 1:
            stack.pop()
            if stack[-1]:
                visit(stack[-1])

    gc.collect()
    gc.disable()  # what an earlier run left, such as a loader that was not read to its end, is no part of the walk
    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        gc.enable()


def small_cnn() -> nn.Module:
    """A CNN of the kind a reader would try first."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    )


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    """What a user's loop does once."""
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure() -> dict[str, Walk]:
    """Every operation's walk, in the order in which a user comes to it."""
    walks: dict[str, Walk] = {}
    data = TensorDataset(torch.randn(400, 1, 8, 8), torch.randint(0, 10, (400,)))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LAMBDACGD_CACHE"] = str(Path(folder) / "cache")
        request = {"epochs": 2, "epsilon": 2.0, "delta": 1e-5}
        lc.plan(400, 20, epochs=2, epsilon=4.0, delta=1e-5)  # imports
        with walking() as walks["plan, uncached"]:
            plan = lc.plan(400, 20, **request)  # type: ignore[arg-type]
        with walking() as walks["plan, cached"]:
            lc.plan(400, 20, **request)  # type: ignore[arg-type]

        def bind() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
            model = small_cnn()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            key = lc.SecretKey.load(Path(folder) / "run.key")
            return model, optimizer, lc.privatize(model, optimizer, data, plan, max_grad_norm=1.0, key=key)

        lc.SecretKey.generate().save(Path(folder) / "run.key")
        bind()[2].detach()
        with walking() as walks["privatize"]:
            model, optimizer, private = bind()
        batches = iter(private.loader)
        for _ in range(5):  # the mixing of examples is looked at in steps 1, 2, 3, 5, 8, …: not in the sixth
            one_step(model, optimizer, batches)
        with walking() as walks["a training step"]:
            one_step(model, optimizer, batches)
        private.save(Path(folder) / "checkpoint")
        one_step(model, optimizer, batches)
        with walking() as walks["save"]:
            private.save(Path(folder) / "checkpoint")
        private.detach()
        _, _, private = bind()
        with walking() as walks["resume"]:
            private.resume(Path(folder) / "checkpoint")
        private.detach()
    return walks


def table(walks: dict[str, Walk]) -> str:
    """The table of docs/design.md."""
    lines = ["| walk | functions | files | hops | at most (files) |", "|---|---|---|---|---|"]
    for name, walk in walks.items():
        functions, files, hops = walk.row()
        lines.append(f"| {name} | {functions} | {files} | {hops} | {MOST_FILES[name]} |")
    return "\n".join(lines)


def main() -> None:
    walks = measure()
    if "--files" in sys.argv:
        for name, walk in walks.items():
            print(name, *sorted(set(walk.files)), sep="\n  ")
    print(table(walks))
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(walks)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
