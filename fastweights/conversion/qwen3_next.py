"""The gated delta rule of transformers' Qwen3-Next as the mixer `gdn`: the same computation under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Qwen3NextConfig

from ..models import FastWeightsConfig
from .names import check_settings, rename, shared_settings

__all__ = ["qwen3_next_config", "qwen3_next_layer", "qwen3_next_layer_weights", "qwen3_next_weights"]

NAMES = {
    r"\.input_layernorm\.": ".mixer_norm.",
    r"\.post_attention_layernorm\.": ".mlp_norm.",
}
CENTRED = re.compile(r"(^model\.norm|layernorm)\.weight$")  # norms whose weights count from 1


def qwen3_next_config(source: Qwen3NextConfig) -> FastWeightsConfig:
    """The configuration of the same model here, for models of gated delta rules and dense MLPs alone.

    Raises:
        ValueError: what does not carry over: experts, or attention, which has a gate there and rotates a part of its channels.
    """
    dense = source.mlp_only_layers or []
    experts = [
        layer
        for layer in range(source.num_hidden_layers)
        if layer not in dense and source.num_experts > 0 and (layer + 1) % source.decoder_sparse_step == 0
    ]
    check_settings(
        "qwen3_next",
        layer_types=(set(source.layer_types or []), {"linear_attention"}),
        layers_with_experts=(experts, []),
    )
    return FastWeightsConfig(
        num_heads=source.linear_num_key_heads,
        mixer=qwen3_next_layer(source),
        intermediate_size=source.intermediate_size,
        norm_eps=source.rms_norm_eps,
        **shared_settings(source),
    )


def qwen3_next_weights(source: Qwen3NextConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model under the names and in the order that they have here."""
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        path, own, parameter = name.partition(".linear_attn.")
        if own:
            parts = qwen3_next_layer_weights(source, {parameter: weight})
            renamed |= {f"{path}.mixer.{part}": value for part, value in parts.items()}
        else:
            renamed[rename(name, NAMES)] = 1 + weight if CENTRED.search(name) else weight
    return renamed


def qwen3_next_layer(source: Qwen3NextConfig) -> dict[str, Any]:
    """Name and options of the mixer that is a layer of linear attention, without the sizes that all mixers of a model share."""
    check_settings("qwen3_next", hidden_act=("silu" if source.hidden_act == "swish" else source.hidden_act, "silu"))
    return {
        "name": "gdn",
        "head_dim": source.linear_key_head_dim,
        "expand_v": source.linear_value_head_dim / source.linear_key_head_dim,
        "num_v_heads": source.linear_num_value_heads,
        "conv_size": source.linear_conv_kernel_dim,
        "output_gate": "silu",
        "norm_eps": source.rms_norm_eps,
    }


def qwen3_next_layer_weights(source: Qwen3NextConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one layer under their names here. Its first matrix holds q, k, v and the gate of a key head and its value
    heads, head by head; the second, b and a likewise; the convolution, the channels of all q, then k, then v."""
    keys, heads = source.linear_num_key_heads, source.linear_num_value_heads
    values = heads // keys * source.linear_value_head_dim
    split: dict[str, tuple[list[str], list[int]]] = {
        "in_proj_qkvz.weight": (
            ["qkv.q_proj.weight", "qkv.k_proj.weight", "qkv.v_proj.weight", "output.g_proj.weight"],
            [source.linear_key_head_dim] * 2 + [values] * 2,
        ),
        "in_proj_ba.weight": (["gain.b_proj.weight", "decay.a_proj.weight"], [heads // keys] * 2),
    }
    renamed = {
        "A_log": "decay.A_log", "dt_bias": "decay.dt_bias", "norm.weight": "output.norm.weight",
        "out_proj.weight": "output.o_proj.weight",
    }  # fmt: skip
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in split:
            names, sizes = split[name]
            parts = weight.unflatten(0, (keys, -1)).split(sizes, 1)
            found |= {part: rows.flatten(0, 1) for part, rows in zip(names, parts, strict=True)}
        elif name == "conv1d.weight":
            channels = keys * source.linear_key_head_dim
            parts = weight.squeeze(1).split([channels, channels, heads * source.linear_value_head_dim])
            found |= {f"qkv.{part}_conv.weight": rows for part, rows in zip("qkv", parts, strict=True)}
        else:
            found[renamed.get(name, name)] = weight
    return found
