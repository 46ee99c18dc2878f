"""The layers that an adapter of the peft library is for where it names none."""

from __future__ import annotations

import sys

__all__ = ["LORA_TARGETS", "tell_peft"]

# The projections of a memory's input and output, by the last part of their names. Every mixer of the library has some of them.
LORA_TARGETS = ("q_proj", "k_proj", "qk_proj", "v_proj", "o_proj", "in_proj", "out_proj")


def tell_peft() -> None:
    """Put the targets of LoRA into PEFT's table of models, if PEFT has been imported."""
    table = getattr(sys.modules.get("peft.utils"), "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", None)
    if table is not None:
        table.setdefault("fastweights", list(LORA_TARGETS))
