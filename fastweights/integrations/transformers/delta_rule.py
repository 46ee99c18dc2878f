"""The gated delta rule and Kimi Delta Attention under the signature that transformers calls them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops import delta_rule
from ...ops.framework.checks import LARGEST_HEAD
from ...ops.gated_norm import gated_rms_norm
from .eligibility import first_of_packed, runs_here

__all__ = ["delta_rule_of"]

EPS = 1e-6  # that of every family


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
        if not _takes(query, key, value, g, beta, initial_state, cu_seqlens):
            return original(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **rest,
            )  # fmt: skip
        if use_qk_l2norm_in_kernel:
            query, key = _unit(query), _unit(key)
        return delta_rule(
            query, key, value, beta, g, scale=query.shape[-1] ** -0.5,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return gated_delta_rule


def _takes(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> bool:
    return (
        runs_here(query, key, value, g, beta, state)
        and query.dtype == key.dtype == value.dtype
        and max(query.shape[-1], value.shape[-1]) <= LARGEST_HEAD
        and value.shape[2] % query.shape[2] == 0
        and (cu_seqlens is None or len(query) == 1)
    )


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps) by the norm, as |x|^2 + eps is K times the mean square plus eps / K; in float32 inside."""
    width = x.shape[-1]
    weight = x.new_full((width,), width**-0.5, dtype=torch.float32)
    return gated_rms_norm(x if x.is_cuda else x.float(), weight, eps=EPS / width).to(x.dtype)
