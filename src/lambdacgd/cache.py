"""Results that take seconds to compute, kept on disk by the content of the question.

A key is a hash of the question and of the code that answers it, so a changed accountant never answers with an old
result; an answer carries its own hash, so a damaged one is computed again. Only public values are cached: no key, no
data, no randomness. ``LAMBDACGD_CACHE`` names another folder, or ``off``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from lambdacgd.version import __version__

_enabled: ContextVar[bool] = ContextVar("cache_enabled", default=True)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Compute everything anew inside this block (``--no-cache``)."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


def folder() -> Path | None:
    """Where results are kept, or None when caching is off."""
    chosen = os.environ.get("LAMBDACGD_CACHE", "")
    if chosen == "off" or not _enabled.get():
        return None
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lambdacgd"
    except RuntimeError:  # a user without a home, as in some containers
        return None


@functools.cache
def _code() -> str:
    """A digest of every source file an answer can depend on: all of the package down to the planner."""
    root = Path(__file__).parent
    files = [root / "validation.py"]
    for part in ("mechanisms", "accounting", "tuning"):
        files += sorted((root / part).rglob("*.py"))
    digest = hashlib.sha256(__version__.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _digest(answer: Any) -> str:
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def cached(kind: str, question: dict[str, Any], compute: Callable[[], Any]) -> Any:
    """The JSON-serialisable answer of ``compute()``, from disk if this question was asked before."""
    where = folder()
    if where is None:
        return compute()
    text = json.dumps({"kind": kind, "code": _code(), "question": question}, sort_keys=True)
    path = where / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        stored = json.loads(path.read_text())
        if stored["asked"] == json.loads(text) and stored["digest"] == _digest(stored["answer"]):
            return stored["answer"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: compute it (again)
    answer = compute()
    with contextlib.suppress(OSError):  # a read-only or full disk costs time, not correctness
        where.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"asked": json.loads(text), "answer": answer, "digest": _digest(answer)})
        with tempfile.NamedTemporaryFile("w", dir=where, suffix=".tmp", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    return answer
