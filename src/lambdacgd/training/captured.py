"""A captured step for small models on CUDA: all of it, from gathering to the optimizer, in one graph launch.

The training data lies on the device; the examples of every step are rows of a table there, padded by examples of
weight exactly zero to one of a few widths, each with a graph of its own, and split where a batch is larger than the
largest; step and position are counters in device memory. What is computed is what the ordinary loop computes, up to
the order of float32 additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lambdacgd.errors import InvalidInput, TrainingError, integer
from lambdacgd.planning import Plan
from lambdacgd.training.loop import Loop, Phase, cut
from lambdacgd.training.step import PrivateStep

LossFunction = Callable[..., Tensor]
Kind = tuple[bool, bool, int]  # of a graph: whether it begins a logical batch, whether it ends it, its rows
_WARM_UP = 3  # runs before capture, as torch asks for: libraries choose their kernels then
_NOT_PUT_BACK = "a captured step failed, and so did putting the weights back: build anew, load the newest checkpoint"


class CapturedStep:
    """Call it once a logical step, or ``run()`` for the rest of the run. ``loss`` is the last batch's, not private.

    Guarantee
    ---------
    As for ``Private``, except that a sum that is not finite is found after the weights have changed: the error says
    so, and the run goes on from its last checkpoint.
    """

    def __init__(self, loop: Loop, loss: LossFunction, data: Sequence[Tensor], padded: int | None) -> None:
        self._loop, self._loss_of, self._data = loop, loss, tuple(data)
        plan = self._plan = loop.private_step.plan
        self._device = _check(loop, plan, self._data)
        # Not the loop's own: graphs hold the memory of its noise, and the loop makes its noise anew when it resumes.
        of_loop = loop.private_step
        self._private_step = PrivateStep(plan, of_loop.run, of_loop.layout, max_grad_norm=of_loop.max_grad_norm)
        if padded is None:
            padded = min(plan.examples, _spread(plan.batch_size, 3))
        self.padded = integer("padded", padded)
        # Half of all batches fit the first width, five of six the second.
        self.widths = sorted({min(self.padded, _spread(plan.batch_size, n)) for n in (0, 1)} | {self.padded})
        self._cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._step = torch.ones(1, dtype=torch.int64, device=self._device)
        self.loss = torch.zeros((), device=self._device)
        self._table = torch.full((1, self.padded), -1, dtype=torch.int64, device=self._device)
        self._parts: list[list[Kind]] = []
        self._first_step = 0
        self._at = 0  # the step that the counters in device memory stand at; ordinary steps and loading leave it behind
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._held: list[Any] = []  # what the graphs hold as constants

    def __call__(self) -> None:
        """One logical step."""
        self.run(1)

    def run(self, steps: int | None = None) -> None:
        """Take logical steps.

        Args:
            steps: How many; by default the rest of the run.

        Raises:
            TrainingError: Fewer steps of the plan are left, or an ordinary logical batch is under way.
            NonFiniteSum: A sum held a NaN or an infinity; the weights have changed.
        """
        loop, cycle, plan = self._loop, self._loop.cycle, self._plan
        loop.check_usable()
        loop.gradients.check_parameters()
        loop.note_changes()
        left = plan.steps - cycle.done
        cycle.refuse_half_done()
        if cycle.phase is not Phase.IDLE:
            raise TrainingError("an ordinary logical batch is under way; finish it before a captured step")
        if left == 0 or (steps is not None and steps > left):
            raise TrainingError(f"{left} of the plan's {plan.steps} steps are left; the horizon is fixed")
        for _ in range(left if steps is None else steps):
            self._launch()
        if plan.sigma:
            self._private_step.noise.check()

    def _launch(self) -> None:
        """One logical step: fill the table and capture what is missing, then replay."""
        loop, cycle = self._loop, self._loop.cycle
        step = cycle.current
        if step != self._at:  # ordinary steps were taken, whose gradients somebody may keep
            loop.clipper.zero()
            loop.clipper.totals.leave()
        if step != self._at or step >= self._first_step + len(self._parts):
            self._fill_table(step)
        if self._held != self._constants():
            self._graphs = {}
        kinds = self._parts[step - self._first_step]
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in self._graphs]
        for kind in missing:  # all before the first replay: capturing writes the clipper's buffers
            self._graphs[kind] = self._capture(kind)
        if missing:
            self._held = self._constants()  # after capturing, which makes the optimizer's state
        cycle.phase = Phase.NOISED  # Ctrl-C leaves unknown whether the device went on: no z may serve twice
        try:
            for kind in kinds:
                self._graphs[kind].replay()
            loop.acted()
            self._at = cycle.current
        except BaseException:
            self._at = 0  # counters in device memory are set anew
            raise
        loop.reading = None  # the loader, which may have read ahead, begins anew
        for act in loop.after_step:
            act()

    def _constants(self) -> list[Any]:
        """What the graphs hold: the optimizer's options, and where weights, its state and sums lie. A change (a
        scheduler's, a checkpoint loaded, weights moved) means capturing again: an old address may be anybody's by now.
        """
        optimizer = self._loop.optimizer
        options = [
            {k: _constant(v) for k, v in group.items() if isinstance(v, (int, float, bool, tuple, Tensor))}
            for group in optimizer.param_groups
        ]
        parameters = self._loop.clipper.parameters.values()
        states = (value for p in parameters for value in optimizer.state.get(p, {}).values())
        places = (x.data_ptr() for x in (*parameters, *states) if isinstance(x, Tensor))
        return [options, *places, *self._loop.clipper.totals.memory]

    def _fill_table(self, step: int) -> None:
        """The rows of the rest of this epoch, in one copy to the device."""
        plan = self._plan
        end = -(-step // plan.steps_per_epoch) * plan.steps_per_epoch
        batches = self._private_step.batches(step)
        rows, parts = [], []
        for number in range(step, end + 1):
            kinds = []
            for chunk in cut(number, next(batches), self.padded):
                chosen = [] if chunk.padding else chunk.indices
                rows.append(chosen + [-1] * (self.padded - len(chosen)))
                width = next(width for width in self.widths if width >= len(chosen))
                kinds.append((chunk.first == 0, chunk.last, width))
            parts.append(kinds)
        table = torch.tensor(rows, dtype=torch.int64)
        if len(rows) > self._table.shape[0]:  # room for an epoch with more splits: a table that moves costs new graphs
            room = max(len(rows), 2 * plan.steps_per_epoch)
            self._table = torch.full((room, self.padded), -1, dtype=torch.int64, device=self._device)
            self._graphs = {}
        self._table[: len(rows)].copy_(table)
        self._cursor.zero_()
        self._step.fill_(step)
        self._parts, self._first_step, self._at = parts, step, step  # last: Ctrl-C before means filling again

    def _work(self, first: bool, last: bool, width: int, step: Tensor) -> None:
        loop, clipper = self._loop, self._loop.clipper
        row = self._table.index_select(0, self._cursor).view(-1)[:width]
        chosen = row.clamp_min(0)
        if first:
            clipper.zero()
        clipper.weigh((row >= 0).to(torch.float32))
        rows = chosen.view(-1, 1).expand(-1, clipper.views).reshape(-1)  # the views of an example are neighbours
        loss = self._loss_of(loop.model, *(tensor.index_select(0, rows) for tensor in self._data))
        loss.backward()
        self.loss.copy_(loss.detach())
        self._cursor.add_(1)
        if not last:
            return
        self._private_step(clipper, step, check=False)
        with torch.no_grad():
            loop.optimizer.step()
            step.add_(1)

    def _capture(self, kind: Kind) -> torch.cuda.CUDAGraph:
        loop = self._loop
        if self._plan.sigma:
            _ = self._private_step.noise  # made before the graph is: its memory is not the graph's own
        cursor, step = self._cursor.clone(), self._step.clone()
        at, self._at = self._at, 0  # whoever goes on after a failure here sets the counters anew
        loop.resting = True
        try:
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(side):
                    self._warm_up(kind, cursor, step)
                    self._cursor.copy_(cursor)
                    self._step.copy_(step)
                    self._come_to(kind)
            finally:
                torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._work(*kind, self._step)
            self._cursor.copy_(cursor)
            self._step.copy_(step)
            self._at = at
        finally:
            loop.resting = False
            loop.clipper.zero()
            loop.clipper.weigh(None)
            for p in loop.clipper.parameters.values():
                p.grad = None
        return graph

    def _come_to(self, kind: Kind) -> None:
        """What goes before a part of this kind: the clipper must be adding to an earlier part, and that is a full one
        (small sums lie together, and which are small may depend on the number of rows).
        """
        if not kind[0]:
            self._work(True, False, self.padded, self._step)
            self._loop.clipper.settle()  # which a capture cannot wait for

    def _warm_up(self, kind: Kind, cursor: Tensor, step: Tensor) -> None:
        """Whole steps, so that the optimizer's state exists; then everything as it was, also where they fail: their
        noise is that of the step to come.
        """
        loop = self._loop
        weights = {id(p): p.detach().clone() for p in loop.clipper.parameters.values()}
        states = {
            id(p): {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
            for p, state in loop.optimizer.state.items()
        }
        loop.broken = _NOT_PUT_BACK
        try:
            for _ in range(_WARM_UP):
                self._cursor.copy_(cursor)
                self._step.copy_(step)
                self._come_to(kind)  # also compiles what adds: a graph's capture is no place for that
                self._work(kind[0], True, kind[2], self._step)
        finally:
            self._restore(weights, states)
            loop.broken = None

    @torch.no_grad()
    def _restore(self, weights: dict[int, Tensor], states: dict[int, dict[str, Tensor]]) -> None:
        """Undo what warming up did, in place: captured kernels know these addresses. Allocates nothing: memory may be
        what it failed for.
        """
        for p in self._loop.clipper.parameters.values():
            p.copy_(weights[id(p)])
            before = states.get(id(p), {})
            for name, value in self._loop.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    value.copy_(before[name]) if name in before else value.zero_()


def _spread(batch_size: float, deviations: int) -> int:
    """So many standard deviations above the mean batch, as a multiple of eight."""
    return 8 * math.ceil((batch_size + deviations * math.sqrt(batch_size)) / 8)


def _constant(value: Any) -> Any:
    """An option as a graph holds it: a tensor on the device by its address, one on the host by its value."""
    if not isinstance(value, Tensor):
        return value
    return value.data_ptr() if value.is_cuda else value.tolist()


def _check(loop: Loop, plan: Plan, data: tuple[Tensor, ...]) -> torch.device:
    devices = {p.device for p in loop.clipper.parameters.values()} | {tensor.device for tensor in data}
    device = next(iter(devices))
    if len(devices) != 1 or device.type != "cuda":
        places = ", ".join(sorted(map(str, devices)))
        raise InvalidInput("data", f"Data and model must be on one CUDA device, and they are on {places}.")
    if device.index not in (None, torch.cuda.current_device()):
        current = f"cuda:{torch.cuda.current_device()}"
        raise InvalidInput(
            "data",
            f"The data is on {device}, and a graph captures work of the current device, {current}: set it first.",
        )
    if not data or any(len(tensor) != plan.examples for tensor in data):
        found = ", ".join(str(len(tensor)) for tensor in data) or "none"
        raise InvalidInput("data", f"Give tensors of {plan.examples} rows in the dataset's order. These have {found}.")
    if not plan.mechanism.regenerates(plan.block.steps):
        raise InvalidInput("plan", f"{plan.mechanism.name} needs buffers on the host: use the ordinary loop.")
    kind = type(loop.optimizer)
    for group in loop.optimizer.param_groups:
        plain = kind is torch.optim.SGD and not group["dampening"]
        if not plain and not (kind in (torch.optim.Adam, torch.optim.AdamW) and group["capturable"]):
            allowed = "SGD without dampening, or Adam or AdamW with capturable=True"
            raise InvalidInput("optimizer", f"A captured step takes {allowed}; this {kind.__name__} is none of them.")
    return device
