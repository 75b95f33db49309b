"""The one secret of a run: a 256-bit key, from which every random number is computed and never drawn.

Whoever holds the key can subtract the noise from a released model. It is as sensitive as the training data, lives
in a file of its own (mode 0600), and never enters a representation, a pickle, a copy, an error message, a checkpoint
or an export. What is public about it is its ``fingerprint()``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn, Self

from lambdacgd.chacha import prf64
from lambdacgd.errors import KeyFileError
from lambdacgd.ledger import Ledger, LedgerError, Release

__all__ = ["DestroyedKeyError", "KeyFileError", "Ledger", "LedgerError", "Release", "SecretKey", "prf64"]

_HEADER = b"lambdacgd secret key, version 1\n"
_BYTES = 32
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class DestroyedKeyError(RuntimeError):
    """Use of a key after ``destroy()``."""


class SubKey(bytes):
    """32 secret bytes that do not show themselves, so that a traceback with local variables holds nothing secret."""

    def __repr__(self) -> str:
        return "<sub-key>"

    __str__ = __repr__


class SecretKey:
    """A 256-bit secret. Make one with ``SecretKey.generate()``, keep it with ``save``, end it with ``destroy``.

    Guarantee
    ---------
    ``derive`` is BLAKE2b keyed with the secret over an injective encoding of the path: sub-keys of different paths are
    computationally independent of each other, of the fingerprint, and tell nothing about the secret.
    """

    __slots__ = ("_path", "_secret")
    _path: Path | None
    _secret: bytearray

    def __init__(self) -> None:
        raise TypeError("make a key with SecretKey.generate(), SecretKey.load(path) or, in tests, SecretKey.from_bytes")

    @classmethod
    def generate(cls) -> Self:
        """A new key from the operating system's generator."""
        return cls._make(bytearray(secrets.token_bytes(_BYTES)))

    @classmethod
    def from_bytes(cls, secret: bytes) -> Self:
        """The key with exactly these 32 bytes: for tests and for keys kept in a vault of your own."""
        if not isinstance(secret, bytes | bytearray) or len(secret) != _BYTES:
            got = f"{len(secret)} bytes" if isinstance(secret, bytes | bytearray) else f"a {type(secret).__name__}"
            raise ValueError(f"a secret key is {_BYTES} bytes, not {got}; SecretKey.generate() makes a good one")
        return cls._make(bytearray(secret))

    @classmethod
    def _make(cls, secret: bytearray, path: Path | None = None) -> Self:
        key = object.__new__(cls)
        key._secret = secret
        key._path = path
        return key

    def derive(self, *path: str | int) -> bytes:
        """The 32-byte sub-key of a path such as ``("run", run_id, "noise")``. Use one sub-key for one purpose.

        Parts are typed and length-prefixed, so ("a", "bc") and ("ab", "c"), or 1 and "1", are different paths.
        """
        if not path:
            raise ValueError('derive() needs a path, such as derive("run", run_id, "noise")')
        return SubKey(self._hash(b"lambdacgd-subkey", _encode(path), _BYTES))

    def fingerprint(self) -> str:
        """32 hexadecimal digits that name the key without revealing it; safe in checkpoints and logs."""
        return self._hash(b"lambdacgd-public", b"fingerprint", 16).hex()

    def _hash(self, purpose: bytes, message: bytes, size: int) -> bytes:
        if not self._secret:
            raise DestroyedKeyError("this key was destroyed: no noise, bins or sub-keys can be computed from it again")
        return hashlib.blake2b(message, key=self._secret, person=purpose, digest_size=size).digest()

    @property
    def path(self) -> Path | None:
        """The file the key was saved to or loaded from, if any."""
        return self._path

    def ledger(self) -> Ledger:
        """The run ledger beside the key's file (``run.key`` -> ``run.ledger``)."""
        if self._path is None:
            raise KeyFileError("a ledger lives beside the key's file; save(path) the key first")
        return Ledger(self._path.with_suffix(".ledger"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read (0600). An existing file is never replaced.

        The file appears whole or not at all: it is written and synced under another name, then linked into place
        (where the file system has no links, it is written in place, and ``load`` refuses one that a crash cut off).
        """
        if not self._secret:
            raise DestroyedKeyError("this key was destroyed; there is nothing left to save")
        target = Path(path)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            self._write_new(draft)
            try:
                os.link(draft, target)  # fails if the target exists, where a rename would replace it
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._write_new(target)
        except FileExistsError:
            raise FileExistsError(
                f"{target} exists; a key file is never overwritten. Load it, or choose another name"
            ) from None
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(target)
        self._path = target.absolute()

    def _write_new(self, path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(_HEADER + self._secret.hex().encode() + b"\n")
            file.flush()
            os.fsync(descriptor)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key file; refused if anyone but its owner could read it, or if it is not a whole key file."""
        source = Path(path)
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{source} is not a regular file; a key lives in a file of its own")
            if status.st_mode & 0o077:
                raise KeyFileError(
                    f"{source} has mode {stat.S_IMODE(status.st_mode):04o}, so others on this machine may have "
                    f"read the key. If they cannot have, run: chmod 600 '{source}'; otherwise train anew with a new key"
                )
            content = file.read(1024)
        secret = _decode(content)
        if secret is None:
            raise KeyFileError(f"{source} is not a whole key file of this library; it may be cut off or another file")
        return cls._make(secret, source.absolute())

    def destroy(self) -> None:
        """Forget the key for good: zero its memory, overwrite and remove its file. Calling it again does nothing.

        Sub-keys already derived live on in whoever holds them; backups, snapshots and flash storage may keep copies of
        the file that no program can reach. If the file cannot be removed, the error says so, and a second call tries
        again; a file that holds another key by now is left alone.
        """
        path = self._path
        replaced = path is not None and bool(self._secret) and not self._may_be_in(path)
        for index in range(len(self._secret)):
            self._secret[index] = 0
        self._secret = bytearray()
        if path is not None and not replaced:
            with contextlib.suppress(FileNotFoundError):
                _overwrite_and_remove(path)
        self._path = None
        if replaced:
            raise KeyFileError(
                f"{path} does not hold this key any more and was left alone; the key in memory is forgotten. If its "
                f"file was moved, destroy it there"
            )

    def _may_be_in(self, path: Path) -> bool:
        try:
            found = _decode(path.read_bytes()[:1024])
        except OSError:
            return True
        return found is None or hmac.compare_digest(found, self._secret)

    def __repr__(self) -> str:
        return f"<SecretKey {self.fingerprint()[:8]}>" if self._secret else "<SecretKey destroyed>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretKey):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a SecretKey cannot be pickled or copied: pass it by reference, and to other processes by its file"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(2)


def _encode(path: tuple[str | int, ...]) -> bytes:
    parts = [len(path).to_bytes(8, "little")]
    for part in path:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise TypeError(f"a sub-key's path holds strings and integers, not a {type(part).__name__}")
        kind, body = (b"s", part.encode()) if isinstance(part, str) else (b"i", str(int(part)).encode())
        parts += [kind, len(body).to_bytes(8, "little"), body]
    return b"".join(parts)


def _decode(content: bytes) -> bytearray | None:
    body = content.removeprefix(_HEADER)
    if len(content) != len(_HEADER) + 2 * _BYTES + 1 or len(body) != 2 * _BYTES + 1 or body[-1:] != b"\n":
        return None
    try:
        secret = bytearray.fromhex(body[:-1].decode("ascii"))
    except ValueError:
        return None
    return secret if len(secret) == _BYTES else None


def _overwrite_and_remove(path: Path) -> None:
    if not os.access(path, os.W_OK):
        path.chmod(0o600)  # a key file may be read-only, which is no protection from its owner
    with open(path, "r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
