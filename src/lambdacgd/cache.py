"""Results that take seconds to compute, kept on disk by the content of the question.

A question is filed under a hash of itself and of the code that answers it, so a changed accountant never answers with
an old result. An answer is signed with a secret that was drawn for this folder and that only its owner can read: an
answer that was damaged, edited, or put there by somebody else is computed again. Only public values are cached: no
training key, no data, no randomness. ``LAMBDACGD_CACHE`` names another folder, or ``off``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from lambdacgd.files import read_json, replace_file, users_folder, write_new
from lambdacgd.version import __version__

#: Parts of the package that use σ and decide nothing about it. Whatever is not named here counts as code of the answer.
AFTER_THE_PLAN = (
    "auditing", "cli", "clipping", "digits.py", "integrations", "noise", "questions.py", "torch_private.py", "training",
)  # fmt: skip
_SECRET = ".secret"
_enabled: ContextVar[bool] = ContextVar("cache_enabled", default=True)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Compute everything anew inside this block (``LAMBDACGD_CACHE=off`` does so everywhere)."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def folder() -> Path | None:
    """Where results are kept, or None when caching is off."""
    return users_folder("LAMBDACGD_CACHE", "XDG_CACHE_HOME", ".cache") if _enabled.get() else None


def cached(kind: str, question: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """Answer a question from disk if it was asked before, and by ``compute()`` otherwise.

    ``question`` is all that the answer depends on besides this package's code; both are plain data. ``kind`` is a word
    for it, which begins the file's name.

    Guarantee
    ---------
    What comes from disk was computed by this version of the code for this very question, by a process that could read
    the folder's secret: this user's own. A folder without such a secret is never believed.
    """
    where = folder()
    secret = None if where is None else _secret(where)
    if where is None or secret is None:
        return compute()
    text = json.dumps({"kind": kind, "code": _code(), "question": question}, sort_keys=True)
    path = where / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        stored = read_json(path)
        if hmac.compare_digest(stored["signature"], _signature(secret, text, stored["answer"])):
            return stored["answer"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # absent or damaged: compute it (again)
    answer = compute()
    signed = {"asked": json.loads(text), "answer": answer, "signature": _signature(secret, text, answer)}
    with contextlib.suppress(OSError):  # a read-only or full disk costs time, not correctness
        replace_file(path, json.dumps(signed).encode())
    return answer


def _signature(secret: bytes, text: str, answer: Any) -> str:
    message = json.dumps([text, answer], sort_keys=True)
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def _secret(where: Path) -> bytes | None:
    """The folder's secret, made if there is none; None if it cannot be made or others may have written or read it."""
    path = where / _SECRET
    with contextlib.suppress(OSError):
        if not path.exists():
            where.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was faster, and its secret is as good
                write_new(path, [secrets.token_bytes(32)], sync=False)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(64)
        private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
        if hasattr(os, "getuid") and not (private and status.st_uid == os.getuid()):
            return None
        if len(content) == 32:
            return content
        path.unlink()  # a crash cut it off: the next question draws a new one
    return None


@functools.cache
def _code() -> str:
    """A digest of all that answers: this package without what comes after the plan, and libraries' versions."""
    root = Path(__file__).parent
    versions = (__version__, np.__version__, scipy.__version__)
    digest = hashlib.sha256(" ".join(versions).encode())
    for file in code_of_answers(root):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def code_of_answers(root: Path) -> list[Path]:
    """The source files under the package's folder ``root`` that can decide an answer, in a fixed order."""
    return sorted(file for file in root.rglob("*.py") if file.relative_to(root).parts[0] not in AFTER_THE_PLAN)
