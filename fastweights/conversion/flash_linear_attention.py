"""Models that flash-linear-attention saved, gated_deltanet and delta_net, as models of this library: the same computation under
other names. That library is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..models import FastWeightsConfig
from .names import check_settings, rename, shared_settings

__all__ = ["FLA_TYPES", "fla_config", "fla_weights"]

NAMES = {
    r"^model\.embeddings\.": "model.embed_tokens.",
    r"\.attn_norm\.": ".mixer_norm.",
    r"\.attn\.": ".mixer.",
    r"\.mixer\.([qkv])_conv1d\.": r".mixer.qkv.\1_conv.",
    r"\.mixer\.b_proj\.": ".mixer.gain.b_proj.",
    r"\.mixer\.(a_proj|A_log|dt_bias)": r".mixer.decay.\1",
    r"\.mixer\.o_norm\.": ".mixer.output.norm.",
    r"\.mixer\.g_proj\.": ".mixer.output.g_proj.",
}
MEMORY_NAMES = {r"\.mixer\.([qkv])_proj\.": r".mixer.qkv.\1_proj.", r"\.mixer\.o_proj\.": ".mixer.output.o_proj."}
# What a config.json of an earlier version may lack.
DEFAULTS: dict[str, Any] = {
    "num_v_heads": None, "allow_neg_eigval": False, "attn": None, "hidden_ratio": None, "intermediate_size": None,
    "tie_word_embeddings": False, "use_beta": True, "qk_norm": "l2", "qk_activation": "silu", "hidden_act": "swish",
}  # fmt: skip


def fla_config(record: Mapping[str, Any]) -> FastWeightsConfig:
    """The configuration of the same model here, of what its config.json holds.

    Raises:
        ValueError: a setting that does not carry over.
        AttributeError: a setting is missing.
    """
    source = SimpleNamespace(**{**DEFAULTS, **record})
    check_settings(source.model_type, hidden_act=(source.hidden_act, "swish"))
    name, options = FLA_TYPES[source.model_type](source)
    memory = {"name": name, **options, **_shared_options(source)}
    mixer: Any = memory
    if source.attn:
        layers = range(source.num_hidden_layers)
        mixer = [_attention(source) if layer in source.attn["layers"] else memory for layer in layers]
    width = source.intermediate_size
    if width is None:  # two thirds of the ratio, in steps of 256
        width = -(-int(source.hidden_size * (source.hidden_ratio or 4) * 2 / 3) // 256) * 256
    return FastWeightsConfig(
        num_heads=source.num_heads,
        mixer=mixer,
        intermediate_size=width,
        norm_eps=source.norm_eps,
        scale_residuals=False,
        **shared_settings(source),
    )


def fla_weights(config: FastWeightsConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model under the names that they have in `fla_config`'s."""
    attention = {f"model.layers.{i}." for i, kind in enumerate(config.layer_types) if kind != "linear_attention"}
    renamed = {}
    for name, weight in weights.items():
        own = rename(name, NAMES)
        if not own.startswith(tuple(attention)):
            own = rename(own, MEMORY_NAMES)
        renamed[own] = weight.squeeze(1) if name.endswith("conv1d.weight") else weight
    return renamed


def _shared_options(source: Any) -> dict[str, Any]:
    return {
        "conv_size": source.conv_size if source.use_short_conv else None,
        "conv_init": "normal",
        "negative_eigenvalues": source.allow_neg_eigval,
        "output_gate": "silu" if source.use_gate else None,
        "norm_eps": source.norm_eps,
    }


def _gated_deltanet(source: Any) -> tuple[str, dict[str, Any]]:
    return "gdn", {"head_dim": source.head_dim, "expand_v": source.expand_v, "num_v_heads": source.num_v_heads}


def _delta_net(source: Any) -> tuple[str, dict[str, Any]]:
    check_settings(
        "delta_net",
        use_beta=(source.use_beta, True), qk_norm=(source.qk_norm, "l2"), qk_activation=(source.qk_activation, "silu"),
    )  # fmt: skip
    keys, values = (int(source.hidden_size * expand) for expand in (source.expand_k, source.expand_v))
    return "deltanet", {"head_dim": keys // source.num_heads, "expand_v": values / keys}


def _attention(source: Any) -> dict[str, Any]:
    """The entry of a layer of softmax attention in a hybrid."""
    attn = source.attn
    check_settings(
        source.model_type,
        qkv_bias=(attn.get("qkv_bias", False), False),
        heads_of_attention=(attn["num_heads"], source.num_heads),
    )
    return {
        "name": "softmax",
        "num_kv_heads": attn.get("num_kv_heads"),
        "rope_theta": attn.get("rope_theta", 10000.0),
        "window": attn.get("window_size"),
    }


FLA_TYPES = {"gated_deltanet": _gated_deltanet, "delta_net": _delta_net}
