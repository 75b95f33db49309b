"""A training script for torchrun: ``torchrun --nproc-per-node 2 ddp_job.py OUT [--stop N] [--resume]``."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

import torch
from tests.integrations import hf
from transformers import TrainerCallback

import lambdacgd as lc


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stop", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    make = secrets.token_hex
    secrets.token_hex = lambda n: "ab" * n if n == 16 else make(n)  # the same run id whatever the number of processes
    path = given.out.with_name(given.out.name + ".key")
    if not path.exists() and os.environ.get("RANK", "0") == "0":
        lc.SecretKey.from_bytes(bytes(range(32))).save(path)
    trainer = hf.make_trainer(
        "llama", given.out, key=path, callbacks=[Stop(given.stop)], save_strategy="steps", save_steps=3,
        per_device_train_batch_size=2, optim="sgd", learning_rate=0.5,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=given.resume or None)
    trainer.save_model(str(given.out / "final"))


if __name__ == "__main__":
    main()
