"""The forward of the memory layers of Qwen3-Next and Qwen3.5 on a GPU, for training and for prompts: queries, keys, values and
output gates are read where the projections write them, the convolution scales queries and keys to length 1, and their heads are
not repeated. The original runs for single tokens and later parts of a sequence, and in a graph that torch.compile traces."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import LARGEST_HEAD
from ...kernels.availability import takes_kernels
from ...ops.short_convolution import WIDEST
from ...ops.short_convolution.joint import convolve_slices, cut
from ...private_huggingface import is_placed
from ..foreign_calls import EPS, call_delta_rule, packed_lengths
from .functions import ACTIVATIONS
from .pointwise import runs_eagerly

__all__ = ["run_gated_delta_layer"]


def run_gated_delta_layer(
    original: Callable, layer: Any, hidden_states: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    heads_fit = max(layer.head_k_dim, layer.head_v_dim) <= LARGEST_HEAD and layer.num_v_heads % layer.num_k_heads == 0
    if arguments or not heads_fit or not begins(layer, hidden_states, options):
        return original(layer, hidden_states, *arguments, **options)
    cache, cu_seqlens = find_cache(options), packed_lengths(options)
    hidden_states = mask_padding(layer, hidden_states, options)
    batch, time, _ = hidden_states.shape
    joint, z, b, a = project(layer, hidden_states)
    per_group = layer.num_v_heads // joint.shape[2] * layer.head_v_dim
    widths = layer.key_dim // joint.shape[2], layer.key_dim // joint.shape[2], per_group
    taps = layer.conv1d.weight.squeeze(1)
    heads = layer.head_k_dim, layer.head_k_dim, 0
    *qkv, rest = convolve_slices(joint, taps, layer.conv1d.bias, heads, widths, EPS, cu_seqlens)
    q, k, v = (
        x.reshape(batch, time, -1, width)
        for x, width in zip(qkv, (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim))
    )
    g = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    o, state = call_delta_rule(
        q, k, v, b.sigmoid(), g, normalize=False, initial_state=None, output_final_state=cache is not None,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if cache is not None:
        keep(cache, layer, cut(joint, widths)[:3], state)
    # The gates of a group's heads lie side by side: [B, T, G, heads of the group, V].
    z = (rest if z is None else z).unflatten(-1, (-1, layer.head_v_dim))
    return layer.out_proj(layer.norm(o.reshape(z.shape), z).reshape(batch, time, -1))


def project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Queries, keys and values side by side in groups, [B, T, G, C]; the output gates [B, T, 1, channels], None where they
    follow the values of each group; the logits of the gains and the rates of the decay, [B, T, heads of v]."""
    if hasattr(layer, "in_proj_qkvz"):
        joint, gates = (
            project(x).unflatten(-1, (layer.num_k_heads, -1)) for project in (layer.in_proj_qkvz, layer.in_proj_ba)
        )
        b, a = (part.flatten(2) for part in gates.chunk(2, -1))
        return joint.contiguous(), None, b, a
    joint, z = (project(x).unsqueeze(2) for project in (layer.in_proj_qkv, layer.in_proj_z))
    return joint.contiguous(), z, layer.in_proj_b(x), layer.in_proj_a(x)


def begins(layer: Any, hidden_states: Tensor, options: dict[str, Any]) -> bool:
    """Whether a memory layer reads first tokens of its sequences that the kernels take."""
    weight, cache = layer.conv1d.weight, find_cache(options)
    taken = (
        runs_eagerly(hidden_states, weight)
        and takes_kernels("auto", hidden_states)
        and hidden_states.shape[1] > 1
        and not is_placed(layer.conv1d)  # the original calls hooks of accelerate
        and ACTIVATIONS.get(layer.activation) == "silu"
        and weight.shape[-1] <= WIDEST
        and (cache is None or not goes_on(cache, layer.layer_idx))
    )
    return taken and (len(hidden_states) == 1 or packed_lengths(options) is None)


def find_cache(options: dict[str, Any]) -> Any:
    return options.get("cache", options.get("cache_params"))  # the name up to 5.23


def goes_on(cache: Any, layer: int) -> bool:
    """Whether a cache holds earlier tokens, or keeps all of them."""
    return cache.has_previous_state(layer) or getattr(cache.layers[layer], "record_past", False)


def mask_padding(layer: Any, hidden_states: Tensor, options: dict[str, Any]) -> Tensor:
    module: Any = sys.modules[type(layer).__module__]
    return module.apply_mask_to_padding_states(hidden_states, options.get("attention_mask"))


def keep(cache: Any, layer: Any, inputs: Sequence[Tensor], state: Tensor | None) -> None:
    """The last inputs of the convolution, from parts [B, T, ...], and the state of the memory."""
    last = torch.cat([x[:, -layer.conv_kernel_size :].flatten(2) for x in inputs], -1)
    cache.update_conv_state(last.mT, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    cache.update_recurrent_state(state, layer.layer_idx)
