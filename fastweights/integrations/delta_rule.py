"""The gated delta rule and Kimi Delta Attention as other libraries call them: with an option for q and k of length 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import delta_rule
from ..ops.gated_norm import gated_rms_norm
from ..ops.l2_normalize import l2_normalize

__all__ = ["delta_rule_of_units"]

EPS = 1e-6  # that of transformers and of flash-linear-attention


def delta_rule_of_units(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    normalize: bool,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule`, with a first state of any dtype. normalize: whether q and k are divided by their lengths first."""
    if normalize:
        q, k = _unit(q), _unit(k)
    state = None if initial_state is None else initial_state.float()
    return delta_rule(q, k, v, beta, g, initial_state=state, **options)


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps), in float32 inside. A single token takes one launch. Others take the norm, which has gradients on a
    GPU: |x|^2 + eps is K times the mean square plus eps / K."""
    if x.shape[1] == 1:
        return l2_normalize(x, EPS)
    width = x.shape[-1]
    weight = x.new_full((width,), width**-0.5, dtype=torch.float32)
    return gated_rms_norm(x if x.is_cuda else x.float(), weight, eps=EPS / width).to(x.dtype)
