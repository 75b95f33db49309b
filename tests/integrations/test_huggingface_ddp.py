"""The Trainer under torchrun: two processes end where one ends, and checkpoints change hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integrations import ddp_job, hf

from lambdacgd.validation import InvalidInput

JOB = Path(__file__).with_name("ddp_job.py")
ROOT = Path(__file__).resolve().parents[2]


def on_two(*args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    done = subprocess.run([*launch, *map(str, args)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_two_processes_end_where_one_ends_and_hand_over_checkpoints(tmp_path):
    """One process alone; two; and two that stop after three steps, for one to go on from their checkpoint."""
    ddp_job.train(tmp_path / "one")
    on_two(tmp_path / "two")
    on_two(tmp_path / "both", "--stop", 3)
    ddp_job.train(tmp_path / "both", resume=True)
    wanted = load_file(tmp_path / "one" / "final" / "model.safetensors")
    for name in ("two", "both"):
        hf.assert_same(load_file(tmp_path / name / "final" / "model.safetensors"), wanted, tolerance=1e-5)
        assert (tmp_path / name / "final" / "PRIVACY.md").exists()


def test_sharding_by_the_trainer_is_refused(tmp_path, monkeypatch):
    """As where accelerate's configuration asks for FSDP, which the arguments then do not say."""
    begin = hf.LambdaCGDTrainer.create_accelerator_and_postprocess

    def sharding(self):
        begin(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(hf.LambdaCGDTrainer, "create_accelerator_and_postprocess", sharding)
    with pytest.raises(InvalidInput, match="fully_shard"):
        hf.make_trainer("bert", tmp_path / "out")
