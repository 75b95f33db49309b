"""A kernel that computes ChaCha20 blocks and nothing else, for the test vectors of RFC 8439. Needs Triton."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from lambdacgd.noise.kernel import _chacha20


@triton.jit
def block_kernel(key, tails, out, ROWS: tl.constexpr):
    """The bare block function: ``tails`` (ROWS, 4) -> ``out`` (ROWS, 16), as words."""
    row = tl.arange(0, ROWS)
    w12 = tl.load(tails + row * 4).to(tl.uint32, bitcast=True)
    w13 = tl.load(tails + row * 4 + 1).to(tl.uint32, bitcast=True)
    w14 = tl.load(tails + row * 4 + 2).to(tl.uint32, bitcast=True)
    w15 = tl.load(tails + row * 4 + 3).to(tl.uint32, bitcast=True)
    words = _chacha20(key, w12, w13, w14, w15)
    for j in tl.static_range(16):
        tl.store(out + row * 16 + j, words[j].to(tl.int32, bitcast=True))
