"""The ridge systems of all tokens of a chunk, solved in one program: see the derivation in __init__."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.math import any_so_far, infinite_to_nan, is_bad, zero_where
from ..common.packing import live_tokens, program_chunk
from ..common.tiles import load_rows, row_places
from .chunk import decay_factors, load_gain, load_sum_of_two, store_in_two

SMALLEST_RIDGE = tl.constexpr(1e-6)  # the ridge without any key so far, as in the PyTorch form
SMALLEST = tl.constexpr(1e-30)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)  # of float32; numbers below it have fewer bits
QUARTER = tl.constexpr(0.7853981633974483)  # of pi


@triton.jit
def row_sizes(x, WIDTH: tl.constexpr):
    """About the length of every row, up to a factor sqrt(WIDTH) more; NaN or infinity where the row holds one."""
    return tl.sum(tl.abs(x), 1) * WIDTH**-0.5


@triton.jit
def exponent(x):
    """The integer below log2 x, as a float; -127 for 0."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255).to(tl.float32) - 127.0


@triton.jit
def power_of_two(x):
    """The largest one not above x, but at least 2^-126: division by it rounds nothing. A smaller x has exponent bits of 0, and
    division by 0 would make its row NaN."""
    return (tl.maximum(x, SMALLEST_NORMAL).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def chebyshev_root(j, count):
    """Root j of so many of the Chebyshev polynomial on [0, 1], sin^2((2 j + 1) pi / (4 count)) by its series."""
    y = (2 * j + 1) * QUARTER / count
    z = y * y
    sine = y * (1 - z / 6 * (1 - z / 20 * (1 - z / 42 * (1 - z / 72 * (1 - z / 110)))))
    return sine * sine


@triton.jit
def apply_system(x, keys, H, weights, kept, acc, PRECISION: tl.constexpr):
    """acc + kept x H + (weights * x keys^T) keys."""
    inner = tl.dot(x, tl.trans(keys), input_precision=PRECISION).to(x.dtype) * weights
    acc = tl.dot(x * kept[:, None].to(x.dtype), H, acc, input_precision=PRECISION)
    return tl.dot(inner, keys, acc, input_precision=PRECISION)


@triton.jit
def chebyshev(b, size, keys, H, weights, kept, low, iterations, stride, WORK: tl.constexpr, PRECISION: tl.constexpr):
    """The iterate for the right-hand sides size b, with eigenvalues in [low, 1 + low]: steps 1 / root along the residual, the
    roots those of the Chebyshev polynomial, taken `stride` apart."""
    count = iterations + 1
    turn = 0
    x = (size / (low + chebyshev_root(turn, count)))[:, None] * b.to(tl.float32)
    for _ in range(iterations):
        turn = (turn + stride) % count
        step = 1.0 / (low + chebyshev_root(turn, count))
        # Factors in 16 bits: a product of two 16-bit numbers is not moved out of the loop, where it would fill registers.
        now = x.to(WORK) * (-step)[:, None].to(WORK)
        acc = (1.0 - step * low)[:, None] * x + (b * (step * size)[:, None].to(WORK)).to(tl.float32)
        x = apply_system(now, keys, H, weights, kept, acc, PRECISION)
    return x


@triton.jit
def conjugate_gradient(
    b, keys, H, weights, kept, low, channels, iterations, WORK: tl.constexpr, PRECISION: tl.constexpr
):
    """From zero, for the ridge low [64], times twice channels [K] unless None. b has at least the length 1, is 0, or is shorter
    where `power_of_two` has no smaller unit. A row whose residual is smaller than the operands' rounding keeps its bits, so that
    no row depends on how long the others take."""
    enough: tl.constexpr = 2.0**-13 if PRECISION == "tf32" else 2.0**-26
    residual = b.to(tl.float32)
    x = tl.zeros(b.shape, tl.float32)
    length = tl.sqrt(tl.maximum(tl.sum(residual * residual, 1), SMALLEST))
    direction = (residual * (1.0 / length)[:, None]).to(WORK)  # over the length of the residual
    left = iterations
    while left > 0:
        # A factor in 16 bits: the ridge in float32 would be moved out of the loop, the direction in float32 kept for later.
        image = 2 * low[:, None] * (direction * (0.5 if channels is None else channels[None, :])).to(tl.float32)
        image = apply_system(direction, keys, H, weights, kept, image, PRECISION)
        # The best step along the direction as it was rounded.
        curvature = tl.abs(tl.sum(direction.to(tl.float32) * image, 1))
        step = tl.sum(direction.to(tl.float32) * residual, 1) / tl.maximum(curvature, SMALLEST)
        step = tl.where(length < enough, 0.0, step)
        x += step[:, None] * direction.to(tl.float32)
        residual -= step[:, None] * image
        before = length
        length = tl.sqrt(tl.maximum(tl.sum(residual * residual, 1), SMALLEST))
        turn = length / before
        direction = (residual * (1.0 / length)[:, None] + turn[:, None] * direction.to(tl.float32)).to(WORK)
        left = tl.where(tl.max(tl.reshape(length, (8, 8))) < enough, 0, left - 1)
    return x


@triton.jit
def scale_keys(keys, bad, unit, WORK: tl.constexpr):
    """Keys over a power of two each, so that they are about of length 1; 0 where they are bad."""
    return (zero_where(keys, bad[:, None]).to(tl.float32) * (1.0 / unit)[:, None]).to(WORK)


@triton.jit
def weigh_systems(keys, gain, energies, decay, outside, PRECISION: tl.constexpr):
    """Of the systems of a chunk in units in which 16-bit operands serve, keys of about length 1, H of Frobenius norm 1, rows of
    norm 1: the weights of the keys in every row [64, 64], what a row keeps of H, and the norms |H_t|_F of before [64]. energies:
    k^T H k; outside: the norm of H."""
    i = tl.arange(0, 64)
    lower = i[:, None] >= i[None, :]
    reach = decay + tl.maximum(tl.associative_scan(exponent(gain) - decay, 0, larger), exponent(outside))
    # Log of the largest weight of a row, about; `largest` is at most that weight in units of the row.
    largest = tl.exp2(tl.minimum(reach + 120.0, 0.0))
    reach = tl.maximum(reach, -120.0)
    weights = tl.exp2(tl.where(lower, decay[:, None] - decay[None, :], 0.0) - reach[:, None]) * gain[None, :]
    weights = tl.where(lower, weights, 0.0)
    kept = tl.exp2(decay - reach) * outside
    overlaps = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    inside = tl.dot(weights.to(keys.dtype), (overlaps * overlaps).to(keys.dtype), input_precision=PRECISION)
    inside += (2 * kept)[:, None] * energies[None, :]
    norm = tl.sqrt(tl.maximum(kept * kept + tl.sum(inside * weights, 1), SMALLEST))
    # Not below the norm of each of its terms, also where their products underflow: keys are at least 1 long.
    norm = tl.maximum(norm, largest)
    weights = (weights * (1.0 / norm)[:, None]).to(keys.dtype)
    return weights, kept / norm, tl.maximum(norm * tl.exp2(reach), 1e-15)


@triton.jit
def key_units(keys, beta, first, live, head, HV, PK: tl.constexpr, HEADS_BETA: tl.constexpr):
    """The power of two that every key is divided by, its gain then, and whether it is bad [64]."""
    unit = row_sizes(keys.to(tl.float32), PK)
    bad = is_bad(unit)
    unit = zero_where(unit, bad)
    is_zero = unit == 0.0
    unit = power_of_two(unit)
    # A key of zero writes nothing: its gain must not stand beside those of keys that strong decay has left small.
    gain = zero_where(load_gain(beta, first, live, head, HV, HEADS_BETA) * unit * unit, is_zero)
    return unit, gain, bad


@triton.jit(do_not_specialize=["time", "iterations", "stride"])
def solve_chunk(
    q, k, beta, gate, mix, diagonal, states, units, outsides, norms, dy, x_high, x_rest, e, y_high, y_rest, slope, dq, dmix,
    chunks, time, scale, ridge, iterations, stride, HV,
    K: tl.constexpr, PK: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr, HEADS_MIX: tl.constexpr,
    CHEBYSHEV: tl.constexpr, ADAPTIVE: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x and y [BT, HV, K], each the sum of two tensors; BACK: e from dy. states [M, HV, K, K]: H at the chunk's
    start; outsides [M, HV]: its norm, and units: H over that, which BACK reads. norms [BT, HV]: |H_t|_F; slope: w. diagonal
    [HV, K]: the ridge per channel, None for a number."""
    WORK: tl.constexpr = tl.float16 if PRECISION == "tf32" else tl.float32
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    decay, _ = decay_factors(gate, first, count, head, HV)
    at_row = first * HV + head + i * HV
    number = m.to(tl.int64) * HV + head
    at_H = number * (K * K) + c[:, None] * K + c[None, :]
    inside_H = (c < K)[:, None] & (c < K)[None, :]
    if BACK:
        H = tl.load(units + at_H, inside_H, 0.0)
        outside = tl.load(outsides + number)
    else:
        H = tl.load(states + at_H, inside_H, 0.0)
        outside = tl.sqrt(tl.sum(H * H))
        H = (H * (1.0 / tl.where(outside == 0.0, 1.0, outside))).to(WORK)
        tl.store(units + at_H, H, inside_H)
        tl.store(outsides + number, outside)
    keys = load_rows(k, first, live, head, HV, c, K, HEADS_K)
    unit, gain, bad = key_units(keys, beta, first, live, head, HV, PK, HEADS_BETA)
    keys = scale_keys(keys, bad, unit, WORK)
    energies = tl.sum(tl.dot(keys, H, input_precision=PRECISION) * keys.to(tl.float32), 1)
    weights, kept, norm = weigh_systems(keys, gain, energies, decay, outside, PRECISION)
    if ADAPTIVE:  # noqa: SIM108 (one is known when compiling)
        level = tl.maximum(ridge * norm, SMALLEST_RIDGE)
    else:
        level = tl.zeros((64,), tl.float32) + ridge

    if BACK:
        alpha = 1.0
        if mix is not None:
            alpha = tl.load(mix + first * (HV // HEADS_MIX) + head // HEADS_MIX + i * (HV // HEADS_MIX), live, 0.0)
            alpha = alpha.to(tl.float32)[:, None]
        b = load_rows(dy, first, live, head, HV, c, K, 1).to(tl.float32) * alpha
    else:
        b = load_rows(q, first, live, head, HV, c, K, HEADS_K).to(tl.float32) * scale
    size = power_of_two(row_sizes(b, PK))
    b = (b * (1.0 / size)[:, None]).to(WORK)
    if CHEBYSHEV:
        low = level / norm
        # So that the solution has at most about the size 1, and a step along it fits float16, for any ridge.
        begin = low * tl.minimum(1.0, 64.0 * (low + chebyshev_root(0, iterations + 1)))
        x = chebyshev(b, begin, keys, H, weights, kept, low, iterations, stride, WORK, PRECISION)
        x *= (size / (begin * norm))[:, None]
    else:
        channels = None
        if diagonal is not None:
            channels = tl.load(diagonal + head * K + c, c < K, 0.0).to(tl.float32)
            level = tl.zeros((64,), tl.float32) + tl.max(channels, 0)
            channels = (channels * (0.5 / tl.max(channels, 0))).to(WORK)
        x = conjugate_gradient(b, keys, H, weights, kept, level / norm, channels, iterations, WORK, PRECISION)
        x *= (size / norm)[:, None]
    x = tl.where(any_so_far(bad)[:, None], float("nan"), infinite_to_nan(x))

    at, here = row_places(first, live, head, HV, c, K, 1)
    if BACK:
        tl.store(e + at, x.to(e.dtype.element_ty), here)
        if slope is not None:
            along = tl.sum(x * load_sum_of_two(x_high, x_rest, first, live, head, HV, c, K), 1)
            w = tl.where(ridge * norm > SMALLEST_RIDGE, 2 * ridge * along / norm, 0.0)
            tl.store(slope + at_row, w, live)
        if mix is not None:
            down = load_rows(dy, first, live, head, HV, c, K, 1).to(tl.float32)
            queries = load_rows(q, first, live, head, HV, c, K, HEADS_K).to(tl.float32) * scale
            answers = load_sum_of_two(x_high, x_rest, first, live, head, HV, c, K)
            tl.store(dmix + at_row, tl.sum(down * (answers - queries), 1).to(dmix.dtype.element_ty), live)
            x += (1 - alpha) * down
        tl.store(dq + at, (x * scale).to(dq.dtype.element_ty), here)
    else:
        store_in_two(x, x_high + at, None if x_rest is None else x_rest + at, here)
        if norms is not None:
            tl.store(norms + at_row, norm, live)
        if y_high is not None:
            alpha = tl.load(mix + first * (HV // HEADS_MIX) + head // HEADS_MIX + i * (HV // HEADS_MIX), live, 0.0)
            queries = load_rows(q, first, live, head, HV, c, K, HEADS_K).to(tl.float32) * scale
            y = queries + alpha.to(tl.float32)[:, None] * (x - queries)
            store_in_two(y, y_high + at, None if y_rest is None else y_rest + at, here)


@triton.jit(do_not_specialize=["time"])
def prepare_systems(
    k, beta, gate, states, squares, units, outsides, norms, keys, weights, factors, chunks, time, HV,
    K: tl.constexpr, PK: tl.constexpr, BK: tl.constexpr, SQUARES: tl.constexpr, HEADS_K: tl.constexpr,
    HEADS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `solve_systems` takes of a chunk, in float16: keys [M, HV, 64, K] and weights [M, HV, 64, 64], see `weigh_systems`; in
    float32 factors [M, HV, 2, 64]: what rows keep of H, and their norms, NaN from a bad key on. states, units, outsides,
    norms: see `solve_chunk`; squares [M, HV, SQUARES]: sums of squares of H. H is read by BK columns, as registers for all of it
    would leave room for one program."""
    m, head, first, count = program_chunk(chunks, time)
    if count == 0:
        return
    i, live = live_tokens(count)
    c = tl.arange(0, PK)
    number = m.to(tl.int64) * HV + head
    at_H = number * (K * K) + c[:, None] * K + tl.arange(0, BK)[None, :]
    outside = tl.sqrt(tl.sum(tl.load(squares + number * SQUARES + tl.arange(0, SQUARES))))
    whole = load_rows(k, first, live, head, HV, c, K, HEADS_K)
    unit, gain, bad = key_units(whole, beta, first, live, head, HV, PK, HEADS_BETA)
    whole = scale_keys(whole, bad, unit, tl.float16)
    tl.store(keys + number * (64 * K) + i[:, None] * K + c[None, :], whole)
    energies = tl.zeros((64,), tl.float32)
    for k0 in range(0, K, BK):
        H = tl.load(states + at_H + k0) * (1.0 / tl.where(outside == 0.0, 1.0, outside))
        tl.store(units + at_H + k0, H.to(tl.float16))
        some = scale_keys(load_rows(k, first, live, head, HV, k0 + tl.arange(0, BK), K, HEADS_K), bad, unit, tl.float16)
        energies += tl.sum(tl.dot(whole, H.to(tl.float16), input_precision=PRECISION) * some.to(tl.float32), 1)
    decay, _ = decay_factors(gate, first, count, head, HV)
    weight, kept, norm = weigh_systems(whole, gain, energies, decay, outside, PRECISION)
    tl.store(outsides + number, outside)
    if norms is not None:
        tl.store(norms + first * HV + head + i * HV, norm, live)
    tl.store(weights + number * 4096 + i[:, None] * 64 + i[None, :], weight)
    tl.store(factors + number * 128 + i, kept)
    tl.store(factors + number * 128 + 64 + i, tl.where(any_so_far(bad), float("nan"), norm))
