"""`Noiser`: the plan's batches and noise alone, for people who bring their own clipped sums."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lambdacgd.errors import CheckpointError, InvalidInput, TrainingError, number
from lambdacgd.keys import SecretKey
from lambdacgd.noise import Layout
from lambdacgd.noise.layout import FORMAT as NOISE_FORMAT
from lambdacgd.planning import Plan
from lambdacgd.torch_private import version
from lambdacgd.training.checkpoint import check_identity, content_digest
from lambdacgd.training.distributed.world import World
from lambdacgd.training.run import Run
from lambdacgd.training.step import PrivateStep, check_plan

FORMAT = "lambdacgd-noiser-1"
Tensors = TypeVar("Tensors", bound=dict[str, torch.Tensor])


class Noiser:
    """Once a step: ``batch()`` says whose examples, you clip and sum their gradients, ``add`` adds the step's noise.

    ```python
    noiser = lc.Noiser(plan, key, max_grad_norm=1.0)
    while not noiser.finished:
        sums = my_clipped_sums(noiser.batch())      # {"name": float32 tensor, …}
        gradients = noiser.add(sums)                # in place; divide by plan.batch_size yourself
    ```

    Args:
        plan: From ``lc.plan``.
        key: A ``SecretKey``; by default a new one in memory. One with a file has a ledger, in which every step is
            entered before ``add`` returns, and only such a run can be resumed.
        max_grad_norm: ζ, which your clipping ensures.

    Raises:
        InvalidInput: The plan is none, or was changed; ``max_grad_norm`` is not a positive number.
        TrainingError: This is not rank 0.

    Guarantee
    ---------
    If every sum holds each example of ``batch()`` at most once with norm at most ``max_grad_norm`` over all tensors
    together, and no other data, what ``add`` returns over the run is (ε, δ)-DP as the plan says. This holds for the
    floating-point numbers that it returns (`docs/noise-proof.md`), of float32 and of float64 sums. Clipping is yours,
    and so is its rounding. With several processes there is one Noiser, on rank 0.
    """

    def __init__(self, plan: Plan, key: SecretKey | None = None, *, max_grad_norm: float = 1.0) -> None:
        check_plan(plan)
        if not World.here().first:
            raise TrainingError("one Noiser a rank would be as many runs. Use it on rank 0, send what it returns")
        zeta = number("max_grad_norm", max_grad_norm, above=0)
        self.run = Run(key, plan=plan.digest)
        self._step = PrivateStep(plan, self.run, None, max_grad_norm=zeta)
        self._done = 0
        self._batches: Iterator[NDArray[np.int64]] | None = None
        self._batch: NDArray[np.int64] | None = None
        self._noised: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # what `add` returned last, its version

    @property
    def plan(self) -> Plan:
        """The plan that noise and batches follow, fixed for a run."""
        return self._step.plan

    @property
    def max_grad_norm(self) -> float:
        """ζ, fixed for a run."""
        return self._step.max_grad_norm

    @property
    def layout(self) -> Layout | None:
        """Names and shapes of the sums; None before the first ones."""
        return self._step.layout

    @property
    def steps_taken(self) -> int:
        """Steps done, of ``plan.steps``."""
        return self._done

    @property
    def finished(self) -> bool:
        """Whether all steps of the plan are done."""
        return self.steps_taken >= self.plan.steps

    def batch(self) -> NDArray[np.int64]:
        """Whose gradients to sum in the next step.

        Returns:
            Indices of examples, which are not private. None at all is possible, and still a step. They are the same
            until ``add``, and after a resume.

        Raises:
            TrainingError: All steps of the plan are done.
        """
        self._check_horizon()
        if self._batch is None:
            if self._batches is None:
                self._batches = self._step.batches(self.steps_taken + 1)
            self._batch = next(self._batches)
        return self._batch

    def add(self, sums: Tensors) -> Tensors:
        """Add this step's correlated noise to the sums in place (no division), advance the step, return the sums.

        This is the release: with a key file the step is entered in the ledger before the call returns. A run that dies
        afterwards resumes from this step's ``state_dict()`` or not at all.

        Args:
            sums: The clipped sums of ``batch()`` by name, in float32 or float64. The first call fixes names and shapes.

        Returns:
            The same dictionary.

        Raises:
            NonFiniteSum: A sum is not finite. Then, and after an interruption, the sums are zeroed, because they hold
                this step's noise, and the step can be done again.
            InvalidInput: The sums are no tensors, or too many numbers for what the plan sets aside for floating point.
            LayoutError: Names or shapes are not those of the first call.
            TrainingError: All steps of the plan are done, ``batch()`` was not called for this step, or the sums are
                those that the last ``add`` returned.
        """
        self._check_horizon()
        if self._batch is None:
            own = "the noise is right for sums over the plan's own batches alone"
            raise TrainingError(f"call batch() before add, in step {self.steps_taken + 1} too: {own}")
        if isinstance(sums, dict) and not sums:
            raise InvalidInput("sums", "sums is an empty dict: it must hold the clipped sums of this batch by name.")
        if not isinstance(sums, dict) or not all(isinstance(x, torch.Tensor) for x in sums.values()):
            raise InvalidInput.of_type("sums", sums, "a dict of name -> float32 tensor, the clipped sums of this batch")
        if any(n in sums and sums[n] is last() and version(sums[n]) == at for n, (last, at) in self._noised.items()):
            copies = "If torch did not see how they were filled since (NumPy, a CUDA graph), give copies"
            raise TrainingError(f"these tensors still hold what the last add returned, not this batch's sums. {copies}")
        if self.layout is None:
            self._step.layout = Layout.of({name: tuple(value.shape) for name, value in sums.items()})
        noised = False
        try:
            self._step.add_noise_(sums, self.steps_taken + 1)
            noised = True
            self.run.release(self.steps_taken + 1, digest="", kind="noiser")
        except BaseException as error:  # not finite, Ctrl-C, a ledger that cannot be written
            if noised or not isinstance(error, (TypeError, ValueError)):  # these come before any sum is touched
                for value in sums.values():
                    value.zero_()
            raise
        self._done += 1
        self._batch = None
        self._noised = {n: (weakref.ref(x), version(x)) for n, x in sums.items() if not x.is_inference()}
        return sums

    def state_dict(self) -> dict[str, Any]:
        """The position, for a file beside your weights (never the key). Counts as a release of this step.

        Returns:
            Plain data, which JSON can hold.

        Raises:
            CheckpointError: The key has no file, so nothing could ever resume the run.
        """
        self.run.check_ledger()
        state = {"format": FORMAT, "identity": self._identity(), "run": self.run.id, "step": self.steps_taken}
        self.run.release(self.steps_taken, digest=content_digest(state), kind="noiser")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the newest ``state_dict()`` of a run.

        Args:
            state: What ``state_dict()`` returned, also after JSON or ``torch.save``.

        Raises:
            CheckpointError: It is not this plan's and key's, not the run's newest release, or was changed.
        """
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"this is not a state of format {FORMAT}")
        kinds = {"identity": dict, "run": str, "step": int}
        if any(type(state.get(name)) is not kind for name, kind in kinds.items()) or state["step"] < 0:
            raise CheckpointError("this state is damaged: restore it from a copy")
        if self.run.started:
            raise CheckpointError("this noiser has already begun; load a state before its first batch")
        current = self._identity()
        if self.layout is None:
            current.pop("layout")
        check_identity(state["identity"], current)
        self._done = state["step"]  # first: after Ctrl-C no step that was released is done again under its noise
        try:
            self.run.resume(state["run"], state["step"], content_digest(state))
        except Exception:
            self._done = 0
            raise
        shapes = state["identity"]["shapes"]
        if shapes is not None:
            self._step.layout = Layout.of({name: tuple(shape) for name, shape in shapes.items()})

    def _identity(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "plan": self.plan.digest,
            "layout": layout and layout.digest,
            "shapes": layout and {entry.name: list(entry.shape) for entry in layout.entries},
            "noise": NOISE_FORMAT,
            "max_grad_norm": self.max_grad_norm,
            "examples": self.plan.examples,
            "key": self.run.key.fingerprint(),
        }

    def _check_horizon(self) -> None:
        if self.finished:
            longer = "to train longer, make a plan with more epochs"
            raise TrainingError(f"all {self.plan.steps} steps are done; the horizon is fixed: {longer}")
