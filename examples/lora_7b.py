"""LoRA fine-tuning of a 7B language model with differential privacy, on one GPU or several.

    python examples/lora_7b.py --model meta-llama/Llama-2-7b-hf --data letters.jsonl --out runs/letters
    torchrun --nproc-per-node 8 examples/lora_7b.py --model … --data … --out runs/letters
    python examples/lora_7b.py --tiny --out /tmp/tiny                    # a random model on a CPU, in seconds

``--data`` is a file of JSON lines with a "text" each; one line is one example, the unit that is protected. The result
holds adapters and a privacy card. Whoever is protected must be protected whole: if one person wrote several lines,
join them into one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

import lambdacgd as lc
from lambdacgd.integrations.huggingface import LambdaCGDTrainer


def tiny_model() -> tuple[Any, list[dict[str, list[int]]], int]:
    """A random Llama of a few thousand parameters and random sentences."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    lengths = torch.randint(4, 16, (64,)).tolist()
    return LlamaForCausalLM(config), [{"input_ids": torch.randint(1, 64, (n,)).tolist()} for n in lengths], 0


def real_model(name: str, data: Path, longest: int) -> tuple[Any, list[dict[str, list[int]]], int]:
    """A pretrained model in bfloat16, and the tokens of every line."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines() if line.strip()]
    tokens = [{"input_ids": tokenizer(text, truncation=True, max_length=longest)["input_ids"]} for text in texts]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), tokens, pad


class Pad:
    """Pad on the right, so that no example's positions depend on the others, and mark padding in mask and labels."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(item["input_ids"]) for item in items)
        missing = [longest - len(item["input_ids"]) for item in items]
        rows = list(zip([item["input_ids"] for item in items], missing, strict=True))
        return {
            "input_ids": torch.tensor([ids + [self.pad] * n for ids, n in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for ids, n in rows]),
            "labels": torch.tensor([ids + [-100] * n for ids, n in rows]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--data", type=Path, help="JSON lines with a 'text' each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a random model and random data, on a CPU")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="expected logical batch size")
    parser.add_argument("--physical", type=int, default=8, help="examples at once on a device")
    parser.add_argument("--longest", type=int, default=512, help="tokens an example")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    if not given.tiny and given.data is None:
        parser.error("--data is needed (or --tiny)")

    base, tokens, pad = tiny_model() if given.tiny else real_model(given.model, given.data, given.longest)
    model = peft.get_peft_model(
        base,
        peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    plan = lc.plan(
        tokens, min(given.batch_size, len(tokens) // 4), epochs=given.epochs, epsilon=given.epsilon,
        delta=1 / (10 * len(tokens)),
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=str(given.out),
        per_device_train_batch_size=given.physical,
        learning_rate=1e-3,
        warmup_steps=max(1, plan.steps // 20),
        bf16=not given.tiny,
        gradient_checkpointing=True,
        save_steps=max(1, plan.steps_per_epoch),
        save_total_limit=2,
        logging_steps=max(1, plan.steps // 50),
        use_cpu=given.tiny,
    )
    trainer = LambdaCGDTrainer(model, args, plan=plan, max_grad_norm=1.0, train_dataset=tokens, data_collator=Pad(pad))
    trainer.train(resume_from_checkpoint=given.resume or None)
    trainer.save_model(str(given.out / "release"))
    print(f"adapters and their privacy card are in {given.out / 'release'}: {trainer.private.spent()}")


if __name__ == "__main__":
    main()
