"""A training script for torchrun: ``torchrun --nproc-per-node 2 ddp_job.py OUT [--stop N]``."""

from __future__ import annotations

import argparse
import gc
import os
import secrets
from pathlib import Path

import torch
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stop", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.out, stop=given.stop)
    gc.collect()  # accelerate holds the process group, too
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process
