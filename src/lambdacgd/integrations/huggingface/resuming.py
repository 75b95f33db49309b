"""How a `LambdaCGDTrainer` saves its run and goes on with it; which folders, says `checkpoints`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from lambdacgd.integrations.huggingface import checkpoints
from lambdacgd.integrations.randomness import TrainingRandomness
from lambdacgd.training import CheckpointError, Private

_Base: Any = object  # stands before Trainer in the method resolution order


class Resuming(_Base):
    """The Trainer's checkpoints, with the run's own state in place of optimizer, scheduler and generators."""

    private: Private | None
    _resumed: dict[str, Any] | None
    _randomness: TrainingRandomness

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self.private is not None
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.args.save_only_model:
            if self.args.should_save:
                self.state.save_to_json(str(folder / "trainer_state.json"))
            scheduler = {} if self.lr_scheduler is None else _plain(self.lr_scheduler.state_dict())
            self._randomness.put_back()
            self.private.save(folder / checkpoints.RUN_STATE, extra={"scheduler": scheduler}, frozen=False)
        super()._save_checkpoint(model, trial)

    def _resume(self, resume_from: str | bool) -> str:
        """Load the newest whole checkpoint; older ones are refused by the ledger."""
        assert self.private is not None
        for folder in checkpoints.candidates(resume_from, self.args.output_dir):
            extra = self.private.resume(folder / checkpoints.RUN_STATE)
            if extra is None:
                continue  # it was being written when the process died, and never left it
            groups = copy.deepcopy([{**g, "params": None} for g in self.private.optimizer.param_groups])
            self._resumed = {"scheduler": extra["scheduler"], "groups": groups}
            self._randomness.keep()
            return str(folder)
        raise CheckpointError(
            f"{self.args.output_dir} holds no whole checkpoint: the process died while it wrote the first, which never "
            "left it. Start with train()"
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The weights came with the run's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._resumed is None or self.private is None:
            return
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(self._resumed["scheduler"])
        # Making the scheduler anew has set the first step's learning rate.
        for group, saved in zip(self.private.optimizer.param_groups, self._resumed["groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Part of the run's state."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Part of the run's state."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Part of the run's state."""

    def _save_scaler(self, output_dir: str) -> None:
        """There is none."""


def _plain(value: Any) -> Any:
    """A scheduler's state of numbers, strings, lists and dicts; functions, which the arguments bring, left out."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, (list, tuple)):
        return [None if callable(v) else _plain(v) for v in value]
    return value
