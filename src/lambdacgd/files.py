"""Reading files that anybody may have written, and writing files that survive a crash. No torch.

Python's own reader of JSON lets a file decide how much memory it takes, keeps the last of two equal keys, and reads
NaN, infinities and ``1e999``, which no arithmetic of ours expects. Here each of these is a ``ValueError`` with a
sentence, which callers put into their own error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from lambdacgd.errors import shown

MOST_BYTES = 64 << 20
"""The largest plan, card or cache entry that is read. They are a few kilobytes long."""


def read_bytes(path: str | os.PathLike[str], *, most: int = MOST_BYTES) -> bytes:
    """Read a file, unless it is longer than ``most`` bytes.

    Raises:
        ValueError: It is longer.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{Path(path).name} is longer than {most} bytes, so it is no such file")
    return content


def parse_json(content: str | bytes) -> Any:
    """Read JSON in UTF-8.

    Raises:
        ValueError: It is no JSON, is nested too deeply, names something twice, or holds a number that no float or
            integer of ordinary length can hold.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_float, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8 text") from None


def read_json(path: str | os.PathLike[str], *, most: int = MOST_BYTES) -> Any:
    """Read a JSON file: `read_bytes`, then `parse_json`."""
    return parse_json(read_bytes(path, most=most))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON has")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} stands there twice")
    return made


def users_folder(setting: str, base: str, otherwise: str) -> Path | None:
    """This user's folder of one kind, which the environment's ``setting`` may name; None if that is "off".

    By default it lies in what ``base`` names, or in ``otherwise`` below the user's home; None without a home.
    """
    if chosen := os.environ.get(setting):
        return None if chosen == "off" else Path(chosen)
    try:
        return Path(os.environ.get(base) or Path.home() / otherwise) / "lambdacgd"
    except RuntimeError:  # a user without a home, as in some containers
        return None


# --- writing ---------------------------------------------------------------------------------------------------------


def write_new(path: Path, parts: Iterable[Any], *, mode: int = 0o600, sync: bool = True) -> str:
    """Write a file that does not exist yet, of bytes-like parts, and return its SHA-256.

    Nothing is buffered, so no copy of a secret stays behind. With ``sync`` it is on disk when this returns. By default
    its owner alone may read it.

    Raises:
        OSError: It exists or cannot be written; then nothing of it stays.
    """
    running = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            for part in parts:
                running.update(part)
                write_all(file, part)
            if sync:
                os.fsync(descriptor)
    except BaseException:
        os.unlink(path)
        raise
    return running.hexdigest()


def write_all(file: Any, part: Any) -> None:
    """Write all of ``part`` to an unbuffered file, whose ``write`` may take less of it."""
    rest = memoryview(part)
    while rest:
        rest = rest[file.write(rest) :]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads, or replace it: readers see the old content or the new, whole.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_new(draft, [content], sync=False)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
