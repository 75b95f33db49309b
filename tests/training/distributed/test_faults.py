"""A rank that dies makes the job fail, not hang; torchrun starts it again, and it ends as if nothing had happened."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

import lambdacgd as lc
from tests.faults import fault
from tests.training import oracle
from tests.training.distributed import jobs, launch

ROOT = Path(__file__).parents[3]


def dies(kind: str) -> None:
    """Rank 1 is killed in the middle of step 3."""
    private, model, optimizer = jobs.bound(kind, None)
    for x, y in private.loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        if private.steps_taken == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@fault(
    "Workers and ranks that die",
    "One of several ranks is killed (kill −9) in the middle of a step.",
    shows="The other ranks fail with torch's error within the process group's timeout; none hangs.",
    loses="The steps since the newest checkpoint.",
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_killed_rank_fails_the_others(kind):
    start = time.monotonic()
    with pytest.raises(launch.RankFailed) as failed:
        launch.run(2, dies, kind, timeout=50, together=20)
    alive, dead = failed.value.errors
    assert dead == "died without a word"
    assert "Traceback" in alive  # gloo sees the connection close; at the latest its timeout ends the wait
    assert time.monotonic() - start < 50


def example():
    spec = importlib.util.spec_from_file_location("torchrun_digits", ROOT / "examples" / "torchrun_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(out: str, *options: str) -> None:
    """The example script's own main, without accidents."""
    with mock.patch("lambdacgd.ledger.secrets.token_hex", return_value=jobs.RUN):
        example().main(["--out", out, *options])


def fail_once(out: str, *options: str) -> None:
    """The example under torchrun: in the first attempt rank 1 is killed at step 13, between two checkpoints."""

    def after_step(private: lc.Private) -> None:
        if private.steps_taken == 13 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            (Path(out) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    with mock.patch("lambdacgd.ledger.secrets.token_hex", return_value=jobs.RUN):
        example().main(["--out", out, *options], after_step)
    dist.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


def prepared(folder: Path) -> Path:
    """A folder with a plan of 22 steps (without amplification, for speed), and one with a key beside it."""
    private = folder.with_name(folder.name + ".private")
    folder.mkdir()
    private.mkdir()
    oracle.plan(1437, 65, 1).save(folder / "plan.json")
    lc.SecretKey.from_bytes(oracle.KEY).save(private / "run.key")
    return folder


@fault(
    "Workers and ranks that die",
    "A rank under `torchrun --max-restarts` is killed between two checkpoints.",
    shows="torchrun starts all ranks again, and they go on.",
    loses="The steps since that checkpoint. They are computed again, to the same bits.",
)
@pytest.mark.parametrize("options", [[], pytest.param(["--sharded"], marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_torchrun_restarts_to_the_same_weights(tmp_path, options):
    calm, rough = prepared(tmp_path / "calm"), prepared(tmp_path / "rough")
    launch.run(2, run_example, str(calm), *options)
    code = f"from tests.training.distributed import test_faults; test_faults.fail_once({str(rough)!r}, *{options!r})"
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--standalone", "--monitor-interval=0.1", str(script)]
    # Without it torchrun offers the store of the attempt before, with its addresses (pytorch/pytorch#135712).
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (rough / "died").exists()
    found, wanted = (load_file(folder / "release" / "model.safetensors") for folder in (rough, calm))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
