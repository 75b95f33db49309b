"""The CUDA kernel (Triton): ChaCha20, the Gaussian transform and the sum over bands in registers, one pass over memory.

One thread computes one ChaCha20 block: 16 words, hence 12 normals. Number k of the 32 blocks of a group belongs to 32
consecutive elements, so that a warp's loads and stores are whole cache lines without any exchange between threads.

Words become normals in float64, by polynomials, as accurately as lemma 2 of `docs/noise-proof.md` asks. Data-centre
GPUs do float64 arithmetic beside the integer arithmetic of ChaCha20, which is the bottleneck.

The secret key is read from device memory. It must never be a compile-time constant: Triton keeps compiled kernels,
constants included, in a cache on disk.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of its functions itself: only tl.constexpr may stand there.

from __future__ import annotations

import os

import triton
import triton.language as tl

from lambdacgd.noise.layout import GROUP_ELEMENTS, MORE, RARE

META_COLUMNS = 5

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # Triton's interpreter knows no assembly
_GROUP = tl.constexpr(GROUP_ELEMENTS)
_COLUMNS = tl.constexpr(META_COLUMNS)
_RARE = tl.constexpr(RARE)
_EDGE = tl.constexpr((1 << 31) + RARE)  # added to a word, it moves the rare ones to 0 … 2·RARE − 1
_MORE = tl.constexpr(MORE)


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
    for _ in range(5):  # two double rounds each: fewer instructions for the loop itself
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12, one)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13, one)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14, one)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15, one)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15, one)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12, one)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13, one)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14, one)
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
def _double(high, low):
    """The float64 with these two words."""
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.float64, bitcast=True)


@triton.jit
def _minus_two_log(u):
    """−2 ln u of a normal float64: 2ᵉm with m in [1, 2), and a polynomial in m − 3/2 with error 2⁻⁵²."""
    bits = u.to(tl.uint64, bitcast=True)
    high = (bits >> 32).to(tl.uint32)
    exponent = _double(high * 0 + 0x43300000, high >> 20) - 4503599627371519.0  # 2⁵² + 1023
    f = _double((high & 0x000FFFFF) | 0x3FF00000, bits.to(tl.uint32)) - 1.5
    p = f * -8.020777914050292e-05 + 0.00012664983830212815
    p = p * f - 0.00010028598014079462
    p = p * f + 0.00016024354028373533
    p = p * f - 0.0003103789704341118
    p = p * f + 0.0004986155672062912
    p = p * f - 0.0007894211889994704
    p = p * f + 0.0012828667728632269
    p = p * f - 0.0021021240479020572
    p = p * f + 0.0034684952375098185
    p = p * f - 0.00578050181426068
    p = p * f + 0.009754597757661162
    p = p * f - 0.016722189877878903
    p = p * f + 0.029263832229841698
    p = p * f - 0.052674897113135936
    p = p * f + 0.09876543208901363
    p = p * f - 0.197530864197578
    p = p * f + 0.4444444444445185
    p = p * f - 1.3333333333333333
    p = p * f - 0.8109302162163289
    return exponent * -1.3862943611198906 + p


@triton.jit
def _root(x):
    """√x: the hardware's estimate of 1/√x, good to 2⁻¹⁹ at least, and one step of third order."""
    if _INTERPRETED:
        y = tl.rsqrt(x.to(tl.float32)).to(tl.float64)
    else:
        y = tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [x], dtype=tl.float64, is_pure=True, pack=1
        )
    t = x * y
    error = 1.0 - t * y
    return t + t * (error * (error * 0.375 + 0.5))


@triton.jit
def _refined(r, w0, w1, w2, w3):
    """The radius where u is within 2⁻¹⁵ of 0 or 1: the pair's word r and 128 more bits, see ``reference.radii``."""
    r = r ^ 0x80000000
    further = (w3.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    further = (w2.to(tl.float64) + further) * 2.3283064365386963e-10
    further = (w1.to(tl.float64) + further) * 2.3283064365386963e-10
    further = (w0.to(tl.float64) + further) * 2.3283064365386963e-10
    near_one = r >= 0x80000000
    near = (tl.where(near_one, 4294967295.0 - r.to(tl.float64), r.to(tl.float64)) + further) * 2.3283064365386963e-10
    series = near * (2.0 + near * (1.0 + near * (0.6666666666666666 + near * 0.5)))  # −2 ln(1 − near)
    return _root(tl.where(near_one, series, _minus_two_log(near)))


@triton.jit
def _radius(r, half, low, UPPER: tl.constexpr):
    """√(−2 ln u), u = ½ + (2²⁰r + 2¹⁰(the lowest ten bits of a half of ``half``) + low + ½)/2⁵² with r signed."""
    own = (half >> 6) if UPPER else (half << 10)
    bits = (r * 1048576 + low) | (own & 0xFFC00)
    return _root(_minus_two_log(_double((r >> 12) ^ 0x3FF80000, bits) - 0.9999999999999999))


@triton.jit
def _pair(first, second, coefficient, radius, a, half, low, UPPER: tl.constexpr):
    """The two sums plus coefficient·radius·(cos 2πv, sin 2πv), v = (2¹⁸a + 2¹²(six bits of half) + low/8)/2⁵⁰."""
    # v = half a turn (the highest bit, a sign) + a quarter + f quarters, f in [−1, 1): the 49 lower bits, as 2·1.f − 3.
    own = (half >> 11) if UPPER else (half << 5)
    bits = (a * 2097152 + low) | (own & 0x1F8000)
    f = _double(((a >> 11) & 0xFFFFF) | 0x40000000, bits) - 3.0
    q = f * f
    s = q * 5.87297574479995e-12 - 6.684416831856085e-10
    c = q * 6.3317327178079e-11 - 6.382235924529259e-09
    s = s * q + 5.6921364280986254e-08
    c = c * q + 4.7108307433635577e-07
    s = s * q - 3.5988430204672576e-06
    c = c * q - 2.5202039782228713e-05
    s = s * q + 0.0001604411847130916
    c = c * q + 0.0009192602739434877
    s = s * q - 0.004681754135304255
    c = c * q - 0.02086348076317886
    s = s * q + 0.07969262624616565
    c = c * q + 0.25366950790103104
    s = s * q - 0.6459640975062462
    c = c * q - 1.233700550136169
    s = s * q + 1.5707963267948966
    c = c * q + 1.0
    sign = (a & 0x80000000).to(tl.uint64) << 32
    signed = (radius.to(tl.uint64, bitcast=True) ^ sign).to(tl.float64, bitcast=True) * coefficient
    return first - signed * (s * f), second + signed * c


@triton.jit(do_not_specialize=["step", "horizon", "restart", "bands", "tensors", "turns", "scale_bits"])
def noise_kernel(
    first_programs, meta, key, coefficients, column_scales, step_counter, flags,
    step, horizon, restart, bands, tensors, turns, scale_bits, lattice,
    READ: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Adds scale·d_t·Σ_j a_j z[t−j] to every tensor of the table; see ``cuda.table_rows``.

    A program is one warp. It serves up to ``turns`` groups of one tensor, one after the other.
    """
    program = tl.program_id(0)
    # Which tensor does this program belong to: the last one whose first program is not behind it.
    left = program * 0
    right = tensors
    while right - left > 1:
        middle = (left + right) // 2
        behind = tl.load(first_programs + middle) > program
        right = tl.where(behind, middle, right)
        left = tl.where(behind, left, middle)
    row = meta + left.to(tl.int64) * _COLUMNS
    count = tl.load(row + 1)
    offset = tl.load(row + 2)
    first_block = tl.load(row + 3)
    # The tensor's groups that this program serves.
    begin = tl.load(row + 4) + (program - tl.load(first_programs + left)).to(tl.int64) * turns
    end = tl.minimum(begin + turns, (offset + count + (_GROUP - 1)) // _GROUP)

    t = step + tl.load(step_counter)
    valid = (t >= 1) & (t <= horizon)
    since = (t - 1) % restart + 1  # steps since the last restart, this one included
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)  # a float argument would be float32
    if SCALED:
        scale = scale * tl.load(column_scales + tl.where(valid, since - 1, 0))
    # A step outside the run must never release a bare sum: its result is NaN, and the flag says why.
    scale = tl.where(valid, scale, float("nan"))
    # M of ``Combination.lattice_at``: ``lattice`` times the power of two that is scale's own.
    power = (scale.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    lattice_start = power * lattice
    last_band = tl.minimum(bands, since).to(tl.int32)

    if WIDE:
        memory = tl.load(row).to(tl.pointer_type(tl.float64))
    else:
        memory = tl.load(row).to(tl.pointer_type(tl.float32))
    lane = tl.arange(0, 32)
    spoiled = tl.zeros([32], memory.dtype.element_ty)

    for turn in range(0, (end - begin).to(tl.int32)):
        group = begin + turn
        block = first_block + group * 32 + lane.to(tl.int64)
        w12 = block.to(tl.uint32)
        w13 = (block >> 32).to(tl.uint32)
        # The local index of the group's first element: negative where a shard starts inside a group.
        start = group * _GROUP - offset
        low = tl.maximum(-start, 0).to(tl.int32)
        size = (tl.minimum(count - start, _GROUP).to(tl.int32) - low).to(tl.uint32)
        above = (lane - low).to(tl.uint32, bitcast=True)  # a lane below ``low`` wraps around, and is outside too
        place = start + lane
        # The sums are asked for now and arrive while the noise is computed.
        sums = ()
        if READ:
            for k in tl.static_range(12):
                inside = above + k * 32 < size
                sums = sums + (tl.load(memory + place + k * 32, mask=inside, other=0.0),)  # type: ignore  # noqa: RUF005

        z0 = tl.zeros([32], tl.float64)
        z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11 = z0, z0, z0, z0, z0, z0, z0, z0, z0, z0, z0
        for j in range(0, last_band):
            coefficient = tl.load(coefficients + j)
            past = t - j
            w14 = w12 * 0 + past.to(tl.uint32)
            w15 = w12 * 0 + (past >> 32).to(tl.uint32)
            r0, r1, r2, r3, r4, r5, a0, a1, a2, a3, a4, a5, h0, h1, h2, e = _chacha20(key, w12, w13, w14, w15)
            common = e & 0x3FF  # what the six pairs share: 10 bits of the radii and 12 of the angles
            radius0 = _radius(r0, h0, common, False)
            radius1 = _radius(r1, h1, common, False)
            radius2 = _radius(r2, h2, common, False)
            radius3 = _radius(r3, h0, common, True)
            radius4 = _radius(r4, h1, common, True)
            radius5 = _radius(r5, h2, common, True)
            # 1.2 % of the groups have a radius that takes more bits.
            least = tl.minimum(tl.minimum(r0 + _EDGE, r1 + _EDGE), tl.minimum(r2 + _EDGE, r3 + _EDGE))
            least = tl.minimum(least, tl.minimum(r4 + _EDGE, r5 + _EDGE))
            if tl.max((least < 2 * _RARE).to(tl.int32), axis=0) != 0:
                for pair in range(0, 6):
                    r = tl.where(pair == 0, r0, tl.where(pair == 1, r1, tl.where(pair == 2, r2, r3)))
                    r = tl.where(pair == 4, r4, tl.where(pair == 5, r5, r))
                    rare = r + _EDGE < 2 * _RARE
                    if tl.max(rare.to(tl.int32), axis=0) != 0:
                        v0, v1, v2, v3, _, _, _, _, _, _, _, _, _, _, _, _ = _chacha20(
                            key, w12, w13 | ((w12 * 0 + pair) * 268435456 + _MORE), w14, w15
                        )
                        refined = _refined(r, v0, v1, v2, v3)
                        radius0 = tl.where(rare & (pair == 0), refined, radius0)
                        radius1 = tl.where(rare & (pair == 1), refined, radius1)
                        radius2 = tl.where(rare & (pair == 2), refined, radius2)
                        radius3 = tl.where(rare & (pair == 3), refined, radius3)
                        radius4 = tl.where(rare & (pair == 4), refined, radius4)
                        radius5 = tl.where(rare & (pair == 5), refined, radius5)
            common = ((e >> 7) & 0x7FF8) | 4  # eight times the twelve bits, and 4 for the half
            z0, z6 = _pair(z0, z6, coefficient, radius0, a0, h0, common, False)
            z1, z7 = _pair(z1, z7, coefficient, radius1, a1, h1, common, False)
            z2, z8 = _pair(z2, z8, coefficient, radius2, a2, h2, common, False)
            z3, z9 = _pair(z3, z9, coefficient, radius3, a3, h0, common, True)
            z4, z10 = _pair(z4, z10, coefficient, radius4, a4, h1, common, True)
            z5, z11 = _pair(z5, z11, coefficient, radius5, a5, h2, common, True)

        noises = (z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11)
        for k in tl.static_range(12):
            result = noises[k] * scale
            if READ:
                spoiled = sums[k] * 0.0 + spoiled  # stays 0 unless a sum is infinite or NaN
                result = (result + sums[k].to(tl.float64) + lattice_start) - lattice_start
            tl.store(memory + place + k * 32, result.to(memory.dtype.element_ty), mask=above + k * 32 < size)
    # Only a thread that saw something bad writes, so the flag costs no reduction.
    tl.atomic_or(flags + lane * 0, 1, mask=spoiled != 0.0)
    tl.atomic_or(flags, 2, mask=(program == 0) & (valid == 0))
