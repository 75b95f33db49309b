"""``python -m reproduce faults``: the table of faults, docs/faults.md, from the tests that commit them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lambdacgd.cli.options import flag

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"

KINDS = (
    "Killed processes",
    "Full disks",
    "Damaged files",
    "Files that were changed or planted",
    "Workers and ranks that die",
    "The wrong key, plan, data or number of processes",
    "Two jobs at once, and going back",
    "Numbers that are not finite",
)

HEAD = """# When something breaks

Each row is a test that does to a run what the first column says. A sentence in quotes is a part of the error, and the
test compares it. What is lost is stated by whoever wrote the test; where a run goes on, most tests compare its end with
that of an undisturbed run. This page is made from the tests by `python -m reproduce faults`, and a test fails where it
is not current.

Besides, every file that is read is tried with random bytes and random changes (`tests/test_readers.py`): each gives a
valid object or an error with a sentence.
"""


@dataclass(frozen=True)
class Fault:
    """A fault, as `tests/faults.py` has a test name it."""

    kind: str
    done: str
    says: str
    shows: str
    loses: str
    test: str
    checked: bool

    @property
    def seen(self) -> str:
        return f"“{self.says}”" if self.says else self.shows


def faults(tests: Path = ROOT / "tests") -> list[Fault]:
    """All faults that tests name, by kind and in the order of files and lines. Tests are read, not imported.

    Args:
        tests: The folder of the tests.

    Returns:
        The faults.

    Raises:
        ValueError: A fault is of no known kind.
    """
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found += [_fault(call, node, path.relative_to(tests.parent)) for call in _marks(node)]
    if unknown := sorted({fault.kind for fault in found} - set(KINDS)):
        raise ValueError(f"{', '.join(unknown)} is not among the kinds of faults: {', '.join(KINDS)}")
    return sorted(found, key=lambda fault: KINDS.index(fault.kind))


def _marks(function: ast.FunctionDef) -> list[ast.Call]:
    calls = [node for decorator in function.decorator_list for node in ast.walk(decorator)]
    return [node for node in calls if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fault"]


def _fault(call: ast.Call, function: ast.FunctionDef, file: Path) -> Fault:
    kind, done = (ast.literal_eval(argument) for argument in call.args)
    rest = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return Fault(
        kind,
        done,
        says=rest.get("says", ""),
        shows=rest.get("shows", ""),
        loses=rest["loses"],
        test=f"{file.as_posix()}::{function.name}",
        checked="sentence" in [argument.arg for argument in function.args.args],
    )


def page(found: list[Fault]) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for kind in KINDS:
        rows = [fault for fault in found if fault.kind == kind]
        if rows:
            parts.append(f"\n## {kind}\n\n| what was done | what the user sees | what is lost |\n|---|---|---|\n")
            parts += [f"| {_cell(fault.done)} | {_cell(fault.seen)} | {_cell(fault.loses)} |\n" for fault in rows]
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(
    check: Annotated[bool, flag("--check", help="Write nothing; fail if the page is not current.")] = False,
) -> None:
    """Write docs/faults.md: what was done to a run, what the user sees, what is lost."""
    text = page(faults())
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/faults.md is not current: python -m reproduce faults")
        raise typer.Exit(1)
