# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels of `fused_norm`: a program holds one group of one example, SIZE contiguous numbers."""

import triton
import triton.language as tl


@triton.jit
def _corners(x, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Where the upper left corners of a group's 2×2 windows lie: rows come in pairs, channels have an even number."""
    window = tl.arange(0, SIZE // 4)
    return x + (window // (WIDTH // 2)) * (2 * WIDTH) + (window % (WIDTH // 2)) * 2


@triton.jit
def forward_kernel(x, out, moments, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, POOL: tl.constexpr):
    """out = max(0, x̂), or the largest of each 2×2 window of it; moments = (mean, 1/√(variance + eps))."""
    group = tl.program_id(0).to(tl.int64)
    x += group * SIZE
    if POOL:
        corner = _corners(x, SIZE, WIDTH)
        a, b = tl.load(corner), tl.load(corner + 1)
        c, d = tl.load(corner + WIDTH), tl.load(corner + WIDTH + 1)
        mean = tl.sum(a + b + c + d, 0) / SIZE
        a, b, c, d = a - mean, b - mean, c - mean, d - mean
        square = tl.sum(a * a + b * b + c * c + d * d, 0)
        top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        place = out + group * (SIZE // 4) + tl.arange(0, SIZE // 4)
    else:
        top = tl.load(x + tl.arange(0, SIZE))
        mean = tl.sum(top, 0) / SIZE
        top = top - mean
        square = tl.sum(top * top, 0)
        place = out + group * SIZE + tl.arange(0, SIZE)
    scale = 1 / tl.sqrt(square / SIZE + eps)
    value = top * scale
    tl.store(place, tl.where(value > 0, value, tl.where(value == value, 0.0, value)))  # NaN stays NaN, as in PyTorch
    tl.store(moments + 2 * group, mean)
    tl.store(moments + 2 * group + 1, scale)


@triton.jit
def backward_kernel(x, gradient, moments, out, SIZE: tl.constexpr, WIDTH: tl.constexpr, POOL: tl.constexpr):
    """out = s (g − mean(g) − x̂ mean(g x̂)), where g is the gradient that reaches x̂ through pooling and ReLU."""
    group = tl.program_id(0).to(tl.int64)
    x += group * SIZE
    out += group * SIZE
    mean = tl.load(moments + 2 * group)
    scale = tl.load(moments + 2 * group + 1)
    if POOL:
        corner = _corners(x, SIZE, WIDTH)
        a, b = (tl.load(corner) - mean) * scale, (tl.load(corner + 1) - mean) * scale
        c, d = (tl.load(corner + WIDTH) - mean) * scale, (tl.load(corner + WIDTH + 1) - mean) * scale
        g = tl.load(gradient + group * (SIZE // 4) + tl.arange(0, SIZE // 4))
        top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
        g = tl.where(top > 0, g, 0.0)
        in_a = a == top  # the first of equals, as in PyTorch
        in_b = (b == top) & (a != top)
        in_c = (c == top) & (a != top) & (b != top)
        in_d = (a != top) & (b != top) & (c != top)
        one = tl.sum(g, 0) / SIZE
        two = tl.sum(g * top, 0) / SIZE
        corner = _corners(out, SIZE, WIDTH)
        tl.store(corner, scale * (tl.where(in_a, g, 0.0) - one - a * two))
        tl.store(corner + 1, scale * (tl.where(in_b, g, 0.0) - one - b * two))
        tl.store(corner + WIDTH, scale * (tl.where(in_c, g, 0.0) - one - c * two))
        tl.store(corner + WIDTH + 1, scale * (tl.where(in_d, g, 0.0) - one - d * two))
    else:
        place = tl.arange(0, SIZE)
        value = (tl.load(x + place) - mean) * scale
        g = tl.where(value > 0, tl.load(gradient + group * SIZE + place), 0.0)
        one = tl.sum(g, 0) / SIZE
        two = tl.sum(g * value, 0) / SIZE
        tl.store(out + place, scale * (g - one - value * two))
