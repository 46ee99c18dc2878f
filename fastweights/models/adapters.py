"""What adapters of the peft library meet in these models: the layers that they are for where their configuration names none, by
the last part of their names; and caches of their own, which are refused."""

from __future__ import annotations

import re
import sys

from transformers import Cache

from .cache import FastWeightsCache

__all__ = ["LORA_TARGETS", "check_kind", "tell_peft"]

# The projections of a memory's input and output. Every mixer of the library has some of them.
LORA_TARGETS = ("q_proj", "k_proj", "qk_proj", "v_proj", "o_proj", "in_proj", "out_proj")
# PEFT has a table per method, TRANSFORMERS_MODELS_TO_..._MODULES_MAPPING. Those that are not here take LORA_TARGETS.
TARGETS = {
    "GLORA_TARGET": ("q_proj", "k_proj", "qk_proj", "v_proj", "in_proj"),  # it takes no subclass of nn.Linear
    "IA3_TARGET": ("k_proj", "qk_proj", "v_proj", "in_proj", "down_proj"),
    "IA3_FEEDFORWARD": ("down_proj",),
    "LNTUNING_TARGET": ("mixer_norm", "mlp_norm", "norm"),
}
TABLE = re.compile("TRANSFORMERS_MODELS_TO_(.+)_MODULES_MAPPING")


def tell_peft(model_type: str) -> None:
    """Put the targets into PEFT's tables of models, if PEFT has been imported."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        found = TABLE.fullmatch(name)
        if found and isinstance(table, dict):
            table.setdefault(model_type, list(TARGETS.get(found[1], LORA_TARGETS)))


def check_kind(cache: object, layers: int) -> None:
    """TypeError unless it is a `FastWeightsCache`. PEFT's prefix tuning brings a cache of keys and values."""
    if isinstance(cache, FastWeightsCache):
        return
    hint = ""
    if isinstance(cache, Cache):
        hint = (
            "; the layers' memories hold no keys and values of tokens: prefix tuning and cartridges do not fit, take prompt "
            "tuning, p-tuning or LoRA"
        )
    raise TypeError(
        f"past_key_values must be a FastWeightsCache of {layers} layers, as this model returns it, got {type(cache).__name__}"
        f"{hint}"
    )
