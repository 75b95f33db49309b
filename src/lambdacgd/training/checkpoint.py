"""Saving a run and going on from it, exactly: one folder format for one process, several, FSDP2 and the integrations.

``checkpoint/step-00000012/`` holds ``run.json`` (what identifies the run, and all plain data), ``whole.safetensors``
(tensors that every process holds, written by rank 0) and, for a sharded model, one ``rows-….safetensors`` per rank with
the rows that it keeps. Any number of processes can go on from it. It holds weights, the optimizer's state, running
averages, torch's and Python's generators, and the user's ``extra``; no key, no noise and no sum. Nothing in it is
pickled. All ranks need the same file system.

Guarantee
---------
A checkpoint exists only between logical steps. It is written under another name, synced, entered in the ledger beside
the key, and only then gets its name; the one before is removed after that. A run killed at any moment therefore resumes
from its newest checkpoint by itself: a draft that the ledger knows is completed, any other is discarded, and both
happen only while the run's lock is held. On one device with the same libraries the resumed run ends with the same bits.
Resuming from anything older than the newest release is refused unless the later ones are declared destroyed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lambdacgd.errors import CheckpointError, LedgerError, brief, shown
from lambdacgd.files import read_json, sync_folder, write_new
from lambdacgd.noise.layout import FORMAT as NOISE_FORMAT
from lambdacgd.training.card import History
from lambdacgd.training.data import generators, set_generators
from lambdacgd.training.distributed.models import groups_by_name, is_sharded, local, place_of, reshard
from lambdacgd.training.run import Run
from lambdacgd.version import __version__

if TYPE_CHECKING:
    from lambdacgd.training.privatize import Private

FORMAT = "lambdacgd-checkpoint-3"
FACTS, WHOLE = "run.json", "whole.safetensors"
_STEP = re.compile(r"step-\d{8,}")  # the rest of the folder is not ours to remove
_DRAFT = re.compile(r"\.(step-\d{8,})\.([0-9a-f]{1,64})\.draft")


# --- save, load, exists ----------------------------------------------------------------------------------------------


def save(
    private: Private,
    path: str | os.PathLike[str],
    extra: dict[str, Any] | None,
    *,
    frozen: bool = True,
    weights_only: bool = False,
) -> None:
    """What `Private.save` does. All ranks must call it; rank 0's ``extra`` is kept.

    The checkpoint becomes ``path/step-…``, and those that were there before are removed. With ``weights_only`` the
    optimizer's state is left out, and nothing can resume from the result.
    """
    world, folder = private.world, Path(path)
    run_id = private.run.id
    reshard(private.model)
    with world.together("saving"):
        private.check_whole()
        if not private.between_steps:
            raise CheckpointError(f"step {private.cycle.current} is under way: checkpoints exist between logical steps")
        private.check_own_weights()
        private.run.check_ledger()
        private.note_changes()
    private.compare_weights()
    all_generators = world.gather(generators())
    with world.together("saving"):
        left_out = set() if frozen else frozen_names(private.model)
        optimizer = None if weights_only else private.optimizer.state_dict()
        _check_optimizer_state(private, {"state": {}} if optimizer is None else optimizer)
        state = {  # tensors are those in use, not copies
            "model": {name: value for name, value in private.model.state_dict().items() if name not in left_out},
            "optimizer": optimizer,
            "averages": [average.state_dict() for average in private.averages],
            "extra": extra if extra is not None and world.first else {},
            "generators": all_generators,
        }
        who = identity(private) | {"sample": private.sample.seal(private.run.key, run_id)}
        parts = {"identity": who, "plan": private.plan_json, "groups": _groups(private), "state": state}
        facts, tensors = encode(parts)
    step = private.steps_taken
    facts |= {"format": FORMAT, "library": __version__, "run": run_id, "step": step}
    draft, target = folder / f".step-{step:08d}.{run_id}.draft", folder / f"step-{step:08d}"
    with contextlib.ExitStack() as held:  # a detached run has let go of its lock
        world.from_first("saving", lambda: held.enter_context(private.run.holding(run_id)))
        # What an error left of the last save may be the run's only checkpoint that can be resumed.
        world.from_first("saving", lambda: _settle(private.run, folder, only=run_id))
        try:
            world.from_first("saving", lambda: _make_draft(draft))
            with world.together("saving"):
                own = _write_tensors(draft, tensors, private)
            written = world.gather(own)
            digest = world.from_first("saving", lambda: _write_facts(draft, facts, written))
        except Exception as error:  # a full disk, a folder that not all ranks see, whatever the file system says
            if world.first:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(
                f"{folder} could not be written ({error}). The previous checkpoint and the ledger are as they were: "
                "make room or choose another place (one that all ranks see), and save again"
            ) from error

        def release() -> None:
            private.run.release(step, digest=digest, kind="checkpoint")
            _give_name(draft, target)
            for old in folder.iterdir():
                if old != target and _STEP.fullmatch(old.name):
                    _remove(old)

        world.from_first("saving", release)


def load(private: Private, path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `Private.load` does, from a checkpoint that any number of ranks wrote. All ranks must call it.

    Everything is checked before anything changes, and the ledger is asked before a weight is read.
    """
    world = private.world
    source, facts = world.from_first("loading", lambda: _newest(private, Path(path)))
    reshard(private.model)
    with world.together("loading"):
        private.check_usable()
        current = identity(private)
        with _damage(source):
            saved = _Saved(source, facts)
            who, state = saved.identity, saved.state
            check_identity(who, current)
            history = private.history.resumed(History.from_dict(who["history"]))
            private.sample.check(who["sample"], private.run.key, facts["run"])
            if state["optimizer"] is None:
                raise CheckpointError(f"{source} holds weights only (save_weights_only=True): no run can go on from it")
            _check_fits(private, facts["groups"], state)
            digest = _digest(source)
    world.agree("loading", {str(source): digest}, {str(source): "All ranks must see one file system"})
    with private.going_on_from(facts["step"], lambda: private.run.resume(facts["run"], facts["step"], digest)):
        with world.together("loading"):
            _apply(private, state)
            extra: dict[str, Any] = _loaded(state["extra"])
        private.compare_weights()
    private.history, private.extra = history, extra  # the weights are the checkpoint's now
    return extra


def exists(private: Private, path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint, or what is left of one that a killed process had entered in the ledger.

    For rank 0. Drafts are settled first, for which the run must not be in use by another process.
    """
    folder = Path(path)
    _settle(private.run, folder)
    return folder.is_file() or bool(_steps(folder))  # a file is refused when it is loaded


def has_traces(path: str | os.PathLike[str]) -> bool:
    """Whether anything of a checkpoint is there: a whole one, or a draft."""
    folder = Path(path)
    return bool(_steps(folder)) or any(folder.glob(".step-*.draft"))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds, in host memory, without going on from it: for evaluation and for looking.

    Args:
        path: The folder that was given to `save`.

    Returns:
        ``step``, ``model`` (a state_dict), ``optimizer``, ``averages`` and ``extra``.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    source, facts = _newest(None, Path(path))
    with _damage(source):
        state = _loaded(_Saved(source, facts).state)
    return {"step": facts["step"], **{name: state[name] for name in ("model", "optimizer", "averages", "extra")}}


# --- whose checkpoint it is ------------------------------------------------------------------------------------------

# What each entry is called when it differs, and what to do about it.
_MEANING = {
    "plan": "the plan: noise, horizon or sampling would not be those of the run. Load the run's own plan",
    "layout": "the trainable parameters (names or shapes): noise could not cancel. Build the same model",
    "noise": "the format of the noise: the run was begun under another one and cannot go on. Start a new one",
    "max_grad_norm": "the clipping norm: it is fixed for a run",
    "clipping_mode": "the clipping mode: it is fixed for a run",
    "augmentations": "the number of augmentations: it is fixed for a run",
    "loss_reduction": "the loss reduction: it is fixed for a run",
    "examples": "the length of the dataset",
    "data_fingerprint": "the data fingerprint: this is other data",
    "optimizer": "the optimizer's class, whose state goes on: use the one that the run was started with",
    "key": "the key (by its fingerprint): use the key file that the run was started with",
}


def identity(private: Private) -> dict[str, Any]:
    """What must be the same for whoever goes on with this run."""
    return {
        **private.settings,
        "noise": NOISE_FORMAT,
        "key": private.run.key.fingerprint(),
        "history": asdict(private.history),
    }


def check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse a state of another run, plan, model, key or dataset, naming everything that differs."""
    differs = [name for name in _MEANING if name in current and saved.get(name) != current[name]]
    if saved.get("data_fingerprint") is None and "data_fingerprint" in differs:
        differs.remove("data_fingerprint")  # a name where there was none: whoever gives it vouches for the data
    if differs:
        both = {name: f"saved {shown(saved.get(name), 16)}, here {shown(current[name], 16)}" for name in differs}
        lines = [f"\n- {_MEANING[name]} ({values})" for name, values in both.items()]
        raise CheckpointError("this checkpoint does not belong here. What differs:" + "".join(lines))


# --- a run's state, and going on from it -----------------------------------------------------------------------------


def frozen_names(model: nn.Module) -> set[str]:
    """Names of parameters that training does not change: whoever builds the model again has them."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def _groups(private: Private) -> list[list[str]]:
    return [group["names"] for group in groups_by_name(private.clipper.parameters, private.optimizer)]


def _parameters(private: Private) -> list[Any]:
    """The optimizer's parameters in the order in which its state_dict counts them."""
    return [p for group in private.optimizer.param_groups for p in group["params"]]


def _check_optimizer_state(private: Private, state: Mapping[str, Any]) -> None:
    """Refuse state of a sharded parameter in another shape, of tensors or given as shapes: nobody could divide it."""
    parameters = _parameters(private)
    for index, values in state["state"].items():
        p: Any = parameters[index] if isinstance(index, int) else None
        for key, value in values.items() if is_sharded(p) else ():
            shape = _shape(value)
            if shape != p.shape and math.prod(shape) > 1:
                kept = f"the optimizer keeps {key!r} of a sharded parameter in shape {tuple(shape)}"
                raise CheckpointError(f"{kept}: use one whose state has the parameters' shapes")


def _check_fits(private: Private, groups: Any, state: dict[str, Any]) -> None:
    """Refuse what could not be loaded, before the run becomes the checkpoint's."""
    if groups != _groups(private):
        raise CheckpointError("the optimizer's parameter groups are not those of the checkpoint: make the same ones")
    averages = len(state["averages"])
    if averages != len(private.averages):
        both = f"the checkpoint has {averages} running averages of the weights, and this run {len(private.averages)}"
        raise CheckpointError(f"{both}: make the same ones with private.ema(…) before loading")
    own, weights = private.model.state_dict(), state["model"]
    wrong = (own.keys() - weights.keys() - frozen_names(private.model)) | (weights.keys() - own.keys())
    wrong |= {name for name, value in weights.items() if _shape(own.get(name)) != _shape(value)}
    if wrong:
        names = brief(", ".join(sorted(wrong)[:4]))
        raise CheckpointError(f"the model is not that of the checkpoint: {names} is missing, new or of another shape")
    _check_optimizer_state(private, state["optimizer"])


def _shape(value: Any) -> Any:
    return getattr(value, "shape", ())


@torch.no_grad()
def _apply(private: Private, state: dict[str, Any]) -> None:
    own, parameters = private.model.state_dict(), _parameters(private)
    private.model.load_state_dict(own | {name: _loaded(value, own[name]) for name, value in state["model"].items()})
    of_parameters = {i: _loaded(values, parameters[i]) for i, values in state["optimizer"]["state"].items()}
    private.optimizer.load_state_dict(_loaded(state["optimizer"] | {"state": of_parameters}))
    for average, saved in zip(private.averages, state["averages"], strict=True):
        held = average.state_dict()["average"]
        read = {name: _loaded(value, held[name]) for name, value in saved["average"].items()}
        average.load_state_dict(saved | {"average": read})
    if len(state["generators"]) == private.world.size:  # other worlds give ranks other examples, so other dropout
        set_generators(_loaded(state["generators"][private.world.rank]))


# --- the folder: drafts, the ledger, names ---------------------------------------------------------------------------


def _steps(folder: Path) -> list[Path]:
    """Whole checkpoints, newest last."""
    return sorted(p for p in folder.glob("step-*") if (p / FACTS).is_file())


def _newest(private: Private | None, folder: Path) -> tuple[Path, dict[str, Any]]:
    if private is not None:
        _settle(private.run, folder)
    steps = _steps(folder)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    source = steps[-1]
    with _damage(source):
        _names(source)
        facts: dict[str, Any] = read_json(source / FACTS, most=MOST_JSON)
        if facts["format"] != FORMAT:
            raise CheckpointError(f"{source} is of format {shown(facts['format'], 40)}: use the version that wrote it")
        kinds = {"run": str, "step": int, "identity": dict, "state": dict, "sharded": dict}
        if any(type(facts[name]) is not kind for name, kind in kinds.items()) or facts["step"] < 0:
            raise ValueError("run.json")
        return source, facts


@contextlib.contextmanager
def _damage(source: Path) -> Iterator[None]:
    """Whatever way a damaged file fails in, in this block, is one error that says what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file fails in whatever way its damage leads to
        raise CheckpointError(
            f"{source} is damaged or not a checkpoint. Restore it from a copy; or, if it is lost with every copy, "
            "declare that (key.ledger().declare_destroyed(run, step)) and resume from the one before"
        ) from error


def _settle(run: Run, folder: Path, only: str | None = None) -> None:
    """Complete drafts that the ledger knows, and remove others, which never left the process whole.

    Only with the lock of a draft's run in hand: another process may be writing it at this moment. Runs that are not in
    this key's ledger are left alone, and so are all but ``only``, where it is given.
    """
    if run.key.path is None or not folder.is_dir():
        return
    ledger = run.key.ledger()
    for draft in folder.glob(".step-*.draft"):
        match = _DRAFT.fullmatch(draft.name)
        if match is None or only not in (None, match[2]) or match[2] not in ledger.runs():
            continue
        try:
            with run.holding(match[2]):
                newest = ledger.newest(match[2])
                if not draft.is_dir():  # whoever held the run before us has settled it
                    continue
                if newest is not None and newest.digest == _digest(draft):
                    _give_name(draft, folder / match[1])
                else:
                    shutil.rmtree(draft, ignore_errors=True)
        except LedgerError as error:
            raise CheckpointError(str(error)) from error


def _make_draft(draft: Path) -> None:
    folder = draft.parent
    if not folder.is_dir():
        folder.mkdir(parents=True, mode=0o700)
        sync_folder(folder.parent)
    draft.mkdir(mode=0o700)


def _give_name(draft: Path, target: Path) -> None:
    """The ledger knows the draft, which is therefore kept whatever happens: give it its name."""
    if target.exists():  # this step was saved before
        _remove(target)
    os.rename(draft, target)
    sync_folder(target.parent)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, which is none from the first moment on."""
    with contextlib.suppress(OSError):
        (folder / FACTS).unlink()
    shutil.rmtree(folder, ignore_errors=True)


# --- what is in it ---------------------------------------------------------------------------------------------------


Written = tuple[dict[str, str], dict[str, list[Any]]]


def _write_tensors(draft: Path, tensors: dict[str, Tensor], private: Private) -> Written:
    """This rank's files: returns their digests and, of each sharded tensor, its shape, the file and its first row."""
    sharded = {name: value for name, value in tensors.items() if is_sharded(value)}
    digests, file = {}, f"rows-{private.world.rank:05d}.safetensors"
    if private.world.first:
        digests[WHOLE] = write_tensors(draft / WHOLE, {n: value for n, value in tensors.items() if n not in sharded})
    if sharded:
        digests[file] = write_tensors(draft / file, {name: local(value) for name, value in sharded.items()})
    return digests, {n: [list(value.shape), file, place_of(n, value).first] for n, value in sharded.items()}


def _write_facts(draft: Path, facts: dict[str, Any], written: list[Written]) -> str:
    """``run.json``, which comes last; returns the digest of the whole."""
    sharded: dict[str, Any] = {}
    for _, rows in written:
        for name, (shape, *part) in rows.items():
            sharded.setdefault(name, {"shape": shape, "parts": []})["parts"].append(part)
    digests = {name: digest for own, _ in written for name, digest in own.items()}
    content = json.dumps(facts | {"sharded": sharded}, allow_nan=False).encode()
    if len(content) > MOST_JSON:
        raise CheckpointError(f"numbers and texts take {len(content)} bytes: give long lists in extra= as tensors")
    digests[FACTS] = write_new(draft / FACTS, [content])
    sync_folder(draft)
    return _joined(digests)


def _names(folder: Path) -> list[str]:
    """The names of all files. Opening a pipe would wait for ever, and a link may lead to anything."""
    names = sorted(os.listdir(folder))
    for name in names:
        if not stat.S_ISREG(os.lstat(folder / name).st_mode):
            raise CheckpointError(
                f"{folder} holds {shown(name)}, which is not a plain file, so it is not as it was written. Restore it"
            )
    return names


def _digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files."""
    digests = {}
    for name in _names(folder):
        with open(folder / name, "rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return _joined(digests)


def _joined(digests: Mapping[str, str]) -> str:
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()  # a planted name may be no text


class _Saved:
    """An open checkpoint: its facts, and its state with a `_Held` in the place of every tensor."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder, self.facts = folder, facts
        self._files: dict[str, Any] = {}
        self.identity, self.state = (decode(facts[name], partial(_Held, self)) for name in ("identity", "state"))

    def file(self, name: str) -> Any:
        if name not in self._files:
            if Path(name).name != name:
                raise ValueError("a file outside of the checkpoint")
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


class _Held:
    """A tensor in a checkpoint, not read yet. Its rows may be in several files."""

    def __init__(self, saved: _Saved, name: str) -> None:
        self._name, self._file = name, saved.file
        self._sharded: Any = saved.facts["sharded"].get(name)

    @property
    def shape(self) -> torch.Size:
        sharded = self._sharded
        return torch.Size(sharded["shape"] if sharded else self._file(WHOLE).get_slice(self._name).get_shape())

    def read(self, like: Any = None) -> Tensor:
        """The tensor; of one that is ``like`` a sharded one, the rows that this rank has."""
        if is_sharded(like) and like.shape == self.shape:
            place = place_of(self._name, like)
            rows = self._rows(place.first, place.local_shape[0])
            made = torch.empty_like(like, dtype=rows.dtype)
            local(made).copy_(rows)
            return made
        if self._sharded:
            return self._rows(0, self.shape[0])
        # A copy: safetensors maps the file into memory, and the file will be removed by the next checkpoint.
        whole: Tensor = self._file(WHOLE).get_tensor(self._name).clone()
        return whole

    def _rows(self, first: int, count: int) -> Tensor:
        """``count`` rows from ``first`` on, whoever wrote them."""
        parts: list[Any] = self._sharded["parts"] if self._sharded else [[WHOLE, 0]]
        found: list[Tensor] = []
        for file, begins in parts:
            held = self._file(file).get_slice(self._name)
            low, high = max(first, begins), min(first + count, begins + held.get_shape()[0])
            if low < high or not found:
                found.append(held[max(0, low - begins) : max(0, high - begins)])
        joined = torch.cat(found)
        if joined.shape[0] != count:
            raise ValueError(f"{self._name} has rows missing")
        return joined


def _loaded(value: Any, like: Any = None) -> Any:
    """Nested data of a checkpoint with its tensors read, those ``like`` a sharded one as this rank has them."""
    if isinstance(value, _Held):
        return value.read(like)
    if isinstance(value, dict):
        return {key: _loaded(item, like) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_loaded(item, like) for item in value)
    return value


# --- plain data as JSON and named tensors, and back: nothing is pickled or unpickled ---------------------------------

# A JSON object that holds this key stands for something that JSON lacks; the key's value says for what.
_TAG = "$"
MOST_JSON = 1 << 30  # bytes: the user's ``extra`` is part of it, and longer files are not read
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Turn nested plain data into a value for ``json.dumps`` and the tensors that it names (those given, not copies).

    Dicts, lists, tuples, numbers, strings, None and tensors may be nested at will. Subclasses of these count as what
    they derive from, NumPy's numbers as Python's. Two places that hold the same memory share one name.

    Raises:
        CheckpointError: Something else is in it; the sentence says where.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}  # of tensors, by the memory that they are in

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
        if isinstance(value, Tensor):
            return {_TAG: "tensor", "name": name_of(value, path)}
        if isinstance(value, (list, tuple)):
            items = [plain(item, f"{path}.{k}") for k, item in enumerate(value)]
            return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
        if isinstance(value, Mapping):
            if all(type(key) is str and key != _TAG for key in value):
                return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
            items = [[plain(k, f"{path}.(key)"), plain(v, f"{path}.{k}")] for k, v in value.items()]
            return {_TAG: "dict", "items": items}
        what = f"{path[1:] or 'this'} is a {type(value).__name__}"
        raise CheckpointError(f"{what}, which cannot be part of a checkpoint: give plain data and tensors")

    def name_of(value: Tensor, path: str) -> str:
        if value.layout != torch.strided or value.dtype not in _DTYPES or value.is_quantized:
            raise CheckpointError(f"{path[1:]} is a tensor of {value.dtype}, {value.layout}: make it dense, ordinary")
        memory = _memory(value)
        if memory is not None and memory in names:
            return names[memory]
        name = path[1:]
        while name in tensors:  # keys such as "a.b" and "a" -> "b" meet
            name += "'"
        tensors[name] = value
        if memory is not None:
            names[memory] = name
        return name

    try:
        return plain(value, ""), tensors
    except RecursionError:
        raise CheckpointError("this state is nested too deeply, or holds itself: it cannot be saved") from None


def _memory(value: Tensor) -> Any:
    """Equal for tensors that are the same numbers in the same memory; None where nobody can tell."""
    if hasattr(value, "placements") or not value.numel() or value.device.type == "meta":
        return None
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`, after JSON. ``tensor`` says what to put in the place of a tensor, by its name.

    Raises:
        CheckpointError: ``value`` holds something that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        match value[_TAG]:
            case "tensor":
                return tensor(value["name"])
            case "tuple":
                return tuple(decode(value["items"], tensor))
            case "dict":
                return {decode(key, tensor): decode(item, tensor) for key, item in value["items"]}
            case "float":
                return float(value["value"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a checkpoint holds a {value[_TAG]!r} that cannot be read ({error})") from error
    raise CheckpointError(f"a checkpoint holds a {str(value[_TAG])[:20]!r}, which this version does not know")


def content_digest(state: Any) -> str:
    """A SHA-256 over all keys, numbers and tensor bytes of nested plain data; the same after saving and loading it."""
    plain, tensors = encode(state)
    running = hashlib.sha256(json.dumps(plain).encode())
    for value in tensors.values():
        running.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        running.update(_bytes(value))
    return running.hexdigest()


def _bytes(value: Tensor) -> Any:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, mode: int = 0o600) -> str:
    """Write a new safetensors file of dense tensors, on any device, synced to disk; returns its SHA-256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each begins aligned
    for name in ordered:
        value = tensors[name]
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8)
    parts = itertools.chain((len(start).to_bytes(8, "little"), start), (_bytes(tensors[name]) for name in ordered))
    return write_new(path, parts, mode=mode)
