"""The Mesa layer: ridge regression on all past tokens, weighted by their decay, with a fixed ridge, by conjugate gradients."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, kernels, op, recurrent, sequential
from ..framework.passing import Passing, Sum
from ..framework.spec import Case, OpSpec, Output
from ..shared.ridge import ITERATIONS, RIDGE_DECODE, RIDGE_KERNELS, STATES, WIDEST, iteration_macs
from ..shared.ridge.forms import chunked, reference

__all__ = ["mesa"]

SPEC = OpSpec(
    name="mesa",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "g": roles.LOG_DECAY, "beta": roles.POSITIVE_GAIN,
        "ridge": roles.CHANNEL_RIDGE,
    },
    states=STATES,
    outputs={"o": Output("GV")},
    options={"iterations": ITERATIONS, "scale": roles.SCALE},
    backends={
        "reference": sequential(partial(reference, solver="conjugate_gradient")),
        "torch": chunkwise(partial(chunked, solver="conjugate_gradient")),
        "triton": kernels(RIDGE_KERNELS, widest=WIDEST, widest_in_float32=64),
    },
    recurrent=recurrent(RIDGE_DECODE, widest=WIDEST),
    cases={"": Case(options={"iterations": 16}, measured={"iterations": 30})},
    equation="H = a H + beta k k^T; U = a U + beta k v^T; o = U^T (H + Diag(ridge))^-1 q",
    macs=iteration_macs,
    passing=Passing(
        states={"H": Sum(x="k", y="k", decay="g", gain="beta"), "U": Sum(x="k", y="v", decay="g", gain="beta")}
    ),
)  # fmt: skip


@op(SPEC)
def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor | float,
    *,
    iterations: int = 30,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""Answer each query with the ridge regression of all values on all keys so far, with one ridge per key channel.

    $$H_t = a_t H_{t-1} + \beta_t k_t k_t^\top, \qquad U_t = a_t U_{t-1} + \beta_t k_t v_t^\top, \qquad a_t = e^{g_t}$$
    $$o_t = U_t^\top (H_t + \mathrm{Diag}(\mathrm{ridge}))^{-1} (\mathrm{scale}\; q_t)$$

    by `iterations` steps of conjugate gradients from zero (von Oswald et al. 2025; a baseline of Gated KalmaNet). The
    gradient is by implicit differentiation with the same number of steps: it is that of the exact solution once they have
    converged. Convergence takes more steps the larger |H_t| is relative to the ridge, and at most K in exact arithmetic.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive value heads.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), [B, T, HV] (or H heads, repeated likewise).
            Any float dtype.
        beta: gain of a token, at least 0, [B, T, HV] (or H heads). Any float dtype.
        ridge: positive, [HV, K] (or H heads). [HV] or a number is repeated over the channels.
        iterations: steps of conjugate gradients, 1 to 10,000. The kernels stop for a chunk of 64 tokens once all of its
            residuals are 2^-13 of their first values (2^-26 in float32), below the resolution of their operands.
        scale: factor on q, K^-0.5 by default.
        initial_state: (H [N, HV, K, K], U [N, HV, K, V]) before the first token; zeros when None. H must be
            symmetric positive semidefinite (not checked). N is B, or the number of packed sequences.
        output_final_state: whether to return (H, U) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise), "triton" (kernels; not in float64, K and V up to 128,
            in float32 up to 64) or "auto": kernels on CUDA where they serve, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and (H, U) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, negative beta, ridge, iterations, cu_seqlens or backend that does not fit;
            the message says which.
        TypeError: an argument of the wrong kind.
    """
    options = {"iterations": iterations, "scale": scale}
    return call(SPEC, (q, k, v, g, beta, ridge), options, initial_state, output_final_state, cu_seqlens, backend)
