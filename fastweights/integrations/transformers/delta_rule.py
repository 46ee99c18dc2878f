"""The gated delta rule and Kimi Delta Attention under the signature that transformers calls them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..delta_rule import delta_rule_of_units
from ..eligibility import first_of_packed, why_no_delta_rule

__all__ = ["delta_rule_of"]


def delta_rule_of(original: Callable) -> Callable:
    """One function for all four of transformers, by chunks or by tokens, with one decay per head or per channel: `delta_rule`
    takes its recurrent kernel by itself where a call has few tokens."""

    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cu_seqlens = first_of_packed(rest)
        if why_no_delta_rule(query, key, value, g, beta, initial_state, cu_seqlens=cu_seqlens) is not None:
            return original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **rest,
            )  # fmt: skip
        return delta_rule_of_units(
            query, key, value, beta, g, normalize=use_qk_l2norm_in_kernel, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return gated_delta_rule
