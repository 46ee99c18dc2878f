"""What stands around the memory, under the signatures that transformers calls it by: the short convolution in front of it, over
tensors [B, D, T], and the gated norm behind it, the forward of every family's class RMSNormGated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from ...ops import short_convolution
from ...ops.gated_norm import gated_rms_norm
from ...ops.gated_norm.torch_form import GATES
from ...ops.short_convolution.step import short_convolution_step, takes_step
from ..eligibility import first_of_packed, runs_here

__all__ = ["convolution", "convolution_step", "gated_norm", "plain_convolution"]

ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def convolution(original: Callable) -> Callable:
    """Over whole sequences. The layers transpose [B, T, D], which is turned back without a copy."""

    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **rest: Any
    ) -> Tensor:
        cu_seqlens = first_of_packed(rest)
        if not _takes(x, weight, bias, activation) or (cu_seqlens is not None and len(x) > 1):
            return original(x, weight, bias, activation=activation, **rest)
        y, _ = short_convolution(x.mT, weight, bias, activation=ACTIVATIONS[activation], cu_seqlens=cu_seqlens)
        return y.mT

    return causal_conv1d_fn


def convolution_step(original: Callable) -> Callable:
    """Over one more token, with the last inputs [B, D, W'] updated in place: on a GPU by one kernel."""

    def causal_conv1d_update(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **rest: Any,
    ) -> Tensor:
        served = _takes(x, weight, bias, activation) and runs_here(x, conv_state)
        if not (served and takes_step(x, conv_state, weight, bias)):
            return original(x, conv_state, weight, bias, activation=activation, **rest)
        return short_convolution_step(x, conv_state, weight, bias, silu=activation is not None)

    return causal_conv1d_update


def plain_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, seq_idx: Tensor | None = None
) -> Tensor:
    """The original of transformers up to 5.14, which stands in the layer itself where causal-conv1d is not installed."""
    if seq_idx is not None:
        raise ValueError(
            "seq_idx must be None in float64 or on this device: install causal-conv1d to pack sequences there"
        )
    y = F.conv1d(x, weight[:, None].to(x.dtype), bias, padding=weight.shape[1] - 1, groups=len(weight))
    y = y[..., : x.shape[2]]
    return y if activation is None else ACT2FN[activation](y)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> bool:
    return runs_here(x, weight, bias) and activation in ACTIVATIONS


def gated_norm(original: Callable) -> Callable:
    """x / rms(x) w a(gate), computed in float32 and rounded once. On a CPU the original does so too, but for the rounding of
    half-precision numbers before the gate, so that ours is in float32 there."""

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        activation = getattr(self, "activation", "silu")  # transformers up to 5.14 has no other
        if (
            gate is None
            or activation not in GATES
            or gate.shape != hidden_states.shape
            or not runs_here(hidden_states, gate, self.weight)
        ):
            return original(self, hidden_states, gate)
        x = hidden_states if hidden_states.is_cuda else hidden_states.float()
        y = gated_rms_norm(x, self.weight, gate, activation=activation, eps=self.variance_epsilon)
        return y.to(hidden_states.dtype)

    return forward
