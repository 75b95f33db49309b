"""``lambdacgd reproduce``: the paper's tables and figures, from scratch, at one command each."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from lambdacgd.validation import InvalidInput

# name -> (module with ``run(out, quick)``, what it shows)
EXPERIMENTS: dict[str, tuple[str, str]] = {
    "rmse-table": ("lambdacgd.experiments.rmse_table", "the paper's RMSE table, every mechanism and ε, beside ours"),
}


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which one; --list names them.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Name what can be reproduced.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for CSV, JSON, Markdown and plots.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="A small version that ends in a minute or two.")] = False,
) -> None:
    """Regenerate one of the paper's tables or figures. Interrupted runs go on where they stopped."""
    if show:
        for title, (_, what) in EXPERIMENTS.items():
            print(f"{title:<14} {what}")
        return
    if name not in EXPERIMENTS:
        raise InvalidInput("name", name, f"it must be one of {', '.join(EXPERIMENTS)} (see lambdacgd reproduce --list)")
    importlib.import_module(EXPERIMENTS[name][0]).run(out / name, quick=quick)
