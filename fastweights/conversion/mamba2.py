"""transformers' Mamba-2 models as models of this library: the same computation under other names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from ..models import FastWeightsConfig
from .names import check_settings, rename, shared_settings

__all__ = ["mamba2_config", "mamba2_layer", "mamba2_layer_weights", "mamba2_weights"]

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
    check_settings("mamba2", hidden_act=("silu" if source.hidden_act == "swish" else source.hidden_act, "silu"))
    if hasattr(source, "norm_eps"):
        _check_saved_by_fla(source)
    return FastWeightsConfig(
        num_heads=source.num_heads,
        mixer=mamba2_layer(source),
        intermediate_size=0,
        norm_eps=source.layer_norm_epsilon,
        **shared_settings(source),
    )


def mamba2_weights(source: Mamba2Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model under the names they have here."""
    return {rename(name, NAMES): _reshape(name, weight) for name, weight in weights.items()}


def mamba2_layer_weights(source: Mamba2Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one layer under their names here."""
    place = "layers.0.mixer."
    named = mamba2_weights(source, {place + name: weight for name, weight in weights.items()})
    return {name.removeprefix(place): weight for name, weight in named.items()}


def mamba2_layer(source: Mamba2Config) -> dict[str, Any]:
    """Name and options of the mixer that is a layer, without the sizes that all mixers of a model share."""
    smallest, largest = source.time_step_limit
    # Earlier versions of transformers normalise all channels at once and ignore the groups: the installed version decides.
    grouped = "group_size" in inspect.signature(MambaRMSNormGated).parameters
    return {
        "name": "mamba2",
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


def _check_saved_by_fla(source: Mamba2Config) -> None:
    """flash-linear-attention saves the same architecture under its own names of some settings, which transformers does not read,
    and normalises all groups at once."""
    limits = tuple(getattr(source, "dt_limit", source.time_step_limit))
    check_settings(
        "mamba2 of flash-linear-attention",
        norm_eps=(source.norm_eps, source.layer_norm_epsilon),
        dt_limit=(limits, tuple(source.time_step_limit)),
        n_groups=(source.n_groups, 1),
    )


def _reshape(name: str, weight: Tensor) -> Tensor:
    return weight.squeeze(1) if name.endswith("conv1d.weight") else weight
