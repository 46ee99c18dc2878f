"""What is measured of a model when its training has ended."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ...data.text import TokenShards
from ...evaluation import continue_text, load_language_model, perplexity_by_length
from .run import LanguageRun

__all__ = ["measure"]

CONTINUED_TOKENS = 100


def measure(run: LanguageRun, model_folder: Path, held_out: TokenShards, device: torch.device) -> dict[str, Any]:
    """The fields `perplexities` and `continuation` of a result, of the model as it was saved. Context lengths that the held-out
    text is too short for are left out."""
    model, tokenizer = load_language_model(model_folder, device=str(device))
    lengths = [length for length in run.context_lengths if length <= len(held_out)]
    entries = []
    if lengths:
        documents = (held_out.document(number) for number in range(len(held_out.starts)))
        entries = perplexity_by_length(model, documents, lengths, texts=run.context_texts)
    written = None
    if run.prompt:
        written = continue_text(model, tokenizer, run.prompt, max_new_tokens=CONTINUED_TOKENS, seed=run.seed)
    return {"perplexities": [dataclasses.asdict(entry) for entry in entries], "continuation": written}
