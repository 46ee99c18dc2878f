"""Tiny random models of the families of transformers that call a gated delta rule or Kimi Delta Attention.

Every token goes through all experts and reads all tokens before it: a choice among them would jump with the last bits.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

SHARED = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
GROUPED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
INDEXED = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 256, "indexer_compress_ratio": 4,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
NO_ROPE = {
    "q_lora_rank": 16, "qk_rope_head_dim": 0, "index_topk": 256, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4,
}  # fmt: skip
# By family: the class of its configuration, of its model, and what makes it small.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**GROUPED, **EXPERTS}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GROUPED),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**GROUPED, **EXPERTS}),
    "olmo_hybrid": (
        "OlmoHybridConfig", "OlmoHybridForCausalLM", {**GROUPED, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True}
    ),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", {**GROUPED, **EXPERTS, **INDEXED}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", LATENT),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", {**LATENT, "n_group": 1, "topk_group": 1}),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextModel", {**LATENT, **NO_ROPE}),
}  # fmt: skip
VERSION = Version(transformers.__version__)
EARLIER = Version("5.15") > VERSION  # whose layers copy the functions of their module
INSTALLED = [name for name in MODELS if find_spec(f"transformers.models.{name}") is not None]


def tiny(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """The same weights for the same seed and changes."""
    config_name, model_name, sizes = MODELS[family]
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, config_name)(**{**SHARED, **sizes, **changes})
    torch.manual_seed(seed)
    model = getattr(modeling, model_name)(config).eval()
    for x in model.parameters():  # their small initial values would hide a wrong memory behind the residual stream
        if x.ndim == 2:
            nn.init.normal_(x, std=x.shape[1] ** -0.5)
    return model
