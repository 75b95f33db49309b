"""Models of the step benchmark, in plain torch (BERT through transformers), randomly initialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Sequential):
    """Six 3×3 convolutions with GroupNorm(8), 0.3M parameters; for 32×32 images."""

    def __init__(self, classes: int = 10) -> None:
        parts: list[nn.Module] = []
        width = 3
        for out in (32, 64, 128):
            for _ in range(2):
                parts += [
                    nn.Conv2d(width, out, 3, padding=1, bias=False),
                    nn.GroupNorm(8, out, affine=False),
                    nn.ReLU(),
                ]
                width = out
            parts.append(nn.MaxPool2d(2))
        super().__init__(*parts, nn.Flatten(), nn.Linear(2048, classes))


class WideBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inner), nn.GroupNorm(16, outer)
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        same = inner == outer and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        return self.conv2(F.relu(self.norm2(self.conv1(h)))) + self.short(
            x if isinstance(self.short, nn.Identity) else h
        )


class WideResNet(nn.Module):
    """WideResNet-``depth``-``width`` with GroupNorm(16) in place of BatchNorm; for 32×32 images."""

    def __init__(self, depth: int = 40, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        blocks, inner = (depth - 4) // 6, 16
        self.stem = nn.Conv2d(3, inner, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        for stage, outer in enumerate((16 * width, 32 * width, 64 * width)):
            for i in range(blocks):
                stages.append(WideBlock(inner, outer, 2 if stage and i == 0 else 1))
                inner = outer
        self.blocks, self.norm, self.head = nn.Sequential(*stages), nn.GroupNorm(16, inner), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer with a class token and learned positions (pre-norm)."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        *,
        patch: int = 16,
        image: int = 224,
        hidden: int | None = None,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden or 4 * width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], 1) + self.position
        return self.head(self.norm(self.blocks(h))[:, 0])


class LSTMClassifier(nn.Module):
    """Embedding, one LSTM layer, mean over time, two classes."""

    def __init__(
        self, vocabulary: int = 30522, width: int = 128, hidden: int = 256, classes: int = 2, *, lstm: Any = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = (lstm or nn.LSTM)(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0].mean(1))


class Bert(nn.Module):
    """Hugging Face BERT for classification, returning logits."""

    def __init__(
        self, width: int, depth: int, heads: int, *, vocabulary: int = 30522, dropout: float = 0.0, positions: int = 512
    ) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=positions,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        return self.bert(input_ids=x, position_ids=place).logits


class LanguageModel(nn.Module):
    """A causal model of transformers, returning each example's mean loss over its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(input_ids=x, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(x), -1).mean(1)


def gpt2(width: int = 768, depth: int = 12, heads: int = 12, *, vocabulary: int = 50257) -> LanguageModel:
    """GPT-2; by default of 124M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=depth, n_head=heads, **rates)
    return LanguageModel(GPT2LMHeadModel(config))


def llama_with_lora(
    width: int = 2048, depth: int = 22, heads: int = 32, *, vocabulary: int = 32000, hidden: int = 5632
) -> LanguageModel:
    """A Llama, by default of TinyLlama's 1.1B parameters, frozen in bfloat16, with adapters of rank 16 in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    base: Any = LlamaForCausalLM(config)
    return LanguageModel(get_peft_model(base.to(torch.bfloat16), lora))


@dataclass(frozen=True)
class Case:
    """A model of the benchmark: how to build it and one batch."""

    build: Callable[..., nn.Module]
    batch: int
    image: int = 0  # side of the square images; 0: token ids
    tokens: int = 256
    vocabulary: int = 30522

    def data(self, device: torch.device, batch: int | None = None) -> tuple[Tensor, Tensor]:
        n = batch or self.batch
        g = torch.Generator().manual_seed(7)
        if self.image:
            x: Tensor = torch.randn(n, 3, self.image, self.image, generator=g)
        else:
            x = torch.randint(1, self.vocabulary, (n, self.tokens), generator=g)
        return x.to(device), torch.randint(0, 2, (n,), generator=g).to(device)


def build(case: Case, device: torch.device, **how: Any) -> nn.Module:
    """On the device at once: initialising 632 million weights on a CPU takes longer than the measurement."""
    torch.manual_seed(1)
    try:
        with torch.device(device):
            model: nn.Module = case.build(**how)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a constructor that insists on the CPU
        model = case.build(**how)
    return model.to(device)


CASES: dict[str, Case] = {
    "cnn": Case(CNN, 128, image=32),
    "wrn-40-4": Case(WideResNet, 128, image=32),
    "wrn-16-4": Case(lambda: WideResNet(16), 128, image=32),
    "vit-b": Case(lambda: ViT(768, 12, 12), 64, image=224),
    "vit-l": Case(lambda: ViT(1024, 24, 16), 32, image=224),
    "vit-h": Case(lambda: ViT(1280, 32, 16, patch=14), 16, image=224),
    "lstm": Case(LSTMClassifier, 64),
    "bert-tiny": Case(lambda: Bert(128, 2, 2), 32),
    "bert-base": Case(lambda: Bert(768, 12, 12), 32),
    "bert-large": Case(lambda: Bert(1024, 24, 16), 16),
    "gpt2": Case(gpt2, 32, vocabulary=50257),
    "llama-lora": Case(llama_with_lora, 16, vocabulary=32000),
    "small-transformer": Case(lambda: ViT(128, 4, 4, patch=4, image=32), 32, image=32),
}
