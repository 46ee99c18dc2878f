"""The small language models of the claims: 6 layers of width 512, about 30 million tokens of the default corpus."""

from __future__ import annotations

from typing import Any

from ..data.text import TextTokenizer

__all__ = ["small"]


def small(layers: int = 6, width: int = 512, heads: int = 4, length: int = 1024, **more: Any) -> dict[str, Any]:
    """Fields of `LanguageRun`: 32 rows of 1024 tokens per step."""
    return {
        "model": {
            "hidden_size": width, "num_hidden_layers": layers, "num_heads": heads, "tie_word_embeddings": True,
            **more.pop("model", {}),
        },
        "tokenizer": TextTokenizer(vocab_size=8192),
        "length": length,
        "batch_size": 32 * 1024 // length,
        "max_steps": 1000,
        "learning_rate": 2e-3,
        "context_lengths": (),
        **more,
    }  # fmt: skip
