"""The Trainer under torchrun: two processes end where one ends, and checkpoints change hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file
from tests.integrations import hf

JOB = Path(__file__).with_name("ddp_job.py")
ROOT = Path(__file__).resolve().parents[2]


def start(processes, *args):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "ACCELERATE_USE_CPU": "1",
    }
    command = [sys.executable, str(JOB)]
    if processes > 1:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            str(JOB),
        ]
    done = subprocess.run([*command, *map(str, args)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_two_processes_end_where_one_ends_and_hand_over_checkpoints(tmp_path):
    """One process alone; two; and two that stop after four steps, for one to go on from their checkpoint."""
    start(1, tmp_path / "one")
    start(2, tmp_path / "two")
    start(2, tmp_path / "both", "--stop", 3)
    start(1, tmp_path / "both", "--resume")
    wanted = load_file(tmp_path / "one" / "final" / "model.safetensors")
    for name in ("two", "both"):
        hf.assert_same(load_file(tmp_path / name / "final" / "model.safetensors"), wanted, tolerance=1e-5)
        assert (tmp_path / name / "final" / "PRIVACY.md").exists()
