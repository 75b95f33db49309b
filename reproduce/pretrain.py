"""A small BERT that learns to fill in masked word pieces of film reviews: weights for ``--weights``.

The reviews are those of IMDb's *test* split, without their labels, so the training split, which private fine-tuning
reads and protects, is not in the weights. Test accuracy after that is on reviews whose text, not their labels, has
been seen; validation accuracy is not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from reproduce.data import PADDING, VOCABULARY, load_imdb

MASK, SPECIAL = 103, 999  # [MASK]; ids up to this one are [CLS], [SEP] and unused ones
_SHARE = 0.15  # of the word pieces
WIDTH, LAYERS, READ = 128, 2, 128  # BERT-tiny's, and how many word pieces it reads


def learn(
    data: Path | None,
    out: Path,
    seconds: float,
    device: torch.device,
    *,
    width: int = WIDTH,
    layers: int = LAYERS,
    length: int = READ,
    batch: int = 256,
    rate: float = 5e-4,
    steps: int | None = None,
    say: Any = print,
) -> None:
    """Train for so long, or for so many steps, and save the encoder as Hugging Face does.

    Args:
        data: Folder with IMDb.
        out: Folder for ``config.json`` and ``model.safetensors``.
        seconds: How long to train. The rate rises for a twentieth of it and then falls to zero.
        device: Where to train.
        width: Of the BERT; a head for 64 of it.
        layers: Of the BERT.
        length: How many word pieces of a review are read at a time, from its beginning or a random place on.
        batch: Reviews a step.
        rate: The largest learning rate of AdamW.
        steps: Stop after so many, for tests.
        say: Is told how it goes.
    """
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    reviews = load_imdb(data).test.inputs.long().to(device)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width, max_position_embeddings=length,
    )  # fmt: skip
    model: Any = BertForMaskedLM(config)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    began, done, losses = time.monotonic(), 0, torch.zeros((), device=device)
    while (share := (time.monotonic() - began) / seconds) < 1 and done != steps:
        optimizer.param_groups[0]["lr"] = rate * min(20 * share + 0.01, 1 - share)
        rows = reviews[torch.randint(len(reviews), (batch,), device=device)]
        place = int(torch.randint(reviews.shape[1] - length + 1, (1,))) if done % 2 else 0  # many reviews are short
        loss = masked_loss(model, rows[:, place : place + length])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses, done = losses + loss.detach(), done + 1
        if done % 200 == 0:
            say(f"{time.monotonic() - began:.0f} s, {done} steps, loss {float(losses) / 200:.3f}")
            losses.zero_()
    model.bert.half().save_pretrained(out)  # half the bytes; fine-tuning reads them as float32
    say(f"{out}: {done} steps of {batch} reviews")


def masked_loss(model: Any, tokens: Tensor) -> Tensor:
    """The loss of word pieces that were hidden: eight of ten by [MASK], one by another piece, one not at all."""
    hidden = (torch.rand(tokens.shape, device=tokens.device) < _SHARE) & (tokens > SPECIAL)
    hidden[0, 0] |= not hidden.any()
    kind = torch.rand(tokens.shape, device=tokens.device)
    other = torch.randint_like(tokens, SPECIAL + 1, VOCABULARY)
    shown = torch.where(hidden & (kind < 0.8), MASK, torch.where(hidden & (kind > 0.9), other, tokens))
    states = model.bert(input_ids=shown, attention_mask=(tokens != PADDING).long()).last_hidden_state
    return F.cross_entropy(model.cls(states[hidden]), tokens[hidden])  # logits of hidden places only: they are dear
