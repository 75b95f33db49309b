"""The ChaCha20 block function (RFC 8439), twice: through OpenSSL for runs of blocks, in NumPy for scattered ones.

A block is addressed by the last four words of the cipher's state, ``tail = (w12, w13, w14, w15)``. RFC 8439 calls
w12 the counter and w13 … w15 the nonce; here each caller says what its words mean, and never uses a tail twice for
two purposes under one key.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

UINT32 = NDArray[np.uint32]
UINT64 = NDArray[np.uint64]

_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)
_CHUNK = 1 << 14  # blocks evaluated together in NumPy: 16 rows of 64 KiB, about the size of a second-level cache


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
    encryptor = Cipher(algorithms.ChaCha20(bytes(key), struct.pack("<4I", *tail)), mode=None).encryptor()
    encryptor.update_into(zeros, out)


def scattered_blocks(key: bytes, tails: UINT32) -> UINT32:
    """The block of every row of ``tails`` (shape (m, 4)), as an array of shape (m, 16)."""
    out = np.empty((len(tails), 16), dtype=np.uint32)
    words = np.frombuffer(bytes(key), dtype="<u4").astype(np.uint32)
    for start in range(0, len(tails), _CHUNK):
        part = tails[start : start + _CHUNK]
        first = [np.full(len(part), w, dtype=np.uint32) for w in (*_CONSTANTS, *words)]
        first += [np.ascontiguousarray(part[:, j], dtype=np.uint32) for j in range(4)]
        state = [word.copy() for word in first]
        for _ in range(10):
            for a in range(4):  # a column round
                _quarter_round(state, a, a + 4, a + 8, a + 12)
            for a in range(4):  # a diagonal round
                _quarter_round(state, a, (a + 1) % 4 + 4, (a + 2) % 4 + 8, (a + 3) % 4 + 12)
        for j in range(16):
            out[start : start + len(part), j] = state[j] + first[j]
    return out


def _quarter_round(state: list[UINT32], a: int, b: int, c: int, d: int) -> None:
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[x] += state[y]
        state[z] ^= state[x]
        state[z] = (state[z] << np.uint32(turn)) | (state[z] >> np.uint32(32 - turn))


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


def prf64_range(subkey: bytes, count: int) -> UINT64:
    """``prf64(subkey, np.arange(count))``, ten times as fast: the keystream itself, without an index."""
    check_key(subkey)
    out = np.empty(count, dtype=np.uint64)
    for start in range(0, count, 1 << 16):
        size = min(1 << 16, count - start)
        block = start >> 3
        out[start : start + size] = keystream(subkey, (block & 0xFFFFFFFF, block >> 32, 0, 0), -(-size // 8)).view(
            "<u8"
        )[:size]
    return out


def _words(subkey: bytes, ids: UINT64) -> UINT64:
    low, high = int(ids.min()) >> 3, int(ids.max()) >> 3
    # Ids that lie close together (a range, a shuffled range) come out of one keystream slice: OpenSSL makes about
    # fifty blocks in the time NumPy makes one.
    if high - low < max(16, 4 * ids.size) and low >> 32 == high >> 32:
        run = keystream(subkey, (low & 0xFFFFFFFF, low >> 32, 0, 0), high - low + 1).view("<u8")
        return run[(ids - np.uint64(8 * low)).astype(np.int64)].astype(np.uint64)
    index = ids >> np.uint64(3)
    tails = np.zeros((ids.size, 4), dtype=np.uint32)
    tails[:, 0] = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    tails[:, 1] = (index >> np.uint64(32)).astype(np.uint32)
    blocks = scattered_blocks(subkey, tails).astype("<u4").view("<u8")
    return blocks[np.arange(ids.size), (ids & np.uint64(7)).astype(np.int64)].astype(np.uint64)
