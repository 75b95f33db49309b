"""`LambdaCGDTrainer`: the Trainer's own loop over logical batches, with `privatize` underneath."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from lambdacgd.clipping import Mode
from lambdacgd.integrations.huggingface import checkpoints, losses
from lambdacgd.integrations.huggingface.arguments import adapt, clipping_norm, looks_at_evaluation
from lambdacgd.integrations.huggingface.publishing import Publishing
from lambdacgd.integrations.huggingface.resuming import Resuming
from lambdacgd.integrations.independence import check_independent, check_losses
from lambdacgd.integrations.keyfile import KeyLike, find_key
from lambdacgd.integrations.logical import LogicalBatch, LogicalLoader
from lambdacgd.integrations.randomness import TrainingRandomness
from lambdacgd.keys import SecretKey
from lambdacgd.planning import Plan
from lambdacgd.training import Private, TrainingError, privatize
from lambdacgd.training.distributed.world import World
from lambdacgd.validation import InvalidInput

logger = logging.getLogger(__name__)
_CHECKED_EXAMPLES = 8
_ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_Trainer: Any = Trainer  # its attributes are annotated as optional where they are not


class LambdaCGDTrainer(Resuming, Publishing, _Trainer):
    """A ``transformers.Trainer`` that trains with the plan's (ε, δ).

    ::

        plan = lc.plan(train_dataset, 128, epochs=3, epsilon=8.0, delta=1e-5)
        trainer = LambdaCGDTrainer(model, args, plan=plan, train_dataset=train_dataset, processing_class=tokenizer)
        trainer.train()

    ``args.per_device_train_batch_size`` is the physical batch size, which does not change the result; steps and epochs
    are the plan's; ``args.max_grad_norm`` (or ``max_grad_norm``) is the per-example clipping norm ζ. ``key`` is a
    ``SecretKey`` or the path of a key file, by default ``<output_dir>.private/run.key``, which is made where there is
    none. ``clipping_mode`` and ``data_fingerprint`` go to ``privatize``, everything else to the Trainer. ``private`` is
    the run under way or last.

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
        **options: Any,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidInput("plan", type(plan).__name__, "the Trainer takes a Plan: lc.plan(…) or Plan.load(path)")
        if model is None or options.get("model_init") is not None:
            raise InvalidInput("model", None, "give a model: model_init would train several, each at its own (ε, δ)")
        args = adapt(TrainingArguments(output_dir="tmp_trainer") if args is None else args, plan)
        self.plan = plan
        self.private: Private | None = None
        self._zeta = clipping_norm(args, max_grad_norm)
        self._key, self._mode, self._fingerprint = key, clipping_mode, data_fingerprint
        self._resumed: dict[str, Any] | None = None
        self._randomness = TrainingRandomness()
        super().__init__(model, args, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise InvalidInput(
                "args",
                "FSDP or DeepSpeed",
                "this Trainer keeps a whole model in every process (DDP). Leave it out, train adapters (LoRA), or "
                "shard the model with fully_shard and write the loop with lc.privatize",
            )
        if not self._has_own_loss():
            losses.kind_of(self.model)  # refused now, not at the first step
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
        """Train the plan's steps, or the rest of them from the newest checkpoint (``resume_from_checkpoint``)."""
        if trial is not None:
            raise InvalidInput("trial", type(trial).__name__, _NO_SEARCH)
        world = World.of(None)
        with world.together("starting to train"):
            self._check_first(resume_from_checkpoint)
            # Rank 0 keeps the key's file and the ledger; the others receive the key from it.
            key = find_key(self._key, self.args.output_dir) if world.first else None
            if key is not None and not resume_from_checkpoint:
                _warn_of_earlier_runs(key)
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
                "the training data",
                "with load_best_model_at_end, save_strategy='best' or reduce_lr_on_plateau, weights follow losses of "
                "private data that no noise protects. Evaluate on public data, or leave these out",
            )
        if resume_from:
            return
        if self.private is not None and self.private.steps_taken:
            raise TrainingError(
                f"this Trainer's run has taken {self.private.steps_taken} of {self.plan.steps} steps. Go on with "
                "train(resume_from_checkpoint=True), or make a new model and Trainer for a new run, which costs its "
                "own (ε, δ)"
            )
        checkpoints.check_fresh(self.args.output_dir)

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
        )

    def _data(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The dataset and the collator without columns that the model does not take, as the Trainer reads them."""
        if hasattr(self.train_dataset, "remove_columns"):  # datasets.Dataset
            return self._remove_unused_columns(self.train_dataset, description="training"), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    def _check_examples(self) -> None:
        """Before the first step: do a few examples have losses of their own?

        From all over the dataset: where it is sorted, by class or length, neighbours are too alike to tell.
        """
        dataset, collate = self._data()
        count = min(_CHECKED_EXAMPLES, len(dataset), max(2, self.args.train_batch_size))
        items = [dataset[k * (len(dataset) - 1) // max(1, count - 1)] for k in range(count)]
        check_independent(
            self.model, lambda batch: self.compute_loss(self.model, self._prepare_inputs(batch)), items, collate
        )

    def get_train_dataloader(self) -> Any:
        """The plan's logical batches."""
        if self.private is None:
            raise TrainingError("the training loader exists once train() has bound the plan to the model")
        return LogicalLoader(self.private)

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
        """One loss per example, a vector. Override it to compute your own; an average is refused."""
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            each = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        else:
            if labels is None:
                raise TrainingError("the batch holds no 'labels'; the collator must put them there")
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
            kind, config = losses.kind_of(self.model), getattr(self.model, "config", None)
            each = losses.per_example(kind, logits, labels, config, self.args.label_smoothing_factor)
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
            claim = {"privacy_epsilon": self.plan.epsilon, "privacy_delta": self.plan.delta}
            logs = {f"{k}_not_private" if k in ("loss", "train_loss") else k: v for k, v in logs.items()} | claim
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
        raise InvalidInput("hyperparameter_search", "called", _NO_SEARCH)


def _warn_of_earlier_runs(key: SecretKey) -> None:
    earlier = len(key.ledger().runs()) if key.path is not None else 0
    if earlier:
        logger.warning("This key has been used for %d run(s). Every run costs its own (ε, δ); they add up.", earlier)


_NO_SEARCH = (
    "every trial trains on the private data at its own (ε, δ), and choosing among them is not covered. Choose "
    "hyperparameters on public data, or make a plan and a Trainer for each trial and add up what they cost"
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
