"""The CUDA kernel (Triton): ChaCha20, the Gaussian transform and the sum over bands in registers, one pass over memory.

One thread computes one ChaCha20 block: 16 words, hence 16 normals. Word w of the 32 blocks of a group belongs to 32
consecutive elements, so that a warp's loads and stores are whole cache lines without any exchange between threads.

The secret key is read from device memory. It must never be a compile-time constant: Triton keeps compiled kernels,
constants included, in a cache on disk.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions itself: only tl.constexpr may stand there.

from __future__ import annotations

import os

import triton
import triton.language as tl

TILE_BLOCKS = 64  # ChaCha20 blocks of one program: two groups, one block a thread
TILE_WARPS = TILE_BLOCKS // 32
TILE_ELEMENTS = 16 * TILE_BLOCKS
META_COLUMNS = 20

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # Triton's interpreter knows no assembly
_TILE = tl.constexpr(TILE_BLOCKS)
_COLUMNS = tl.constexpr(META_COLUMNS)


@triton.jit
def _rotate(x, left: tl.constexpr):
    return (x << left) | (x >> (32 - left))


@triton.jit
def _quarter(a, b, c, d, one):
    # Additions as multiply-adds by a 1 that the compiler cannot know: they run beside the arithmetic unit that rotates
    # and xors, which is the bottleneck (6 % faster on an H200).
    a = b * one + a
    d = _rotate(d ^ a, 16)
    c = d * one + c
    b = _rotate(b ^ c, 12)
    a = b * one + a
    d = _rotate(d ^ a, 8)
    c = d * one + c
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _chacha20(key, w12, w13, w14, w15):
    """The RFC 8439 block function; ``key`` points to 8 words and a 1, the rest are tensors of words 12 to 15."""
    zero = w12 ^ w12
    one = tl.load(key + 8).to(tl.uint32, bitcast=True)
    k4 = zero + tl.load(key).to(tl.uint32, bitcast=True)
    k5 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    k6 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    k7 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    k8 = zero + tl.load(key + 4).to(tl.uint32, bitcast=True)
    k9 = zero + tl.load(key + 5).to(tl.uint32, bitcast=True)
    k10 = zero + tl.load(key + 6).to(tl.uint32, bitcast=True)
    k11 = zero + tl.load(key + 7).to(tl.uint32, bitcast=True)
    c0 = zero + 0x61707865
    c1 = zero + 0x3320646E
    c2 = zero + 0x79622D32
    c3 = zero + 0x6B206574
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k4, k5, k6, k7
    x8, x9, x10, x11, x12, x13, x14, x15 = k8, k9, k10, k11, w12, w13, w14, w15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12, one)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13, one)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14, one)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15, one)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15, one)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12, one)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13, one)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14, one)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k4, x5 + k5, x6 + k6, x7 + k7,
        x8 + k8, x9 + k9, x10 + k10, x11 + k11, x12 + w12, x13 + w13, x14 + w14, x15 + w15,
    )  # fmt: skip


@triton.jit
def _log2(x):
    """The hardware's base-2 logarithm, relative error 2⁻²² below 1/2 (tl.log2 would be a long software routine)."""
    if _INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _gaussian_pair(a, b):
    """Box–Muller in float32, each step good to about one rounding: see ``reference.gaussian_pairs`` for the format."""
    # The 16 shared bits as a float, without a conversion: 0x4B000000 | n is the float 2²³ + n.
    shared = ((b & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5
    u = a.to(tl.float32) * 2.3283064365386963e-10 + shared * 3.5527136788005009e-15
    # −2 ln u. Below 1/2 the hardware logarithm is good to 2⁻²²; above, log1p of the exact complement t = 1 − u.
    t = ((a ^ 0xFFFFFFFF).to(tl.float32) + (1.0 - shared * 1.52587890625e-05)) * 2.3283064365386963e-10
    p = 1.7459241151809692 * t - 2.48227858543396
    p = p * t + 1.9766734838485718
    p = p * t - 0.5953473448753357
    p = p * t + 0.3410414755344391
    p = p * t + 0.17569103837013245
    p = p * t + 0.2518884539604187
    p = p * t + 0.3332621455192566
    p = p * t + 0.5000008940696716
    radius = tl.sqrt(tl.where(u < 0.5, -1.3862943611198906 * _log2(u), 2.0 * (t + t * t * p)))
    # The angle 2π(b+½)/2³² folded into one octant, so that float32 keeps its relative accuracy near every axis.
    odd = ((b << 2).to(tl.int32, bitcast=True) >> 31).to(tl.uint32, bitcast=True)
    phi = (((b ^ odd) & 0x1FFFFFFF).to(tl.float32) + 0.5) * 1.4629180792671596e-09
    q = phi * phi
    sine = phi + phi * q * (-0.16666655242443085 + q * (0.00833216030150652 + q * -0.00019515282474458218))
    cosine = 1.0 + q * (-0.5 + q * (0.04166664555668831 + q * (-0.0013887316454201937 + q * 2.4433154976577498e-05)))
    fold = b ^ (b << 1)
    swap = (fold & 0x40000000) != 0
    x = radius * tl.where(swap, sine, cosine)
    y = radius * tl.where(swap, cosine, sine)
    x = (x.to(tl.uint32, bitcast=True) ^ (fold & 0x80000000)).to(tl.float32, bitcast=True)
    y = (y.to(tl.uint32, bitcast=True) ^ (b & 0x80000000)).to(tl.float32, bitcast=True)
    return x, y


@triton.jit
def _place(index, row, first: tl.constexpr):
    """Memory offset of a row-major logical index in a tensor of up to four (merged) dimensions."""
    n1 = tl.load(row + 9)
    n2 = tl.load(row + 10)
    n3 = tl.load(row + 11)
    i3 = index % n3
    rest = index // n3
    i2 = rest % n2
    rest = rest // n2
    i1 = rest % n1
    i0 = rest // n1
    place = i0 * tl.load(row + first) + i1 * tl.load(row + first + 1)
    return place + i2 * tl.load(row + first + 2) + i3 * tl.load(row + first + 3)


@triton.jit(do_not_specialize=["step", "horizon", "restart", "bands", "tensors"])
def noise_kernel(
    tiles, meta, key, coefficients, column_scales, step_counter, flags,
    step, horizon, restart, bands, tensors, scale,
    READ: tl.constexpr, WIDE: tl.constexpr, WIDE_OUT: tl.constexpr, BF16_OUT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """target = source + scale·d_t·Σ_j a_j z[t−j] over every tensor of the table; see ``cuda.table_rows``."""
    program = tl.program_id(0)
    # Which tensor does this tile belong to: the last one whose first tile is not behind it.
    left = program * 0
    right = tensors
    while right - left > 1:
        middle = (left + right) // 2
        behind = tl.load(tiles + middle) > program
        right = tl.where(behind, middle, right)
        left = tl.where(behind, left, middle)
    row = meta + left.to(tl.int64) * _COLUMNS
    count = tl.load(row + 3)
    offset = tl.load(row + 4)
    first_block = tl.load(row + 5)
    tile = (program - tl.load(tiles + left)).to(tl.int64)
    group = tl.load(row + 6) + tile * (_TILE // 32)  # the tensor's group this tile starts with
    direct = tl.load(row + 7) == 0  # contiguous: the logical index is the place in memory

    t = step + tl.load(step_counter)
    valid = (t >= 1) & (t <= horizon)
    since = (t - 1) % restart + 1  # steps since the last restart, this one included
    if SCALED:
        scale = scale * tl.load(column_scales + tl.where(valid, since - 1, 0))
    # A step outside the run must never release a bare sum: its result is NaN, and the flag says why.
    scale = tl.where(valid, scale, float("nan"))
    if WIDE:
        scale = scale.to(tl.float64)

    thread = tl.arange(0, _TILE)
    block = first_block + group * 32 + thread.to(tl.int64)
    w12 = block.to(tl.uint32)
    w13 = (block >> 32).to(tl.uint32)
    if WIDE:
        source = tl.load(row).to(tl.pointer_type(tl.float64))
    else:
        source = tl.load(row).to(tl.pointer_type(tl.float32))
    if BF16_OUT:
        target = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16))
    elif WIDE_OUT:
        target = tl.load(row + 1).to(tl.pointer_type(tl.float64))
    else:
        target = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    # The local index of the tile's first element: negative where a shard starts inside a group.
    start = group * 512 - offset
    low = tl.maximum(-start, 0).to(tl.int32)
    high = tl.minimum(count - start, _TILE * 16).to(tl.int32)
    lane = (thread // 32) * 512 + thread % 32
    place = start + lane
    # The sums are asked for now and arrive while the noise is computed.
    sums = ()
    if READ:
        for k in tl.static_range(16):
            inside = (lane + k * 32 >= low) & (lane + k * 32 < high) & direct
            sums = sums + (tl.load(source + place + k * 32, mask=inside, other=0.0),)  # type: ignore  # noqa: RUF005

    z0 = tl.zeros([_TILE], tl.float32)
    z1 = z0
    z2 = z0
    z3 = z0
    z4 = z0
    z5 = z0
    z6 = z0
    z7 = z0
    z8 = z0
    z9 = z0
    z10 = z0
    z11 = z0
    z12 = z0
    z13 = z0
    z14 = z0
    z15 = z0
    for j in range(0, tl.minimum(bands, since).to(tl.int32)):
        a = tl.load(coefficients + j)
        past = t - j
        w14 = w12 * 0 + past.to(tl.uint32)
        w15 = w12 * 0 + (past >> 32).to(tl.uint32)
        r0, r1, r2, r3, r4, r5, r6, r7, v0, v1, v2, v3, v4, v5, v6, v7 = _chacha20(key, w12, w13, w14, w15)
        x, y = _gaussian_pair(r0, v0)
        z0 += a * x
        z8 += a * y
        x, y = _gaussian_pair(r1, v1)
        z1 += a * x
        z9 += a * y
        x, y = _gaussian_pair(r2, v2)
        z2 += a * x
        z10 += a * y
        x, y = _gaussian_pair(r3, v3)
        z3 += a * x
        z11 += a * y
        x, y = _gaussian_pair(r4, v4)
        z4 += a * x
        z12 += a * y
        x, y = _gaussian_pair(r5, v5)
        z5 += a * x
        z13 += a * y
        x, y = _gaussian_pair(r6, v6)
        z6 += a * x
        z14 += a * y
        x, y = _gaussian_pair(r7, v7)
        z7 += a * x
        z15 += a * y

    noises = (z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11, z12, z13, z14, z15)
    bad = thread < 0
    if direct:
        for k in tl.static_range(16):
            inside = (lane + k * 32 >= low) & (lane + k * 32 < high)
            result = noises[k].to(scale.dtype) * scale
            if READ:
                bad = bad | ((sums[k] - sums[k]) != 0.0)  # x − x is 0 for every finite x and NaN for the rest
                result += sums[k]
            tl.store(target + place + k * 32, result.to(target.dtype.element_ty), mask=inside)
    else:
        for k in tl.static_range(16):
            inside = (lane + k * 32 >= low) & (lane + k * 32 < high)
            result = noises[k].to(scale.dtype) * scale
            if READ:
                value = tl.load(source + _place(place + k * 32, row, 12), mask=inside, other=0.0)
                bad = bad | ((value - value) != 0.0)
                result += value
            tl.store(target + _place(place + k * 32, row, 16), result.to(target.dtype.element_ty), mask=inside)
    # Only a thread that saw something bad writes, so the flag costs no reduction.
    tl.atomic_or(flags + thread * 0, 1, mask=bad)
    tl.atomic_or(flags, 2, mask=(program == 0) & (valid == 0))


@triton.jit
def block_kernel(key, tails, out, ROWS: tl.constexpr):
    """The bare block function, for the RFC 8439 test vectors: ``tails`` (ROWS, 4) -> ``out`` (ROWS, 16), as words."""
    row = tl.arange(0, ROWS)
    w12 = tl.load(tails + row * 4).to(tl.uint32, bitcast=True)
    w13 = tl.load(tails + row * 4 + 1).to(tl.uint32, bitcast=True)
    w14 = tl.load(tails + row * 4 + 2).to(tl.uint32, bitcast=True)
    w15 = tl.load(tails + row * 4 + 3).to(tl.uint32, bitcast=True)
    words = _chacha20(key, w12, w13, w14, w15)
    for j in tl.static_range(16):
        tl.store(out + row * 16 + j, words[j].to(tl.int32, bitcast=True))
