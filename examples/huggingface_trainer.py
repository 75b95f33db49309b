"""A BERT classifier trained with differential privacy by ``LambdaCGDTrainer``.

    python examples/huggingface_trainer.py --out /tmp/first                       # a random BERT on made-up sentences
    python examples/huggingface_trainer.py --out runs/imdb --model bert-base-uncased --dataset imdb

The second form needs ``datasets`` and a network for the pretrained model and the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    TrainingArguments,
)

import lambdacgd as lc
from lambdacgd.integrations.huggingface import LambdaCGDTrainer

VOCABULARY = 60


def made_up(examples: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of class 1 hold more of the first words."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for label in torch.randint(2, (examples,), generator=generator).tolist():
        length = int(torch.randint(5, 12, (1,), generator=generator))
        top = VOCABULARY // 3 if label else VOCABULARY
        ids = torch.randint(1, top, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "attention_mask": [1] * length, "labels": label})
    return found


def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    batch = {
        name: torch.tensor([item[name] + [0] * (longest - len(item[name])) for item in items])
        for name in ("input_ids", "attention_mask")
    }
    return batch | {"labels": torch.tensor([item["labels"] for item in items])}


def small() -> tuple[Any, Any, Any, Any, Any]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config), made_up(512, 1), made_up(128, 2), pad, None


def pretrained(model: str, dataset: str) -> tuple[Any, Any, Any, Any, Any]:
    import datasets

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = datasets.load_dataset(dataset).map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=256), batched=True
    )
    data = data.rename_column("label", "labels")
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
    return classifier, data["train"], data["test"], DataCollatorWithPadding(tokenizer), tokenizer


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--dataset", default="imdb")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    model, train, test, collator, tokenizer = pretrained(given.model, given.dataset) if given.model else small()
    plan = lc.plan(train, given.batch_size, epochs=given.epochs, epsilon=given.epsilon, delta=1 / (10 * len(train)))
    args = TrainingArguments(
        output_dir=str(given.out),
        per_device_train_batch_size=32,
        learning_rate=5e-4 if given.model else 5e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=10,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = LambdaCGDTrainer(
        model, args, plan=plan, max_grad_norm=1.0, train_dataset=train, eval_dataset=test, data_collator=collator,
        processing_class=tokenizer, compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate()["eval_accuracy"], trainer.private.spent())
    trainer.save_model(str(given.out / "release"))


if __name__ == "__main__":
    main()
