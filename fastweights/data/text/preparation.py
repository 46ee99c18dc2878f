"""From text to tokens on disk: made once for a corpus and a tokenizer, found again by every later run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from ..._files import staged_folder
from .corpus import TextCorpus
from .shards import ShardWriter, TokenShards, is_whole, token_dtype, write_manifest
from .tokenizer import TextTokenizer, fingerprint

__all__ = ["PreparedText", "prepare_text"]

BATCH_CHARACTERS = 2**22  # text that is tokenized at a time


@dataclass(frozen=True)
class PreparedText:
    """A tokenizer, and the tokens of train and held-out text."""

    tokenizer: Any
    train: TokenShards
    held_out: TokenShards


def prepare_text(
    corpus: TextCorpus,
    tokenizer: TextTokenizer,
    cache: str | Path,
    report: Callable[[str], None] = lambda line: None,
) -> PreparedText:
    """Train or load the tokenizer and tokenize the corpus, unless the folder `cache` has the result already.

    Each document ends with the tokenizer's end of text, if it has one. Several processes may call this at once: one works, the
    others wait for it. What is made appears in the cache whole or not at all.

    Args:
        report: is told, in one line each, of what takes time.

    Raises:
        ValueError: a corpus or a tokenizer that cannot be used; see `TextCorpus.documents` and `TextTokenizer.load`.
        OSError: the cache cannot be written to, or the disk is full.
    """
    folder = Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    loaded = tokenizer.load() if tokenizer.path is not None else _trained(corpus, tokenizer, folder, report)
    tokens = folder / f"tokens-{_key(corpus.fingerprint, fingerprint(loaded))}"
    with filelock.FileLock(tokens.with_name(f".{tokens.name}.lock")):
        if not is_whole(tokens):
            with staged_folder(tokens) as staged:
                _tokenize(corpus, loaded, staged)
            report(f"tokenized the corpus: {len(TokenShards(tokens, 'train')):,} tokens of train text in {tokens}")
    return PreparedText(loaded, TokenShards(tokens, "train"), TokenShards(tokens, "held_out"))


def _trained(corpus: TextCorpus, settings: TextTokenizer, folder: Path, report: Callable[[str], None]) -> Any:
    path = folder / f"tokenizer-{_key(corpus.fingerprint, repr(settings))}"
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            texts = (document.text for document in corpus.documents() if not document.held_out)
            trained = settings.train(texts)
            with staged_folder(path) as staged:
                trained.save_pretrained(staged)
            report(f"trained a tokenizer of {len(trained):,} tokens: {path}")
    return TextTokenizer(path=str(path)).load()  # as a later run loads it


def _tokenize(corpus: TextCorpus, tokenizer: Any, folder: Path) -> None:
    dtype = token_dtype(len(tokenizer))
    writers = {split: ShardWriter(folder, split, dtype) for split in ("train", "held_out")}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = corpus.documents()
    while batch := _batch(documents):
        texts = [document.text for document in batch]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for document, ids in zip(batch, encoded, strict=True):
            writers["held_out" if document.held_out else "train"].append([*ids, *end])
    entries = {split: writer.finished() for split, writer in writers.items()}
    if not any(entry["documents"] for entry in entries.values()):
        raise ValueError("corpus must hold text, but all its files are empty; pass others")
    write_manifest(folder, dtype=dtype, splits=entries)


def _batch(documents: Any) -> list[Any]:
    batch: list[Any] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            break
    return batch


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(itertools.chain(parts)).encode()).hexdigest()[:16]
