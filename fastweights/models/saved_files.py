"""What a folder of a saved model and its tokenizer consists of: what a command that saves another model there may delete."""

from __future__ import annotations

from ..ownership import Own, any_file
from .card import is_card

__all__ = ["SAVED_MODEL"]

NAMES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "training_args.bin"),
)
SAVED_MODEL: Own = {**dict.fromkeys(NAMES, any_file), "README.md": is_card}
