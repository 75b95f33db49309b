"""What a `LambdaCGDTrainer` is given: arguments that hold under a plan, and a loss for each example.

Arguments that the plan fixes are set, and those that cannot hold are refused with advice.

The models' own losses average over all tokens of a batch, and the Trainer's ``num_items_in_batch`` over all tokens of
an accumulated one: a long example would then shrink the gradients of short ones. Here every example's tokens are
averaged among themselves, so that its loss never depends on the others of its batch. Labels of -100 do not count; an
example without any has loss zero.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainingArguments
from transformers.models.auto import modeling_auto as auto

from lambdacgd.errors import InvalidInput
from lambdacgd.planning import Plan

# --- arguments -------------------------------------------------------------------------------------------------------

_BY_THE_PLAN = "which examples meet in a batch is fixed by the plan. Leave it out"
# Arguments that keep their defaults under a plan, and what to do instead of changing them.
_DEFAULTS = {
    "gradient_accumulation_steps": "leave it at 1: logical batches come from the plan and are split into physical ones "
    "of per_device_train_batch_size by themselves",
    "fp16": "GradScaler looks at gradients before they are noised. Use bf16=True",
    "auto_find_batch_size": "it starts training over after running out of memory. Set per_device_train_batch_size "
    "lower: the result does not depend on it",
    "dataloader_drop_last": "bins are never cut off: dropping examples is not what the plan accounts for. Leave it out",
    "train_sampling_strategy": _BY_THE_PLAN,
    "torch_compile": "every layer whose gradient is clipped is a graph break, so nothing is gained. Leave it out",
    "use_liger_kernel": "its fused kernels hide the layers that clipping must see. Leave it out",
    "neftune_noise_alpha": "its noise depends on the longest example of the batch. Leave it out",
    "deepspeed": "it changes gradients behind our back. Use one process per GPU with torchrun",
    "ddp_static_graph": "it counts on gradients that private training never makes. Leave it out",
    "parallelism_config": "tensor, context and sequence parallelism split examples. Use DDP by torchrun",
    "enable_jit_checkpoint": "it saves in the middle of a logical step, where nothing may be written. Use save_steps",
    "include_num_input_tokens_seen": "the number of tokens seen depends on the drawn batches and is not private. Leave "
    "it out",
}
_WHOLE_STEP_OPTIMIZERS = ("lomo", "adalomo", "layerwise")


def adapt(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """A copy of ``args`` that does what the plan says, or an ``InvalidInput`` that says what to change."""
    for name, advice in _DEFAULTS.items():
        given = getattr(args, name, None)  # a version may not have it
        if given not in (None, False) and given != _default(name):
            raise InvalidInput(name, given, advice)
    _check_horizon(args, plan)
    _check_optimizer_and_devices(args)
    _check_reports(args)
    adapted = copy.copy(args)
    adapted.num_train_epochs, adapted.max_steps = float(plan.epochs), -1
    adapted.ignore_data_skip = True  # the loader begins where the run stands, so there is nothing to skip
    if args.gradient_checkpointing:
        how: Any = args.gradient_checkpointing_kwargs or {}
        if how.get("use_reentrant"):
            raise InvalidInput(
                "gradient_checkpointing_kwargs", how, "reentrant checkpointing hides layers. Say use_reentrant=False"
            )
        adapted.gradient_checkpointing_kwargs = {**how, "use_reentrant": False}
    return adapted


def looks_at_evaluation(args: TrainingArguments) -> bool:
    """Whether weights, or the learning rates that make them, are chosen by an evaluation."""
    saves, schedule = (str(getattr(x, "value", x)) for x in (args.save_strategy, args.lr_scheduler_type))
    return args.load_best_model_at_end or saves == "best" or schedule == "reduce_lr_on_plateau"


def _check_horizon(args: TrainingArguments, plan: Plan) -> None:
    if args.max_steps > 0 and args.max_steps != plan.steps:
        raise InvalidInput(
            "max_steps",
            args.max_steps,
            f"the plan has {plan.steps} steps, and its noise is for all of them. Leave max_steps out, or plan anew; to "
            "stop early use a callback: the claim stays the plan's",
        )
    untouched = _default("num_train_epochs")
    if args.max_steps <= 0 and args.num_train_epochs not in (untouched, plan.epochs):
        raise InvalidInput(
            "num_train_epochs",
            args.num_train_epochs,
            f"the plan has {plan.epochs} epochs. Leave num_train_epochs out, or plan anew",
        )
    if args.max_steps <= 0 and args.num_train_epochs != plan.epochs:  # nobody can tell a default from a wish
        warnings.warn(
            f"the plan has {plan.epochs} epochs, and so many are trained: num_train_epochs = {untouched:g}, which is "
            f"transformers' default, is not used. Say num_train_epochs={plan.epochs}, or plan for {untouched:g}",
            stacklevel=4,
        )


def _check_optimizer_and_devices(args: TrainingArguments) -> None:
    name = str(getattr(args.optim, "value", args.optim))
    if any(word in name for word in _WHOLE_STEP_OPTIMIZERS):
        raise InvalidInput(
            "optim", name, "it changes weights during the backward pass, before there is noise. Use adamw_torch or sgd"
        )
    if args.n_gpu > 1:
        raise InvalidInput(
            "args",
            f"This process sees {args.n_gpu} GPUs, and DataParallel would split batches behind our back. Set "
            "CUDA_VISIBLE_DEVICES to one, or start one process per GPU with torchrun.",
        )


def _check_reports(args: TrainingArguments) -> None:
    where = [getattr(args, name, None) for name in ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")]
    if "trackio" in (args.report_to or []) and any(where):
        raise InvalidInput(
            "report_to", "Training losses are not private and must not go to a Space of trackio. Log locally."
        )
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        raise InvalidInput(
            "hub_strategy",
            strategy,
            "checkpoints hold training losses and the run's identity, which must not be uploaded. Use 'end', and "
            "push_to_hub() after training, which uploads weights and the privacy card",
        )


def _default(name: str) -> Any:
    return {field.name: field.default for field in dataclasses.fields(TrainingArguments)}[name]


# --- losses ----------------------------------------------------------------------------------------------------------

Kind = Literal["next-token", "tokens", "whole"]
IGNORED = -100

_MAPPINGS: tuple[tuple[Kind, str], ...] = (
    ("next-token", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("tokens", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("tokens", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    ("whole", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("whole", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("whole", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
)
_ENDINGS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("next-token", ("ForCausalLM", "LMHeadModel")),
    ("tokens", ("ForMaskedLM", "ForTokenClassification")),
    ("whole", ("ForSequenceClassification", "ForImageClassification")),
)


def kind_of(model: nn.Module) -> Kind:
    """What the model's labels are for; refused where we do not know it."""
    bare = base_model(model)
    name = type(bare).__name__
    if not getattr(getattr(bare, "config", None), "is_encoder_decoder", False):
        for kind, mapping in _MAPPINGS:
            if name in dict(getattr(auto, mapping, {})).values():
                return kind
        for kind, endings in _ENDINGS:
            if name.endswith(endings):
                return kind
    raise InvalidInput(
        "model",
        f"The per-example loss of {name} is not known here. Pass compute_loss_func=function(outputs, labels, **kwargs) "
        "that returns one loss per example, or override compute_loss to return that vector.",
    )


def base_model(model: nn.Module) -> nn.Module:
    """The model inside a peft wrapper, which gives adapters no class of their own."""
    getter: Any = getattr(model, "get_base_model", None)
    return getter() if callable(getter) else model


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
