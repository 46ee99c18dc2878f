"""The kernels of fading attention. One program per sequence and head holds S [K, V] in registers.

Backwards, with dS the gradient of the state after a token:

    dS_t += q do^T       dq = S_t do            dk = beta dS_t v
    dv = beta dS_t^T k   dbeta = k^T dS_t v     dS_{t-1} = keep dS_t

dq needs the states and is computed from the first token to the last; the others need dS alone, from the last to the first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastweights.kernels.chunk.sizes import CallSizes
from fastweights.kernels.chunk.tiles import padded
from fastweights.kernels.math import float_or_nan, or_nan
from fastweights.kernels.packing import tokens_of_sequence
from fastweights.ops.authoring import Rule


class FadingInputs(NamedTuple):
    """Named as the op's inputs and states. S and cu_seqlens may be None."""

    q: Any
    k: Any
    v: Any
    beta: Any
    S: Any = None
    cu_seqlens: Any = None


@triton.jit
def load_row(x, token, head, HV, GROUP: tl.constexpr, WIDTH: tl.constexpr, channel):
    """The row of a token in x [tokens, HV // GROUP, WIDTH], of the key head of this value head; infinity as NaN."""
    at = x + (token * (HV // GROUP) + head // GROUP) * WIDTH + channel
    return float_or_nan(tl.load(at, channel < WIDTH, 0.0))


@triton.jit(do_not_specialize=["T"])
def read_forward(
    q, k, v, beta, start, o, end, do, dq, cu_seqlens, T, scale, keep, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr,
    GROUP_K: tl.constexpr, GROUP_BETA: tl.constexpr,
):  # fmt: skip
    """The outputs o [tokens, HV, V] and the last states end [N, HV, K, V]; or, where do is given, dq [tokens, HV, K]."""
    n, head = tl.program_id(0), tl.program_id(1)
    channel, column = tl.arange(0, PK), tl.arange(0, PV)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    at = (n.to(tl.int64) * HV + head) * K * V + channel[:, None] * V + column[None, :]
    inside = (channel < K)[:, None] & (column < V)[None, :]
    S = tl.zeros((PK, PV), tl.float32) if start is None else float_or_nan(tl.load(start + at, inside, 0.0))
    for i in range(0, count):
        token = first + i
        key, value = load_row(k, token, head, HV, GROUP_K, K, channel), load_row(v, token, head, HV, 1, V, column)
        gain = float_or_nan(tl.load(beta + token * (HV // GROUP_BETA) + head // GROUP_BETA))
        S = keep * S + key[:, None] * (gain * value)[None, :]
        if do is None:
            query = load_row(q, token, head, HV, GROUP_K, K, channel) * scale
            answer = or_nan(tl.sum(S * query[:, None], 0))
            tl.store(o + (token * HV + head) * V + column, answer.to(o.dtype.element_ty), column < V)
        else:
            grad = load_row(do, token, head, HV, 1, V, column) * scale
            of_query = or_nan(tl.sum(S * grad[None, :], 1))
            tl.store(dq + (token * HV + head) * K + channel, of_query.to(dq.dtype.element_ty), channel < K)
    if end is not None:
        tl.store(end + at, or_nan(S), inside)


@triton.jit(do_not_specialize=["T"])
def read_backward(
    q, k, v, beta, do, d_end, dk, dv, dbeta, d_start, cu_seqlens, T, scale, keep, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, PV: tl.constexpr,
    GROUP_K: tl.constexpr, GROUP_BETA: tl.constexpr,
):  # fmt: skip
    """dk [tokens, HV, K], dv [tokens, HV, V], dbeta [tokens, HV] and, unless it is None, d_start [N, HV, K, V]."""
    n, head = tl.program_id(0), tl.program_id(1)
    channel, column = tl.arange(0, PK), tl.arange(0, PV)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    at = (n.to(tl.int64) * HV + head) * K * V + channel[:, None] * V + column[None, :]
    inside = (channel < K)[:, None] & (column < V)[None, :]
    dS = tl.zeros((PK, PV), tl.float32) if d_end is None else float_or_nan(tl.load(d_end + at, inside, 0.0))
    for i in range(count - 1, -1, -1):
        token = first + i
        query = load_row(q, token, head, HV, GROUP_K, K, channel) * scale
        key, value = load_row(k, token, head, HV, GROUP_K, K, channel), load_row(v, token, head, HV, 1, V, column)
        gain = float_or_nan(tl.load(beta + token * (HV // GROUP_BETA) + head // GROUP_BETA))
        dS += query[:, None] * load_row(do, token, head, HV, 1, V, column)[None, :]
        of_key, of_value = tl.sum(dS * value[None, :], 1), tl.sum(dS * key[:, None], 0)
        to_key, to_value = dk + (token * HV + head) * K + channel, dv + (token * HV + head) * V + column
        tl.store(to_key, or_nan(gain * of_key).to(dk.dtype.element_ty), channel < K)
        tl.store(to_value, or_nan(gain * of_value).to(dv.dtype.element_ty), column < V)
        tl.store(dbeta + token * HV + head, or_nan(tl.sum(of_value * value, 0)).to(dbeta.dtype.element_ty))
        dS = keep * dS
    if d_start is not None:
        tl.store(d_start + at, or_nan(dS), inside)


def constants(sizes, x):
    """What is compiled in: widths, their powers of two, and how many value heads a head serves."""
    return {
        "K": sizes.K, "PK": padded(sizes.K), "V": sizes.V, "PV": padded(sizes.V), "GROUP_K": sizes.group(x.k),
        "GROUP_BETA": sizes.group(x.beta),
    }  # fmt: skip


def shapes(x, device, options, final):
    """o and S, and what a backward needs: nothing but the inputs."""
    sizes = CallSizes(x)
    return (sizes.per_token(sizes.HV, sizes.V), sizes.state(sizes.N) if final else None), ()


def forward(recorder, x, device, options, final):
    (scale, keep), sizes = options, CallSizes(x)
    (o, end), saved = shapes(x, device, options, final)
    recorder.launch(
        read_forward, (sizes.N, sizes.HV), *x[:5], o, end, None, None, x.cu_seqlens, sizes.T, scale, keep, sizes.HV,
        **constants(sizes, x),
    )  # fmt: skip
    return (o, end), saved


def backward(recorder, x, device, options, saved, output_grads, state_grads):
    (scale, keep), (do, d_end), sizes = options, output_grads, CallSizes(x)
    dq, dk = (sizes.per_token(sizes.HV, sizes.K) for _ in range(2))
    dv, dbeta = sizes.per_token(sizes.HV, sizes.V), sizes.per_token(sizes.HV, dtype=x.beta.dtype)
    d_start = sizes.state(sizes.N) if state_grads and x.S is not None else None
    grid, rest = (sizes.N, sizes.HV), (x.cu_seqlens, sizes.T, scale, keep, sizes.HV)
    recorder.launch(read_forward, grid, *x[:5], None, None, do, dq, *rest, **constants(sizes, x))
    recorder.launch(read_backward, grid, *x[:4], do, d_end, dk, dv, dbeta, d_start, *rest, **constants(sizes, x))
    return FadingInputs(dq, dk, dv, dbeta, d_start)


FADING = Rule(shapes, forward, backward)
