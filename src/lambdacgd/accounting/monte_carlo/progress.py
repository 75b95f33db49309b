"""A progress bar on the terminal for whatever takes longer than two seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_PATIENCE = 2.0  # seconds


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields ``tick(amount)``. Silent where standard error is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    started = time.monotonic()
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total)
    shown = False

    def tick(amount: int) -> None:
        nonlocal shown
        bar.update(task, advance=amount)
        if not shown and bar.console.is_terminal and time.monotonic() - started > _PATIENCE:
            bar.start()
            shown = True

    try:
        yield tick
    finally:
        if shown:
            bar.stop()
