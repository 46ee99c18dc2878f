"""transformers' Mamba-2 models as models of this library: the same computation under other names."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from ..models import FastWeightsConfig

__all__ = ["mamba2_config", "mamba2_weights"]

NAMES = {
    r"^backbone\.embeddings\.": "model.embed_tokens.",
    r"^backbone\.norm_f\.": "model.norm.",
    r"^backbone\.layers\.": "model.layers.",
    r"(layers\.\d+)\.norm\.": r"\1.mixer_norm.",
    r"\.mixer\.(A_log|dt_bias)$": r".mixer.decay.\1",
    r"\.mixer\.D$": ".mixer.skip.D",
    r"\.mixer\.conv1d\.": ".mixer.conv.",
}


def mamba2_config(source: Mamba2Config) -> FastWeightsConfig:
    """The configuration of the same model here. Mamba-2's heads are those of the values; its groups, heads of keys (B) and
    queries (C); its state size, their channels. It has no MLP.

    `residual_in_fp32` has no counterpart: the residual stream has the dtype of the parameters (float32 under autocast).

    Raises:
        ValueError: an option that does not carry over.
    """
    if source.hidden_act not in ("silu", "swish"):
        raise ValueError(f"mamba2 with hidden_act={source.hidden_act!r} cannot be carried over: it must be 'silu'")
    return FastWeightsConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        num_hidden_layers=source.num_hidden_layers,
        num_heads=source.num_heads,
        mixer={"name": "mamba2", **_carry_options(source)},
        intermediate_size=0,
        norm_eps=source.layer_norm_epsilon,
        initializer_range=source.initializer_range,
        tie_word_embeddings=source.tie_word_embeddings,
        pad_token_id=source.pad_token_id,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
    )


def mamba2_weights(model: Mamba2ForCausalLM) -> dict[str, Tensor]:
    """Its weights under the names they have here."""
    return {_rename(name): _reshape(name, weight) for name, weight in model.state_dict().items()}


def _carry_options(source: Mamba2Config) -> dict[str, Any]:
    smallest, largest = source.time_step_limit
    # Earlier versions of transformers normalise all channels at once and ignore the groups: the installed version decides.
    grouped = "group_size" in inspect.signature(MambaRMSNormGated).parameters
    return {
        "head_dim": source.state_size,
        "expand_v": source.head_dim / source.state_size,
        "num_groups": source.n_groups,
        "dt_min": float(smallest),
        "dt_max": None if math.isinf(largest) else float(largest),
        "conv_size": source.conv_kernel,
        "conv_bias": source.use_conv_bias,
        "bias": source.use_bias,
        "norm_groups": source.n_groups if grouped else 1,
        "norm_eps": source.layer_norm_epsilon,
    }


def _rename(name: str) -> str:
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _reshape(name: str, weight: Tensor) -> Tensor:
    return weight.squeeze(1) if name.endswith("conv1d.weight") else weight
