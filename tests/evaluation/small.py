"""A small text model with a tokenizer trained on a few sentences, and texts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fastweights.evaluation.ruler_text import documentation
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

HYBRID = ["pgdn", {"name": "softmax", "window": 7}]
TEXT = documentation()[:40_000]


def tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE with an end-of-text token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


def model(mixer: Any = "gdn", vocabulary: int = 400, **options: Any) -> FastWeightsForCausalLM:
    torch.manual_seed(0)
    layers = len(mixer) if isinstance(mixer, list) else 1
    sizes = {"hidden_size": 16, "num_hidden_layers": layers, "num_heads": 2, "initializer_range": 0.2}
    return FastWeightsForCausalLM(FastWeightsConfig(vocab_size=vocabulary, mixer=mixer, **{**sizes, **options})).eval()


def save(folder: Path, vocabulary: int = 400, **options: Any) -> Path:
    """A folder as training leaves it."""
    model(vocabulary=vocabulary, **options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
