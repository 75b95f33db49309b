"""A checkpoint of two processes resumes on one or four; the ledger's rules hold, kept by rank 0 alone."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

import lambdacgd as lc
from lambdacgd.training import checkpoint
from tests.faults import fault
from tests.training import oracle
from tests.training.distributed import jobs, launch


@functools.lru_cache(maxsize=2)
def expected(bins):
    return launch.run(0, jobs.uninterrupted, bins)[0]


@pytest.fixture
def folder(tmp_path):
    lc.SecretKey.from_bytes(oracle.KEY).save(tmp_path / "run.key")
    return tmp_path


def entries(folder):
    return [json.loads(line) for line in (folder / "run.ledger").read_text().splitlines()]


@fault(
    "The wrong key, plan, data or number of processes",
    "A run of two processes is resumed on one or four, with DDP, FSDP2 or neither.",
    shows=(
        "Nothing: the same noise and batches follow. Sums are added up in another order, so the last bits may differ."
    ),
    loses="Nothing.",
)
@pytest.mark.parametrize(
    ("first", "second", "size", "bins"),
    [
        ("ddp", "fsdp", 4, "fixed"),
        ("fsdp", "plain", 0, "fresh"),
        ("fsdp", "ddp", 4, "fixed"),
        pytest.param("ddp", "plain", 0, "fresh", marks=pytest.mark.slow),
        pytest.param("fsdp", "fsdp", 4, "fresh", marks=pytest.mark.slow),
    ],
)
def test_from_two_processes_to_another_world(folder, first, second, size, bins):
    """Step 6 is an epoch's end, step 5 is not: resumed there, the noise of step 6 takes back that of step 5."""
    launch.run(2, jobs.begin_and_save, first, str(folder), 5, bins)
    events = entries(folder)
    assert [(e["event"], e.get("step")) for e in events] == [("run", None), ("release", 5)]
    for start, weights, averaged in launch.run(size, jobs.go_on, second, str(folder), bins):
        assert start == 5
        for found, wanted in zip((weights, averaged), expected(bins), strict=True):
            for name, value in found.items():
                torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-10)


def on_one_process(where: str) -> list[str]:
    """Without a process group, in the folder that two made: it stays a folder."""
    path = Path(where) / "checkpoint"
    for step in (5, 6):
        private, model, optimizer = jobs.bound("plain", where, seed=9)
        extra = private.load(path)
        assert private.steps_taken == step
        jobs.loop(private, model, optimizer, step + 1)
        private.save(path, extra=extra)
        private.detach()
    return [p.name for p in path.iterdir()]


def test_one_process_saves_where_two_did(folder):
    launch.run(2, jobs.begin_and_save, "ddp", str(folder), 5, "fixed")
    assert launch.run(0, on_one_process, str(folder)) == [["step-00000007"]]
    assert [e["step"] for e in entries(folder) if e["event"] == "release"] == [5, 6, 7]
    for start, weights, _ in launch.run(2, jobs.go_on, "fsdp", str(folder), "fixed"):
        assert start == 7
        for name, value in weights.items():
            torch.testing.assert_close(value, expected("fixed")[0][name], rtol=0, atol=1e-10)


def test_no_secret_in_the_folder(folder):
    launch.run(2, jobs.begin_and_save, "fsdp", str(folder), 1, "fixed")
    content = b"".join(p.read_bytes() for p in (folder / "checkpoint").rglob("*") if p.is_file())
    assert len(content) > 1000
    for secret in (oracle.KEY, oracle.KEY.hex().encode()):
        assert secret not in content
    assert not [p for p in folder.rglob("*.key") if p != folder / "run.key"]


def _refuses(act, match):
    """Both ranks fail, and say why."""
    with pytest.raises(lc.TrainingError, match=match):
        act()
    dist.barrier()


def life_of_a_folder(where: str) -> None:
    """What may happen to a checkpoint folder, in order, on both ranks."""
    folder = Path(where)
    first = dist.get_rank() == 0
    path = folder / "checkpoint"
    private, model, optimizer = jobs.bound("fsdp", where)
    assert private.resume(path) is False
    batches = iter(private.loader)

    def step() -> None:
        x, y = next(batches)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    x, y = next(batches)
    _refuses(lambda: private.save(path), "between logical steps")
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    private.save(path)
    if first:
        shutil.copytree(path, folder / "copy")
    private.save(path)  # once more, at the same step
    assert [p.name for p in path.iterdir()] == ["step-00000001"]
    step()
    private.save(path)
    assert [p.name for p in path.iterdir()] == ["step-00000002"]

    # A full disk on one rank: an error that `except Exception` sees, on both, and nothing is left or entered.
    def write(*given):
        if not first:
            raise OSError("no space left")
        return whole(*given)

    whole = checkpoint.write_tensors
    with mock.patch.object(checkpoint, "write_tensors", write):
        _refuses(lambda: private.save(path), "no space left")
    assert [p.name for p in path.iterdir()] == ["step-00000002"]
    _refuses(lambda: private.save(path, extra={"set": {1}}), "cannot be part of a checkpoint|failed on rank 0")
    assert [p.name for p in path.iterdir()] == ["step-00000002"]
    dist.barrier()

    # Going back is refused on both ranks, also within a running process.
    _refuses(lambda: private.load(folder / "copy"), "released weights after step 2")
    private.detach()
    private, model, optimizer = jobs.bound("ddp", where)
    _refuses(lambda: private.load(folder / "copy"), "released weights after step 2")
    # A file that was changed is refused.
    if first:
        broken = folder / "broken" / "step-00000002"
        shutil.copytree(path / "step-00000002", broken)
        part = sorted(broken.glob("rows-*"))[0]
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    dist.barrier()
    _refuses(lambda: private.load(folder / "broken"), "another digest")
    _refuses(lambda: private.load(folder / "nowhere"), "no checkpoint")
    # Two nodes, each with a folder of its own under this name: rank 1 would go on from other weights.
    with mock.patch("lambdacgd.training.checkpoint._digest", return_value=f"seen by {dist.get_rank()}"):
        _refuses(lambda: private.load(path), "must see one file system")
    # Killed after the ledger's entry: the draft is whole. Killed before: it never left.
    if first:
        run = entries(folder)[0]["run"]
        (path / "step-00000002").rename(path / f".step-00000002.{run}.draft")
        shutil.copytree(folder / "copy" / "step-00000001", path / f".step-00000003.{run}.draft")
    dist.barrier()
    assert private.resume(path) is True
    assert private.extra == {}
    assert private.steps_taken == 2
    assert [p.name for p in path.iterdir()] == ["step-00000002"]
    weights = jobs.weights(model)
    private.detach()

    # Half loaded, the run is the checkpoint's already: going on from the start would use its noise again.
    private, model, optimizer = jobs.bound("fsdp", where)
    with mock.patch("lambdacgd.training.checkpoint._apply", side_effect=lc.TrainingError("no memory")):
        _refuses(lambda: private.load(path), "no memory")
    assert private.steps_taken == 2
    _refuses(lambda: next(iter(private.loader)), "failed half-way")
    _refuses(lambda: private.save(path), "failed half-way")
    private.detach()

    # Out of a sharded model, one file with whole weights, entered in the ledger.
    private, model, optimizer = jobs.bound("fsdp", where)
    private.load(path)
    with mock.patch("lambdacgd.training.export.verify"):  # the plan's σ is made up
        lc.export(private, folder / "release")
    released = load_file(folder / "release" / "model.safetensors")
    assert released.keys() == weights.keys()
    assert all(torch.equal(released[name], weights[name]) for name in weights)
    private.detach()
    dist.barrier()


def test_the_life_of_a_folder(folder):
    launch.run(2, life_of_a_folder, str(folder))
    kinds = [(e["step"], e["kind"]) for e in entries(folder) if e["event"] == "release"]
    assert kinds == [(1, "checkpoint"), (1, "checkpoint"), (2, "checkpoint"), (2, "export")]


def releases(where: str) -> None:
    """Exports of replicas: rank 0 keeps the books."""
    private, model, optimizer = jobs.bound("ddp", where)
    jobs.loop(private, model, optimizer, 2)
    with mock.patch("lambdacgd.training.export.verify"):  # the plan's σ is made up
        lc.export(private, Path(where) / "release")  # only rank 0 writes
    private.detach()
    dist.barrier()


def test_exports_of_replicas(folder):
    launch.run(2, releases, str(folder))
    kinds = [(e["step"], e["kind"]) for e in entries(folder) if e["event"] == "release"]
    assert kinds == [(2, "export")]
    assert "module." not in "".join(load_file(folder / "release" / "model.safetensors"))
