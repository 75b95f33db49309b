# mypy: disable-error-code="no-untyped-def"
"""Triton kernels on CUDA: norms of many layers in one launch, their tensors in tables of addresses (`grouped`), and
per-example gradients that are kept (`fused`). Neither Gram matrices nor patches reach memory.

Imported only where there is a CUDA device.
"""

import triton
import triton.language as tl

# Sizes that change with the batch are not specialised: a drawn batch size must not make Triton compile again.


@triton.jit(do_not_specialize=["examples", "tokens", "pairs"])
def gram_kernel(
    table, out, examples, tokens, inner, outer, a_batch, a_token, b_batch, b_token, pairs,
    LOW: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Partial sums over one pair of token tiles: ⟨G_a, G_b⟩, tr G_a, tr G_b, ‖G_a‖², ‖G_b‖² (pairs counted twice)."""
    pair = tl.program_id(0)
    example = tl.program_id(1)
    layer = tl.program_id(2)
    kind = tl.bfloat16 if LOW else tl.float32
    a = tl.multiple_of(tl.load(table + 2 * layer).to(tl.pointer_type(kind)), 16) + example.to(tl.int64) * a_batch
    b = tl.multiple_of(tl.load(table + 2 * layer + 1).to(tl.pointer_type(kind)), 16) + example.to(tl.int64) * b_batch
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5 + 1e-3).to(tl.int32)
    j = pair - i * (i + 1) // 2
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    here = tl.arange(0, DEPTH)
    gram_a = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, inner, DEPTH):
        inside = (k + here) < inner
        x = tl.load(a + rows[:, None] * a_token + (k + here)[None, :], (rows < tokens)[:, None] & inside[None, :], 0.0)
        y = tl.load(
            a + columns[None, :] * a_token + (k + here)[:, None], (columns < tokens)[None, :] & inside[:, None], 0.0
        )
        gram_a = tl.dot(x, y, gram_a, input_precision="tf32")
    gram_b = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, outer, DEPTH):
        inside = (k + here) < outer
        x = tl.load(b + rows[:, None] * b_token + (k + here)[None, :], (rows < tokens)[:, None] & inside[None, :], 0.0)
        y = tl.load(
            b + columns[None, :] * b_token + (k + here)[:, None], (columns < tokens)[None, :] & inside[:, None], 0.0
        )
        gram_b = tl.dot(x, y, gram_b, input_precision="tf32")
    twice = tl.where(i == j, 1.0, 2.0)
    diagonal = rows[:, None] == columns[None, :]
    place = out + ((layer * examples + example) * pairs + pair).to(tl.int64) * 5
    tl.store(place, tl.sum(gram_a * gram_b) * twice)
    tl.store(place + 1, tl.sum(tl.where(diagonal, gram_a, 0.0)))
    tl.store(place + 2, tl.sum(tl.where(diagonal, gram_b, 0.0)))
    tl.store(place + 3, tl.sum(gram_a * gram_a) * twice)
    tl.store(place + 4, tl.sum(gram_b * gram_b) * twice)


@triton.jit
def patch_gradient_kernel(
    image, response, out, squares, views, channels, positions, width, columns, height, across,
    stride_y, stride_x, dilation_y, dilation_x, padding_y, padding_x,
    KERNEL: tl.constexpr, KERNEL_X: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[example, o, n] = Σ_t response[example, o, t] · patch_t[n] over the example's images (its views, neighbours),
    all contiguous, n = (c, y, x), and the sum of its squares over this tile. Around an image are zeros.

    Patches are read from the image as they are needed: written out, they would be KERNEL times as large as it.
    """
    tile = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(columns, INNER)
    n = (tile % tiles) * INNER + tl.arange(0, INNER)
    o = (tile // tiles) * OUTER + tl.arange(0, OUTER)
    tap = n % KERNEL
    up, left = (tap // KERNEL_X) * dilation_y - padding_y, (tap % KERNEL_X) * dilation_x - padding_x
    pixels = (columns // KERNEL) * height * across
    image += example * views * pixels + (n // KERNEL)[:, None] * height * across
    response += example * views * channels * positions
    total = tl.zeros([OUTER, INNER], tl.float32)
    for _ in range(0, views):
        for start in range(0, positions, DEPTH):
            t = start + tl.arange(0, DEPTH)
            y, x = up[:, None] + ((t // width) * stride_y)[None, :], left[:, None] + ((t % width) * stride_x)[None, :]
            inside = (t < positions)[None, :]
            around = (y < 0) | (y >= height) | (x < 0) | (x >= across)
            b = tl.load(response + o[:, None] * positions + t[None, :], (o < channels)[:, None] & inside, 0.0)
            # Positions last: neighbouring threads read neighbouring pixels.
            a = tl.load(image + (y * across + x), (n < columns)[:, None] & inside & ~around, 0.0)
            total = tl.dot(b, tl.trans(a), total, input_precision="tf32")
        image += pixels
        response += channels * positions
    mask = (o < channels)[:, None] & (n < columns)[None, :]
    tl.store(out + (example * channels + o[:, None]) * columns + n[None, :], total, mask)
    # outside the mask all are zero
    tl.store(squares + tile.to(tl.int64) * tl.num_programs(1) + example, tl.sum(total * total))


@triton.jit(do_not_specialize=["examples"])
def weighted_sum_kernel(
    gradients, factor, keep, total, examples, size,
    ALL: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """total[j] (+)= Σ_i factor[i] · gradients[i, j] over the examples kept; others may hold anything, NaN included."""
    _weighted_sum(gradients, factor, keep, total, examples, size, ALL, FRESH, BLOCK, ROWS)


@triton.jit(do_not_specialize=["examples"])
def weighted_sums_kernel(
    table, keep, examples, ALL: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """The same for every layer of the table."""
    row = table + tl.program_id(1) * 4
    gradients = tl.load(row).to(tl.pointer_type(tl.float32))
    factor = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    total = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    size = tl.load(row + 3)
    if tl.program_id(0) * BLOCK < size:
        _weighted_sum(gradients, factor, keep, total, examples, size, ALL, FRESH, BLOCK, ROWS)


@triton.jit
def _weighted_sum(
    gradients, factor, keep, total, examples, size,
    ALL: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, ROWS)
    found = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, examples, ROWS):
        row = start + i
        if ALL:
            kept = row < examples
        else:
            kept = tl.load(keep + row, row < examples, 0) != 0
        weight = tl.load(factor + row, kept, 0.0)
        mask = kept[:, None] & (j < size)[None, :]
        found += weight[:, None] * tl.load(gradients + row.to(tl.int64)[:, None] * size + j[None, :], mask, 0.0)
    result = tl.sum(found, 0)
    if not FRESH:
        result += tl.load(total + j, j < size, 0.0)
    tl.store(total + j, result, j < size)


@triton.jit(do_not_specialize=["width"])
def column_sum_kernel(table, out, width, LOW: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """out[example, offset + j] = Σ_t b[example, t, j] for every layer of the table."""
    block = tl.program_id(0)
    example = tl.program_id(1)
    row = table + tl.program_id(2) * 6
    kind = tl.bfloat16 if LOW else tl.float32
    size = tl.load(row + 4).to(tl.int32)
    if block * BLOCK < size:
        base = tl.load(row).to(tl.pointer_type(kind)) + example.to(tl.int64) * tl.load(row + 1)
        step = tl.load(row + 2)
        tokens = tl.load(row + 3).to(tl.int32)
        j = block * BLOCK + tl.arange(0, BLOCK)
        t = tl.arange(0, ROWS)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, tokens, ROWS):
            mask = ((start + t) < tokens)[:, None] & (j < size)[None, :]
            total += tl.load(base + (start + t)[:, None] * step + j[None, :], mask, 0.0).to(tl.float32)
        tl.store(out + example.to(tl.int64) * width + tl.load(row + 5) + j, tl.sum(total, 0), j < size)


@triton.jit(do_not_specialize=["tokens"])
def layer_norm_kernel(
    x, gradient, mean, rstd, scale, shift, tokens, size,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """scale[example, j] = Σ_t b x̂ and shift[example, j] = Σ_t b for contiguous x and b [examples, tokens, size]."""
    example = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    plain = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, tokens, ROWS):
        inside = (start + t) < tokens
        mask = inside[:, None] & (j < size)[None, :]
        row = example * tokens + start + t
        place = row[:, None] * size + j[None, :]
        b = tl.load(gradient + place, mask, 0.0).to(tl.float32)
        value = tl.load(x + place, mask, 0.0).to(tl.float32)
        centre = tl.load(mean + row, inside, 0.0)[:, None]
        width = tl.load(rstd + row, inside, 0.0)[:, None]
        total += b * ((value - centre) * width)
        plain += b
    tl.store(scale + example * size + j, tl.sum(total, 0), j < size)
    tl.store(shift + example * size + j, tl.sum(plain, 0), j < size)


@triton.jit
def group_norm_kernel(x, gradient, mean, rstd, scale, shift, positions, share, BLOCK: tl.constexpr):
    """scale[row] = Σ_t b x̂ and shift[row] = Σ_t b for contiguous x and b [rows, positions]; a row is a channel of an
    example, and ``share`` channels have one mean and deviation.
    """
    row = tl.program_id(0).to(tl.int64)
    centre, width = tl.load(mean + row // share), tl.load(rstd + row // share)
    t = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, positions, BLOCK):
        inside = (start + t) < positions
        b = tl.load(gradient + row * positions + start + t, inside, 0.0)
        value = tl.load(x + row * positions + start + t, inside, 0.0)
        total += b * ((value - centre) * width)
        plain += b
    tl.store(scale + row, tl.sum(total, 0))
    tl.store(shift + row, tl.sum(plain, 0))
