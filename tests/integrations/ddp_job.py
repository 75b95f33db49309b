"""A training job for one process, or for several that train together."""

from __future__ import annotations

import gc
import os
import secrets
from pathlib import Path

from torch import distributed as dist
from transformers import TrainerCallback

import lambdacgd as lc
from tests.integrations import hf


class Stop(TrainerCallback):
    """Of two processes only the second says so: a time limit, say, that the first has not reached yet."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if os.environ.get("RANK", "1") == "1":
            control.should_training_stop = state.global_step == self.step


def train(out: Path, *, stop: int = 0, resume: bool = False) -> None:
    make = secrets.token_hex
    path = out.with_name(out.name + ".key")
    if not path.exists() and os.environ.get("RANK", "0") == "0":
        lc.SecretKey.from_bytes(bytes(range(32))).save(path)
    trainer = hf.make_trainer(
        "llama", out, key=path, callbacks=[Stop(stop)], save_strategy="steps", save_steps=3,
        per_device_train_batch_size=2, optim="sgd", learning_rate=0.5,
    )  # fmt: skip
    secrets.token_hex = lambda n: "ab" * n if n == 16 else make(n)  # one run id, whatever the number of processes
    try:
        trainer.train(resume_from_checkpoint=resume or None)
    finally:
        secrets.token_hex = make
    trainer.save_model(str(out / "final"))


def as_rank(out: Path, stop: int) -> None:
    """`train` as one of the processes that `launch` has started, which torchrun would tell by the environment."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    train(out, stop=stop)
    gc.collect()  # accelerate holds the process group, too
