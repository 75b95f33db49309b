"""One loss per example, from logits and labels: an example's loss never depends on the others of its batch.

The models' own losses average over all tokens of a batch, and the Trainer's ``num_items_in_batch`` over all tokens of
an accumulated one: a long example would then shrink the gradients of short ones. Here every example's tokens are
averaged among themselves. Labels of -100 do not count; an example without any has loss zero.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto as auto

from lambdacgd.validation import InvalidInput

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
        name,
        "its per-example loss is not known here. Pass compute_loss_func=function(outputs, labels, **kwargs) that "
        "returns one loss per example, or override compute_loss to return that vector",
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
