"""A progress bar on the terminal for whatever takes longer than two seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_PATIENCE = 2.0  # seconds


@contextlib.contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Yields ``tick(amount)``. Silent where standard error is not a terminal, or where another bar is shown already."""
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import Progress

    started = time.monotonic()
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(description, total=total)
    shown, wanted = False, bar.console.is_terminal

    def tick(amount: int) -> None:
        nonlocal shown, wanted
        bar.update(task, advance=amount)
        if wanted and not shown and time.monotonic() - started > _PATIENCE:
            try:
                bar.start()
                shown = True
            except LiveError:  # the caller's own bar
                wanted = False

    try:
        yield tick
    finally:
        if shown:
            bar.stop()
