"""Lightning in two processes ends where it ends in one, and checkpoints change hands."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("lightning")
from tests.integrations import lightning_job
from tests.training.distributed import launch


def on_two(out, stop=0):
    launch.run(2, lightning_job.as_rank, out, stop, timeout=240)


def same(folder, other):
    wanted = torch.load(other / "end.pt")
    for name, value in torch.load(folder / "end.pt").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)


def test_one_process_goes_on_where_two_stopped(tmp_path):
    lightning_job.train(tmp_path / "one")
    on_two(tmp_path / "both", 3)
    lightning_job.train(tmp_path / "both", ckpt_path=tmp_path / "both" / "step=3.ckpt")
    same(tmp_path / "both", tmp_path / "one")


@pytest.mark.slow
def test_two_processes_end_where_one_ends(tmp_path):
    lightning_job.train(tmp_path / "one")
    on_two(tmp_path / "two")
    same(tmp_path / "two", tmp_path / "one")
