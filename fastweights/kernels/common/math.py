"""Device functions that kernels share: decays, NaN and infinity, exponentials, fetching ahead."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# A decay of exp(-40) is as good as 0, and sums over a chunk stay small enough for float32.
STRONGEST = tl.constexpr(-40.0)
LARGEST_LOG_RATE = tl.constexpr(44.0)  # as ops/step_decay has it
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamp_decay(g):
    """A log decay in base 2, not below what counts as 0; NaN stays NaN."""
    g = g.to(tl.float32)
    return tl.where(g < STRONGEST, STRONGEST, g) * LOG2E


@triton.jit
def is_bad(x):
    return ~(tl.abs(x.to(tl.float32)) < float("inf"))


@triton.jit
def infinite_to_nan(x):
    """x, infinities as NaN."""
    return tl.where(is_bad(x), float("nan"), x)


@triton.jit
def to_float_or_nan(x):
    """x in float32, infinities as NaN."""
    return infinite_to_nan(x.to(tl.float32))


@triton.jit
def zero_where(x, bad):
    return tl.where(bad, 0.0, x.to(tl.float32)).to(x.dtype)


@triton.jit
def any_so_far(bad):
    """Whether a row or one above it is bad."""
    return tl.cumsum(bad.to(tl.int32), 0) > 0


@triton.jit
def has_bad_number(x):
    """Whether a product holds a bad number (or comes near the largest one). One sum over both axes: of a product that is summed
    over one axis after the other, Triton 3.6 and 3.7 compile nothing for Blackwell."""
    return is_bad(tl.sum(x))


@triton.jit
def exp2(x, PRECISION: tl.constexpr):
    """2^x, where results below 2^-126 may be 0 unless the inputs are float32."""
    if PRECISION == "tf32":
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def log2(x, PRECISION: tl.constexpr):
    """The hardware's own logarithm, to 2^-22, unless the inputs are float32."""
    return libdevice.fast_log2f(x) if PRECISION == "tf32" else tl.log2(x)


@triton.jit
def reciprocal(x, PRECISION: tl.constexpr):
    return libdevice.fast_dividef(1.0, x) if PRECISION == "tf32" else 1.0 / x


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the division by way of a square root, which takes fewer instructions. The square is an fma:
    the compiler fuses a product into some of the sums that read it and not into others, which would then have other bits."""
    root = tl.rsqrt(1 + tl.exp2(x * -LOG2E))  # Triton 3.7's interpreter keeps LOG2E * x as a constant
    return tl.fma(root, root, 0.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x))"""
    e = tl.exp(-tl.abs(x))  # of the logarithm of 1 + e float32 keeps little where e is small
    return tl.maximum(x, 0.0) + tl.where(e < 1e-3, e - 0.5 * e * e, tl.log(1 + e))


@triton.jit
def log_rate_and_rest(A_log):
    """A_log as far as it counts, NaN as NaN, and what is above."""
    A_log = A_log.to(tl.float32)
    rest = tl.where(A_log > LARGEST_LOG_RATE, A_log - LARGEST_LOG_RATE, 0.0)
    return A_log - rest, rest


@triton.jit
def prefetch(address):
    """Fetch the cache lines at these addresses (int64) into the L1 cache. The interpreter lacks the instruction."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
