"""The kernels of fading attention. One program per sequence and head holds S [K, V] in registers.

Backwards, with dS the gradient of the state after a token:

    dS_t += q do^T       dq = S_t do            dk = beta dS_t v
    dv = beta dS_t^T k   dbeta = k^T dS_t v     dS_{t-1} = keep dS_t

dq needs the states and is computed from the first token to the last; the others need dS alone, from the last to the first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastweights.kernels.common.call import Call, make_rule, padded
from fastweights.kernels.common.math import infinite_to_nan, to_float_or_nan
from fastweights.kernels.common.packing import tokens_of_sequence
from fastweights.kernels.common.tiles import token_address


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
    at = token_address(x, token, head, HV, GROUP, WIDTH) + channel
    return to_float_or_nan(tl.load(at, channel < WIDTH, 0.0))


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
    S = tl.zeros((PK, PV), tl.float32) if start is None else to_float_or_nan(tl.load(start + at, inside, 0.0))
    for i in range(0, count):
        token = first + i
        key, value = load_row(k, token, head, HV, GROUP_K, K, channel), load_row(v, token, head, HV, 1, V, column)
        gain = to_float_or_nan(tl.load(token_address(beta, token, head, HV, GROUP_BETA, 1)))
        S = keep * S + key[:, None] * (gain * value)[None, :]
        if do is None:
            query = load_row(q, token, head, HV, GROUP_K, K, channel) * scale
            answer = infinite_to_nan(tl.sum(S * query[:, None], 0))
            tl.store(o + (token * HV + head) * V + column, answer.to(o.dtype.element_ty), column < V)
        else:
            grad = load_row(do, token, head, HV, 1, V, column) * scale
            of_query = infinite_to_nan(tl.sum(S * grad[None, :], 1))
            tl.store(dq + (token * HV + head) * K + channel, of_query.to(dq.dtype.element_ty), channel < K)
    if end is not None:
        tl.store(end + at, infinite_to_nan(S), inside)


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
    dS = tl.zeros((PK, PV), tl.float32) if d_end is None else to_float_or_nan(tl.load(d_end + at, inside, 0.0))
    for i in range(count - 1, -1, -1):
        token = first + i
        query = load_row(q, token, head, HV, GROUP_K, K, channel) * scale
        key, value = load_row(k, token, head, HV, GROUP_K, K, channel), load_row(v, token, head, HV, 1, V, column)
        gain = to_float_or_nan(tl.load(token_address(beta, token, head, HV, GROUP_BETA, 1)))
        dS += query[:, None] * load_row(do, token, head, HV, 1, V, column)[None, :]
        of_key, of_value = tl.sum(dS * value[None, :], 1), tl.sum(dS * key[:, None], 0)
        to_key, to_value = dk + (token * HV + head) * K + channel, dv + (token * HV + head) * V + column
        tl.store(to_key, infinite_to_nan(gain * of_key).to(dk.dtype.element_ty), channel < K)
        tl.store(to_value, infinite_to_nan(gain * of_value).to(dv.dtype.element_ty), column < V)
        tl.store(dbeta + token * HV + head, infinite_to_nan(tl.sum(of_value * value, 0)).to(dbeta.dtype.element_ty))
        dS = keep * dS
    if d_start is not None:
        tl.store(d_start + at, infinite_to_nan(dS), inside)


class FadingCall(Call):
    """Options: scale and keep. Outputs: o and S (None unless it is wanted). A backward needs nothing but the inputs."""

    def launch_kernel(self, kernel, *arguments):
        x = self.x
        self.launch(
            kernel, (self.N, self.HV), x.q, x.k, x.v, x.beta, *arguments, x.cu_seqlens, self.T, *self.options, self.HV,
            K=self.K, PK=padded(self.K), V=self.V, PV=padded(self.V), GROUP_K=self.group(x.k), GROUP_BETA=self.group(x.beta),
        )  # fmt: skip

    def shapes(self, final):
        return (self.token_tensor(self.HV, self.V), self.state(self.N) if final else None), ()

    def forward(self, final):
        (o, end), saved = self.shapes(final)
        self.launch_kernel(read_forward, self.x.S, o, end, None, None)
        return (o, end), saved

    def backward(self, saved, output_grads, state_grads):
        do, d_end = output_grads
        dq, dk = (self.token_tensor(self.HV, self.K) for _ in range(2))
        dv, dbeta = self.token_tensor(self.HV, self.V), self.gate_gradient(self.x.beta)
        d_start = self.state(self.N) if state_grads and self.x.S is not None else None
        self.launch_kernel(read_forward, self.x.S, None, None, do, dq)
        self.launch_kernel(read_backward, do, d_end, dk, dv, dbeta, d_start)
        return FadingInputs(dq, dk, dv, dbeta, d_start)


FADING = make_rule(FadingCall)
