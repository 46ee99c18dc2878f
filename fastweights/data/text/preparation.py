"""From text to tokens on disk: made once for a corpus and a tokenizer, reused by every later run."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
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
    publish_folder,
    staged_folder,
    write_checksums,
    writing,
)
from ...kinds import checked
from ...outputs import check_place, hold_lock
from .corpus import TextCorpus
from .shards import SHARDS, TokenShards, shards_damage, text_hash
from .splitting import Document, Lengths
from .tokenizer import TextTokenizer, fingerprint
from .tokenizing import Encoder, note_path, tokenize

__all__ = ["PreparedText", "prepare_text"]

# What the tokenizers library and transformers write for a tokenizer that is trained here.
TOKENIZER: Own = dict.fromkeys(
    ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", CHECKSUMS), any_file
)

Progress = Callable[[str, int, int | None], None]


@checked
@dataclass(frozen=True)
class PreparedText:
    """A tokenizer, and the tokens of train and held-out text.

    Attributes:
        train, held_out: tokens of all sources, one source after the other. `train` is empty for a streamed corpus.
        fingerprints: hashes of the documents (`corpus_text`) and of the tokenizer (`tokenizer_content`), which depend on the
            content alone. For a streamed corpus `corpus_text` is of the held-out documents and of the names and sizes of local
            files.
        sources: the train text of each source; () where `train` is the only one.
        corpus: the corpus that the tokens come from; None where it is not known.
    """

    tokenizer: Any
    train: TokenShards
    held_out: TokenShards
    fingerprints: dict[str, str]
    sources: tuple[TokenShards, ...] = ()
    corpus: TextCorpus | None = None


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

    Each document ends with the tokenizer's end of text, if it has one. Of a streamed corpus only held-out text is tokenized
    here; the training reads the train text. A call continues what a killed one has begun. Several processes may call this at
    once: one works, the others wait. Results appear in the cache whole or not at all. Checksums are kept with them: a result
    that has changed since is reported and made again.

    Args:
        report: receives one line for each slow step, and for each damaged result.
        read_all: whether all tokens are read once to compare their checksums; otherwise only the sizes of files are compared.
            One process of a training needs it, the others do not.
        progress: receives the name of a slow step ("tokenizing the text"), the number of characters it has read (0 at its
            start), and about how many there are (None where this is not known).

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
    loaded = tokenizer.load() if tokenizer.exists else None
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
    folders = []
    for single in corpus.singles:
        tokens = folder / f"tokens-{_key(single.fingerprint, content)}"
        with _lock(tokens, SHARDS):
            why = shards_damage(tokens, content=read_all) if tokens.exists() else None
            if why is None and tokens.exists() and not single.held_out and not len(TokenShards(tokens, "held_out")):
                why = "an earlier version of fastweights held no text out"
            if why is not None:
                report(f"the tokens in {tokens} cannot be used, as {why}; the corpus is tokenized again")
            if why is not None or not tokens.exists():
                _make_tokens(single, loaded, tokens, tokenizer.processes, progress)
                _report_tokens(single, tokens, report)
        folders.append(tokens)
    train, held_out = ([TokenShards(tokens, split) for tokens in folders] for split in ("train", "held_out"))
    texts = [[text_hash(tokens), *single.content] for tokens, single in zip(folders, corpus.singles, strict=True)]
    text = texts[0][0] if len(texts) == 1 and not corpus.streaming else _key(json.dumps(texts))
    return PreparedText(
        tokenizer=loaded,
        train=TokenShards.joined(train),
        held_out=TokenShards.joined(held_out),
        fingerprints={"corpus_text": text, "tokenizer_content": content},
        sources=tuple(train),
        corpus=corpus,
    )


def _make_tokens(corpus: TextCorpus, tokenizer: Any, tokens: Path, processes: int, progress: Progress) -> None:
    """Make the folder `tokens`, or continue what a killed process has begun. For a streamed corpus it holds held-out text
    alone."""
    begun = tokens.with_name(f".{tokens.name}.unfinished")
    check_own("cache", tokens.parent, {tokens.name: SHARDS, begun.name: SHARDS, note_path(begun).name: any_file})
    work, total = ("reading held-out text", None) if corpus.streaming else ("tokenizing the text", corpus.size)
    encoder = Encoder(tokenizer, corpus.lengths)
    documents = _measured(corpus, encoder) if corpus.streaming else corpus.documents()
    try:
        tokenize(documents, encoder, begun, processes=processes, progress=lambda read: progress(work, read, total))
        with writing(tokens.name, tokens.parent):
            publish_folder(begun, tokens, SHARDS)
        note_path(begun).unlink(missing_ok=True)
    except (ValueError, WriteError):  # which would come again; after others the next call continues
        shutil.rmtree(begun, ignore_errors=True)
        note_path(begun).unlink(missing_ok=True)
        raise


def _measured(corpus: TextCorpus, encoder: Encoder) -> Iterator[Document]:
    """The first held-out documents of a streamed corpus, about `held_out_megabytes` of those that have an admitted length.

    Raises:
        ValueError: there are none.
    """
    wanted = left = corpus.held_out_megabytes * 1e6
    for document in corpus.held_out_documents():
        if left <= 0:
            return
        yield document
        left -= len(document.text) if corpus.lengths == Lengths() or len(encoder([document.text])[0]) else 0
    if left == wanted:
        raise ValueError(
            "corpus must have held-out text, but none of its documents is held out and as long as it must be; raise "
            "held_out_fraction, or name files in held_out"
        )


def _report_tokens(corpus: TextCorpus, tokens: Path, report: Callable[[str], None]) -> None:
    if corpus.unreadable_files:
        report(f"left out {corpus.unreadable_files:,} files of the corpus: binary, or not UTF-8")
    split, kind = ("held_out", "held-out") if corpus.streaming else ("train", "train")
    report(f"tokenized the corpus: {len(TokenShards(tokens, split)):,} tokens of {kind} text in {tokens}")


def _trained(
    corpus: TextCorpus, settings: TextTokenizer, folder: Path, report: Callable[[str], None], progress: Progress
) -> Any:
    path = folder / f"tokenizer-{_key(corpus.fingerprint, repr(settings))}"
    with _lock(path, TOKENIZER):
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
    """The texts that a tokenizer learns from. Sources have shares in proportion to their weights. `progress` follows the
    reading only: the tokenizers library reports nothing of the learning after it."""
    work, read, sample, size = "training a tokenizer", 0, int(settings.sample_megabytes * 1e6), corpus.size
    total = None if size is None else min(sample, size)
    progress(work, read, total)
    for single, weight in zip(corpus.singles, corpus.weights):
        left = sample * weight / sum(corpus.weights)
        for document in single.documents():
            if left <= 0:
                break
            if not document.held_out:
                yield document.text
                read += len(document.text)
                left -= len(document.text)
                progress(work, read, total)


@contextmanager
def _lock(path: Path, own: Own) -> Iterator[None]:
    """Let one process at a time make `path`, and delete what a killed one has left."""
    with hold_lock("cache", path, path.with_name(f".{path.name}.lock"), wait=-1):
        drop_partials(path.parent, {path.name: own})
        yield


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(itertools.chain(parts)).encode()).hexdigest()[:16]
