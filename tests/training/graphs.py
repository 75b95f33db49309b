"""CUDA graphs on the CPU: capturing changes no memory, a replay uses the buffers that the clipper had then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from lambdacgd.training import captured
from lambdacgd.training.step import PrivateStep


def on_the_host(add_noise: Callable[..., None]) -> Callable[..., None]:
    """Steps in device memory are for CUDA: the CPU's noise takes a number."""
    return lambda self, sums, step, **options: add_noise(self, sums, int(step), **options)


class Captured(captured.CapturedStep):
    """The captured step with its own capturing, on stand-ins; ``disturb(n)`` is called at the end of its n-th work."""

    work = 0
    disturb: Callable[[int], None] = staticmethod(lambda n: None)

    def _work(self, first: bool, last: bool, width: int, step: torch.Tensor) -> None:
        self.work += 1
        self.kind = (first, last, width)
        self.kinds = [*getattr(self, "kinds", []), self.kind]
        super()._work(first, last, width, step)
        self.disturb(self.work)

    def memory(self) -> list[torch.Tensor]:
        """All that a graph writes and somebody else reads."""
        totals, parameters = self._loop.clipper.totals, self._loop.clipper.parameters.values()
        states = [x for s in self._loop.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
        sums = [*totals._buffers.values(), *(whole for whole, _ in totals._packs.values())]
        return [self._cursor, self._step, self.loss, *sums, *states, *(p.data for p in parameters)]


class Graphs:
    """``torch.cuda`` as far as the captured step uses it; ``steps``: where the counters stood at each replay."""

    def __init__(self) -> None:
        self.step: Captured | None = None
        self.steps: list[int] = []

    def Stream(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace()

    @contextlib.contextmanager
    def graph(self, graph: SimpleNamespace) -> Iterator[None]:
        step = self.step
        assert step is not None
        filled = dict(step._loop.clipper.totals.filled)
        memory = step.memory()
        before = [x.clone() for x in memory]
        try:
            yield
        finally:
            with torch.no_grad():
                for x, y in zip(memory, before, strict=True):
                    x.copy_(y)
        kind = step.kind
        graph.replay = lambda: self._replay(step, kind, filled)

    def _replay(self, step: Captured, kind: captured.Kind, filled: dict[str, torch.Tensor]) -> None:
        loop = step._loop
        self.steps.append(int(step._step))
        loop.clipper.totals.filled = dict(filled)
        loop.resting = True
        captured.CapturedStep._work(step, *kind, step._step)
        loop.resting = False
        loop.clipper.zero()
        for p in loop.clipper.parameters.values():
            p.grad = None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()
    monkeypatch.setattr(PrivateStep, "add_noise_", on_the_host(PrivateStep.add_noise_))
    monkeypatch.setattr(captured, "_check", lambda loop, plan, data: torch.device("cpu"))
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found
