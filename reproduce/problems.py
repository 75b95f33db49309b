"""What the training experiments train: data on the device in two splits, and small models for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping import convert
from lambdacgd.validation import InvalidInput
from reproduce import pretrained
from reproduce.data import Examples, Splits, cifar10, digits, imdb
from reproduce.fused_norm import fuse
from reproduce.runs import TrainingRun
from reproduce.tasks import cifar10_model, digits_model

# BERT's vocabulary is listed roughly by frequency, a public order. Later pieces become [UNK]: a smaller table to noise.
PIECES, UNKNOWN = 8192, 100
_ORDER = 20260122  # the seed of the public shuffle behind the validation split


class DistinctWords(nn.Module):
    """Embeddings of the distinct word pieces of a review, summed and divided by √(their number), then a linear layer.

    Distinct, because a gradient is as long as its most frequent words make it, and "the" tells nothing. Embeddings
    begin near zero, so that they, not the output layer, take up the clipping norm. 131 106 parameters.
    """

    def __init__(self, vocabulary: int = PIECES, width: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=imdb.PADDING)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        ordered = tokens.sort(1).values
        repeated = nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        ordered = torch.where(repeated, imdb.PADDING, ordered)
        seen = (ordered != imdb.PADDING).unsqueeze(-1)
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
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=imdb.PADDING)
        with torch.no_grad():
            self.embedding.weight.div_(self.SCALE)
        self.lstm = nn.LSTM(width, states, batch_first=True)
        self.output = nn.Linear(states, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.LENGTH]
        seen = (tokens != imdb.PADDING).unsqueeze(-1)
        states, _ = self.lstm(self.SCALE * self.embedding(tokens))
        out: Tensor = self.output((states * seen).sum(1) / seen.sum(1).clamp_min(1))
        return out


class Classifier(nn.Module):
    """A classifier of ``transformers`` as a function of tokens."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=tokens, attention_mask=(tokens != imdb.PADDING).long()).logits
        return logits


class RandomBert(Classifier):
    """A BERT of the given size with random weights, through ``transformers``: the path that fine-tuning takes."""

    def __init__(self, *, layers: int, width: int, heads: int) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=PIECES,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=imdb.LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        config.num_labels = 2
        super().__init__(BertForSequenceClassification(config))


@dataclass(frozen=True)
class Problem:
    """A data set and the models for it; ``read`` turns stored rows into the model's input on the device."""

    name: str
    load: Callable[[Path | None], Splits]
    models: dict[str, Callable[[], nn.Module]]
    read: Callable[[Examples], Tensor]


def _images(examples: Examples) -> Tensor:
    return examples._numbers(examples.inputs)


def _pieces(examples: Examples) -> Tensor:
    tokens = examples.inputs.long()
    return torch.where(tokens < PIECES, tokens, UNKNOWN)


# Models whose forward passes decide things on the host, which a captured step cannot.
UNCAPTURED = ("lstm", "bert-tiny")
PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("digits", digits.load, {"mlp": digits_model}, _images),
        Problem("cifar10", cifar10.load, {"cnn": lambda: fuse(cifar10_model())}, _images),
        Problem(
            "imdb",
            imdb.load,
            {
                "words": DistinctWords,
                "lstm": lambda: convert(ReviewLSTM()),
                "bert-tiny": lambda: RandomBert(layers=2, width=128, heads=2),
            },
            _pieces,
        ),
    )
}


def problem(name: str) -> Problem:
    """The problem of that name."""
    if name not in PROBLEMS:
        raise InvalidInput("task", name, f"it must be one of {', '.join(PROBLEMS)}")
    return PROBLEMS[name]


def make_model(run: TrainingRun) -> nn.Module:
    """The run's model, with weights drawn from torch's generator or pretrained."""
    if pretrained.is_pretrained(run.model):
        return Classifier(pretrained.make(run.model))
    return problem(run.task).models[run.model]()


def capturable(run: TrainingRun) -> bool:
    """Whether the run's model can be trained by a captured step."""
    return run.model not in UNCAPTURED and not pretrained.is_pretrained(run.model)


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
        whole = pretrained.is_pretrained(run.model)  # pretrained weights know every word piece
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
        part: {"inputs": one.inputs, "labels": one.labels, "shift": one.shift, "scale": one.scale}
        for part, one in (("train", splits.train), ("test", splits.test))
    } | {"classes": splits.classes}


def unpacked(content: dict[str, Any]) -> Splits:
    """The inverse of ``packed``."""
    train, test = (
        Examples(part["inputs"], part["labels"], shift=part["shift"], scale=part["scale"])
        for part in (content["train"], content["test"])
    )
    return Splits(train, test, content["classes"])
