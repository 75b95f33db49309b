"""The one secret of a run: a 256-bit key, from which every random number is computed and never drawn.

Whoever holds the key can subtract the noise from a released model. It is as sensitive as the training data, lives
in a file of its own (mode 0600), and never enters a representation, a pickle, a copy, an error message, a checkpoint
or an export. What is public about it is its ``fingerprint()``.

The second half of this file turns sub-keys of the secret into random words: ChaCha20, and a pseudorandom function of
integer ids on top of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from numpy.typing import NDArray

from lambdacgd.errors import KeyFileError
from lambdacgd.files import sync_folder, write_new
from lambdacgd.ledger import Ledger

# A key file: the header, the secret in hexadecimal, and the fingerprint, by which damage is noticed.
_HEADER = b"lambdacgd secret key, version 2\n"
_CHECK = b"fingerprint "
_DIGITS = b"0123456789abcdef"
_BYTES = 32
_TESTS = b"lambdacgd-tests"


class DestroyedKeyError(RuntimeError):
    """Use of a key after ``destroy()``."""


class SubKey(bytes):
    """32 secret bytes that do not show themselves, so that a traceback with local variables holds nothing secret.

    A sub-key can be neither pickled nor copied: another process derives its own from the key's file.
    """

    def __repr__(self) -> str:
        return "<sub-key>"

    __str__ = __repr__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a sub-key cannot be pickled or copied: derive it again from the SecretKey")


class _Buffer(bytearray):
    """Secret bytes that are wiped after use, and that do not show themselves in a traceback until then."""

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__

    def wipe(self) -> None:
        self[:] = bytes(len(self))  # of the same length, so it is written in place


class SecretKey:
    """A 256-bit secret. Make one with ``SecretKey.generate()``, keep it with ``save``, end it with ``destroy``.

    Guarantee
    ---------
    ``derive`` is BLAKE2b keyed with the secret over an injective encoding of the path: sub-keys of different paths are
    computationally independent of each other, of the fingerprint, and tell nothing about the secret.
    """

    __slots__ = ("_for_tests", "_path", "_secret")
    _for_tests: bool
    _path: Path | None
    _secret: _Buffer

    def __init__(self) -> None:
        raise TypeError("make a key with SecretKey.generate(), SecretKey.load(path) or, in tests, SecretKey.for_tests")

    @classmethod
    def generate(cls) -> Self:
        """Make a new key from the operating system's generator.

        Returns:
            The key. It lives in memory until ``save`` gives it a file.
        """
        return cls._make(_Buffer(secrets.token_bytes(_BYTES)))

    @classmethod
    def from_bytes(cls, secret: bytes) -> Self:
        """Make the key with exactly these bytes: for keys that you keep in a vault of your own.

        Args:
            secret: 32 bytes.

        Returns:
            The key. It holds a copy of the bytes.

        Raises:
            ValueError: ``secret`` is not 32 bytes.
        """
        if not isinstance(secret, bytes | bytearray) or len(secret) != _BYTES:
            got = f"{len(secret)} bytes" if isinstance(secret, bytes | bytearray) else f"a {type(secret).__name__}"
            del secret  # a traceback may show local variables, and this could be a key with one byte too many
            raise ValueError(f"a secret key is {_BYTES} bytes, not {got}; SecretKey.generate() makes a good one")
        return cls._make(_Buffer(secret))

    @classmethod
    def for_tests(cls, seed: int) -> Self:
        """Make a key that everybody can compute, for tests that shall come out the same every time.

        Every run under it has the same id, so the same batches and noise; seed torch for weights and dropout yourself.
        Such a run claims nothing: training warns, and its privacy card says so.

        Args:
            seed: Any integer. Other seeds give other batches and noise.

        Returns:
            The key. It stays in memory: ``save`` refuses it, so that nobody takes its file for a secret.

        Raises:
            ValueError: ``seed`` is not an integer.

        >>> SecretKey.for_tests(0) == SecretKey.for_tests(0)
        True
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed is {seed!r}; it must be an integer")
        key = cls._make(_Buffer(hashlib.blake2b(str(int(seed)).encode(), person=_TESTS, digest_size=_BYTES).digest()))
        key._for_tests = True
        return key

    @property
    def is_for_tests(self) -> bool:
        """Whether ``for_tests`` made it: then it is no secret, and nothing trained with it may claim anything."""
        return self._for_tests

    @classmethod
    def _make(cls, secret: _Buffer, path: Path | None = None) -> Self:
        key = object.__new__(cls)
        key._secret = secret
        key._path = path
        key._for_tests = False
        return key

    def derive(self, *path: str | int) -> bytes:
        """Compute the sub-key of a path such as ``("run", run_id, "noise")``. Use one sub-key for one purpose.

        Args:
            *path: Strings and integers. They are typed and length-prefixed, so ("a", "bc") and ("ab", "c"), or 1 and
                "1", are different paths.

        Returns:
            32 bytes that do not show themselves and cannot be pickled.

        Raises:
            ValueError: The path is empty.
            TypeError: The path holds something else than strings and integers.
            DestroyedKeyError: The key was destroyed.
        """
        if not path:
            raise ValueError('derive() needs a path, such as derive("run", run_id, "noise")')
        return SubKey(self._hash(b"lambdacgd-subkey", _encode_path(path), _BYTES))

    def fingerprint(self) -> str:
        """Name the key without revealing it: 32 hexadecimal digits, safe in checkpoints and logs.

        Returns:
            A one-way function of the secret.

        Raises:
            DestroyedKeyError: The key was destroyed.
        """
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
        """The run ledger beside the key's file (``run.key`` -> ``run.ledger``).

        Returns:
            The ledger.

        Raises:
            KeyFileError: The key has no file yet.
        """
        if self._path is None:
            raise KeyFileError("a ledger lives beside the key's file; save(path) the key first")
        return Ledger(self._path.with_suffix(".ledger"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read (0600). An existing file is never replaced.

        The file is on disk when this returns. ``load`` refuses one that a crash cut off.

        Args:
            path: Where the key shall live from now on.

        Raises:
            FileExistsError: There is such a file.
            DestroyedKeyError: The key was destroyed.
            KeyFileError: The key was made by ``for_tests``.
            OSError: The file cannot be written.
        """
        if self._for_tests:
            raise KeyFileError("a key of for_tests is no secret, so it gets no file: take SecretKey.generate()")
        target = Path(path).absolute()
        content = _key_file(self._secret, self.fingerprint())
        try:
            write_new(target, [content])
        except FileExistsError:
            raise FileExistsError(f"{target} exists; a key file is never overwritten: choose another name") from None
        finally:
            content.wipe()
        sync_folder(target.parent)
        self._path = target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key file.

        Args:
            path: A file that ``save`` wrote.

        Returns:
            The key.

        Raises:
            KeyFileError: Others than its owner may have read the file, or it is not a whole and unchanged key file.
            OSError: The file cannot be read.
        """
        source = Path(path)
        try:
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no key file {source}: SecretKey.generate().save makes one") from None
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{source} is not a regular file; a key lives in a file of its own")
            if status.st_mode & 0o077:
                raise KeyFileError(
                    f"others on this machine may have read {source} (mode {stat.S_IMODE(status.st_mode):04o}). If they "
                    f"cannot have, run: chmod 600 '{source}'; otherwise train anew with a new key"
                )
            secret = _read_secret(file)
        if secret is None:
            raise KeyFileError(
                f"{source} is not a whole key file of this library: it is cut off, damaged or another file. Restore it "
                f"from a backup; or, if the process was killed when it saved a new key, remove the file"
            )
        return cls._make(secret, source.absolute())

    def destroy(self) -> None:
        """Forget the key: overwrite it in this object's memory, overwrite its file, and remove the file.

        Calling it again does nothing. Once it is done, this object computes nothing any more, and nobody can read the
        key from its file. What it cannot reach: sub-keys that live noise objects hold; copies in memory that Python,
        the hash function or the operating system freed without overwriting them, or swapped out; backups, snapshots,
        and spare blocks of flash drives.

        Raises:
            KeyFileError: The file holds another key by now. It is left alone; the key in memory is forgotten.
            OSError: The file cannot be removed. The key in memory is forgotten, and a second call tries again.
        """
        path = self._path
        replaced = path is not None and bool(self._secret) and not self._may_be_in(path)
        self._secret.wipe()
        self._secret = _Buffer()
        if path is not None and not replaced:
            with contextlib.suppress(FileNotFoundError):
                _overwrite_and_remove(path)
        self._path = None
        if replaced:
            raise KeyFileError(f"{path} holds another key by now and was left alone; this key is forgotten in memory")

    def _may_be_in(self, path: Path) -> bool:
        try:
            with open(path, "rb", buffering=0) as file:
                secret = _read_secret(file)
        except OSError:
            return True
        same = secret is None or hmac.compare_digest(secret, self._secret)
        if secret is not None:
            secret.wipe()
        return same

    def __repr__(self) -> str:
        return f"<SecretKey {self.fingerprint()[:8]}>" if self._secret else "<SecretKey destroyed>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretKey):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a SecretKey cannot be pickled or copied: other processes take it from its file")


def _encode_path(path: tuple[str | int, ...]) -> bytes:
    parts = [len(path).to_bytes(8, "little")]
    for part in path:
        if isinstance(part, bool) or not isinstance(part, str | int):
            raise TypeError(f"a sub-key's path holds strings and integers, not a {type(part).__name__}")
        kind, body = (b"s", part.encode()) if isinstance(part, str) else (b"i", str(int(part)).encode())
        parts += [kind, len(body).to_bytes(8, "little"), body]
    return b"".join(parts)


# --- The key's file. The secret stands in buffers that are wiped after use, never in strings or bytes, which cannot be.


def _key_file(secret: _Buffer, fingerprint: str) -> _Buffer:
    start, check = len(_HEADER), b"\n" + _CHECK + fingerprint.encode() + b"\n"
    content = _Buffer(start + 2 * _BYTES + len(check))
    content[:start] = _HEADER
    for index, byte in enumerate(secret):
        content[start + 2 * index] = _DIGITS[byte >> 4]
        content[start + 2 * index + 1] = _DIGITS[byte & 15]
    content[start + 2 * _BYTES :] = check
    return content


def _read_secret(file: Any) -> _Buffer | None:
    """The secret in an unbuffered key file; None unless the file is whole and as it was written."""
    content, start, end = _Buffer(1024), len(_HEADER), len(_HEADER) + 2 * _BYTES
    try:
        whole = memoryview(content)[: file.readinto(content)]
        digits = _Buffer(_DIGITS.find(byte) % 256 for byte in whole[start:end])
        if len(digits) != 2 * _BYTES or max(digits) > 15:
            return None
        secret = _Buffer(_BYTES)
        for index in range(_BYTES):
            secret[index] = 16 * digits[2 * index] + digits[2 * index + 1]
        check = b"\n" + _CHECK + SecretKey._make(secret).fingerprint().encode() + b"\n"
        if whole[:start] == _HEADER and whole[end:] == check:
            return secret
        secret.wipe()
        return None
    finally:
        content.wipe()


def _overwrite_and_remove(path: Path) -> None:
    if not os.access(path, os.W_OK):
        path.chmod(0o600)  # a key file may be read-only, which is no protection from its owner
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    with open(descriptor, "r+b") as file:
        file.write(bytes(os.fstat(descriptor).st_size))
        file.flush()
        os.fsync(descriptor)
    path.unlink()
    sync_folder(path.absolute().parent)


# --- Random words from a sub-key: the ChaCha20 block function (RFC 8439), by OpenSSL ----------------------------------
#
# A block is addressed by the last four words of the cipher's state, ``tail = (w12, w13, w14, w15)``. RFC 8439 calls w12
# the counter and w13 … w15 the nonce; here each caller says what its words mean, and never uses a tail twice for two
# purposes under one key.

UINT32 = NDArray[np.uint32]
UINT64 = NDArray[np.uint64]


def check_key(key: bytes) -> None:
    """Refuse anything but 32 bytes, without ever repeating them in the message."""
    if not isinstance(key, bytes | bytearray) or len(key) != 32:
        raise ValueError("a ChaCha20 key is 32 bytes; take one from SecretKey.derive(...)")


def keystream(key: bytes, tail: tuple[int, int, int, int], blocks: int) -> UINT32:
    """``blocks`` consecutive blocks (w12 counts up) as one array of 16·blocks little-endian words.

    The run must not carry out of w12: how OpenSSL builds treat that differs, so callers split there.
    """
    if tail[0] + blocks > 1 << 32:
        raise ValueError(f"{blocks} blocks from counter {tail[0]} overflow its 32 bits; split the run at 2**32")
    out = bytearray(64 * blocks)
    keystream_into(key, tail, bytes(64 * blocks), out)
    return np.frombuffer(out, dtype="<u4")


def keystream_into(key: bytes, tail: tuple[int, int, int, int], zeros: bytes | memoryview, out: Any) -> None:
    """The keystream from ``tail`` on into the writable buffer ``out``, as long as ``zeros`` (which must be zero)."""
    _cipher(key, struct.pack("<4I", *tail)).update_into(zeros, out)


def scattered_blocks(key: bytes, tails: UINT32) -> UINT32:
    """The block of every row of ``tails`` (shape (m, 4)), as an array of shape (m, 16)."""
    words, zeros = np.ascontiguousarray(tails, dtype="<u4"), bytes(64)
    blocks = b"".join([_cipher(key, tail.tobytes()).update(zeros) for tail in words])
    return np.frombuffer(blocks, dtype="<u4").reshape(-1, 16)


def _cipher(key: bytes, tail: bytes) -> CipherContext:
    return Cipher(algorithms.ChaCha20(bytes(key), tail), mode=None).encryptor()


def prf64(subkey: bytes, ids: NDArray[np.integer]) -> UINT64:
    """A pseudorandom function with 64-bit values: word ``id`` of the ChaCha20 keystream of ``subkey``.

    ``prf64(k, ids)[j]`` is the little-endian 8-byte word at byte ``8·ids[j]`` of the keystream whose 64-bit block
    counter is (w12, w13), w14 = w15 = 0. Any id from 0 to 2⁶⁴−1 is allowed, in any order, any shape, with repeats.
    Memory beyond the output is bounded by a constant (about 20 MB), whatever the ids.

    Guarantee
    ---------
    Without the sub-key the values are indistinguishable from independent uniform 64-bit words, as far as ChaCha20 is
    a secure stream cipher; and they are the same on every machine. The sub-key must serve nothing else.
    """
    check_key(subkey)
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"ids have dtype {ids.dtype}; they must be integers")
    if ids.dtype.kind == "i" and ids.size and int(ids.min()) < 0:
        raise ValueError(f"the smallest id is {int(ids.min())}; ids must not be negative")
    flat = ids.reshape(-1)
    out = np.empty(flat.size, dtype=np.uint64)
    for start in range(0, flat.size, 1 << 16):
        part = flat[start : start + (1 << 16)].astype(np.uint64)
        out[start : start + part.size] = _words(subkey, part)
    return out.reshape(ids.shape)


def _words(subkey: bytes, ids: UINT64) -> UINT64:
    low, high = int(ids.min()) >> 3, int(ids.max()) >> 3
    # Ids that lie close together (a range, a shuffled range) come out of one keystream slice. A block of a slice takes
    # some hundredths of the time of a block by itself.
    if high - low < max(16, 4 * ids.size) and low >> 32 == high >> 32:
        run = keystream(subkey, (low & 0xFFFFFFFF, low >> 32, 0, 0), high - low + 1).view("<u8")
        return run[(ids - np.uint64(8 * low)).astype(np.int64)].astype(np.uint64)
    index = ids >> np.uint64(3)
    tails = np.zeros((ids.size, 4), dtype=np.uint32)
    tails[:, 0] = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    tails[:, 1] = (index >> np.uint64(32)).astype(np.uint32)
    blocks = scattered_blocks(subkey, tails).view("<u8")
    return blocks[np.arange(ids.size), (ids & np.uint64(7)).astype(np.int64)].astype(np.uint64)
