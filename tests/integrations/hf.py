"""Small random models and data for the Hugging Face integration, and the loop by hand that the Trainer must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

import lambdacgd as lc
from lambdacgd.integrations.huggingface import LambdaCGDTrainer
from lambdacgd.training import privatize
from tests.training import oracle

SEED, VOCABULARY, PAD = 3, 29, 0
EXAMPLES, BATCH, EPOCHS = 24, 6, 2


class Sentences(Dataset[dict[str, Any]]):
    """Sequences of different lengths, padded by the collator."""

    def __init__(self, labels: bool, examples: int = EXAMPLES, seed: int = SEED) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (examples,), generator=g).tolist()
        self._ids = [torch.randint(1, VOCABULARY, (length,), generator=g) for length in lengths]
        self._labels = torch.randint(2, (examples,), generator=g).tolist() if labels else None

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {"input_ids": self._ids[index]}
        return item if self._labels is None else item | {"labels": self._labels[index]}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad on the right; language model labels are the ids themselves."""
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.full((len(items), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        ids[row, : len(item["input_ids"])] = item["input_ids"]
        mask[row, : len(item["input_ids"])] = 1
    if "labels" in items[0]:
        labels = torch.tensor([item["labels"] for item in items])
    else:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_model(kind: str, *, lora: bool = False, dropout: float = 0.0, layers: int = 1) -> Any:
    """One layer, unless a test is about what layers do together: looking at a model takes most of a test's time."""
    torch.manual_seed(SEED)
    if kind == "bert":
        model: Any = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY, hidden_size=12, intermediate_size=16, num_hidden_layers=layers,
                num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    elif kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=layers, n_head=2, resid_pdrop=dropout,
                embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=1,
            )
        )  # fmt: skip
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=12, intermediate_size=16, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
            )
        )  # fmt: skip
    if not lora:
        return model
    import peft

    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[kind]
    task = "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    torch.manual_seed(SEED + 1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=targets, task_type=task, fan_in_fan_out=kind == "gpt2")
    )


def make_plan(epsilon: float = 8.0, examples: int = EXAMPLES, epochs: int = EPOCHS) -> lc.Plan:
    """Without amplification, which needs no accountant but the closed form."""
    return lc.plan(
        examples, BATCH, epochs=epochs, epsilon=epsilon, delta=1e-4, mechanism=lc.LambdaCGD(0.7), sampling=lc.Cyclic()
    )


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "adamw_torch",
        "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": SEED,
    }  # fmt: skip
    return TrainingArguments(**(given | changes))


def make_trainer(kind: str, folder: Path, *, lora: bool = False, **changes: Any) -> LambdaCGDTrainer:
    options = {
        name: changes.pop(name)
        for name in ("plan", "model", "key", "callbacks", "cls", "compute_loss_func", "eval_dataset", "data_collator",
                     "optimizers", "max_grad_norm", "compute_metrics", "processing_class", "train_dataset")
        if name in changes
    }  # fmt: skip
    cls = options.pop("cls", LambdaCGDTrainer)
    model = options.pop("model", None)
    return cls(
        make_model(kind, lora=lora) if model is None else model,
        arguments(folder, **changes),
        **({"plan": make_plan(), "train_dataset": Sentences(kind == "bert"), "data_collator": collate} | options),
    )


def fix_run(key: lc.SecretKey) -> str:
    """Enter a run in the key's ledger, for two programs to train with the same noise and batches."""
    return key.ledger().new_run()


def loss_by_hand(model: nn.Module, batch: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """The mean over examples of each example's own loss, written out."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if kind == "bert":
        return F.cross_entropy(logits, labels)
    own = []
    for row in range(len(labels)):
        length = int(batch["attention_mask"][row].sum())
        own.append(F.cross_entropy(logits[row, : length - 1], labels[row, 1:length]))
    return torch.stack(own).mean()


def train_by_hand(
    model: Any, kind: str, plan: lc.Plan, key: lc.SecretKey, run: str, *, lr: float = 0.05, size: int = 24
) -> None:
    """The loop of the documentation, with the Trainer's optimizer and schedule."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (plan.steps - step) / plan.steps)
    private = privatize(
        model, optimizer, Sentences(kind == "bert"), plan, max_grad_norm=1.0, max_physical_batch_size=size, key=key,
        collate_fn=collate,
    )  # fmt: skip
    private.run._id = run
    model.train()
    for batch in private.loader:
        loss_by_hand(model, batch, kind).backward()
        optimizer.step()
        if private.between_steps:
            schedule.step()
        optimizer.zero_grad()
    private.detach()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            oracle.assert_close_but_for_lattice(a[name], b[name], tolerance, msg=name)
        else:
            assert torch.equal(a[name], b[name]), name


def fix_id(trainer: LambdaCGDTrainer, run: str) -> None:
    """Give the run that train() will begin a known id."""
    make = trainer._privatize

    def privatize_with_id(key: Any) -> Any:
        private = make(key)
        private.run._id = run
        return private

    trainer._privatize = privatize_with_id  # type: ignore[method-assign]


class Meddler(TrainerCallback):
    """Does what it should not at one moment of the loop."""

    def __init__(self, moment, act):
        setattr(self, moment, self._run)
        self._act = act

    def _run(self, args, state, control, model=None, optimizer=None, **kwargs):
        self._act(model, optimizer)


def backward(model, optimizer):
    batch = collate([Sentences(True)[0]])
    labels = batch.pop("labels")
    F.cross_entropy(model(**batch).logits, labels).backward()
