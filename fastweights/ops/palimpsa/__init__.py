"""Palimpsa: a memory that keeps a mean and a precision for each of its elements."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..framework import roles
from ..framework.call import call, chunkwise, defer_decode, defer_family, kernels, op, recurrent, sequential
from ..framework.spec import Case, OpSpec, Output, State
from .forms import chunked, reference

__all__ = ["palimpsa", "palimpsa_posterior"]


name_family = partial(defer_family, "posterior.memory", "POSTERIOR", "PosteriorInputs", scale=1.0)
OF_MEAN, OF_IMPORTANCE = ("k", "v", "g", "M"), ("k", "beta", "g", "J")
SPEC = OpSpec(
    name="palimpsa",
    inputs={
        "q": roles.QUERY, "k": roles.KEY, "v": roles.VALUE, "beta": roles.VALUE_GAIN, "g": roles.LOG_DECAY,
        "prior": roles.PRIOR,
    },
    states={
        "M": State("GKV", by_column=True, depends_on=OF_MEAN),
        "J": State("GKV", by_column=True, depends_on=OF_IMPORTANCE),
    },
    outputs={"o": Output("GV")},
    options={"scale": roles.SCALE},
    backends={
        "reference": sequential(partial(reference, variance=False)),
        "torch": chunkwise(partial(chunked, variance=False)),
        "triton": kernels(name_family(variance=False)),
    },
    recurrent=recurrent(defer_decode("palimpsa"), numbers=("prior",)),
    cases={"": Case()},
    equation="M = a M + k v^T; J = a J + k^2 beta^T; o = (M / (J + prior))^T q",
)  # fmt: skip
POSTERIOR_SPEC = replace(
    SPEC,
    name="palimpsa_posterior",
    outputs={"o": Output("GV"), "variance": Output("GV", depends_on=OF_IMPORTANCE)},
    backends={
        "reference": sequential(partial(reference, variance=True)),
        "torch": chunkwise(partial(chunked, variance=True)),
        "triton": kernels(name_family(variance=True)),
    },
    recurrent=recurrent(defer_decode("palimpsa", "decode_posterior"), numbers=("prior",)),
    equation="as palimpsa; variance = (1 / (J + prior))^T q^2",
)


@op(SPEC)
def palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    prior: Tensor | float = 1.0,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    r"""Read from the mean of an elementwise Gaussian posterior over the memory.

    $$M_t = a_t M_{t-1} + k_t v_t^\top, \qquad J_t = a_t J_{t-1} + k_t^2 \beta_t^\top, \qquad
      o_t = \Big(\frac{M_t}{J_t + p}\Big)^\top (\mathrm{scale}\; q_t), \qquad a_t = e^{g_t}$$

    The importance I = J + p is the precision of each memory element. An element that many keys have written to changes slowly,
    one that no key has written to changes at once, and decay lets the importance fall back to the prior p. With the paper's
    symbols (Palimpsa, eq. 28 and 29) M = I mu, and v here is the paper's beta * v: the write values, already multiplied by beta
    (or by what the layer puts in its place). beta = 0 is gated linear attention divided by p.

    Args:
        q, k: [B, T, H, K], K up to 256, float16, bfloat16, float32 or float64.
        v: write values [B, T, HV, V] of the same dtype, V up to 256, HV a multiple of H: each q/k head serves HV/H consecutive
            value heads.
        beta: gain of the importance, at least 0, [B, T, HV, V] (or H heads, repeated likewise). Any float dtype.
        g: log decay (natural logarithm, at most 0; -inf forgets everything), [B, T, HV] or [B, T, H]. Any float dtype.
            1 / (1 - exp(g)) is the memory window in tokens.
        prior: p, importance before any key, a positive number or a positive tensor [HV] or [H].
        scale: factor on q, K^-0.5 by default.
        initial_state: (M, J) before the first token, each [N, HV, K, V], J at least 0; zeros when None. N is B, or the
            number of packed sequences.
        output_final_state: whether to return (M, J) after the last token.
        cu_seqlens: int32 or int64 [N+1], cumulative lengths of sequences packed into one row (B = 1).
        backend: "reference" (loop over tokens), "torch" (chunkwise, exact), "triton" (kernels; not in float64) or "auto":
            kernels on CUDA where triton is installed, else the chunkwise form.

    Returns:
        o [B, T, HV, V] in v's dtype, and (M, J) in float32 (float64 for float64 inputs) or None.

    Raises:
        ValueError: a shape, dtype, device, positive g, negative beta, prior, cu_seqlens or backend that does not fit; the
            message says which.
        TypeError: an argument of the wrong kind.
    """
    return call(
        SPEC, (q, k, v, beta, g, prior), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip


@op(POSTERIOR_SPEC)
def palimpsa_posterior(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    prior: Tensor | float = 1.0,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    r"""`palimpsa` with the variance of its output.

    $$\mathrm{variance}_t = \Big(\frac{1}{J_t + p}\Big)^\top (\mathrm{scale}\; q_t)^2$$

    This is the variance of S^T (scale q) when the memory S has independent elements of mean M / (J + p) and variance
    1 / (J + p). The noise 1 / beta of a value itself is not included. Gradients flow through output and variance.

    Args:
        q, k, v, beta, g, prior, scale, initial_state, output_final_state, cu_seqlens, backend: as for `palimpsa`.

    Returns:
        o [B, T, HV, V] and variance [B, T, HV, V] in v's dtype, and (M, J) as for `palimpsa`, or None.

    Raises:
        ValueError, TypeError: as `palimpsa`.
    """
    (o, variance), state = call(
        POSTERIOR_SPEC, (q, k, v, beta, g, prior), {"scale": scale}, initial_state, output_final_state, cu_seqlens, backend
    )  # fmt: skip
    return o, variance, state
