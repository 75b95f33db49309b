"""Many small matrix products on several cores: each worker takes whole batches, on one torch thread.

Torch's own threads meet after every small product and spin while they wait: where other processes want the cores too
that burned ten times the processor time of the work itself. Workers meet once a transform and sleep while they wait.
Rounding no longer depends on the number of threads either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")

_lock = threading.Lock()
_users = 0
_threads = 1
"""torch's number of threads before the first of ``_users`` came"""


def workers() -> int:
    """How many batches may be computed at once: the threads that torch has been given."""
    import torch

    with _lock:
        return _threads if _users else torch.get_num_threads()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch on one thread inside; the last one to leave restores what the first one found."""
    import torch

    global _users, _threads
    with _lock:
        if _users == 0:
            _threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.set_num_threads(_threads)


def in_parallel(compute: Callable[[Part], None], parts: Sequence[Part], *, at_once: int) -> None:
    """``compute`` for every part, ``at_once`` of them at a time; an error of any of them is raised."""
    with _one_thread_each():
        if at_once == 1 or len(parts) == 1:
            for part in parts:
                compute(part)
            return
        with ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(compute, part) for part in parts]:
                done.result()
