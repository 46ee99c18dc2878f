"""The same computations by flash-linear-attention and by torch's attention: their public functions, called as they ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Call = Callable[[Mapping[str, Tensor]], Tensor]


def peers(case: str) -> dict[str, Call]:
    """What computes the same as the case (or, for attention, serves the same purpose), by name; only torch's where
    flash-linear-attention is not installed."""
    found: dict[str, Call] = {"sdpa": attention}
    try:
        from fla.ops.common import chunk_o
    except ImportError:
        return found
    # It refuses its gated backward on Hopper with this Triton for wrong gradients; here it runs, and its errors are reported.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    if case in FLA:
        found["fla"] = FLA[case]
    return found


def attention(x: Mapping[str, Tensor]) -> Tensor:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def simple_gla(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(x["q"], x["k"], x["v"], g=x.get("g"))[0]


def gla(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.gla import chunk_gla

    return chunk_gla(x["q"], x["k"], x["v"], x["g"])[0]


def deltanet(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"])[0]


def gdn(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def kda(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.kda import chunk_kda

    return chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def pgdn(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.precond_gated_delta_rule import chunk_precond_gated_delta_rule

    return chunk_precond_gated_delta_rule(
        x["q"], x["k"], x["v"], x["precond_g"], x["g"], x["precond_beta"], x["beta"], log_atk_scale=x["center"],
        use_qk_l2norm_in_kernel=False,
    )[0]  # fmt: skip


def pkda(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.precond_kda import chunk_precond_kda

    return chunk_precond_kda(
        x["q"], x["k"], x["v"], x["g"], x["precond_g"], x["precond_beta"], x["beta"], log_atk_scale=x["center"]
    )[0]


FLA: dict[str, Call] = {
    "linear": simple_gla, "simple_gla": simple_gla, "gla": gla, "deltanet": deltanet, "gdn": gdn, "kda": kda,
    "pgdn": pgdn, "pkda": pkda,
}  # fmt: skip
