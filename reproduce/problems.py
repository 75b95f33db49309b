"""What experiments train: models for each data set, pretrained weights, and the data on a device in two splits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm

from lambdacgd import digits
from lambdacgd.clipping import convert
from lambdacgd.errors import InvalidInput
from reproduce.bench_models import CNN
from reproduce.data import LENGTH, PADDING, VOCABULARY, Examples, Splits, load_cifar10, load_digits, load_imdb
from reproduce.framework import free
from reproduce.fused_norm import fuse
from reproduce.patches import KINDS, DrawnFeatures
from reproduce.record_models import Head, ScatteringCNN, ScatteringLinear, WideResNet
from reproduce.runs import TrainingRun
from reproduce.scattering import Scattering

# BERT's vocabulary is listed roughly by frequency, a public order. Later pieces become [UNK]: a smaller table to noise.
PIECES, UNKNOWN = 8192, 100
_ORDER = 20260122  # the seed of the public shuffle behind the validation split


class PlainCNN(nn.Sequential):
    """``CNN`` without normalisation: six 3×3 convolutions with biases, as PyTorch initialises them."""

    def __init__(self, classes: int = 10) -> None:
        convolutions = [layer for layer in CNN(classes) if isinstance(layer, nn.Conv2d)]
        parts: list[nn.Module] = []
        for place, layer in enumerate(convolutions):
            parts += [nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1), nn.ReLU()]
            parts += [nn.MaxPool2d(2)] if place % 2 else []
        super().__init__(*parts, nn.Flatten(), nn.Linear(2048, classes))


class DistinctWords(nn.Module):
    """Embeddings of the distinct word pieces of a review, summed and divided by √(their number), then a linear layer.

    Distinct, because a gradient is as long as its most frequent words make it, and "the" tells nothing. Embeddings
    begin near zero, so that they, not the output layer, take up the clipping norm. 131 106 parameters.
    """

    def __init__(self, vocabulary: int = PIECES, width: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        ordered = tokens.sort(1).values
        repeated = nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        ordered = torch.where(repeated, PADDING, ordered)
        seen = (ordered != PADDING).unsqueeze(-1)
        out: Tensor = self.output((self.embedding(ordered) * seen).sum(1) / seen.sum(1).clamp_min(1).sqrt())
        return out


class ReviewLSTM(nn.Module):
    """An LSTM over the first word pieces of a review; the mean of its states goes to a linear layer.

    Embeddings are small and multiplied by ``SCALE``: so they, not the recurrent weights, take up the clipping norm, and
    a rate at which they learn leaves the recurrence in order. 137 538 parameters.
    """

    LENGTH, SCALE = 128, 8.0

    def __init__(self, vocabulary: int = PIECES, width: int = 16, states: int = 32, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        with torch.no_grad():
            self.embedding.weight.div_(self.SCALE)
        self.lstm = nn.LSTM(width, states, batch_first=True)
        self.output = nn.Linear(states, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.LENGTH]
        seen = (tokens != PADDING).unsqueeze(-1)
        states, _ = self.lstm(self.SCALE * self.embedding(tokens))
        out: Tensor = self.output((states * seen).sum(1) / seen.sum(1).clamp_min(1))
        return out


class Classifier(nn.Module):
    """A classifier of ``transformers`` as a function of tokens: as many of them as it has positions for."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert, self.length = bert, int(bert.config.max_position_embeddings)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.length]
        logits: Tensor = self.bert(input_ids=tokens, attention_mask=(tokens != PADDING).long()).logits
        return logits


class BagOfWords(nn.Module):
    """The mean of the words' embeddings, then one hidden layer. Padding does not count."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = (tokens != PADDING).unsqueeze(-1)
        mean = (self.embedding(tokens) * seen).sum(1) / seen.sum(1).clamp_min(1)
        out: Tensor = self.output(torch.relu(self.hidden(mean)))
        return out


# Pretrained BERT weights
PHYSICAL = 256  # examples at a time
_PREFIX = "pretrained-"
_FILES = ("model.safetensors", "pytorch_model.bin")
_FOLDERS: dict[str, Path] = {}


def register_weights(folder: Path) -> str:
    """Name the BERT in ``folder``, in Hugging Face's layout, as a model for fine-tuning.

    Runs know weights by a digest of their content, so that results do not depend on where a folder lies.

    Raises:
        InvalidInput: The folder holds no BERT.
    """
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
    """Whether a model is called as ``register_weights`` calls one."""
    return model.startswith(_PREFIX)


def make_pretrained(model: str) -> nn.Module:
    """The weights with a new output layer for two classes, without dropout."""
    from transformers import BertForSequenceClassification

    bert: nn.Module = BertForSequenceClassification.from_pretrained(
        _FOLDERS[model], num_labels=2, dtype=torch.float32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return bert


def reviews(model: str, data: Path | None) -> Splits:
    """IMDb for the weights: word piece ids where ``data`` has them, else texts through the weights' own tokenizer."""
    folder = _FOLDERS[model]

    def tokenize(texts: list[str]) -> Tensor:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(texts, truncation=True, max_length=LENGTH, padding="max_length")["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    splits = load_imdb(data, tokenize=tokenize)
    known = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    largest = int(splits.train.inputs.max())
    if largest >= known:
        raise InvalidInput(
            "data",
            str(data),
            f"its ids go up to {largest}, but the weights know {known}: give weights with bert-base-uncased's "
            "vocabulary, or the reviews as text (train-*.parquet)",
        )
    return splits


@dataclass(frozen=True)
class Task:
    """A data set with a model, for ``python -m reproduce train``. The numbers are its defaults.

    Learning rates are for SGD on mean gradients.
    They suit λCGD with fresh bins, the default plan. For digits the learning rate is the best on a validation split
    at ε = 2 (results/demo_tuning.json). For cifar10 it is the best at ε = 2 and 4; at ε = 8 twice the rate is better,
    at ε = 1 a third of it (results/methods-cifar).
    """

    name: str
    load: Callable[[Path | None], Splits]
    model: Callable[[], nn.Module]
    epochs: int
    batch_size: int
    delta: float
    learning_rate: float
    max_grad_norm: float
    about: str


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "digits", load_digits, digits.model, 2, 8, 1e-4, 0.25, 1.0, "1 437 handwritten digits of 8×8; no download"
        ),
        Task("cifar10", load_cifar10, CNN, 10, 128, 1e-5, 1.0, 0.3, "50 000 small photographs"),
        Task("imdb", load_imdb, lambda: BagOfWords(VOCABULARY, 32, 2), 10, 128, 1e-5, 2.0, 1.0, "25 000 film reviews"),
    )
}


@dataclass(frozen=True)
class Problem:
    """A data set and the models for it; ``read`` turns stored rows into the model's input on the device."""

    name: str
    load: Callable[[Path | None], Splits]
    models: dict[str, Callable[[], nn.Module]]
    read: Callable[[Examples], Tensor]


def _images(examples: Examples) -> Tensor:
    return examples.numbers(examples.inputs)


def _pieces(examples: Examples) -> Tensor:
    tokens = examples.inputs.long()
    return torch.where(tokens < PIECES, tokens, UNKNOWN)


# Fixed features in the place of images: made once, of every image alone, and kept in 16 bits
def views_of(model: str) -> int:
    """K, how many views of an image a step reads: what stands behind "/k" in the model's name, else 1.

    "/k4+2" is six views, two of them mixes of two of the other four.
    """
    return sum(map(int, (model.partition("/k")[2] or "1").split("+")))


def mixes_of(model: str) -> int:
    """How many of these views are mixes of two others."""
    return int(model.partition("/k")[2].partition("+")[2] or 0)


def _kind(model: str) -> str:
    return model.partition("/k")[0]


@lru_cache(maxsize=1)
def _cifar10(folder: Path | None) -> Splits:
    return load_cifar10(folder)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _fixed(make: Callable[[Tensor], Tensor], folder: Path | None, device: torch.device) -> Splits:
    at_a_time = 500 if device.type == "cuda" else 8
    splits = _cifar10(folder)

    @torch.no_grad()
    def numbers(examples: Examples) -> Examples:
        parts = [
            make(examples.numbers(examples.inputs[i : i + at_a_time].to(device))).half().cpu()
            for i in range(0, len(examples), at_a_time)
        ]
        return Examples(torch.cat(parts), examples.labels)

    made = Splits(numbers(splits.train), numbers(splits.test), splits.classes)
    free(device)  # for the processes that train on them
    return made


def load_scattering(folder: Path | None = None) -> Splits:
    """CIFAR-10 as scattering coefficients, [243, 8, 8] an image, normalised within the image in groups of nine maps."""
    module = Scattering().to(_device())
    return _fixed(lambda images: group_norm(module(images), 27), folder, _device())


def load_drawn(kind: str, folder: Path | None = None) -> Splits:
    """CIFAR-10 as features of that kind, which drawn images make (`reproduce.patches`)."""
    return _fixed(DrawnFeatures(KINDS[kind], _device()), folder, _device())


# Models whose forward passes decide things on the host, which a captured step cannot; and those too large for it.
UNCAPTURED = ("lstm", "wrn")
LARGE = {"wrn": 256}  # models that see so many examples at a time, in bfloat16 on CUDA
PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("digits", load_digits, {"mlp": digits.model}, _images),
        Problem(
            "cifar10", load_cifar10, {"cnn": lambda: fuse(CNN()), "cnn-plain": PlainCNN, "wrn": WideResNet}, _images
        ),
        Problem(
            "cifar10-scattering",
            load_scattering,
            {"linear": ScatteringLinear, "cnn": lambda: fuse(ScatteringCNN())},
            _images,
        ),
        *(
            Problem(
                f"cifar10-{name}",
                partial(load_drawn, name),
                {
                    "linear": partial(Head, kind.kept),
                    "mlp": partial(Head, kind.kept, 256),
                },
                _images,
            )
            for name, kind in KINDS.items()
        ),
        Problem("imdb", load_imdb, {"words": DistinctWords, "lstm": lambda: convert(ReviewLSTM())}, _pieces),
    )
}


def problem(name: str) -> Problem:
    """The problem of that name."""
    if name not in PROBLEMS:
        raise InvalidInput("task", name, f"it must be one of {', '.join(PROBLEMS)}")
    return PROBLEMS[name]


def make_model(run: TrainingRun) -> nn.Module:
    """The run's model, with weights drawn from torch's generator or pretrained."""
    if is_pretrained(run.model):
        return Classifier(make_pretrained(run.model))
    return problem(run.task).models[_kind(run.model)]()


def capturable(run: TrainingRun) -> bool:
    """Whether the run's model can be trained by a captured step."""
    return _kind(run.model) not in UNCAPTURED and not is_pretrained(run.model)


def physical_batch_size(run: TrainingRun) -> int | None:
    """How many examples of the run fit at a time; None is all."""
    return PHYSICAL if is_pretrained(run.model) else LARGE.get(_kind(run.model))


def sizes(every: int, run: TrainingRun) -> tuple[int, int]:
    """How many training examples a run learns from, and how many are held out for validation."""
    if run.split == "test":
        return (every if run.examples is None else min(every, run.examples)), 0
    held_out = every // 5
    training = every - held_out
    if run.examples is None:
        return training, held_out
    kept = min(every, run.examples)
    return kept - kept // 5, kept // 5


TRAINING_EXAMPLES = {"digits": digits.TRAIN, "cifar10": 50_000, "imdb": 25_000}
TRAINING_EXAMPLES |= dict.fromkeys(("cifar10-scattering", *(f"cifar10-{kind}" for kind in KINDS)), 50_000)


class Data:
    """A problem's examples on a device, cut for validation or test; held out is the last fifth of a public shuffle."""

    def __init__(self, name: str, splits: Splits, device: torch.device) -> None:
        order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(_ORDER))
        self.name, self.device, self._splits, self._order = name, device, splits, order
        self._cuts: dict[tuple[str, int | None, bool], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}

    def examples(self, run: TrainingRun) -> int:
        """How many examples a run trains on."""
        return sizes(len(self._order), run)[0]

    def cut(self, run: TrainingRun) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(training inputs, labels), (evaluation inputs, labels) of a run; as much of the test set as is trained on
        where ``run.examples`` limits it.
        """
        whole = is_pretrained(run.model)  # pretrained weights know every word piece
        key = (run.split, run.examples, whole)
        if key not in self._cuts:
            train, held_out = sizes(len(self._order), run)
            apart = (
                self._splits.train.part(self._order[-held_out:])
                if run.split == "validation"
                else self._splits.test.part(slice(0, run.examples))
            )
            parts = self._splits.train.part(self._order[:train]), apart
            self._cuts[key] = (self._place(parts[0], whole), self._place(parts[1], whole))
        return self._cuts[key]

    def _place(self, examples: Examples, whole: bool) -> tuple[Tensor, Tensor]:
        inputs, labels = examples.inputs.to(self.device), examples.labels.to(self.device)  # bytes travel, not floats
        if whole:
            return inputs.long(), labels
        return problem(self.name).read(Examples(inputs, labels, shift=examples.shift, scale=examples.scale)), labels


def packed(splits: Splits) -> dict[str, Any]:
    """Splits as plain tensors, for ``torch.save``: worker processes read them back without decoding again."""
    return {
        part: {"inputs": examples.inputs, "labels": examples.labels, "shift": examples.shift, "scale": examples.scale}
        for part, examples in (("train", splits.train), ("test", splits.test))
    } | {"classes": splits.classes}


def unpacked(content: dict[str, Any]) -> Splits:
    """The inverse of ``packed``."""
    train, test = (
        Examples(part["inputs"], part["labels"], shift=part["shift"], scale=part["scale"])
        for part in (content["train"], content["test"])
    )
    return Splits(train, test, content["classes"])
