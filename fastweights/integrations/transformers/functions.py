"""What takes the place of functions and forwards of transformers, under the signatures that it calls them by: the delta rule, the
short convolution in front of it over tensors [B, D, T], the gated norm behind it (the forward of every family's class
RMSNormGated), and, for the layers of versions up to 5.14, where packed documents begin. Each gets the original as its
first argument, and calls it where our ops do not apply."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from ...ops import short_convolution
from ...ops.gated_norm import GATES, gated_rms_norm
from ...ops.short_convolution.token import short_convolution_step, takes_step
from ..foreign_calls import call_delta_rule, explain_refusal, packed_lengths, runs_here

__all__ = ["add_boundaries", "convolve", "convolve_step", "normalise_gated", "plain_convolution", "run_delta_rule"]


def run_delta_rule(
    original: Callable,
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
    """The delta rule by chunks or by tokens, with one decay per head or per channel, for which transformers has four functions:
    `delta_rule` takes its recurrent kernel by itself where a call has few tokens."""
    cu_seqlens = packed_lengths(rest)
    states: dict[str, Any] = {"initial_state": initial_state, "output_final_state": output_final_state}
    if explain_refusal(query, key, value, g, beta, initial_state, cu_seqlens=cu_seqlens) is not None:
        normalize = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return original(query, key, value, g=g, beta=beta, **states, **normalize, **rest)
    return call_delta_rule(
        query, key, value, beta, g, normalize=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, **states
    )


ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}


def convolve(
    original: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Tensor:
    """The convolution over whole sequences. The layers transpose [B, T, D], which is turned back without a copy."""
    cu_seqlens = packed_lengths(rest)
    if not _takes(x, weight, bias, activation) or (cu_seqlens is not None and len(x) > 1):
        return original(x, weight, bias, activation=activation, **rest)
    y, _ = short_convolution(x.mT, weight, bias, activation=ACTIVATIONS[activation], cu_seqlens=cu_seqlens)
    return y.mT


def convolve_step(
    original: Callable,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **rest: Any,
) -> Tensor:
    """The convolution over one more token, with the last inputs [B, D, W'] updated in place: on a GPU by one kernel."""
    served = _takes(x, weight, bias, activation) and runs_here(x, conv_state)
    if not (served and takes_step(x, conv_state, weight, bias)):
        return original(x, conv_state, weight, bias, activation=activation, **rest)
    return short_convolution_step(x, conv_state, weight, bias, silu=activation is not None)


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


def normalise_gated(original: Callable, layer: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """x / rms(x) w a(gate), computed in float32 and rounded once. On a CPU the original does so too, but for the rounding of
    half-precision numbers before the gate, so that ours is in float32 there."""
    activation = getattr(layer, "activation", "silu")  # transformers up to 5.14 has no other
    if (
        gate is None
        or activation not in GATES
        or gate.shape != hidden_states.shape
        or not runs_here(hidden_states, gate, layer.weight)
    ):
        return original(layer, hidden_states, gate)
    x = hidden_states if hidden_states.is_cuda else hidden_states.float()
    y = gated_rms_norm(x, layer.weight, gate, activation=activation, eps=layer.variance_epsilon)
    return y.to(hidden_states.dtype)


def add_boundaries(original: Callable, layer: Any, *arguments: Any, **options: Any) -> Any:
    """Call the forward of a decoder layer with seq_idx, made from cumulative lengths. The host waits for a GPU.

    Raises:
        ValueError: the layer passes no boundaries at all to its convolution, so that documents would see each other.
    """
    memory, ends = getattr(layer, "linear_attn", None), options.get("cu_seq_lens_q")
    if memory is not None and ends is not None and len(ends) > 2:
        kind: Any = type(memory)
        if not _takes_boundaries(kind) or "causal_conv1d_fn" not in vars(memory):
            raise ValueError(
                f"cu_seq_lens_q must be None for {kind.__name__} of this version of transformers, which passes no "
                "boundaries to its convolution: pass each document as a row of its own, or install transformers 5.15 or later"
            )
        if options.get("seq_idx") is None:
            options["seq_idx"] = number_documents(ends)
    return original(layer, *arguments, **options)


def number_documents(cu_seqlens: Tensor) -> Tensor:
    """[1, T]: of every token the number of its document, from cumulative lengths [N + 1]."""
    number = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    return number.repeat_interleave(cu_seqlens.diff())[None]


@lru_cache
def _takes_boundaries(layer: Any) -> bool:
    """Whether the forward of a memory layer takes seq_idx and its like, as further keywords: before 5.9 it does not."""
    parameters = inspect.signature(layer.forward).parameters.values()
    return any(one.kind is one.VAR_KEYWORD for one in parameters)
