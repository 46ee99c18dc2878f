"""From text to tokens on disk: made once for a corpus and a tokenizer, reused by every later run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checks import check_path, describe_value
from ...files import (
    CHECKSUMS,
    Own,
    WriteError,
    any_file,
    check_own,
    damage,
    disk_is_full,
    drop_partials,
    staged_folder,
    write_checksums,
    writing,
)
from ...kinds import checked
from ...outputs import check_place, hold_lock
from .corpus import TextCorpus
from .shards import SHARDS, ShardWriter, TokenShards, shards_damage, text_hash, token_dtype, write_manifest
from .tokenizer import TextTokenizer, fingerprint, vocabulary_size

__all__ = ["PreparedText", "prepare_text"]

# What the tokenizers library and transformers write for a tokenizer that is trained here.
TOKENIZER: Own = dict.fromkeys(
    ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", CHECKSUMS), any_file
)
BATCH_CHARACTERS = 2**22  # text that is tokenized at a time

Progress = Callable[[str, int, int | None], None]


@checked
@dataclass(frozen=True)
class PreparedText:
    """A tokenizer, and the tokens of train and held-out text.

    Attributes:
        fingerprints: of the documents (`corpus_text`) and of the tokenizer (`tokenizer_content`), by content alone.
    """

    tokenizer: Any
    train: TokenShards
    held_out: TokenShards
    fingerprints: dict[str, str]


@checked
def prepare_text(
    corpus: TextCorpus,
    tokenizer: TextTokenizer,
    cache: str | Path,
    report: Callable[[str], None] = lambda line: None,
    *,
    read_all: bool = True,
    progress: Progress = lambda work, done, total: None,
) -> PreparedText:
    """Train or load the tokenizer and tokenize the corpus, unless the folder `cache` has the result already.

    Each document ends with the tokenizer's end of text, if it has one. Several processes may call this at once: one works, the
    others wait for it. What is made appears in the cache whole or not at all. Checksums are kept with it; a cache that has
    changed since is reported and made again.

    Args:
        report: receives one line for each slow step, and for what was damaged.
        read_all: compare the checksums of all tokens, which reads them once; without it only the sizes of the files. For all
            processes but one of a training.
        progress: receives what a slow step does ("tokenizing the text"), how many characters it has read, 0 as it begins, and
            about how many there are, None where nobody knows.

    Raises:
        ValueError: a corpus or a tokenizer that cannot be used; see `TextCorpus.documents` and `TextTokenizer.load`.
        WriteError: the cache cannot be written, as where the disk is full.
    """
    if not isinstance(corpus, TextCorpus):
        raise TypeError(f"corpus must be a TextCorpus, got {describe_value(corpus)}; TextCorpus(paths=...) makes one")
    if not isinstance(tokenizer, TextTokenizer):
        raise TypeError(
            f"tokenizer must be a TextTokenizer, got {describe_value(tokenizer)}; TextTokenizer(path=...) is one"
        )
    folder = check_path("cache", cache, "a folder that can be written to")
    check_place("cache", folder)
    loaded = tokenizer.load() if tokenizer.path is not None else None
    if next(corpus.texts(), None) is None:
        raise ValueError("corpus must hold text to train on, but all its files are empty or held out; pass others")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if disk_is_full(error):
            raise WriteError(f"the cache could not be written to {cache}: {error.strerror}") from None
        raise ValueError(
            f"cache must be a folder that can be written to, but {cache} cannot: {error.strerror}; choose another folder"
        ) from None
    if loaded is None:
        loaded = _trained(corpus, tokenizer, folder, report, progress)
    content = fingerprint(loaded)
    tokens = folder / f"tokens-{_key(corpus.fingerprint, content)}"
    with _alone(tokens, SHARDS):
        why = shards_damage(tokens, content=read_all) if tokens.exists() else None
        if why is None and tokens.exists() and not corpus.held_out and not len(TokenShards(tokens, "held_out")):
            why = "an earlier version of fastweights held no text out"
        if why is not None:
            report(f"the tokens in {tokens} cannot be used, as {why}; the corpus is tokenized again")
        if why is not None or not tokens.exists():
            check_own("cache", folder, {tokens.name: SHARDS})
            with staged_folder(tokens, SHARDS) as staged:
                _tokenize(corpus, loaded, staged, progress)
            if corpus.unreadable_files:
                report(f"left out {corpus.unreadable_files:,} files of the corpus: binary, or not UTF-8")
            report(f"tokenized the corpus: {len(TokenShards(tokens, 'train')):,} tokens of train text in {tokens}")
    fingerprints = {"corpus_text": text_hash(tokens), "tokenizer_content": content}
    return PreparedText(loaded, TokenShards(tokens, "train"), TokenShards(tokens, "held_out"), fingerprints)


def _trained(
    corpus: TextCorpus, settings: TextTokenizer, folder: Path, report: Callable[[str], None], progress: Progress
) -> Any:
    path = folder / f"tokenizer-{_key(corpus.fingerprint, repr(settings))}"
    with _alone(path, TOKENIZER):
        # One of an earlier version has no checksums. Trained again it might be another one, and so end its trainings.
        why = damage(path) if (path / CHECKSUMS).exists() else None
        if why is not None:
            report(f"the tokenizer in {path} cannot be used, as {why}; it is trained again")
        if why is not None or not path.exists():
            check_own("cache", folder, {path.name: TOKENIZER})
            trained = settings.train(_train_texts(corpus, settings, progress))
            # The tokenizers library raises a bare Exception where the disk is full.
            with writing("the tokenizer", path, Exception), staged_folder(path, TOKENIZER) as staged:
                trained.save_pretrained(staged)
                write_checksums(staged)
            report(f"trained a tokenizer of {len(trained):,} tokens: {path}")
    return TextTokenizer(path=str(path)).load()  # as a later run loads it


def _train_texts(corpus: TextCorpus, settings: TextTokenizer, progress: Progress) -> Iterator[str]:
    """What a tokenizer learns from, with the progress of reading it; what it does afterwards nobody can tell."""
    work, read, sample, size = "training a tokenizer", 0, int(settings.sample_megabytes * 1e6), corpus.size
    total = None if size is None else min(sample, size)
    progress(work, read, total)
    for document in corpus.documents():
        if not document.held_out:
            yield document.text
            read += len(document.text)
            progress(work, read, total)


@contextmanager
def _alone(path: Path, own: Own) -> Iterator[None]:
    """Lets one process at a time make `path`, and deletes what a killed one left."""
    with hold_lock("cache", path, path.with_name(f".{path.name}.lock"), wait=True):
        drop_partials(path.parent, {path.name: own})
        yield


def _tokenize(corpus: TextCorpus, tokenizer: Any, folder: Path, progress: Progress) -> None:
    work, read, total = "tokenizing the text", 0, corpus.size
    progress(work, read, total)
    dtype = token_dtype(vocabulary_size(tokenizer))
    writers = {split: ShardWriter(folder, split, dtype) for split in ("train", "held_out")}
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents, content = corpus.documents(), hashlib.sha256()
    while batch := _batch(documents):
        encoded = tokenizer(
            [document.text for document in batch],
            add_special_tokens=False,
            split_special_tokens=True,  # a document that writes the name of one means the name
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        for document, ids in zip(batch, encoded, strict=True):
            split = "held_out" if document.held_out else "train"
            writers[split].append([*ids, *end])
            read += len(document.text)
            content.update(f"{split} {len(document.text)} {document.text}".encode())
        progress(work, read, total)
    entries = {split: writer.finished() for split, writer in writers.items()}
    if not any(entry["documents"] for entry in entries.values()):
        raise ValueError("corpus must hold text, but all its files are empty; pass others")
    write_manifest(folder, dtype=dtype, splits=entries, text=content.hexdigest())


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
