"""`LambdaCGDTrainer`: a `transformers.Trainer` that trains with differential privacy from a plan.

The Trainer's own loop runs over logical batches, with `privatize` underneath. Arguments that the plan fixes are set,
and those that cannot hold under it are refused with advice.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import Mode
from lambdacgd.errors import CheckpointError, InvalidInput, TrainingError
from lambdacgd.integrations import shared
from lambdacgd.integrations.shared import LogicalBatch
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.training import Private, privatize
from lambdacgd.training.card import GivenCard, write_card
from lambdacgd.training.checkpoint import content_digest, has_traces
from lambdacgd.training.data import a_few
from lambdacgd.training.distributed.world import World
from lambdacgd.training.step import check_is_plan

shared.need("hf", "transformers", "accelerate")

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402

__all__ = ["LambdaCGDTrainer"]

# What this Trainer replaces of the Trainer's own, and in the last lines calls, with the parameters that it counts on.
INTERNALS: shared.Internals = {
    Trainer: {
        "train": "resume_from_checkpoint", "training_step": "model inputs num_items_in_batch",
        "get_train_dataloader": "", "get_batch_samples": "epoch_iterator num_batches device",
        "compute_loss": "model inputs return_outputs num_items_in_batch", "floating_point_ops": "inputs",
        "log": "logs start_time", "save_model": "output_dir _internal_call",
        "create_model_card": "language license tags model_name", "_clip_grad_norm": "model",
        "push_to_hub": "commit_message blocking token revision", "_get_grad_norm": "model grad_norm",
        "_maybe_log_save_evaluate": "tr_loss grad_norm model trial", "_save_checkpoint": "model trial",
        "_load_from_checkpoint": "resume_from_checkpoint model", "_load_optimizer_and_scheduler": "checkpoint",
        "_load_rng_state": "checkpoint", "_load_best_model": "", "_push_from_checkpoint": "checkpoint_folder",
        "create_optimizer": "", "compute_loss_context_manager": "", "_prepare_inputs": "inputs",
        "_get_output_dir": "trial", "_remove_unused_columns": "dataset description",
        "_get_collator_with_removed_columns": "data_collator description",
    },
    TrainerState: {"save_to_json": "json_path"},
}  # fmt: skip
shared.check_internals("transformers", "hf", ((5, 17), (5, 22)), INTERNALS)

_CHECKED_EXAMPLES = 8
_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_Trainer: Any = Trainer  # its attributes are annotated as optional where they are not

_NO_UPLOAD = (
    "The output folder, checkpoints and the Trainer's model card hold training losses and the run's identity, which "
    "must not be uploaded. After training call save_model(folder) or lc.export, and upload what they write: "
    "huggingface_hub.upload_folder(repo_id=…, folder_path=folder)"
)


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
    Weights that ``save_model`` and checkpoints write are (ε, δ)-DP as `Private` says, for one run. Every such write is
    entered in the ledger beside the key. Nothing is uploaded. Choosing among checkpoints, or when to stop, by looking
    at private data is not covered.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        plan: Plan,
        max_grad_norm: float | None = None,
        key: shared.KeyLike = None,
        clipping_mode: Mode = "flat",
        data_fingerprint: str | None = None,
        earlier: Iterable[GivenCard] | None = None,
        **options: Any,
    ) -> None:
        check_is_plan(plan)
        if model is None or options.get("model_init") is not None:
            raise InvalidInput("model", "Give a model: model_init would train several, each at its own (ε, δ).")
        args = adapt(TrainingArguments(output_dir="tmp_trainer") if args is None else args, plan)
        self.plan, self._key = plan, key
        self.private: Private | None = None
        zeta = args.max_grad_norm if max_grad_norm is None else max_grad_norm
        if not zeta:  # "no clipping", for a plain Trainer
            raise InvalidInput("max_grad_norm", zeta, "it is the per-example clipping norm ζ and must be above 0")
        self._terms: dict[str, Any] = {"max_grad_norm": zeta, "clipping_mode": clipping_mode}
        # Every train() reads the cards.
        self._terms |= {"data_fingerprint": data_fingerprint, "earlier": None if earlier is None else list(earlier)}
        self._scheduler_state: Any = None  # of the checkpoint that is gone on from; with it the optimizer's settings
        self._group_settings: list[dict[str, Any]] = []
        self._randomness = shared.TrainingRandomness()
        super().__init__(model, args, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            why = "this Trainer keeps a whole model in every process (DDP)"
            raise InvalidInput(
                "args", f"Without FSDP and DeepSpeed: {why}. To shard it use fully_shard and lc.privatize."
            )
        if self.compute_loss_func is None and type(self).compute_loss is LambdaCGDTrainer.compute_loss:
            kind_of(self.model)  # refused now, not at the first step
        self.callback_handler.callbacks.insert(0, _Position(self))

    # --- the run -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train the plan's steps, or the rest of them.

        Args:
            resume_from_checkpoint: True to go on from the newest checkpoint in the output folder, or that folder.
            *args: Passed on to the Trainer, as is ``kwargs``.

        Returns:
            What the Trainer's own ``train`` returns.

        Raises:
            CheckpointError: There is no checkpoint, it is not the run's newest release, or the output folder holds
                another run's.
            TrainingError: This Trainer has trained already.
        """
        world = World.here()
        with world.together("starting to train"):
            self._check_first(resume_from_checkpoint)
            # Rank 0 keeps the key's file and the ledger; the others receive the key from it.
            key = shared.find_key(self._key, self.args.output_dir) if world.first else None
        self.private, self._randomness = self._privatize(key), shared.TrainingRandomness()
        try:
            folder = self._resume(resume_from_checkpoint) if resume_from_checkpoint else None
            with world.together("looking at the first examples"):
                dataset, collate = self._data()
                count = min(_CHECKED_EXAMPLES, max(2, self.args.train_batch_size))
                self.private.check_loss(self._losses, a_few(dataset, count), collate)
            return super().train(folder, *args, **kwargs)
        finally:
            self.private.detach()

    def _check_first(self, resume_from: str | bool | None) -> None:
        adapt(self.args, self.plan)  # they may have been changed since, by accelerator_config too
        if self.train_dataset is None:
            raise InvalidInput("train_dataset", None, "training needs the dataset that the plan was made for")
        saves, schedule = (str(getattr(x, "value", x)) for x in (self.args.save_strategy, self.args.lr_scheduler_type))
        chosen = self.args.load_best_model_at_end or saves == "best" or schedule == "reduce_lr_on_plateau"
        if chosen and self.eval_dataset is self.train_dataset:
            why = "eval_dataset is the training data: weights would follow losses that no noise protects"
            raise InvalidInput("eval_dataset", f"{why}. Evaluate on public data, or do not choose by it.")
        if resume_from:
            return
        shared.refuse_second_run(self.private, "train(resume_from_checkpoint=True)")
        if found := with_runs(self.args.output_dir):  # which a new run would mix up with its own
            there = f"{self.args.output_dir} holds checkpoints of another run (the newest is {found[0].name})"
            raise CheckpointError(f"{there}. Go on, train(resume_from_checkpoint=True), or choose another output_dir")

    def _privatize(self, key: SecretKey | None) -> Private:
        dataset, collate = self._data()
        optimizer, args = self.create_optimizer(), self.args
        return privatize(
            self.model,
            getattr(optimizer, "optimizer", optimizer),
            dataset,
            self.plan,
            max_physical_batch_size=args.train_batch_size,
            key=key,
            loss_reduction="sum",
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor,
            **self._terms,
        )

    def _data(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The dataset and the collator without columns that the model does not take, as the Trainer reads them."""
        if hasattr(self.train_dataset, "remove_columns"):  # datasets.Dataset
            return self._remove_unused_columns(self.train_dataset, description="training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    def get_train_dataloader(self) -> Any:
        """The plan's logical batches."""
        return shared.LogicalLoader(self, self.train_dataset)

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
            raise TrainingError(f"a training step takes a logical batch of the plan, not a {type(inputs).__name__}")
        model.train()
        switch: Any = getattr(self.optimizer, "train", None)
        if callable(switch):
            switch()
        total, examples = torch.zeros((), device=self.args.device), 0
        with self._randomness.step():
            for part, _ in inputs.parts():
                each = self._losses(model, part)
                each.sum().backward()
                total += each.detach().sum()
                examples += len(each)
        return total / examples

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss per example of a physical batch, as a vector."""
        inputs = self._prepare_inputs(batch)
        assert self.private is not None
        rows = self.private.clipper.count((), {k: v for k, v in inputs.items() if k != "labels"})
        with self.compute_loss_context_manager():
            losses = self.compute_loss(model, inputs)
        if not isinstance(losses, Tensor) or losses.shape != (rows,):
            found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise TrainingError(f"compute_loss must return one loss per example ({rows} of them), not {found}")
        return losses

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
            kind, config = kind_of(self.model), getattr(self.model, "config", None)
            each = per_example(kind, logits, labels, config, self.args.label_smoothing_factor)
        if not return_outputs:
            return each
        return each, ((each.mean(), *outputs) if isinstance(outputs, tuple) else outputs)  # as if it had the labels

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
            logs |= {} if self.private is None else shared.logged_claim(self.private)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What a callback asks for on one rank happens on all: who saves or stops alone would wait for the others."""
        if self.private is not None:
            asked = self.private.world.gather([getattr(self.control, name) for name in _ASKED])
            for name, by_rank in zip(_ASKED, zip(*asked, strict=True), strict=True):
                setattr(self.control, name, any(by_rank))
        super()._maybe_log_save_evaluate(*args, **kwargs)

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
        place = Path(self.args.output_dir if isinstance(resume_from, bool) else resume_from)
        for folder in with_runs(place) if isinstance(resume_from, bool) else [place]:
            if not self.private.resume(folder / RUN_STATE):
                continue  # it was being written when the process died, and never left it
            extra = self.private.extra
            self._scheduler_state = extra["scheduler"]
            self._group_settings = [
                copy.deepcopy({name: value for name, value in group.items() if name != "params"})
                for group in self.private.optimizer.param_groups
            ]
            self._randomness.keep()
            if self.args.should_save:  # the Trainer's counters are those of this checkpoint, whatever was written there
                (folder / TRAINER_STATE).write_text(extra["trainer"], encoding="utf-8")
            return str(folder)
        raise CheckpointError(f"{place} holds no checkpoint (save_only_model keeps none). Start with train()")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The weights came with the run's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.private is None:
            return
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(self._scheduler_state)
        # Making the scheduler anew has set the first step's learning rate.
        for group, saved in zip(self.private.optimizer.param_groups, self._group_settings, strict=True):
            group.update(saved)

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
        private = self.private
        if private is not None:
            private.cycle.refuse_half_done()
            private.weights.check()  # before anything is written: no weights without their card
            if self.model is not private.model:
                other = "trainer.model is not the model that this run has trained"
                raise TrainingError(f"{other}: its card is not the run's")
            if self.is_world_process_zero():  # which keeps the ledger
                trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
                private.run.release(private.steps_taken, digest=content_digest(trained), kind="save_model")
        super().save_model(output_dir, _internal_call=True)
        if private is not None and self.args.should_save:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            write_card(private.card(), folder)
            if not _internal_call:  # a release: the pickled arguments may hold a token and name places of ours
                (folder / "training_args.bin").unlink(missing_ok=True)

    # --- what is refused whatever is given ---------------------------------------------------------------------------

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: write a folder with ``save_model`` or ``lc.export`` and upload that yourself.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput("push_to_hub", _NO_UPLOAD)

    create_model_card = push_to_hub  # the Trainer's shows training losses
    _push_from_checkpoint = push_to_hub  # the output folder, during training


class _Position(TrainerCallback):
    """Epochs as the plan counts them; a resumed Trainer counts from the batches it saw."""

    def __init__(self, trainer: LambdaCGDTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        private = self._trainer.private
        if private is None:
            return
        if private.steps_taken != state.global_step:
            both = f"the Trainer counts {state.global_step} steps and the run has taken {private.steps_taken}"
            raise TrainingError(f"{both}: it left out part of its logical batch, or the optimizer was exchanged")
        state.epoch = private.steps_taken / private.plan.steps_per_epoch


# --- checkpoint folders ----------------------------------------------------------------------------------------------
# Every ``checkpoint-N`` folder holds ``run_state``, written by ``Private.save``: trainable weights, optimizer,
# scheduler, the Trainer's counters, generators and the run's identity. The Trainer's own files beside it (weights for
# ``from_pretrained``, ``trainer_state.json``) are written after that.

RUN_STATE, TRAINER_STATE = "run_state", "trainer_state.json"


def with_runs(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders that hold a run, or one that was being written, the newest first."""
    found = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and has_traces(folder / RUN_STATE):
            found[int(match[1])] = folder
    return [found[step] for step in sorted(found, reverse=True)]


def _plain(value: Any) -> Any:
    """A scheduler's state of numbers, strings, lists and dicts; functions, which the arguments bring, left out."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, (list, tuple)):
        return [None if callable(v) else _plain(v) for v in value]
    return value


# --- arguments -------------------------------------------------------------------------------------------------------

# Arguments that keep their defaults under a plan, and why, or what to do instead of changing them.
_DEFAULTS = {
    "gradient_accumulation_steps": "logical batches are split into those of per_device_train_batch_size by themselves",
    "fp16": "GradScaler looks at gradients before they are noised. Use bf16=True",
    "auto_find_batch_size": "it starts training over after running out of memory. Lower per_device_train_batch_size",
    "dataloader_drop_last": "dropping examples is not what the plan accounts for. Leave it out",
    "train_sampling_strategy": "which examples meet in a batch is fixed by the plan. Leave it out",
    "torch_compile": "every layer whose gradient is clipped is a graph break, so nothing is gained. Leave it out",
    "use_liger_kernel": "its fused kernels hide the layers that clipping must see. Leave it out",
    "neftune_noise_alpha": "its noise depends on the longest example of the batch. Leave it out",
    "deepspeed": "it changes gradients behind our back. Use one process per GPU with torchrun",
    "ddp_static_graph": "it counts on gradients that private training never makes. Leave it out",
    "parallelism_config": "tensor, context and sequence parallelism split examples. Use DDP by torchrun",
    "enable_jit_checkpoint": "it saves in the middle of a logical step, where nothing may be written. Use save_steps",
    "include_num_input_tokens_seen": "the number of tokens seen depends on the drawn batches and is not private",
    "push_to_hub": _NO_UPLOAD,
}
_OF_THE_TRAINER = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
_WHOLE_STEP_OPTIMIZERS = ("lomo", "adalomo", "layerwise")


def adapt(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """A copy of ``args`` that does what the plan says, or an ``InvalidInput`` that says what to change."""
    for name, advice in _DEFAULTS.items():
        given = getattr(args, name, None)  # a version may not have it
        if given not in (None, False) and given != _OF_THE_TRAINER[name]:
            raise InvalidInput(name, given, advice)
    _check_horizon(args, plan)
    name = str(getattr(args.optim, "value", args.optim))
    if any(word in name for word in _WHOLE_STEP_OPTIMIZERS):
        raise InvalidInput("optim", name, "it changes weights in the backward pass, before the noise. Use adamw_torch")
    if args.n_gpu > 1:
        raise InvalidInput("args", f"Set CUDA_VISIBLE_DEVICES to one of {args.n_gpu} GPUs, or use torchrun.")
    adapted = copy.copy(args)
    adapted.num_train_epochs, adapted.max_steps = float(plan.epochs), -1
    adapted.ignore_data_skip = True  # the loader begins where the run stands, so there is nothing to skip
    if args.gradient_checkpointing:
        how: Any = args.gradient_checkpointing_kwargs or {}
        if how.get("use_reentrant"):
            raise InvalidInput("gradient_checkpointing_kwargs", how, "it hides layers: say use_reentrant=False")
        adapted.gradient_checkpointing_kwargs = {**how, "use_reentrant": False}
    return adapted


def _check_horizon(args: TrainingArguments, plan: Plan) -> None:
    fixed = "and its noise is for all of them. Leave this out, or plan anew; to stop early use a callback"
    if args.max_steps > 0:
        if args.max_steps != plan.steps:
            raise InvalidInput("max_steps", args.max_steps, f"the plan has {plan.steps} steps, {fixed}")
        return
    default = _OF_THE_TRAINER["num_train_epochs"]
    if args.num_train_epochs not in (default, plan.epochs):
        raise InvalidInput("num_train_epochs", args.num_train_epochs, f"the plan has {plan.epochs} epochs, {fixed}")
    if args.num_train_epochs != plan.epochs:  # nobody can tell a default from a wish
        used = f"the plan has {plan.epochs} epochs, and so many are trained"
        warnings.warn(
            f"{used}: num_train_epochs = {default:g}, transformers' default, is not used. Say {plan.epochs}",
            stacklevel=4,
        )


# --- losses ----------------------------------------------------------------------------------------------------------
# The models' own losses average over all tokens of a batch, and the Trainer's ``num_items_in_batch`` over all tokens of
# an accumulated one: a long example would then shrink the gradients of short ones. Here every example's tokens are
# averaged among themselves, so that its loss never depends on the others of its batch. Labels of -100 do not count; an
# example without any has loss zero.

Kind = Literal["next-token", "tokens", "whole"]
IGNORED = -100

_TASKS: dict[Kind, str] = {
    "next-token": "CAUSAL_LM",
    "tokens": "MASKED_LM TOKEN_CLASSIFICATION",
    "whole": "SEQUENCE_CLASSIFICATION IMAGE_CLASSIFICATION AUDIO_CLASSIFICATION",
}


def kind_of(model: nn.Module) -> Kind:
    """What the model's labels are for; refused where we do not know it."""
    bare: Any = model
    if hasattr(bare, "get_base_model"):  # a wrapper of peft, which gives adapters no class of their own
        bare = bare.get_base_model()
    if not getattr(getattr(bare, "config", None), "is_encoder_decoder", False):
        for own in type(bare).__mro__:
            for kind, tasks in _TASKS.items():
                if any(own.__name__ in getattr(auto, f"MODEL_FOR_{t}_MAPPING_NAMES").values() for t in tasks.split()):
                    return kind
    unknown = f"The per-example loss of {type(bare).__name__} is not known here"
    raise InvalidInput("model", f"{unknown}: give a compute_loss_func that returns one loss per example.")


def per_example(kind: Kind, logits: Tensor, labels: Tensor, config: Any, smoothing: float = 0.0) -> Tensor:
    """One loss per example."""
    if kind == "whole":
        return _whole(logits.float(), labels, config, smoothing)
    logits = logits[:, -labels.shape[1] :]  # prompt tuning puts virtual tokens in front
    if kind == "next-token":
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )
    counted = labels != IGNORED
    return (each * counted).sum(1) / counted.sum(1).clamp(min=1)


def _whole(logits: Tensor, labels: Tensor, config: Any, smoothing: float) -> Tensor:
    problem = getattr(config, "problem_type", None)
    if problem is None:
        whole_numbers = labels.dtype in (torch.long, torch.int)
        problem = "regression" if logits.shape[-1] == 1 else "single" if whole_numbers else "multi"
    if problem == "regression":
        return F.mse_loss(logits, labels.reshape(logits.shape).float(), reduction="none").mean(1)
    if problem.startswith("single"):
        return F.cross_entropy(
            logits, labels.reshape(-1).long(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
        )
    return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
