"""Checkpoints of several processes: a folder that any number of them can go on from (torch.distributed.checkpoint).

``checkpoint/step-00000012/`` holds the tensors, written by all ranks, and ``run.pt``, written by rank 0: what
identifies the run, generators, optimizer settings, your ``extra``. No key, no noise, no sum. All ranks need the same
file system.

Guarantee
---------
As for one process: the folder is drafted under another name, synced, entered in the ledger by rank 0 (while the others
wait), and only then gets its name; the one before is removed after that. A draft that the ledger knows was whole and
is completed by the next load; any other is discarded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lambdacgd.keys import LedgerError
from lambdacgd.training import checkpoint
from lambdacgd.training.distributed import state
from lambdacgd.training.distributed.compare import compare_weights
from lambdacgd.training.distributed.shards import reshard
from lambdacgd.training.distributed.world import World
from lambdacgd.training.errors import CheckpointError
from lambdacgd.training.identity import content_digest, read_state

if TYPE_CHECKING:
    from lambdacgd.training.private import Private

FORMAT = "lambdacgd-folder-1"
FACTS = "run.pt"


def save(private: Private, path: str | os.PathLike[str], extra: dict[str, Any] | None, *, frozen: bool = True) -> None:
    """Write a checkpoint together. All ranks must call it; rank 0's ``extra`` is kept."""
    world, folder = private.world, Path(path)
    _ = private.run.id
    reshard(private.model)
    with world.together("saving"):
        checkpoint.check_savable(private)
        tensors, facts = state.of(private, frozen=frozen)
        who = checkpoint.identity(private)
    compare_weights(private)
    facts |= {
        "format": FORMAT,
        "identity": who,
        "run": private.run.id,
        "step": private.steps_taken,
        "plan": private.plan.to_json(),
        "extra": {} if extra is None else extra,
        "generators": world.gather(checkpoint.generators()),
    }
    draft, target = folder / f".{_name(private)}.draft", folder / _name(private)
    world.from_first("saving", lambda: _make_draft(folder, draft))
    try:
        _write(tensors, draft, world)
        world.from_first("saving", lambda: _write_facts(facts, draft))
        digest = _digest(draft, world)
    except Exception as error:
        if world.first:
            shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"{folder} could not be written ({error}). The previous checkpoint and the ledger are as they were: make "
            "room or choose another place (one that all ranks see), and save again"
        ) from error

    def release() -> None:
        private.run.release(private.steps_taken, digest=digest, kind="checkpoint")
        _give_name(draft, target)
        _remove_others(folder, target)

    world.from_first("saving", release)


def load(private: Private, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Go on from a checkpoint folder, written by any number of ranks. All ranks must call it. Returns ``extra``."""
    world, folder = private.world, Path(path)
    found, facts = world.from_first("loading", lambda: _newest(private, folder))
    reshard(private.model)
    with world.together("loading"):
        private.check_usable()
        checkpoint.check_belongs(private, facts["identity"])
        tensors = state.places(private, facts)
        seen = _view(found)
    world.agree("loading", {str(found): seen}, {str(found): "All ranks must see one file system"})
    digest = _digest(found, world)
    try:
        private.run.resume(facts["run"], facts["step"], digest)
    except LedgerError as error:
        raise CheckpointError(str(error)) from error
    with private.going_on_from(facts["step"]):
        _read(tensors, found, world)
        with world.together("loading"):
            state.apply(private, tensors, facts)
            if len(facts["generators"]) == world.size:  # other worlds give ranks other examples, so other dropout
                checkpoint.set_generators(facts["generators"][world.rank])
        compare_weights(private)
    checkpoint.adopt(private, facts["identity"])
    return dict(facts["extra"])


def exists(private: Private, folder: Path) -> bool:
    """Whether there is anything to go on from. For rank 0."""
    _settle(private, folder)
    return bool(_steps(folder))


# --- the folder ------------------------------------------------------------------------------------------------------


def _name(private: Private) -> str:
    return f"step-{private.steps_taken:08d}"


def _steps(folder: Path) -> list[Path]:
    """Whole checkpoints, newest last."""
    return sorted(p for p in folder.glob("step-*") if (p / FACTS).is_file())


def _newest(private: Private, folder: Path) -> tuple[Path, dict[str, Any]]:
    _settle(private, folder)
    steps = _steps(folder)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    facts = _read_facts(steps[-1])
    if facts is None:
        raise CheckpointError(
            f"{steps[-1]} is damaged or not a checkpoint. Restore it from a copy; or, if it is lost for good with "
            "every copy, declare it destroyed in the ledger (key.ledger().declare_destroyed(run, step)) and resume "
            "from the one before; or start a new run"
        )
    return steps[-1], facts


def _settle(private: Private, folder: Path) -> None:
    """Complete a draft that the ledger knows; remove others, which never left the process whole."""
    if private.run.key.path is None:
        return
    ledger = private.run.key.ledger()
    for draft in folder.glob(".step-*.draft"):
        facts, known = _read_facts(draft), False
        with contextlib.suppress(LedgerError):
            newest = None if facts is None else ledger.newest(facts["run"])
            known = newest is not None and newest.digest == _digest(draft, World(None))
        if known:
            target = folder / draft.name[1 : -len(".draft")]
            _give_name(draft, target)
            _remove_others(folder, target)
        else:
            shutil.rmtree(draft, ignore_errors=True)


def _make_draft(folder: Path, draft: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(".step-*.draft"):  # never entered in the ledger: this process would have named them
        shutil.rmtree(old, ignore_errors=True)
    draft.mkdir()


def _give_name(draft: Path, target: Path) -> None:
    if target.exists():  # this step was saved before; the ledger knows both
        aside = target.with_name(f".{target.name}.old")
        os.rename(target, aside)
        os.rename(draft, target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(draft, target)
    checkpoint.sync_folder(target.parent)


def _remove_others(folder: Path, kept: Path) -> None:
    for old in (*folder.glob("step-*"), *folder.glob(".step-*.old")):
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)


# --- what is in it ---------------------------------------------------------------------------------------------------


def _write(tensors: dict[str, Any], draft: Path, world: World) -> None:
    from torch.distributed import checkpoint as dcp  # takes a second, which one process alone need not spend

    writer = dcp.FileSystemWriter(draft, sync_files=True)
    with _plainly(dcp.CheckpointException):
        dcp.save(tensors, storage_writer=writer, process_group=world.group, no_dist=world.group is None)


def _read(tensors: dict[str, Any], source: Path, world: World) -> None:
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(source)
    with _plainly(dcp.CheckpointException):
        dcp.load(tensors, storage_reader=reader, process_group=world.group, no_dist=world.group is None)


@contextlib.contextmanager
def _plainly(failure: type[BaseException]) -> Iterator[None]:
    """torch.distributed.checkpoint's ``failure`` is no Exception, so nobody's ``except`` would see it: raise ours."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is no accident
            yield
    except failure as error:
        rank, (cause, _) = min(error.failures.items())  # type: ignore[attr-defined]
        raise CheckpointError(f"rank {rank} failed: {type(cause).__name__}: {cause}") from error


def _write_facts(facts: dict[str, Any], draft: Path) -> None:
    content_digest(facts)  # refuses what could not be read again
    with open(draft / FACTS, "wb") as file:
        torch.save(facts, file)
        file.flush()
        os.fsync(file.fileno())
    checkpoint.sync_folder(draft)


def _read_facts(folder: Path) -> dict[str, Any] | None:
    try:
        facts = read_state(folder / FACTS)
    except Exception:  # a damaged file fails in whatever way its damage leads to
        return None
    return facts if isinstance(facts, dict) and facts.get("format") == FORMAT else None


def _view(folder: Path) -> str:
    """What this rank sees of a folder: sizes of all files, and what names the run. Files' contents are shared work."""
    sizes = sorted((p.name, p.stat().st_size) for p in folder.iterdir())
    return hashlib.sha256(repr(sizes).encode() + (folder / FACTS).read_bytes()).hexdigest()


def _digest(folder: Path, world: World) -> str:
    """SHA-256 over the names and bytes of all files. Ranks share the work, so all must call it."""
    names = world.from_first("reading", lambda: sorted(p.name for p in folder.iterdir()))
    own: dict[str, str] = {}
    with world.together("reading"):
        for name in names[world.rank :: world.size]:
            with open(folder / name, "rb") as file:
                own[name] = hashlib.file_digest(file, "sha256").hexdigest()
    every = {name: digest for part in world.gather(own) for name, digest in part.items()}
    return hashlib.sha256("\n".join(f"{name} {every[name]}" for name in names).encode()).hexdigest()
