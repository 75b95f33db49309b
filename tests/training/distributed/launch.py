"""Several processes on this machine that run one function together, over gloo.

Processes come from a fork server that has imported torch already, so that starting one takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "tests.training.distributed.jobs",
    ]
)


class RankFailed(AssertionError):
    """A rank raised: ``errors`` holds every rank's traceback, or None, or that it died."""

    def __init__(self, errors: list[Any]) -> None:
        super().__init__("\n".join(f"rank {r}: {e}" for r, e in enumerate(errors) if e is not None))
        self.errors = errors


def _body(
    function: Callable[..., Any], rank: int, size: int, store: str, timeout: float, args: Any, pipe: Connection
) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    if size:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        dist.barrier()  # whoever leaves while another still connects makes that one fail
    try:
        pipe.send_bytes(pickle.dumps((True, function(*args))))  # plain pickle: tensors travel by value
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
    if size:
        dist.destroy_process_group()


def run(size: int, function: Callable[..., Any], *args: Any, timeout: float = 60, together: float = 40) -> list[Any]:
    """What ``function(*args)`` returns on each of ``size`` ranks (0: one process without a process group).

    ``together`` is the process group's timeout, ``timeout`` that of the whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(max(1, size)):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_body,
                args=(function, rank, size, str(Path(folder) / "store"), together, args, there),
                daemon=False,
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        results: list[Any] = [None] * len(pipes)
        errors: list[Any] = [None] * len(pipes)
        waiting, deadline = dict(enumerate(pipes)), time.monotonic() + timeout
        try:
            while waiting:
                ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(waiting)} hang; others: {errors}")
                for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                    try:
                        done, value = pickle.loads(waiting[rank].recv_bytes())
                        results[rank], errors[rank] = (value, None) if done else (None, value)
                    except EOFError:
                        errors[rank] = "died without a word"
                    del waiting[rank]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    if any(e is not None for e in errors):
        raise RankFailed(errors)
    return results
