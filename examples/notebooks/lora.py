# %% [markdown]
# # LoRA fine-tuning of a language model
#
# Adapters of rank 4 on a small Llama with random weights, trained on made-up sentences by `LambdaCGDTrainer`, which is
# a Hugging Face `Trainer` that takes a plan. With a pretrained model only the second cell changes. It needs the extra
# `hf`: `pip install '.[hf]'` in a checkout.

# %%
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import lambdacgd as lc
from lambdacgd.integrations.huggingface import LambdaCGDTrainer

generator = torch.manual_seed(0)

# %% [markdown]
# ## Model and data
#
# One sentence is one example, the unit that is protected. Every sentence counts upwards from a random word.

# %%
WORDS = 48
config = LlamaConfig(
    vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = peft.get_peft_model(LlamaForCausalLM(config), adapters)
starts, lengths = torch.randint(1, WORDS, (96,)), torch.randint(4, 12, (96,))
sentences = [
    {"input_ids": [1 + (int(start) + i) % (WORDS - 1) for i in range(int(length))]}
    for start, length in zip(starts, lengths, strict=True)
]
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{trainable} of {sum(p.numel() for p in model.parameters())} weights are trained, and get noise")

# %% [markdown]
# Padding goes to the right, and is marked: positions of one example must not depend on the others in its batch.


# %%
def collate(items):
    longest = max(len(item["input_ids"]) for item in items)
    rows = [(item["input_ids"], longest - len(item["input_ids"])) for item in items]
    return {
        "input_ids": torch.tensor([ids + [0] * n for ids, n in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for ids, n in rows]),
        "labels": torch.tensor([ids + [-100] * n for ids, n in rows]),
    }


# %% [markdown]
# ## Plan and train

# %%
plan = lc.plan(sentences, 24, epochs=2, epsilon=8.0, delta=1e-3, mechanism=lc.LambdaCGD(0.5))
plan

# %%
arguments = TrainingArguments(
    output_dir="letters",
    num_train_epochs=plan.epochs,
    per_device_train_batch_size=12,  # what fits into memory; it does not change the result
    learning_rate=1e-3,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
)
trainer = LambdaCGDTrainer(
    model, arguments, plan=plan, max_grad_norm=1.0, train_dataset=sentences, data_collator=collate
)
trainer.train()
print(trainer.private.spent())

# %% [markdown]
# ## The release
#
# `save_model` writes the adapters with their privacy card. So few steps on so few examples teach the model nothing; the
# mechanics are those of a real run.

# %%
trainer.save_model("letters/release")
trainer.private.card()
