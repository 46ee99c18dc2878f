"""The same computations by flash-linear-attention, FlashQLA and torch's attention: their public functions, called as they ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Call = Callable[[Mapping[str, Tensor]], Tensor]
Step = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Any]

# It refuses this backward on Hopper with Triton 3.4 to 3.7.0 for wrong gradients. Here it runs all the same, to be timed; its
# errors are reported.
GUARDED = frozenset({"simple_gla", "gdn", "pgdn"})
# Their backward reads numbers on the host, so that no CUDA graph can hold it.
UNCAPTURED = frozenset({"flashqla"})


def is_installed() -> bool:
    try:
        from fla.ops.common import chunk_o
    except ImportError:
        return False
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return True


def flashqla_is_installed() -> bool:
    """It needs its CUDA compiler too, so a broken installation raises other errors than ImportError."""
    try:
        import flash_qla  # noqa: F401 (only asked for)
    except Exception:
        return False
    return True


def peers(case: str) -> dict[str, Call]:
    """What computes the same as the case (or, for attention, serves the same purpose), by name; only torch's where
    the others are not installed."""
    found: dict[str, Call] = {"sdpa": attention}
    if case in CHUNK and is_installed():
        found["fla"] = CHUNK[case]
    if case == "gdn" and flashqla_is_installed():
        found["flashqla"] = flashqla_gdn
    return found


def decoding_peers(case: str) -> dict[str, Step]:
    return {"fla": RECURRENT[case]} if case in RECURRENT and is_installed() else {}


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


def flashqla_gdn(x: Mapping[str, Tensor]) -> Tensor:
    from flash_qla import chunk_gated_delta_rule

    return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def kda(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.kda import chunk_kda

    return chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


def preconditioner(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"g_atk": x["precond_g"], "beta_atk": x["precond_beta"], "log_atk_scale": x["center"]}


def pgdn(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.precond_gated_delta_rule import chunk_precond_gated_delta_rule

    return chunk_precond_gated_delta_rule(
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], use_qk_l2norm_in_kernel=False, **preconditioner(x)
    )[0]


def pkda(x: Mapping[str, Tensor]) -> Tensor:
    """It always normalizes q and k as well, which here have length 1."""
    from fla.ops.precond_kda import chunk_precond_kda

    return chunk_precond_kda(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **preconditioner(x))[0]


def mesa(x: Mapping[str, Tensor]) -> Tensor:
    from fla.ops.mesa_net import chunk_mesa_net

    return chunk_mesa_net(x["q"], x["k"], x["v"], x["g"], x["beta"], x["ridge"], max_CG_iteration=30)[0]


def simple_gla_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    return fused_recurrent_simple_gla(
        x["q"], x["k"], x["v"], g=x.get("g"), initial_state=s["S"], output_final_state=True
    )


def gla_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.gla import fused_recurrent_gla

    return fused_recurrent_gla(x["q"], x["k"], x["v"], gk=x["g"], initial_state=s["S"], output_final_state=True)


def deltanet_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    return fused_recurrent_delta_rule(x["q"], x["k"], x["v"], x["beta"], initial_state=s["S"], output_final_state=True)


def gdn_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=s["S"], output_final_state=True
    )


def kda_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.kda import fused_recurrent_kda

    return fused_recurrent_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=s["S"], output_final_state=True)


def pgdn_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.precond_gated_delta_rule import fused_recurrent_precond_gated_delta_rule

    return fused_recurrent_precond_gated_delta_rule(
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], use_qk_l2norm_in_kernel=False, initial_state=s["S"],
        initial_A_state=s["A"], output_final_state=True, **preconditioner(x),
    )  # fmt: skip


def pkda_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.precond_kda import fused_recurrent_precond_kda

    return fused_recurrent_precond_kda(
        x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], use_qk_l2norm_in_kernel=False, initial_state=s["S"],
        initial_A_state=s["A"], output_final_state=True, **preconditioner(x),
    )  # fmt: skip


def mesa_step(x: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Any:
    from fla.ops.mesa_net import mesa_net_decoding_one_step

    q, k, v, g, beta = (x[name][:, 0] for name in ("q", "k", "v", "g", "beta"))
    o, *states = mesa_net_decoding_one_step(q, k, v, g, x["ridge"], beta, s["H"], s["U"], max_CG_iteration=30)
    return o[:, None], *states


CHUNK: dict[str, Call] = {
    "linear": simple_gla, "simple_gla": simple_gla, "gla": gla, "deltanet": deltanet, "gdn": gdn, "kda": kda,
    "pgdn": pgdn, "pkda": pkda, "mesa": mesa,
}  # fmt: skip
RECURRENT: dict[str, Step] = {
    "linear": simple_gla_step, "simple_gla": simple_gla_step, "gla": gla_step, "deltanet": deltanet_step, "gdn": gdn_step,
    "kda": kda_step, "pgdn": pgdn_step, "pkda": pkda_step, "mesa": mesa_step,
}  # fmt: skip
