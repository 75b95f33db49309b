"""Files of JSON lines that survive an interruption: a line that was cut off is passed over, and nothing glued to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[Any]:
    """What the whole lines of a file hold; nothing where there is no file."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            yield json.loads(line.decode())  # line by line: a cut may fall within a letter
        except ValueError:
            continue


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line, on disk before this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
