"""Lightning in two processes ends where it ends in one, and checkpoints change hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")
from tests.integrations import lightning_job

JOB = Path(__file__).with_name("lightning_job.py")
ROOT = Path(__file__).resolve().parents[2]


def on_two(*args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    done = subprocess.run([*launch, *map(str, args)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def same(folder, other):
    wanted = torch.load(other / "end.pt")
    for name, value in torch.load(folder / "end.pt").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)


def test_one_process_goes_on_where_two_stopped(tmp_path):
    lightning_job.train(tmp_path / "one")
    on_two(tmp_path / "both", "--stop", 3)
    lightning_job.train(tmp_path / "both", ckpt_path=tmp_path / "both" / "step=3.ckpt")
    same(tmp_path / "both", tmp_path / "one")


@pytest.mark.slow
def test_two_processes_end_where_one_ends(tmp_path):
    lightning_job.train(tmp_path / "one")
    on_two(tmp_path / "two")
    same(tmp_path / "two", tmp_path / "one")
