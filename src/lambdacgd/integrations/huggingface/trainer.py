"""`LambdaCGDTrainer`: the Trainer's own loop over logical batches, with `privatize` underneath."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from lambdacgd.clipping import Mode
from lambdacgd.errors import CheckpointError, InvalidInput, TrainingError
from lambdacgd.integrations.huggingface import publishing, settings
from lambdacgd.integrations.huggingface.settings import adapt, looks_at_evaluation
from lambdacgd.integrations.shared import (
    Internals,
    KeyLike,
    LogicalBatch,
    LogicalLoader,
    TrainingRandomness,
    check_internals,
    check_losses,
    find_key,
    logged_claim,
)
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.training import Private, privatize
from lambdacgd.training.card import GivenCard, write_card
from lambdacgd.training.checkpoint import content_digest, has_traces
from lambdacgd.training.data import a_few
from lambdacgd.training.distributed.world import World

# What this Trainer replaces or calls of the Trainer's own, with the parameters that it counts on.
INTERNALS: Internals = {
    Trainer: {
        "train": "resume_from_checkpoint trial",
        "get_train_dataloader": "",
        "get_batch_samples": "epoch_iterator num_batches device",
        "training_step": "model inputs num_items_in_batch",
        "compute_loss": "model inputs return_outputs num_items_in_batch",
        "floating_point_ops": "inputs",
        "log": "logs start_time",
        "hyperparameter_search": "",
        "save_model": "output_dir _internal_call",
        "create_model_card": "language license tags model_name",
        "push_to_hub": "commit_message blocking token revision",
        "_clip_grad_norm": "model",
        "_get_grad_norm": "model grad_norm",
        "_maybe_log_save_evaluate": "tr_loss grad_norm model trial",
        "_save_checkpoint": "model trial",
        "_load_from_checkpoint": "resume_from_checkpoint model",
        "_load_optimizer_and_scheduler": "checkpoint",
        "_load_rng_state": "checkpoint",
        "_load_best_model": "",
        "_push_from_checkpoint": "checkpoint_folder",
        # called, not replaced
        "create_optimizer": "",
        "init_hf_repo": "token",
        "compute_loss_context_manager": "",
        "_prepare_inputs": "inputs",
        "_get_output_dir": "trial",
        "_remove_unused_columns": "dataset description",
        "_get_collator_with_removed_columns": "data_collator description",
    },
    TrainerState: {"save_to_json": "json_path"},
}
check_internals("transformers", "hf", ((5, 17), (5, 22)), INTERNALS)

logger = logging.getLogger(__name__)
_CHECKED_EXAMPLES = 8
_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_Trainer: Any = Trainer  # its attributes are annotated as optional where they are not


class LambdaCGDTrainer(_Trainer):
    """A ``transformers.Trainer`` that trains with the plan's (ε, δ).

    ```python
    plan = lc.plan(train_dataset, 128, epochs=3, epsilon=8.0, delta=1e-5)
    trainer = LambdaCGDTrainer(model, args, plan=plan, train_dataset=train_dataset, processing_class=tokenizer)
    trainer.train()
    ```

    Args:
        model: The model to train.
        args: ``per_device_train_batch_size`` is the physical batch size, which does not change the result. Steps and
            epochs are the plan's. What cannot hold under a plan is refused with advice.
        plan: From ``lc.plan``, for ``train_dataset``.
        max_grad_norm: ζ, the norm that every example's gradient is clipped to; by default ``args.max_grad_norm``.
        key: A ``SecretKey`` or the path of a key file, which is made where there is none; by default
            ``<output_dir>.private/run.key``.
        clipping_mode: As for ``lc.privatize``, as are ``data_fingerprint`` and ``earlier``.
        **options: Everything else that a ``Trainer`` takes.

    Attributes:
        private: The run under way or last.

    Raises:
        InvalidInput: Something given cannot hold under a plan.

    Guarantee
    ---------
    Weights that ``save_model``, checkpoints and ``push_to_hub`` write are (ε, δ)-DP as `Private` says, for one run.
    Every such write is entered in the ledger beside the key. Uploads hold weights, configuration, tokenizer and the
    privacy card only. Choosing among checkpoints, or when to stop, by looking at private data is not covered.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        plan: Plan,
        max_grad_norm: float | None = None,
        key: KeyLike = None,
        clipping_mode: Mode = "flat",
        data_fingerprint: str | None = None,
        earlier: Iterable[GivenCard] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidInput.of_type("plan", plan, "a Plan (lc.plan(…) makes one, Plan.load reads one)")
        if model is None or options.get("model_init") is not None:
            raise InvalidInput("model", "Give a model: model_init would train several, each at its own (ε, δ).")
        args = adapt(TrainingArguments(output_dir="tmp_trainer") if args is None else args, plan)
        self.plan = plan
        self.private: Private | None = None
        self._zeta = args.max_grad_norm if max_grad_norm is None else max_grad_norm
        if not self._zeta:  # "no clipping", for a plain Trainer
            raise InvalidInput("max_grad_norm", self._zeta, "it is the per-example clipping norm ζ and must be above 0")
        self._key, self._mode, self._fingerprint = key, clipping_mode, data_fingerprint
        self._earlier = None if earlier is None else list(earlier)  # every train() reads it
        self._resumed: dict[str, Any] | None = None
        self._randomness = TrainingRandomness()
        super().__init__(model, args, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InvalidInput(
                "args",
                "This Trainer keeps a whole model in every process (DDP). Leave FSDP and DeepSpeed out, train adapters "
                "(LoRA), or shard the model with fully_shard and write the loop with lc.privatize.",
            )
        if not self._has_own_loss():
            settings.kind_of(self.model)  # refused now, not at the first step
        if looks_at_evaluation(args):
            warnings.warn(
                "load_best_model_at_end, save_strategy='best' and lr_scheduler_type='reduce_lr_on_plateau' choose "
                "weights or learning rates by looking at eval_dataset. If that is private data, the result is not "
                "covered by the plan's (ε, δ)",
                stacklevel=2,
            )
        self.callback_handler.callbacks.insert(0, _Position(self))

    def _has_own_loss(self) -> bool:
        return self.compute_loss_func is not None or type(self).compute_loss is not LambdaCGDTrainer.compute_loss

    # --- the run -----------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train the plan's steps, or the rest of them.

        Args:
            resume_from_checkpoint: True to go on from the newest checkpoint in the output folder, or that folder.
            trial: Refused: every trial of a search is a run with its own cost.
            *args: Passed on to the Trainer, as is ``kwargs``.

        Returns:
            What the Trainer's own ``train`` returns.

        Raises:
            CheckpointError: There is no checkpoint, it is not the run's newest release, or the output folder holds
                another run's.
            TrainingError: This Trainer has trained already.
        """
        if trial is not None:
            raise InvalidInput("trial", _NO_SEARCH)
        world = World.of(None)
        with world.together("starting to train"):
            self._check_first(resume_from_checkpoint)
            # Rank 0 keeps the key's file and the ledger; the others receive the key from it.
            key = find_key(self._key, self.args.output_dir) if world.first else None
            if key is not None and key.path is not None and not resume_from_checkpoint:
                earlier = len(key.ledger().runs())
                if earlier:
                    logger.warning("This key has been used for %d run(s), whose (ε, δ) add up.", earlier)
        self.private, self._randomness = self._privatize(key), TrainingRandomness()
        try:
            folder = self._resume(resume_from_checkpoint) if resume_from_checkpoint else None
            with world.together("looking at the first examples"):
                self._check_examples()
            return super().train(folder, None, *args, **kwargs)
        finally:
            self.private.detach()

    def _check_first(self, resume_from: str | bool | None) -> None:
        adapt(self.args, self.plan)  # they may have been changed since, by accelerator_config too
        if self.train_dataset is None:
            raise InvalidInput("train_dataset", None, "training needs the dataset that the plan was made for")
        if self.eval_dataset is self.train_dataset and looks_at_evaluation(self.args):
            raise InvalidInput(
                "eval_dataset",
                "eval_dataset is the training data: with load_best_model_at_end, save_strategy='best' or "
                "reduce_lr_on_plateau, weights would follow losses of private data that no noise protects. Evaluate on "
                "public data, or leave these out.",
            )
        if resume_from:
            return
        if self.private is not None and self.private.steps_taken:
            raise TrainingError(
                f"this Trainer's run has taken {self.private.steps_taken} of {self.plan.steps} steps. Go on with "
                "train(resume_from_checkpoint=True), or make a new model and Trainer for a new run, which costs its "
                "own (ε, δ)"
            )
        found = with_runs(self.args.output_dir)
        if found:  # which a new run would mix up with its own
            raise CheckpointError(
                f"{self.args.output_dir} holds checkpoints of another run (the newest is {found[0].name}). Go on with "
                "it: train(resume_from_checkpoint=True); or choose another output_dir: a second run has noise of its "
                "own and costs its own (ε, δ)"
            )

    def _privatize(self, key: SecretKey | None) -> Private:
        dataset, collate = self._data()
        optimizer = self.create_optimizer()
        return privatize(
            self.model,
            getattr(optimizer, "optimizer", optimizer),
            dataset,
            self.plan,
            max_grad_norm=self._zeta,
            max_physical_batch_size=self.args.train_batch_size,
            key=key,
            loss_reduction="sum",
            clipping_mode=self._mode,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            prefetch_factor=self.args.dataloader_prefetch_factor,
            data_fingerprint=self._fingerprint,
            earlier=self._earlier,
        )

    def _data(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The dataset and the collator without columns that the model does not take, as the Trainer reads them."""
        if hasattr(self.train_dataset, "remove_columns"):  # datasets.Dataset
            return self._remove_unused_columns(self.train_dataset, description="training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    def _check_examples(self) -> None:
        """Before the first step: do a few examples have losses of their own?"""
        dataset, collate = self._data()
        assert self.private is not None

        def loss(model: nn.Module, batch: Any) -> Tensor:
            prepared = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                return check_losses(self.compute_loss(model, prepared), self._rows(prepared))

        count = min(_CHECKED_EXAMPLES, max(2, self.args.train_batch_size))
        self.private.check_loss(loss, a_few(dataset, count), collate)

    def get_train_dataloader(self) -> Any:
        """The plan's logical batches."""
        return LogicalLoader(self, self.train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[LogicalBatch], num_batches: int, device: torch.device
    ) -> tuple[list[LogicalBatch], None]:
        """One logical batch; nothing is counted over examples."""
        found = next(epoch_iterator, None)
        return ([] if found is None else [found]), None

    # --- a logical step ----------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward passes of one logical batch. Returns its mean loss, which is not private."""
        if not isinstance(inputs, LogicalBatch):
            raise TrainingError(
                f"a training step takes a logical batch of the plan, not a {type(inputs).__name__}: leave "
                "get_train_dataloader and get_batch_samples as they are"
            )
        model.train()
        switch: Any = getattr(self.optimizer, "train", None)
        if callable(switch):
            switch()
        total, examples = torch.zeros((), device=self.args.device), 0
        with self._randomness.step():
            for part, _ in inputs.parts():
                prepared = self._prepare_inputs(part)
                rows = self._rows(prepared)
                with self.compute_loss_context_manager():
                    each = check_losses(self.compute_loss(model, prepared), rows)
                each.sum().backward()
                total += each.detach().sum()
                examples += rows
        return total / examples

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """One loss per example. Override it to compute your own.

        Args:
            model: The model.
            inputs: A batch, with its labels.
            return_outputs: Whether to return the model's outputs too.
            num_items_in_batch: Not used: an example's loss does not depend on the others.

        Returns:
            A vector of losses; an average is refused.

        Raises:
            TrainingError: The batch has no labels.
        """
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            each = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        else:
            if labels is None:
                raise TrainingError("the batch holds no 'labels'; the collator must put them there")
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
            kind, config = settings.kind_of(self.model), getattr(self.model, "config", None)
            each = settings.per_example(kind, logits, labels, config, self.args.label_smoothing_factor)
        if not return_outputs:
            return each
        return each, ((each.mean(), *outputs) if isinstance(outputs, tuple) else outputs)  # as if it had the labels

    def _rows(self, inputs: Any) -> int:
        assert self.private is not None
        return self.private.clipper.count((), {k: v for k, v in inputs.items() if k != "labels"})

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Gradients are clipped per example, and there is none to look at before the noise."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        return None

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the number of drawn examples is not private."""
        return 0 if isinstance(inputs, LogicalBatch) else super().floating_point_ops(inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Training losses under names that say what they are, with the plan's (ε, δ) beside them."""
        if "loss" in logs or "train_loss" in logs:
            logs = {f"{k}_not_private" if k in ("loss", "train_loss") else k: v for k, v in logs.items()}
            logs |= {} if self.private is None else logged_claim(self.private)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What a callback asks for on one rank happens on all: who saves or stops alone would wait for the others."""
        if self.private is not None and self.private.world.many:
            asked = torch.tensor([getattr(self.control, name) for name in _ASKED], device=self.args.device).int()
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.private.world.group)
            for name, found in zip(_ASKED, asked.tolist(), strict=True):
                setattr(self.control, name, bool(found))
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial is a run with its own cost."""
        raise InvalidInput("hyperparameter_search", _NO_SEARCH)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        assert self.private is not None
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if not self.args.save_only_model:
            extra = {"scheduler": {} if self.lr_scheduler is None else _plain(self.lr_scheduler.state_dict())}
            if self.args.should_save:
                self.state.save_to_json(str(folder / TRAINER_STATE))
                extra["trainer"] = (folder / TRAINER_STATE).read_text(encoding="utf-8")
            self._randomness.put_back()
            self.private.save(folder / RUN_STATE, extra=extra, frozen=False)
        asked, self.args.save_only_model = self.args.save_only_model, True  # the rest is part of the run's state
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_only_model = asked

    def _resume(self, resume_from: str | bool) -> str:
        """Load the newest whole checkpoint; older ones are refused by the ledger."""
        assert self.private is not None
        for folder in _candidates(resume_from, self.args.output_dir):
            extra = self.private.resume(folder / RUN_STATE)
            if extra is None:
                continue  # it was being written when the process died, and never left it
            groups = copy.deepcopy([{**g, "params": None} for g in self.private.optimizer.param_groups])
            self._resumed = {"scheduler": extra["scheduler"], "groups": groups}
            self._randomness.keep()
            if self.args.should_save:  # the Trainer's counters are those of this checkpoint, whatever was written there
                (folder / TRAINER_STATE).write_text(extra["trainer"], encoding="utf-8")
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

    def _load_best_model(self) -> None:
        """Weights of an earlier checkpoint of this run: nothing from outside has changed them."""
        assert self.private is not None
        with self.private.loading():
            super()._load_best_model()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Part of the run's state."""

    # --- how weights leave ------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, configuration, tokenizer and the privacy card, once the ledger knows of it.

        Args:
            output_dir: Where to; by default the output folder.

        Raises:
            TrainingError: Something other than the run has changed the weights.
        """
        self._enter_release("save_model")
        super().save_model(output_dir, _internal_call=True)
        if self.private is not None and self.args.should_save:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            write_card(self.private.card(), folder)
            if not _internal_call:  # a release: the pickled arguments may hold a token and name places of ours
                (folder / "training_args.bin").unlink(missing_ok=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _enter_release(self, kind: str) -> None:
        if self.private is None:
            return
        self.private.cycle.refuse_half_done()
        self.private.check_weights()  # before anything is written: no weights without their card
        if self.model is not self.private.model:
            raise TrainingError(
                "trainer.model is not the model that this run has trained, so the run's card is not its card. Save the "
                "trained model first; what you make of it (merged adapters, say) save yourself, with that card"
            )
        if not self.is_world_process_zero():
            return  # rank 0 keeps the ledger
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.private.run.release(self.private.steps_taken, digest=content_digest(trained), kind=kind)

    def create_model_card(
        self, language: Any = None, license: Any = None, tags: Any = None, model_name: str | None = None, **kwargs: Any
    ) -> None:
        """A README of public facts: the privacy card, no training results."""
        if self.is_world_process_zero():
            text = self._readme(language=language, license=license, tags=tags, model_name=model_name, **kwargs)
            Path(self.args.output_dir, "README.md").write_text(text, encoding="utf-8")

    def _readme(self, *, tags: Any = None, model_name: str | None = None, **kwargs: Any) -> str:
        if self.private is None:
            raise TrainingError("there is no privacy card before training. Train, then push or make the card")
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        given = {"language": kwargs.get("language"), "license": kwargs.get("license")}
        if kwargs.get("finetuned_from"):
            given["base_model"] = kwargs["finetuned_from"]
        return publishing.readme(
            self.model,
            self.private,
            name=model_name,
            tags=[*tags, *(getattr(self.model, "model_tags", None) or [])],
            **given,
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upload weights, configuration, tokenizer and the privacy card, and nothing else.

        Args:
            commit_message: The commit's.
            blocking: Not used: this returns when the upload is done.
            token: Of the hub; by default ``args.hub_token``.
            revision: The branch; by default ``args.hub_revision``.
            **kwargs: As for ``create_model_card``.

        Returns:
            What the hub says of the commit; None on other ranks than the first.

        Raises:
            TrainingError: Nothing was trained, or something other than the run has changed the weights.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        if not self.is_world_process_zero():
            return None
        kwargs.setdefault("model_name", (self.hub_model_id or "").split("/")[-1] or None)
        text = self._readme(**kwargs)
        assert self.private is not None  # or there would be no card
        self._enter_release("push_to_hub")
        own = self.processing_class
        return publishing.upload(
            self.model,
            self.private,
            own if own is not None else getattr(self.data_collator, "tokenizer", None),
            text,
            repo=str(self.hub_model_id),
            message=commit_message or "End of training",
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing is uploaded during training."""


_NO_SEARCH = (
    "Every trial trains on the private data at its own (ε, δ), and choosing among them is not covered. Choose "
    "hyperparameters on public data, or make a plan and a Trainer for each trial and add up what they cost."
)


class _Position(TrainerCallback):
    """Epochs as the plan counts them; a resumed Trainer counts from the batches it saw."""

    def __init__(self, trainer: LambdaCGDTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        private = self._trainer.private
        if private is None:
            return
        if private.steps_taken != state.global_step:
            raise TrainingError(
                f"the Trainer counts {state.global_step} steps and the run has taken {private.steps_taken}: a training "
                "step left out part of its logical batch, another optimizer was put in place, or trainer_state.json is "
                "not this checkpoint's"
            )
        state.epoch = private.steps_taken / private.plan.steps_per_epoch


# --- checkpoint folders ----------------------------------------------------------------------------------------------
# Every ``checkpoint-N`` folder holds ``run_state``, written by ``Private.save``: trainable weights, optimizer,
# scheduler, the Trainer's counters, generators and the run's identity. The Trainer's own files beside it (weights for
# ``from_pretrained``, ``trainer_state.json``) are written after that.

RUN_STATE, TRAINER_STATE = "run_state", "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def with_runs(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders that hold a run, or one that was being written, the newest first."""
    folder = Path(output_dir)
    found = []
    for child in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(child.name)
        if match and has_traces(child / RUN_STATE):
            found.append((int(match[1]), child))
    return [child for _, child in sorted(found, reverse=True)]


def _candidates(resume_from: str | bool, output_dir: str | Path) -> list[Path]:
    """Folders to try to resume from, in order: the one named, or all of the output folder."""
    if isinstance(resume_from, bool):
        found = with_runs(output_dir)
        if not found:
            raise CheckpointError(
                f"{output_dir} holds no checkpoint of a private run. Start with train(), and set save_strategy and "
                "save_steps so that there will be one"
            )
        return found
    folder = Path(resume_from)
    if not has_traces(folder / RUN_STATE):
        raise CheckpointError(
            f"{folder} holds no {RUN_STATE}, so it is not a checkpoint that private training can resume from. With "
            "save_only_model=True the Trainer saves weights only"
        )
    return [folder]


def _plain(value: Any) -> Any:
    """A scheduler's state of numbers, strings, lists and dicts; functions, which the arguments bring, left out."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, (list, tuple)):
        return [None if callable(v) else _plain(v) for v in value]
    return value
