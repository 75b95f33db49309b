"""Pretrained BERT weights in a folder of Hugging Face's layout, for fine-tuning in ``methods-imdb``.

Runs know weights by a digest of their content, so that results do not depend on where a folder lies.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lambdacgd.validation import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor, nn

    from reproduce.data import Splits

PHYSICAL = 64  # examples at a time
_PREFIX = "pretrained-"
_FILES = ("model.safetensors", "pytorch_model.bin")
_FOLDERS: dict[str, Path] = {}


def register(folder: Path) -> str:
    """The name of the weights in ``folder`` as a model."""
    config, weights = folder / "config.json", [folder / name for name in _FILES if (folder / name).is_file()]
    if not config.is_file() or not weights or json.loads(config.read_text()).get("model_type") != "bert":
        raise InvalidInput(
            "weights",
            str(folder),
            "it must hold a BERT as save_pretrained or a hub leaves it: config.json (model_type bert) and "
            "model.safetensors",
        )
    digest = hashlib.sha256(config.read_bytes())
    with weights[0].open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    name = _PREFIX + digest.hexdigest()[:16]
    _FOLDERS[name] = folder
    return name


def is_pretrained(model: str) -> bool:
    """Whether a run's model is one of registered weights."""
    return model.startswith(_PREFIX)


def make(model: str) -> nn.Module:
    """The weights with a new output layer for two classes, without dropout."""
    from transformers import BertForSequenceClassification

    found: nn.Module = BertForSequenceClassification.from_pretrained(
        _FOLDERS[model], num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return found


def reviews(model: str, data: Path | None) -> Splits:
    """IMDb for the weights: word piece ids where ``data`` has them, else texts through the weights' own tokenizer."""
    from reproduce.data import imdb

    folder = _FOLDERS[model]

    def tokenize(texts: list[str]) -> Tensor:
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(texts, truncation=True, max_length=imdb.LENGTH, padding="max_length")["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    found = imdb.load(data, tokenize=tokenize)
    known = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    largest = int(found.train.inputs.max())
    if largest >= known:
        raise InvalidInput(
            "data",
            str(data),
            f"its ids go up to {largest}, but the weights know {known}: give weights with bert-base-uncased's "
            "vocabulary, or the reviews as text (train-*.parquet)",
        )
    return found
