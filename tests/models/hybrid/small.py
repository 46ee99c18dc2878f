"""Tiny pretrained Transformers of every family, with weights that no initialisation gives, and their hybrids."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from transformers import AutoConfig

from fastweights.models import HybridModel, linearize
from fastweights.models.hybrid import FAMILIES

VOCABULARY = 64
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

# Beside what all have: tied embeddings, biases, windows of attention and experts where the family has them.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True},
    "olmo2": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 20},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 20},
}
EVERY = list(FAMILIES)


def teacher(model_type: str = "llama", **changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0, "max_position_embeddings": 128,
    }  # fmt: skip
    family = FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, **{**sizes, **OPTIONS[model_type], **changes})
    module = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    torch.manual_seed(0)
    model = getattr(module, f"{family.name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def hybrid(model_type: str = "llama", to: str = "gdn", keep: Any = (1,), **options: Any) -> HybridModel:
    return linearize(teacher(model_type), to=to, keep=keep, **options)


def tokens(batch: int = 2, time: int = 11) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(1))
