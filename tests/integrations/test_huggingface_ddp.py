"""The Trainer under torchrun: two processes end where one ends, and checkpoints change hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lambdacgd.errors import InvalidInput
from tests.integrations import ddp_job, hf

JOB = Path(__file__).with_name("ddp_job.py")
ROOT = Path(__file__).resolve().parents[2]


def on_two(*args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    done = subprocess.run([*launch, *map(str, args)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def same(folder, other):
    found, wanted = (load_file(place / "final" / "model.safetensors") for place in (folder, other))
    hf.assert_same(found, wanted, tolerance=1e-5)
    assert (folder / "final" / "PRIVACY.md").exists()


def test_one_process_goes_on_where_two_stopped(tmp_path):
    ddp_job.train(tmp_path / "one")
    on_two(tmp_path / "both", "--stop", 3)
    ddp_job.train(tmp_path / "both", resume=True)
    same(tmp_path / "both", tmp_path / "one")


@pytest.mark.slow
def test_two_processes_end_where_one_ends(tmp_path):
    ddp_job.train(tmp_path / "one")
    on_two(tmp_path / "two")
    same(tmp_path / "two", tmp_path / "one")


def test_sharding_by_the_trainer_is_refused(tmp_path, monkeypatch):
    """As where accelerate's configuration asks for FSDP, which the arguments then do not say."""
    begin = hf.LambdaCGDTrainer.create_accelerator_and_postprocess

    def sharding(self):
        begin(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(hf.LambdaCGDTrainer, "create_accelerator_and_postprocess", sharding)
    with pytest.raises(InvalidInput, match="fully_shard"):
        hf.make_trainer("bert", tmp_path / "out")
