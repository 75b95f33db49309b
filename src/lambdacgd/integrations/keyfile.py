"""Where an integration keeps a run's key: a file of its own beside the output folder, never in it.

An output folder is copied, archived and uploaded as a whole. The key must not travel with it, so the default place is
``<output_dir>.private/run.key``, and a place inside the output folder is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

from lambdacgd.keys import SecretKey
from lambdacgd.validation import InvalidInput

KeyLike = SecretKey | str | os.PathLike[str] | None


def default_key_path(output_dir: str | os.PathLike[str]) -> Path:
    """``runs/first`` -> ``runs/first.private/run.key``."""
    folder = Path(os.path.abspath(output_dir))  # "runs/.." too has a name then
    return folder.with_name(folder.name + ".private") / "run.key"


def find_key(key: KeyLike, output_dir: str | os.PathLike[str]) -> SecretKey:
    """The key given, or that of the file given, or of the output folder's own file, which is made if there is none."""
    if key is None:
        key = default_key_path(output_dir)
    path = key.path if isinstance(key, SecretKey) else key
    if isinstance(path, (str, os.PathLike)):
        check_outside(Path(path), output_dir)
    return load_or_make(key)


def load_or_make(key: KeyLike) -> SecretKey:
    """The key given, or that of the file given, which is made if there is none."""
    check_key(key)
    if isinstance(key, SecretKey):
        return key
    path = Path(os.fspath(key))  # type: ignore[arg-type]  # checked
    if path.exists():
        return SecretKey.load(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = SecretKey.generate()
    made.save(path)
    return made


def check_key(key: object) -> None:
    if not isinstance(key, (SecretKey, str, os.PathLike)):
        raise InvalidInput("key", type(key).__name__, "it must be a SecretKey or the path of a key file")


def check_outside(path: Path, output_dir: str | os.PathLike[str]) -> None:
    if path.resolve().is_relative_to(Path(output_dir).resolve()):
        raise InvalidInput(
            "key",
            str(path),
            f"it must lie outside the output folder, which is copied and uploaded as a whole. Leave key out to have "
            f"it at {default_key_path(output_dir)}",
        )
