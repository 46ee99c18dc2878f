r"""Kernels of the short convolution: one pass over x each way, nothing kept between them.

    c_t = sum_j w_j e_(t-W+1+j) + b,   s = silu(c),   y = s / sqrt(|s|^2 + eps) per head

e is x, with the window (or zeros) at the places -(W-1)..-1 of a sequence. A sequence is cut into segments of L places, and one
program computes R segments at the same time over the channels of one head (or 128). It loads all its rows first, so that their
latencies overlap, and keeps them in registers: memory delivers x once, except for the W-1 rows that neighbouring segments
share. The backward computes c again, also for W-1 places beyond its segment:

    dx_p = sum_j w_j dc_(p+W-1-j),   dw_j = sum_t dc_t e_(t-W+1+j),   db = sum_t dc_t

and writes its sums for w and b per tile, [tiles, D, W], which are added up in a fixed order.

The channels may lie in groups, as slices of a joint projection of heads do: channel c of group g stands g strides of a group and
c numbers behind its token's first one.

Segments of packed sequences are found without a table: sequence n, which starts at token a, owns the segments from
floor(a / L) + n on, which no other sequence owns, and a program finds the n of its first segment by bisection.
"""

# mypy: disable-error-code="assignment"
# (tuples of rows grow in the kernels)

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.call import MULTIPROCESSORS, padded
from ..common.math import sigmoid
from ..runtime.launch_plan import alignment, launch, make_rows_contiguous
from .tile_sums import sum_tiles

NOWHERE = tl.constexpr(1 << 30)
VARYING = ["time", "count", "blocks", "per_group", "steps", "eps"]  # a value of 1 gets no kernel of its own
THREADS = 128
ENOUGH_PROGRAMS = 512
FORWARD_PLACES = (8,)  # per segment: as many rows as registers hold
BACKWARD_PLACES = range(32, 97, 4)  # per segment
BACKWARD_STEP = {4: 4, 8: 1}  # rows loaded ahead, by the width of the filter
FEW_REGISTERS = 128  # per thread at most, so that four programs share a multiprocessor
AT_ONCE = 4 * MULTIPROCESSORS  # programs of the backward that run at the same time on an H100 or H200
BEFORE_FIRST = 10  # places that take as long as the start of a program


@triton.jit
def find_segments(tile, edges, time, count, steps, LEAD: tl.constexpr, L, R: tl.constexpr, PACKED: tl.constexpr):
    """Of the R segments of a tile: their sequence, that one's first token and length, and the segment's first place. The
    places of a sequence begin at -LEAD; a segment beyond all sequences begins at NOWHERE.

    The packed sequences are found as scalars, one segment after the other: loaded as a vector they would have a layout, and
    everything computed from them would have to be converted.
    """
    row = tl.arange(0, R)
    segment = tile * R + row
    if PACKED:
        at = 0
        for i in range(steps):
            later = at + (1 << (steps - 1 - i))
            begin = tl.load(edges + later, later < count, 0).to(tl.int32) + later * LEAD
            at = tl.where((later < count) & (begin // L + later <= tile * R), later, at)
        begin, end = tl.load(edges + at).to(tl.int32), tl.load(edges + at + 1).to(tl.int32)
        n, start, stop = row * 0, row * 0, row * 0
        for r in tl.static_range(R):
            moved = (at + 1 < count) & ((end + (at + 1) * LEAD) // L + at + 1 <= tile * R + r)
            at = tl.where(moved, at + 1, at)
            begin = tl.where(moved, end, begin)
            end = tl.load(edges + at + 1).to(tl.int32)
            n, start, stop = tl.where(row == r, at, n), tl.where(row == r, begin, start), tl.where(row == r, end, stop)
        start = tl.maximum(start, 0)
        length = tl.minimum(stop, time) - start
        part = segment - ((start + n * LEAD) // L + n)
    else:
        parts = tl.maximum(tl.cdiv(time + LEAD, L), 1)
        n = segment // parts
        part = segment % parts
        start = n * time
        length = n * 0 + time
    first = part * L - LEAD
    return n, start, length, tl.where((n < count) & ((part == 0) | (first < length)), first, NOWHERE)


@triton.jit
def place_block(block, per_group, group_stride, HEAD: tl.constexpr):
    """Where a block of channels begins in a token whose groups have `per_group` blocks each."""
    return (block // per_group) * group_stride + (block % per_group) * HEAD


@triton.jit
def load_row(
    x, row, x_column, column, inside, place, length, window, n, channels, W: tl.constexpr, MAY_BE_WINDOW: tl.constexpr,
):  # fmt: skip
    """e at a place of each segment [R, BD]; `row` is where place 0 stands in x, with the rows' stride;
    `x_column` where the channels stand there."""
    start, stride = row
    at = start + place.to(tl.int64) * stride
    e = tl.load(x + at[:, None] + x_column[None, :], ((place >= 0) & (place < length))[:, None] & inside[None, :], 0.0)
    if MAY_BE_WINDOW:
        at = (n * (W - 1) + place + W - 1).to(tl.int64) * channels
        before = (place < 0) & (place > -W)
        in_window = tl.load(window + at[:, None] + column[None, :], before[:, None] & inside[None, :], 0.0)
        e = tl.where(before[:, None], in_window, e)
    return e


@triton.jit
def load_filter(weight, bias, column, inside, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The W taps and the bias [1, BD] in float32."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + column * W + j, inside, 0.0).to(tl.float32)[None, :],)
    b = tl.load(bias + column, inside, 0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0
    return taps, b


@triton.jit
def convolve(rows, i: tl.constexpr, taps, b, W: tl.constexpr):
    """c of the token whose window begins at row i."""
    c = rows[i].to(tl.float32) * taps[0] + b
    for j in tl.static_range(1, W):
        c += rows[i + j].to(tl.float32) * taps[j]
    return c


@triton.jit
def part_of_block(block, channels, HEAD: tl.constexpr, KEYS: tl.constexpr):
    """Where the queries, keys or values that a block of channels belongs to begin, and how many channels they have."""
    first = block * HEAD
    begin = tl.minimum(first // KEYS, 2) * KEYS
    return begin, tl.where(begin < 2 * KEYS, KEYS, channels - 2 * KEYS)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    x, weight, bias, window, edges, y, final, stride_b, stride_t, stride_g, time, count, channels, blocks, per_group, steps, eps,
    HEAD: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, R: tl.constexpr, L: tl.constexpr, SILU: tl.constexpr,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """KEYS: the channels of queries, as many of keys follow, and values behind them. y then has the three one after another. The
    norm is that of queries and keys alone, of numbers that are rounded first. 0 where all channels are alike."""
    if ALIGN > 1:  # Triton compiles a stride of 1 in as a constant
        stride_b, stride_t = tl.multiple_of(stride_b, ALIGN), tl.multiple_of(stride_t, ALIGN)
        stride_g, channels = tl.multiple_of(stride_g, ALIGN), tl.multiple_of(channels, ALIGN)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    n, start, length, first = find_segments(tile, edges, time, count, steps, 0, L, R, PACKED)
    lane = tl.arange(0, BD)
    column = block * HEAD + lane
    x_column = place_block(block, per_group, stride_g, HEAD) + lane
    inside = (lane < HEAD) & (column < channels)
    at = start.to(tl.int64) * stride_t if PACKED else n.to(tl.int64) * stride_b
    rows = ()
    for i in tl.static_range(L + W - 1):
        place = first + (i - (W - 1))
        e = load_row(
            x, (at, stride_t), x_column, column, inside, place, length, window, n, channels, W, HAS_WINDOW and i < W - 1
        )
        rows = rows + (e,)
    taps, b = load_filter(weight, bias, column, inside, W, HAS_BIAS)
    y_column, y_channels = column, channels
    if KEYS > 0:
        begin, y_channels = part_of_block(block, channels, HEAD, KEYS)
        tokens = (time if PACKED else count * time).to(tl.int64)
        y, y_column = y + begin * tokens, column - begin
    for i in tl.static_range(L):
        s = convolve(rows, i, taps, b, W)
        if SILU:
            s = s * sigmoid(s)
        if KEYS > 0:
            s = s.to(y.dtype.element_ty).to(tl.float32)
        if NORM:
            r = tl.rsqrt(tl.sum(s * s, 1) + eps)
            if KEYS > 0:
                r = tl.where(block * HEAD < 2 * KEYS, r, 1.0)
            s = s * r[:, None]
        place = first + i
        at_y = (start + place).to(tl.int64) * y_channels
        tl.store(
            y + at_y[:, None] + y_column[None, :], s.to(y.dtype.element_ty), (place < length)[:, None] & inside[None, :]
        )
    if KEEP:  # the last W-1 inputs, by the sequence's last segment
        for i in tl.static_range(L + W - 1):
            place = first + (i - (W - 1))
            kept = place - length + W - 1
            at_final = (n * (W - 1) + kept).to(tl.int64) * channels
            last = (place < length) & (kept >= 0) & (first + L >= length)
            tl.store(final + at_final[:, None] + column[None, :], rows[i], last[:, None] & inside[None, :])


@triton.jit
def convolution_gradient(dy, c, eps, SILU: tl.constexpr, NORM: tl.constexpr):
    """dc [R, BD] of dy and c. A place has the same bits wherever a segment begins: no difference here leaves the compiler
    a choice of the product that it fuses."""
    dc = dy.to(tl.float32)
    gate = sigmoid(c) if SILU else 1.0
    s = c * gate
    if NORM:
        r = tl.rsqrt(tl.sum(s * s, 1) + eps)[:, None]
        dc = r * (dc - s * (r * r * tl.sum(s * dc, 1)[:, None]))
    if SILU:
        dc = dc * (gate + s * (1 - gate))
    return dc


@triton.jit
def last_rows(rows, W: tl.constexpr, dropped: tl.constexpr):
    """W-1 rows after the dropped ones."""
    kept = ()
    for j in tl.static_range(W - 1):
        kept = kept + (rows[dropped + j],)
    return kept


@triton.jit
def load_step(
    x, dy, x_row, dy_row, x_column, column, inside, place, stop, channels, n, W: tl.constexpr, U: tl.constexpr
):
    """The rows of x and dy at U places from `locate_rows` on."""
    rows, d_rows = (), ()
    for i in tl.static_range(U):
        rows = rows + (load_row(x, x_row, x_column, column, inside, place + i, stop, x, n, channels, W, False),)
        d_rows = d_rows + (load_row(dy, dy_row, column, column, inside, place + i, stop, dy, n, channels, W, False),)
    return rows, d_rows


@triton.jit(do_not_specialize=[*VARYING, "L"])
def backward_kernel(
    x, weight, bias, window, edges, dy, dfinal, dx, dwindow, dw_sums, db_sums,
    stride_b, stride_t, stride_g, dy_stride_b, dy_stride_t, dx_stride_b, dx_stride_t, dx_stride_g,
    time, count, channels, sum_channels, blocks, per_group, steps, eps, L,
    HEAD: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, R: tl.constexpr, U: tl.constexpr, SILU: tl.constexpr,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """dx of L places from `first` on, sums over the L tokens from first + W - 1 on: what both need of c begins at `first`."""
    if ALIGN > 1:  # Triton compiles a stride of 1 in as a constant
        stride_b, stride_t = tl.multiple_of(stride_b, ALIGN), tl.multiple_of(stride_t, ALIGN)
        dy_stride_b, dy_stride_t = tl.multiple_of(dy_stride_b, ALIGN), tl.multiple_of(dy_stride_t, ALIGN)
        dx_stride_b, dx_stride_t = tl.multiple_of(dx_stride_b, ALIGN), tl.multiple_of(dx_stride_t, ALIGN)
        stride_g, dx_stride_g = tl.multiple_of(stride_g, ALIGN), tl.multiple_of(dx_stride_g, ALIGN)
        channels = tl.multiple_of(channels, ALIGN)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    n, start, length, first = find_segments(tile, edges, time, count, steps, W - 1, L, R, PACKED)
    lane = tl.arange(0, BD)
    column = block * HEAD + lane
    x_column = place_block(block, per_group, stride_g, HEAD) + lane
    dx_column = place_block(block, per_group, dx_stride_g, HEAD) + lane
    inside = (lane < HEAD) & (column < channels)
    x_row = (start.to(tl.int64) * stride_t if PACKED else n.to(tl.int64) * stride_b, stride_t)
    dy_row = (start.to(tl.int64) * dy_stride_t if PACKED else n.to(tl.int64) * dy_stride_b, dy_stride_t)
    dx_start = start.to(tl.int64) * dx_stride_t if PACKED else n.to(tl.int64) * dx_stride_b
    stop = tl.minimum(length, first + (L + W - 1))
    taps, b = load_filter(weight, bias, column, inside, W, HAS_BIAS)
    before, early, dc_before, dw = (), (), (), ()
    for i in tl.static_range(W - 1):
        place = first + (i - (W - 1))
        e = load_row(x, x_row, x_column, column, inside, place, stop, window, n, channels, W, HAS_WINDOW)
        before = before + (e,)
    for i in tl.static_range(W - 1):
        e = load_row(x, x_row, x_column, column, inside, first + i, stop, window, n, channels, W, HAS_WINDOW)
        d = load_row(dy, dy_row, column, column, inside, first + i, stop, dy, n, channels, W, False)
        before = before + (e,)
        early = early + (d,)
    next_x, next_dy = load_step(
        x, dy, x_row, dy_row, x_column, column, inside, first + (W - 1), stop, channels, n, W, U
    )
    for i in tl.static_range(W - 1):
        c = convolve(before, i, taps, b, W)
        dc_before = dc_before + (convolution_gradient(early[i], c, eps, SILU, NORM),)
    x_before = last_rows(before, W, W - 1)
    for _ in tl.static_range(W):
        dw = dw + (tl.zeros((R, BD), tl.float32),)
    db = tl.zeros((R, BD), tl.float32)
    for step in range(0, L, U):
        rows, d_rows = x_before + next_x, next_dy
        next_x, next_dy = load_step(
            x, dy, x_row, dy_row, x_column, column, inside, first + step + (W - 1 + U), stop, channels, n, W, U
        )
        dc_rows = dc_before
        for i in tl.static_range(U):
            dc = convolution_gradient(d_rows[i], convolve(rows, i, taps, b, W), eps, SILU, NORM)
            dc_rows = dc_rows + (dc,)
            if HAS_BIAS:
                db += dc
            sums = ()
            for j in tl.static_range(W):
                sums = sums + (dw[j] + dc * rows[i + j].to(tl.float32),)
            dw = sums
            de = dc * taps[0]
            for j in tl.static_range(1, W):
                de += dc_rows[i + W - 1 - j] * taps[j]
            place = first + step + i
            here = place < length
            if KEEP:
                kept = place - length + W - 1
                at_kept = (n * (W - 1) + kept).to(tl.int64) * channels
                added = (here & (kept >= 0))[:, None] & inside[None, :]
                de += tl.load(dfinal + at_kept[:, None] + column[None, :], added, 0.0).to(tl.float32)
            at_dx = dx_start + place.to(tl.int64) * dx_stride_t
            to_x = (here & (place >= 0))[:, None] & inside[None, :]
            tl.store(dx + at_dx[:, None] + dx_column[None, :], de.to(dx.dtype.element_ty), to_x)
            if HAS_WINDOW:
                at_window = (n * (W - 1) + place + W - 1).to(tl.int64) * channels
                to_window = (place < 0)[:, None] & inside[None, :]
                tl.store(dwindow + at_window[:, None] + column[None, :], de.to(dwindow.dtype.element_ty), to_window)
        x_before, dc_before = last_rows(rows, W, U), last_rows(dc_rows, W, U)
    at_sums = tile.to(tl.int64) * sum_channels + column
    for j in tl.static_range(W):
        tl.store(dw_sums + at_sums * W + j, tl.sum(dw[j], 0), inside)
    if HAS_BIAS:
        tl.store(db_sums + tile.to(tl.int64) * channels + column, tl.sum(db, 0), inside)


class Tiling(NamedTuple):
    """How one launch divides x [B, T, D] or [B, T, G, C]: tiles of `rows` segments of `places` each over blocks of `head`
    channels."""

    tiles: int
    rows: int
    places: int
    blocks: int
    per_group: int  # of the blocks
    head: int
    sequences: int
    steps: int  # of the bisection
    warps: int

    @property
    def duration(self) -> int:
        """Of the launch, in places of a program: those that run at the same time end together."""
        return -(-self.tiles * self.blocks // AT_ONCE) * (self.places + BEFORE_FIRST)


def choose_tiling(
    x: Tensor, edges: Tensor | None, head: int | None, lead: int, places: Sequence[int], row_bytes: int
) -> Tiling:
    """Segments of at most one of `places`; a thread holds row_bytes of a row, or more where a warp would not hold the row."""
    return _choose_tiling(
        x.shape, x.element_size(), None if edges is None else len(edges) - 1, head, lead, places, row_bytes
    )


def choose_backward_tiling(x: Tensor, edges: Tensor | None, head: int | None, taps: int) -> Tiling:
    return choose_tiling(x, edges, head, taps - 1, BACKWARD_PLACES, 8)


@lru_cache(maxsize=256)
def _choose_tiling(
    shape: tuple[int, ...], item: int, packed: int | None, head: int | None, lead: int, places: Sequence[int],
    row_bytes: int,
) -> Tiling:  # fmt: skip
    tilings = (_divide(shape, item, packed, head, lead, most, row_bytes) for most in places)
    return min(tilings, key=lambda tiling: tiling.duration)


def _divide(
    shape: tuple[int, ...], item: int, packed: int | None, head: int | None, lead: int, places: int, row_bytes: int
) -> Tiling:
    batch, time, within = *shape[:2], shape[-1]
    channels = math.prod(shape[2:])
    count = batch if packed is None else packed
    longest = max((time if packed is None else -(-time // max(count, 1))) + lead, 1)
    places = min(places, padded(longest, 1))
    segments = batch * -(-longest // places) if packed is None else (time + count * lead) // places + count
    head = head or (min(padded(channels, 1), 128) if within == channels else math.gcd(within, 128))
    row = padded(head, 1) * item
    row_bytes = min(max(row_bytes, row // 32), 16)
    blocks = -(-channels // head)
    rows = max(1, THREADS * row_bytes // row)
    while rows > 1 and segments * blocks < ENOUGH_PROGRAMS * rows:
        rows //= 2
    warps = min(max(rows * row // (32 * row_bytes), 1), THREADS // 32)
    steps = max(count - 1, 0).bit_length()
    return Tiling(-(-segments // rows), rows, places, blocks, -(-within // head), head, count, steps, warps)


def group_stride(x: Tensor) -> int:
    """Of x [B, T, G, C]; 0 for x [B, T, D]."""
    return x.stride(2) if x.ndim == 4 else 0


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    edges: Tensor | None,
    silu: bool,
    head: int | None,
    eps: float,
    keep: bool,
    keys: int = 0,
) -> tuple[Tensor, Tensor]:
    """y of the shape of x [B, T, D] or [B, T, G, C], and the last W-1 inputs [N, W-1, D] if `keep`; nothing is checked. keys:
    KEYS of the kernel, whose heads of `head` channels then are those of queries and keys."""
    x, weight = make_rows_contiguous(x), weight.contiguous()
    tiling = choose_tiling(x, edges, head, 0, FORWARD_PLACES, 16)
    channels, taps = weight.shape
    y = x.new_empty(x.shape)
    final = x.new_empty(tiling.sequences, taps - 1, channels) if keep else x.new_empty(0)
    launch(
        forward_kernel, (tiling.tiles * tiling.blocks,), x, weight, bias, None if window is None else window.contiguous(),
        edges, y, final, *x.stride()[:2], group_stride(x), x.shape[1], tiling.sequences, channels, tiling.blocks,
        tiling.per_group, tiling.steps, eps, W=taps, SILU=silu, NORM=head is not None, HAS_BIAS=bias is not None,
        HAS_WINDOW=window is not None, KEEP=keep, PACKED=edges is not None, HEAD=tiling.head, BD=padded(tiling.head, 1),
        R=tiling.rows, L=tiling.places, ALIGN=alignment(*x.stride()[:2], group_stride(x), channels), KEYS=keys,
        num_warps=tiling.warps,
    )  # fmt: skip
    return y, final


def backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    edges: Tensor | None,
    silu: bool,
    head: int | None,
    eps: float,
    dx: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and window (None where these are). That of x is written into dx, where it is given. sums:
    float32 [tiles, D, W], whose sum over the tiles becomes the gradient of the weight, which is then not returned; its rows may
    lie apart."""
    dy = dy.flatten(2) if dy.ndim == 4 else dy
    x, dy, weight = make_rows_contiguous(x), make_rows_contiguous(dy), weight.contiguous()
    channels, taps = weight.shape
    tiling = choose_backward_tiling(x, edges, head, taps)
    step = min(BACKWARD_STEP[4 if taps <= 4 else 8], tiling.places)
    is_plain = bias is None and window is None and dfinal is None  # others would spill, within the loop too
    suffices = is_plain and taps <= 4 and x.element_size() == 2 and tiling.head <= 128
    registers = FEW_REGISTERS if suffices else None
    dx = x.new_empty(x.shape) if dx is None else dx
    window = None if window is None else window.contiguous()
    dwindow = None if window is None else torch.empty_like(window)
    dw = torch.empty((tiling.tiles, *weight.shape), device=x.device, dtype=torch.float32) if sums is None else sums
    db = None if bias is None else torch.empty((tiling.tiles, channels), device=x.device, dtype=torch.float32)
    strides = *x.stride()[:2], group_stride(x), *dy.stride()[:2], *dx.stride()[:2], group_stride(dx)
    launch(
        backward_kernel, (tiling.tiles * tiling.blocks,), x, weight, bias, window, edges, dy,
        None if dfinal is None else dfinal.contiguous(), dx, dwindow, dw, db, *strides, x.shape[1], tiling.sequences, channels,
        dw.stride(0) // taps, tiling.blocks, tiling.per_group, tiling.steps, eps, tiling.places, W=taps, SILU=silu,
        NORM=head is not None, HAS_BIAS=bias is not None, HAS_WINDOW=window is not None, KEEP=dfinal is not None,
        PACKED=edges is not None, HEAD=tiling.head, BD=padded(tiling.head, 1), R=tiling.rows, U=step,
        ALIGN=alignment(*strides, channels), num_warps=tiling.warps, maxnreg=registers,
    )  # fmt: skip
    dbias = None if bias is None or db is None else sum_tiles(db, bias.dtype)
    return dx, sum_tiles(dw, weight.dtype) if sums is None else None, dbias, dwindow
