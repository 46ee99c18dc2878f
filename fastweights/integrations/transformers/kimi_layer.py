"""The forward of Kimi-Linear's memory layers on a GPU, for training and for prompts: each of queries, keys and values has a
convolution of its own, which scales queries and keys to length 1, in place of one over all three joined. And their forget gates,
on any device. Otherwise as in `gated_delta_layer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...checks import LARGEST_HEAD
from ...ops import short_convolution
from ..foreign_calls import EPS, call_delta_rule, packed_lengths, runs_here
from .gated_delta_layer import begins, find_cache, keep, mask_padding

__all__ = ["forget", "run_kimi_layer"]


def run_kimi_layer(original: Callable, layer: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
    width = layer.head_dim
    if arguments or width > LARGEST_HEAD or not begins(layer, hidden_states, options):
        return original(layer, hidden_states, *arguments, **options)
    cache, cu_seqlens = find_cache(options), packed_lengths(options)
    x = mask_padding(layer, hidden_states, options)
    inputs = [project(x) for project in (layer.q_proj, layer.k_proj, layer.v_proj)]
    filters = layer.conv1d.weight.squeeze(1).chunk(3)
    biases = [None] * 3 if layer.conv1d.bias is None else layer.conv1d.bias.chunk(3)
    q, k, v = (
        short_convolution(part, taps, bias, activation="silu", normalize=head, eps=EPS, cu_seqlens=cu_seqlens)[0]
        for part, taps, bias, head in zip(inputs, filters, biases, (width, width, None))
    )
    q, k, v, gate = (y.unflatten(-1, (-1, width)) for y in (q, k, v, layer.g_b_proj(layer.g_a_proj(x))))
    o, state = call_delta_rule(
        q, k, v, layer.b_proj(x).sigmoid(), layer.forget_gate(x), normalize=False, initial_state=None,
        output_final_state=cache is not None, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if cache is not None:
        keep(cache, layer, inputs, state)
    return layer.o_proj(layer.o_norm(o, gate).flatten(2))


def forget(original: Callable, layer: Any, hidden_states: Tensor) -> Tensor:
    """-exp(A_log) softplus(f + dt_bias) [B, T, heads, channels] in float32: three tensors are written in place of eight."""
    if not runs_here(hidden_states, layer.dt_bias):
        return original(layer, hidden_states)
    f = layer.f_b_proj(layer.f_a_proj(hidden_states))
    g = (f + layer.dt_bias.float()).unflatten(-1, (-1, layer.head_dim))
    return F.softplus(g) * -layer.A_log.float().exp()
