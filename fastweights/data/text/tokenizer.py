"""Tokenizers: any of Hugging Face's from a file or folder, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checks import check_positive, check_size, check_text

__all__ = ["END_OF_TEXT", "TextTokenizer", "fingerprint", "vocabulary_size"]

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the bytes and the end of text
LONGEST_RUN = 4096
LONG_RUN = re.compile(rf"\S{{{LONGEST_RUN}}}|\s{{{LONGEST_RUN}}}")


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Which tokenizer a run uses.

    Attributes:
        path: a folder with a Hugging Face tokenizer, or a tokenizer.json; None trains one on the corpus.
        vocab_size: of a tokenizer that is trained, at least 257.
        sample_megabytes: how much train text, in million characters, it is trained on.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    path: str | None = None
    vocab_size: int = 8192
    sample_megabytes: float = 10.0

    def __post_init__(self) -> None:
        if self.path is not None:
            check_text("tokenizer path", self.path)
        if check_size("tokenizer vocab_size", self.vocab_size) < SMALLEST_VOCABULARY:
            raise ValueError(
                f"tokenizer vocab_size must be at least {SMALLEST_VOCABULARY}, the bytes and {END_OF_TEXT}, got {self.vocab_size}"
            )
        check_positive("sample_megabytes", self.sample_megabytes)

    def load(self) -> Any:
        """The tokenizer at `path`.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        path = Path(str(self.path))
        if not path.exists():
            raise ValueError(
                f"tokenizer path {path} does not exist; pass a tokenizer.json or the folder of a tokenizer"
            )
        if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
            path = path.parent  # which says what the special tokens are
        try:
            if path.is_dir():
                return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # transformers and the tokenizers library raise errors of many kinds here
            raise ValueError(f"tokenizer path {path} holds no Hugging Face tokenizer: {error}") from None
        if END_OF_TEXT in tokenizer.get_vocab():
            tokenizer.eos_token = tokenizer.pad_token = END_OF_TEXT
        return tokenizer

    def train(self, texts: Iterable[str]) -> Any:
        """A byte-level BPE, the same for the same texts. It encodes every string, and decoding returns the same string."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first(texts, self.sample_megabytes * 1e6), trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
        )


def _first(texts: Iterable[str], characters: float) -> Iterator[str]:
    """The first texts, up to `characters`. Very long runs come in pieces: the time to learn a run grows with its square."""
    for text in texts:
        length = LONGEST_RUN if LONG_RUN.search(text) else len(text)
        yield from (text[start : start + length] for start in range(0, len(text), length or 1))
        characters -= len(text)
        if characters <= 0:
            return


def vocabulary_size(tokenizer: Any) -> int:
    """How many embeddings a model needs: more than there are tokens where the ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def fingerprint(tokenizer: Any) -> str:
    """A hash that changes whenever the tokens of a text may change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{content} {tokenizer.eos_token_id}".encode()).hexdigest()
