"""The user's loop around a private step: the batches it gets, what backward passes and ``optimizer.step()`` set off.

The loop stays the user's own. `Loader` hands out the plan's batches. `Loop` stands behind the hooks on the optimizer
and on the clipper, and calls `step.PrivateStep` once for every whole logical batch. `Cycle` knows where the run stands,
`Gradients` what is in ``p.grad``, `Weights` whether something else has changed the weights; `EMA` is their average.

Guarantee
---------
The examples of step t are exactly those that the plan's sampling gives for (key, run, t): never shuffled, truncated or
rebalanced. Several processes split them by their place in the batch: none is left out, none is on two. Where nobody
takes part, one example of weight exactly zero is handed out, so that the step is pure noise; what fills a batch up
(``pad_batches``) has weight exactly zero, too. What random augmentation does depends on the run, the step and the place
in the logical batch only, not on workers, padding or resuming.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lambdacgd.clipping import Clipper
from lambdacgd.clipping.probe import fingerprints
from lambdacgd.errors import CheckpointError, TrainingError, number
from lambdacgd.torch_private import GIVEN_BY_SCALER, SCALES_BY_ITSELF, foreach_lerp_, version
from lambdacgd.training.card import History
from lambdacgd.training.data import random_numbers_of
from lambdacgd.training.distributed import models
from lambdacgd.training.distributed.models import is_sharded, local, reshard
from lambdacgd.training.step import PrivateStep

_DETACHED = "this run was detached; call privatize again (and load a checkpoint to go on)"
_ALONE = "a step failed on this rank, and none goes on alone: stop, and resume all ranks from the newest checkpoint"
_LOADED_BY_HAND = (
    "optimizer.load_state_dict() was called in a private run, which goes on by private.load or private.resume alone. "
    "Load other state before privatize"
)
_HALF_LOADED = "loading a checkpoint failed half-way: detach(), build model and optimizer anew, privatize, load again"
_INTERRUPTED = (
    "the logical batch under way is not whole: handing it out was interrupted, or a backward pass failed while it "
    "added to the sums, and what earlier parts had added was lost. Loop over private.loader anew, which yields it again"
)
_LONGER = "to train longer, make a plan with more epochs"
_CLOSURE = "optimizer.step(closure) would use the batch twice: call backward(), then optimizer.step() without a closure"
_SCALER = (
    "GradScaler does not fit: its scale would change what is clipped. Use torch.autocast with bfloat16, which needs no "
    "scaler, or GradScaler(enabled=False). The batch was dropped; the loader yields it again"
)
_LOSS_NOT_CHECKED = (
    "nobody has looked whether the training loss adds examples up, which the claim needs: class weights in a mean or a "
    "mean over all tokens do not. Give it to privatize(…, loss=loss), where loss(model, batch) returns what your loop "
    "calls backward() on. The privacy card says that it was not checked"
)


# --- the plan's batches ----------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A physical batch: part of the logical batch of ``step``, from its ``first`` example on."""

    step: int
    first: int
    indices: list[int]
    last: bool  # whether the logical batch is whole with it
    padding: int  # of its examples, how many at the end have weight zero: all, where nobody takes part
    least: int = 0  # examples that every rank has at least in this physical batch


def cut(
    step: int, batch: np.ndarray, size: int | None, *, rank: int = 0, ranks: int = 1, multiple: int = 1
) -> Iterator[Chunk]:
    """A logical batch in parts of at most ``size`` examples; an empty one borrows example 0 at weight zero.

    A part is filled up at weight zero to a multiple of ``multiple``, though not beyond ``size``, by its first example.
    With several ranks, rank r has every ``ranks``-th example from place r on: each example is on one rank. All ranks
    have as many parts as the one with the most examples, so that they go through them together.
    """
    own, most = batch[rank::ranks], max(1, -(-len(batch) // ranks))
    step_size = size or most
    for first in range(0, most, step_size):
        part = own[first : first + step_size].tolist()
        least = min(step_size, max(0, len(batch) // ranks - first))
        width = max(1, -(-len(part) // multiple)) * multiple
        padding = (width if size is None else min(width, size)) - len(part)
        indices = part + (part[:1] or [0]) * padding
        yield Chunk(step, rank + ranks * first, indices, first + step_size >= most, padding, least)


class Examples(Dataset[Any]):
    """The user's dataset, read a chunk at a time with random numbers of the chunk's own (``views`` readings each).

    The readings of an example are neighbours. What fills a chunk up is read last: nobody's random numbers move.
    """

    def __init__(self, dataset: Any, run: str, views: int) -> None:
        self._dataset, self._run, self._views = dataset, run, views

    def __getitems__(self, chunk: Chunk) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        own = len(chunk.indices) - chunk.padding
        items: list[Any] = []
        with random_numbers_of(f"{self._run}/{chunk.step}/{chunk.first}"):
            for some in (chunk.indices[:own], chunk.indices[own:]):
                readings = [
                    together(some) if callable(together) else [self._dataset[i] for i in some]
                    for _ in range(self._views if some else 0)
                ]
                items += [item for of_example in zip(*readings, strict=True) for item in of_example]
        return items


class Rows(Examples):
    """A ``TensorDataset``, a chunk by one indexing of each tensor: the batch that collating its items would give.

    Nothing about it is random. Item by item, a batch on a GPU costs as many launches as it has numbers.
    """

    def __getitems__(self, chunk: Chunk) -> list[Tensor]:
        tensors = self._dataset.tensors
        rows = torch.tensor([i for i in chunk.indices for _ in range(self._views)])
        places = {t.device: rows.to(t.device, non_blocking=True) for t in tensors}  # nobody waits for a GPU
        return [tensor.index_select(0, places[tensor.device]) for tensor in tensors]

    @staticmethod
    def collate(batch: list[Tensor]) -> list[Tensor]:
        return batch

    @staticmethod
    def can_read(dataset: Any) -> bool:
        """Whether the batch is the same to the bit, strides included: plain tensors, row after row."""
        return type(dataset) is TensorDataset and all(
            type(t) is Tensor and t.layout == torch.strided and t.is_contiguous() and not t.requires_grad
            for t in dataset.tensors
        )


class Loader:
    """Iterates the remaining steps of the run. ``private.epochs()`` groups them."""

    def __init__(
        self,
        loop: Loop,
        dataset: Any,
        *,
        max_physical_batch_size: int | None,
        pad_batches: int,
        views: int,
        **options: Any,
    ) -> None:
        """``options`` go to ``torch.utils.data.DataLoader``; every example is read ``views`` times."""
        self._loop, self._dataset, self._views, self._options = loop, dataset, views, options
        self._plan, self._size, self._multiple = loop.private_step.plan, max_physical_batch_size, pad_batches
        self._given: deque[Chunk] = deque()  # what the workers were given and the loop not yet
        self._turn = 0

    def __iter__(self) -> Iterator[Any]:
        return self.until(self._plan.steps)

    def __len__(self) -> int:
        return self.left_until(self._plan.steps)

    def until(self, last_step: int) -> Iterator[Any]:
        """The physical batches of the steps up to ``last_step``. A logical batch under way starts again."""
        self._loop.begin()
        # A run that was finished when it was loaded has no more batches: the same script goes on behind its loop.
        if self._loop.cycle.done >= self._plan.steps and self._loop.reading is not None:
            over = f"all {self._plan.steps} steps of the plan are done; the horizon is fixed"
            raise TrainingError(f"{over}. For one epoch after the other loop over private.epochs(); {_LONGER}")
        self._turn += 1
        return self._iterate(last_step, self._turn)

    def _iterate(self, last_step: int, turn: int) -> Iterator[Any]:
        loop, cycle = self._loop, self._loop.cycle
        while True:
            if turn != self._turn:
                raise TrainingError("another iteration of the loader has begun; there is one position in a run")
            loop.before_batch()
            if cycle.phase is Phase.IDLE and cycle.done >= last_step:
                if loop.reading is not None and cycle.done >= self._plan.steps:
                    loop.reading = iter(())  # ends workers. Left to the garbage collector, torch waits 5 s for each
                return
            if loop.reading is None:
                loop.drop_batch()
                loop.reading = self._start(cycle.current)
            reading, loop.reading = loop.reading, None  # after a failure or Ctrl-C here, nobody goes on from there
            data = next(reading)
            loop.hand_out(self._given.popleft())
            loop.reading = reading
            yield data

    def _start(self, step: int) -> Iterator[Any]:
        """Begin to read at a step, ahead of the loop if there are workers."""
        plan, world, dataset = self._plan, self._loop.world, self._dataset
        if len(dataset) != plan.examples:
            raise TrainingError(f"the dataset now has {len(dataset)} examples, not {plan.examples}: it must not change")
        self._given = given = deque[Chunk]()

        def chunks() -> Iterator[Chunk]:
            for t, batch in enumerate(self._loop.private_step.batches(step), start=step):
                for chunk in cut(t, batch, self._size, rank=world.rank, ranks=world.size, multiple=self._multiple):
                    given.append(chunk)
                    yield chunk

        options, kind = self._options, Examples
        if options["collate_fn"] is None and Rows.can_read(dataset):
            options, kind = {**options, "collate_fn": Rows.collate}, Rows
        examples = kind(dataset, self._loop.private_step.run.id, self._views)
        # Chunks, which the examples understand; and a generator of its own: starting to read must not move dropout's.
        generator = torch.Generator().manual_seed(step)
        return iter(DataLoader(examples, batch_sampler=chunks(), generator=generator, **options))  # type: ignore[arg-type]

    def left_until(self, last_step: int) -> int:
        """Logical steps left; physical batches are more where logical ones are split."""
        if self._size is not None:
            raise TypeError("how many physical batches are left depends on the bins; plan.steps counts logical ones")
        return max(0, last_step - self._loop.cycle.done)


class Epoch:
    """What is left of one epoch. ``number`` counts from 1."""

    def __init__(self, loader: Loader, number: int, last_step: int) -> None:
        self.number = number
        self._loader, self._last_step = loader, last_step

    def __iter__(self) -> Iterator[Any]:
        return self._loader.until(self._last_step)

    def __len__(self) -> int:
        """Logical steps left in the epoch."""
        return self._loader.left_until(self._last_step)


# --- where the run stands --------------------------------------------------------------------------------------------


class Phase(Enum):
    IDLE = "between two logical steps"
    GATHERING = "within a logical batch"
    WHOLE = "a whole logical batch, waiting for optimizer.step()"
    NOISED = "gradients noised, the optimizer has not finished"


@dataclass
class Cycle:
    """Where a run stands: which step, how much of its logical batch has been handed out, and what may happen next.

    A logical batch is handed out in one or more physical batches; each must see exactly one backward pass; when all
    have, the optimizer acts once. Whatever goes wrong before that, the step can be done again: nothing was released.
    """

    steps: int  #: the plan's
    done: int = 0
    phase: Phase = Phase.IDLE
    handed_out: int = 0  #: examples of this logical batch that the loop has received
    before_last: int = 0  #: the same, without its last physical batch

    @property
    def current(self) -> int:
        """The step under way or next, from 1."""
        return self.done + 1

    def hand_out(self, chunk: Chunk) -> None:
        """The user gets a physical batch."""
        if chunk.step != self.current:
            raise TrainingError(f"a batch of step {chunk.step} was handed out, but step {self.current} is next")
        self.before_last = 0 if self.phase is Phase.IDLE else self.handed_out
        self.handed_out = self.before_last + len(chunk.indices)
        self.phase = Phase.WHOLE if chunk.last else Phase.GATHERING

    def acted(self) -> None:
        """The optimizer has changed the weights."""
        self.done, self.phase = self.done + 1, Phase.IDLE

    def refuse_half_done(self) -> None:
        if self.phase is Phase.NOISED:
            raise TrainingError(
                f"the optimizer failed in the middle of step {self.current}: the weights may be half updated. Call "
                "optimizer.step() again if the cause is gone, or resume from a checkpoint"
            )

    def check_taken(self) -> None:
        """Raise if ``optimizer.step()`` was called without a batch."""
        if self.phase is not Phase.IDLE:
            return
        if self.done == self.steps:
            raise TrainingError(f"all {self.steps} steps of the plan are done: {_LONGER}")
        if not self.done:
            own = "take batches from private.loader or private.epochs(), not from a DataLoader of your own"
            raise TrainingError(f"optimizer.step() without a new batch (no batch was taken): {own}")
        once = "the same gradients are never used twice. Call it once for each batch"
        raise TrainingError(f"optimizer.step() without a new batch (step {self.done} is done): {once}")

    def check_backward(self, seen: int) -> None:
        """Raise unless the backward passes have covered what was handed out: ``seen`` is the number of examples."""
        size, rows = self.handed_out - self.before_last, seen - self.before_last
        if rows == size:
            return
        if rows == 0:
            raise TrainingError(f"backward() was not called on the last physical batch ({size} examples): call it once")
        if rows > size and rows % size == 0:
            once = "call it once. To accumulate gradients, give privatize max_physical_batch_size"
            raise TrainingError(f"backward() was called {rows // size} times on one physical batch: {once}")
        raise TrainingError(
            f"the backward passes covered {rows} rows for a batch of {size} examples: check collate_fn, or the model "
            "ran on other data than the loader's batch"
        )


# --- the hooks -------------------------------------------------------------------------------------------------------


class Loop:
    """A run under way: its position, its gradients and weights, and what is called around its steps."""

    history: History

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, clipper: Clipper, step: PrivateStep, undo: contextlib.ExitStack
    ) -> None:
        """``undo`` takes what gives the optimizer back and ends the run."""
        self._model, self.optimizer, self.clipper, self.private_step = model, optimizer, clipper, step
        self.world, self.shards = step.run.world, step.shards
        self.cycle = Cycle(step.plan.steps)
        self.gradients = Gradients(clipper.parameters, optimizer)
        self.weights = Weights(model)
        self.averages: list[EMA] = []
        self.after_step: list[Callable[[], None]] = []
        self.reading: Iterator[Any] | None = None  # what the loader reads, from the next physical batch on
        self.loss_checked = False
        self.resting = False  # whether hooks do nothing: a step is being captured that does all of it by itself
        self.attached = True
        self.broken: str | None = None  # why this run must not go on in this process
        self._steps_per_epoch = step.plan.steps_per_epoch
        self._sharded_modules = len(models.fsdp_modules(model))
        self._loading = False
        if SCALES_BY_ITSELF in vars(optimizer):
            undo.callback(setattr, optimizer, SCALES_BY_ITSELF, vars(optimizer)[SCALES_BY_ITSELF])
        else:
            undo.callback(vars(optimizer).pop, SCALES_BY_ITSELF, None)
        setattr(optimizer, SCALES_BY_ITSELF, True)  # GradScaler then calls step(), whose hook refuses it
        clipper.before_adding = self._before_adding
        for hook in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ):
            undo.callback(hook.remove)
        undo.callback(self._end)

    @property
    def model(self) -> nn.Module:
        """The user's model, as it is, fixed for a run: its weights are in no other."""
        return self._model

    def _end(self) -> None:
        """The run ends in this process. A logical batch under way is dropped."""
        self.attached, self.reading = False, None
        self.weights.seal()
        self.gradients.clear()
        self.private_step.forget()

    # --- may the run go on? ------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise where this run cannot go on now: detached, or with weights that are not those of its last step."""
        if not self.attached:
            raise TrainingError(_DETACHED)
        self.check_whole()
        self.check_own_weights()

    def check_whole(self) -> None:
        """Raise if the weights, here or on another rank, may not be those of a whole step."""
        if self.shards is not None and self.shards.failed and self.world.many:
            raise TrainingError(_ALONE)
        if self.broken is not None:
            raise TrainingError(self.broken)

    def check_own_weights(self) -> None:
        """Raise while the model holds an average: what is trained, saved or loaded then is not the run's weights."""
        if any(average.in_use for average in self.averages):
            raise CheckpointError("the model holds an average now: leave ema.applied() before you train, save or load")

    def compare_weights(self) -> None:
        """An error on every rank unless all have the same weights. All must call it."""
        models.compare_weights(self.clipper.parameters, self.optimizer, self.cycle.done, self.world)

    def note_changes(self) -> None:
        """Before weights are used: the card will say it if something else has changed them since the last step, before
        the first one only where their history was declared.
        """
        watched = self.cycle.done > 0 or self.history.declared
        if watched and not self.history.changed and self.weights.changed():
            self.history = replace(self.history, changed=True)

    # --- batches -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A loop over the loader begins. A logical batch under way starts again."""
        self.check_usable()
        self.drop_batch()
        models.check_spread_as_before(self.model, self._sharded_modules, self.world)

    def before_batch(self) -> None:
        """Raise unless the next physical batch may be handed out."""
        self.check_usable()
        cycle = self.cycle
        if cycle.phase is Phase.IDLE:
            return
        cycle.refuse_half_done()
        self._refuse_interrupted()
        cycle.check_backward(self.clipper.examples)
        if cycle.phase is Phase.WHOLE:
            late = f"the batch of step {cycle.current} is whole, but optimizer.step() was not called before the next"
            how = "Call it after every backward(). To accumulate gradients, give privatize max_physical_batch_size"
            raise TrainingError(f"{late}. {how}")

    def hand_out(self, chunk: Chunk) -> None:
        """The loader gives the next physical batch to the user."""
        if self.cycle.phase is Phase.IDLE:
            self.clipper.zero()  # what a backward pass outside any batch left behind is not the plan's batch
            if self.cycle.done % self._steps_per_epoch == 0:
                self.clipper.begin_epoch()
        self.cycle.hand_out(chunk)
        self.clipper.begin_batch()
        if self.shards is not None:
            self.shards.expect(chunk.step, last=chunk.last)
            self.clipper.allow_probe(chunk.least > 1)
        own = len(chunk.indices) - chunk.padding
        self.clipper.weigh(torch.tensor([1.0] * own + [0.0] * chunk.padding) if chunk.padding else None)

    def _refuse_interrupted(self) -> None:
        """Raise if the logical batch under way was not handed out whole, or the sums of its earlier parts are gone."""
        cycle = self.cycle
        if cycle.phase is not Phase.IDLE and (self.reading is None or self.clipper.examples < cycle.before_last):
            raise TrainingError(_INTERRUPTED)

    def drop_batch(self) -> None:
        """Forget the logical batch under way, which will be handed out again. Nothing of it was released."""
        self.cycle.refuse_half_done()
        if self.cycle.phase is not Phase.IDLE:
            self.cycle.phase, self.reading = Phase.IDLE, None
        self.clipper.zero()
        self.clipper.weigh(None)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _before_adding(self) -> None:
        """A backward pass is about to write the buffers that p.grad shares with the clipper: noised gradients that the
        optimizer has not finished with, or that somebody kept, must not become sums without noise.
        """
        if not self.resting:
            self.cycle.refuse_half_done()
            self._refuse_interrupted()  # an earlier batch, or this one twice, could count as many examples
            self.clipper.totals.leave()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``optimizer.step()`` was called: where the logical batch is whole, write its noised gradients."""
        if self.resting:
            return
        self.check_usable()
        if any(x is not None for x in args[1:]) or kwargs.get("closure") is not None:
            raise TrainingError(_CLOSURE)
        if not vars(optimizer).keys().isdisjoint(GIVEN_BY_SCALER):
            for name in GIVEN_BY_SCALER:
                vars(optimizer).pop(name, None)
            self.drop_batch()  # its losses were scaled, so its sums are not what was meant
            raise TrainingError(_SCALER)
        self.gradients.check_parameters()
        cycle = self.cycle
        if cycle.phase is Phase.NOISED:  # the optimizer failed half-way, and is called again
            return
        cycle.check_taken()
        self._refuse_interrupted()
        seen = self.clipper.examples
        try:
            cycle.check_backward(seen)
        except TrainingError:
            if seen > cycle.handed_out:
                self.drop_batch()  # too many backward passes: the sums are spoilt, the loader yields the batch again
            raise
        self.gradients.check_clear(cycle.done)
        if cycle.phase is not Phase.WHOLE:
            return
        if cycle.done == 0 and not self.loss_checked:
            warnings.warn(_LOSS_NOT_CHECKED, stacklevel=3)
        self.note_changes()
        if cycle.done % self._steps_per_epoch == 0:
            self._warn_of_dropped()
        try:
            self.private_step(self.clipper, cycle.current)
        except BaseException:  # a sum that is not finite, Ctrl-C
            self.gradients.clear()
            self.drop_batch()  # the sums are spoilt; the loader yields the batch again
            self.broken = _ALONE if self.world.many else None
            raise
        cycle.phase = Phase.NOISED

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.resting or self.cycle.phase is not Phase.NOISED:
            return
        self.acted()
        if self.cycle.done % self._steps_per_epoch == 0:
            self.compare_weights()
        for act in self.after_step:
            act()

    def acted(self) -> None:
        """The optimizer has changed the weights."""
        self.cycle.acted()
        self.weights.settle()

    def _warn_of_dropped(self) -> None:
        """Warn of examples without a finite gradient. Once an epoch: it waits for the device."""
        dropped = self.clipper.dropped
        if dropped:
            warnings.warn(
                f"{dropped} of the {self.cycle.handed_out} examples of step {self.cycle.current} have no finite "
                "gradient and count for nothing. Look for NaN and infinities in the data, the loss and the learning "
                "rate (steps are looked at once an epoch)",
                stacklevel=4,
            )

    # --- a resumed run -----------------------------------------------------------------------------------------------

    def stand_at(self, step: int) -> None:
        """Set the position of a resumed run. Only loading leads back: noise that was added serves no other sum."""
        if not self._loading and (step < self.cycle.done or self.cycle.phase is not Phase.IDLE):
            now = f"the run stands after step {self.cycle.done}, whose noise must serve no other sum"
            raise TrainingError(f"{now}; only a checkpoint leads back: private.load(path)")
        self.cycle.done, self.cycle.phase, self.reading = step, Phase.IDLE, None
        self.drop_batch()
        self.gradients.clear()
        self.private_step.forget()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """In this block the run's own state may be loaded, and the position set back: the ledger has allowed it."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False
            self.weights.settle()

    @contextlib.contextmanager
    def going_on_from(self, step: int, become: Callable[[], None]) -> Iterator[None]:
        """Restore weights and the rest in this block, once ``become`` has made the run that of the checkpoint.

        Should the block fail, or Ctrl-C come before the position is set, the run refuses to go on: no step that was
        released can be done again under its noise. An error of ``become`` leaves everything as it was.
        """
        before, self.broken = self.broken, _HALF_LOADED
        try:
            become()
        except Exception:
            self.broken = before
            raise
        with self.loading():
            self.stand_at(step)
            yield
        self.broken = None

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Refuse state loaded by hand. Loading its own state again does no harm: accelerate moves it to a device so."""
        if not self._loading and state.get("state") and not _same(state["state"], optimizer.state_dict()["state"]):
            raise TrainingError(_LOADED_BY_HAND)


# --- gradients, weights and their average ----------------------------------------------------------------------------


class Gradients:
    """The gradients of the clipped parameters: None until a step is noised, ours until ``zero_grad()``."""

    def __init__(self, parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._clipped = {id(p) for p in parameters.values()}

    def check_parameters(self) -> None:
        """The optimizer still holds what it was privatized with, and nothing else that trains."""
        held = 0
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._clipped:
                    held += 1
                elif p.requires_grad or p.grad is not None:
                    raise TrainingError(
                        f"the optimizer holds a trainable parameter of shape {tuple(p.shape)} that is not clipped: it "
                        "was added or unfrozen after privatize. Detach, change the model, privatize anew"
                    )
        if held != len(self._clipped):
            raise TrainingError(f"the optimizer now holds {held} of the {len(self._clipped)} parameters that it had")

    def check_clear(self, done: int) -> None:
        """Nothing is left in ``p.grad`` from step ``done`` or from somebody else."""
        for name, p in self._parameters.items():
            if p.grad is None:
                continue
            if bool(local(p.grad).any()):
                raise TrainingError(
                    f"{name}.grad holds a gradient. If it is that of step {done}, call optimizer.zero_grad() after "
                    "every step. If it was written by something other than this library, it is not private"
                )
            p.grad = None  # zero_grad(set_to_none=False): a zero gradient would still decay weights and move momentum

    def clear(self) -> None:
        """No gradient is left."""
        for p in self._parameters.values():
            p.grad = None


class Weights:
    """Whether anything but the run's own steps has changed the model's parameters.

    Torch's counters of in-place changes tell, which cost nothing to read. They see neither writes by way of ``p.data``
    nor those of fused optimizers. So when the run ends, and anybody may train on, numbers computed from all bits of the
    weights are kept, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._ids = [id(p) for p in self._parameters]
        self._sharded = any(map(is_sharded, self._parameters))
        self._bits: list[int] | None = None  # once the run has ended
        self._expected = self._counters()

    def _counters(self) -> dict[int, int]:
        now = map(local, self._parameters) if self._sharded else self._parameters
        return dict(zip(self._ids, map(version, now), strict=True))

    def settle(self) -> None:
        """The weights are what the run made them."""
        self._expected = self._counters()

    def seal(self) -> None:
        """The run ends: from now on anybody may change the weights, by any means."""
        self._bits = fingerprints(map(local, self._parameters))

    @contextlib.contextmanager
    def exchanged(self, parameters: Iterable[nn.Parameter]) -> Iterator[Callable[[], None]]:
        """A block in which other weights of the run stand in these parameters, and at its end the own ones again. It is
        given a function to call when the others are in place: they too are watched.
        """
        written, start, before, bits = {id(p) for p in parameters}, self._counters(), self._expected, self._bits

        def in_place() -> None:
            self._expected = before | {i: n for i, n in self._counters().items() if i in written}
            if bits is not None:
                self.seal()

        try:
            yield in_place
        finally:  # what others had changed before is changed still
            self._expected = before | {i: before[i] + n - start[i] for i, n in self._counters().items() if i in written}
            self._bits = bits

    def changed(self) -> bool:
        """Whether something else wrote to a parameter since ``settle``."""
        if self._counters() != self._expected:
            return True
        return self._bits is not None and self._bits != fingerprints(map(local, self._parameters))

    def check(self) -> None:
        """Raise unless the weights are those of the run's last step."""
        reshard(self._model)
        if not {id(p) for p in self._model.parameters()} <= self._expected.keys() or self.changed():
            raise TrainingError(
                "these weights are not those of the run's last step: something else has changed them since, and the "
                "run's (ε, δ) may not be theirs. Export before you change them. No claim is made for "
                "what you make of them: save it with torch.save(model.state_dict(), path)"
            )


class EMA:
    """A running average of the weights. It only post-processes released steps, so it costs no privacy.

    w̄ ← βw̄ + (1−β)w after every logical step, with β_t = min(β, (1+t)/(10+t)) so that the start is forgotten.

    Kept in float32 or wider. ``with ema.applied():`` puts the average into the model, for evaluation or export; the
    model's own weights come back at the end.
    """

    def __init__(self, loop: Loop, decay: float) -> None:
        """An average that begins with the model's weights."""
        self.decay = number("decay", decay, above=0, below=1, include=(0,))
        self._loop, self._model = loop, loop.model
        reshard(self._model)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._updates = 0
        self._average = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._parameters.items()
        }
        self.in_use = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights. The run calls this after every logical step.

        Raises:
            CheckpointError: The model holds an average now.
        """
        self._loop.check_own_weights()
        self._loop.note_changes()
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        averages = [local(average) for average in self._average.values()]
        new = [local(p).detach().to(a.dtype) for a, p in zip(averages, self._parameters.values(), strict=True)]
        foreach_lerp_(averages, new, 1 - decay)  # one launch: small models are bound by launches

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Put the average into the model, for a block.

        Returns:
            A context that gives the model. Its own weights come back at the end.
        """
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        with self._loop.weights.exchanged(self._parameters.values()) as in_place:
            try:
                self._copy(self._average)
                in_place()
                self.in_use = True
                yield self._model
            finally:
                self.in_use = False
                self._copy(own)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor]) -> None:
        for name, p in self._parameters.items():
            p.copy_(source[name])
        reshard(self._model)

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints hold: ``decay``, ``updates`` (their number) and ``average`` (by name; not copies)."""
        return {"decay": self.decay, "updates": self._updates, "average": dict(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned.

        Raises:
            TrainingError: It has another decay.
        """
        if state["decay"] != self.decay:
            raise TrainingError(f"the saved average has decay {state['decay']} and this one {self.decay}")
        self._updates = state["updates"]
        for name, value in state["average"].items():
            self._average[name].copy_(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(local(a).to(local(b).device), local(b)))
    return type(a) is type(b) and bool(a == b)
