"""The Kalman filter of a drifting memory: what Gated KalmaNet starts from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, op, sequential
from ..framework.checks import Sizes
from ..framework.spec import Case, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["kalman_filter"]


def filter_macs(K: int, V: int, C: int = 64) -> float:
    return 3 * K * V + 2 * K**2 + C * (5 * K + 1.5 * V) + C**2


def first_covariance(sizes: Sizes, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(sizes.K, dtype=dtype, device=device).repeat(count, sizes.G, 1, 1)


SPEC = OpSpec(
    name="kalman_filter",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "noise": roles.POSITIVE_GAIN,
        "process_noise": roles.optional(replace(roles.POSITIVE_GAIN, dims=roles.CHANNEL_LOG_DECAY.dims)),
        "g": roles.optional(roles.CHANNEL_LOG_DECAY),
    },
    states={
        "S": State("GKV", by_column=True),
        "P": State(
            "GKK", symmetric=True, depends_on=("k", "noise", "process_noise", "g", "P"), first=first_covariance, begins="I"
        ),
    },
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={"reference": sequential(reference), "torch": chunkwise(chunked)},
    cases={"plain": Case(), "channel": Case(given={"g": "GK", "process_noise": "GK"})},
    equation="P' = a P a + Q; G = P' k / (k^T P' k + r); S = a S + G (v - (a S)^T k)^T; P = P' - G k^T P'; o = S^T q",
    macs=filter_macs,
)  # fmt: skip


@op(SPEC)
def kalman_filter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    noise: Tensor,
    process_noise: Tensor | None = None,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""Hold, at every token, the most probable memory that drifts and of which keys and values are noisy observations.

    The columns s of the memory follow $s_t = A_t s_{t-1} + w_t$, $w_t \sim N(0, Q_t)$, and are observed as
    $v_t = k_t^\top s_t + n_t$, $n_t \sim N(0, r_t)$, with $A_t = \mathrm{Diag}(e^{g_t})$, $Q_t$ = Diag(process_noise),
    $r_t$ = noise. The filter (Gated KalmaNet, eq. 12 to 14, without inputs $B_t u_t$; P is its $\Sigma$) is

    $$P' = A_t P_{t-1} A_t + Q_t, \qquad G_t = \frac{P' k_t}{k_t^\top P' k_t + r_t}, \qquad P_t = P' - G_t k_t^\top P'$$

    $$S_t = A_t S_{t-1} + G_t (v_t - (A_t S_{t-1})^\top k_t)^\top, \qquad o_t = S_t^\top (\mathrm{scale}\; q_t)$$

    from $P_0 = I$. A prior $\sigma I$ is noise and process noise divided by $\sigma$, or an initial state. Without process noise
    and decay this is `recursive_least_squares` with beta = 1 / noise. With a decay the two differ: there old tokens lose weight,
    here the memory shrinks to 0, and its uncertainty with it.

    It has an exact chunkwise form, with process noise too: the observations of a chunk are jointly Gaussian, and one Cholesky
    factor of their covariance conditions on every prefix of them (docs/rules.md has the derivation). Everything inside is
    float64. There are no kernels.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64. Keys usually have unit length.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        noise: r, variance of an observation, at least 0; below 1e-6 it counts as 1e-6. [B, T, HV] (or H heads, repeated
            likewise). Any float dtype.
        process_noise: the diagonal of Q, variances at least 0, None for 0, [B, T, HV] or [B, T, HV, K] (or H heads). Any float
            dtype.
        g: the logarithm of the diagonal of A (natural, at most 0, -inf included), None for 0, [B, T, HV] or [B, T, HV, K] (or H
            heads). Any float dtype.
        scale: factor on q, K^-0.5 by default.
        initial_state: (S [N, HV, K, V], P [N, HV, K, K] symmetric, positive semidefinite) before the first token; zeros and I
            when None. N is B, or the number of packed sequences.
        output_final_state: whether to return (S, P) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" or "auto" (chunkwise, exact).

    Returns:
        o [B, T, HV, V] in v's dtype, and (S, P) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, negative noise, positive g, cu_seqlens or backend that does not fit; the message says
            which.
        TypeError: an argument of the wrong kind.
    """
    inputs = (q, k, v, noise, process_noise, g)
    return call(SPEC, inputs, {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend)
