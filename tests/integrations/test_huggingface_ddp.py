"""The Trainer in two processes ends where it ends in one, and checkpoints change hands."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from lambdacgd.errors import InvalidInput
from tests.integrations import ddp_job, hf
from tests.training.distributed import launch


def on_two(out, stop=0):
    launch.run(2, ddp_job.as_rank, out, stop, timeout=240)


def same(folder, other):
    found, wanted = (load_file(place / "final" / "model.safetensors") for place in (folder, other))
    hf.assert_same(found, wanted, tolerance=1e-5)
    assert (folder / "final" / "PRIVACY.md").exists()


def test_one_process_goes_on_where_two_stopped(tmp_path):
    ddp_job.train(tmp_path / "one")
    on_two(tmp_path / "both", 3)
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
