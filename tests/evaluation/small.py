"""A small text model with a tokenizer trained on a few sentences, and texts for it."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fastweights.evaluation.answers import Question
from fastweights.evaluation.ruler_text import documentation
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

HYBRID = ["pgdn", {"name": "softmax", "window": 7}]
TEXT = documentation()[:40_000]
GENERATOR = torch.Generator().manual_seed(0)
LONG = [torch.randint(400, (length,), generator=GENERATOR) for length in (150, 130, 200)]
BLOCK = 8
LENGTHS = (3, 40, 1, 23, 40)  # tokens of the prompts: beside 40 the others begin with blocks that are padding alone


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


class Numbers:
    """A tokenizer for which every number is a token."""

    eos_token_id = sep_token_id = bos_token_id = pad_token_id = None

    def __call__(self, text, verbose=True):
        return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(token)) for token in ids)


def questions(lm):
    """Prompts and answers of different lengths. The second answer is what the model itself says."""
    draws = random.Random(0)
    found = []
    for length, answer in zip(LENGTHS, (1, 4, 2, 6, 3), strict=True):
        prompt, value = (" ".join(str(draws.randrange(400)) for _ in range(count)) for count in (length, answer))
        found.append(Question(prompt, value, [value]))
    ids = torch.tensor([Numbers()(found[1].prompt).input_ids])
    own = lm.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, LENGTHS[1] :].tolist()
    found[1] = found[1]._replace(answer=" ".join(map(str, own)))
    return found
