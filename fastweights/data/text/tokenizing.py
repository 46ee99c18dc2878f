"""Text to token shards, by one process or several. Killed, it continues with the document after the last that it has noted."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from ...files import write_json, writing
from ...safe_path import same_path
from ...untrusted import read_json_object
from .shards import ShardWriter, token_dtype, write_manifest
from .splitting import Document, Lengths
from .tokenizer import vocabulary_size

__all__ = ["Encoder", "note_path", "tokenize"]

BATCH_CHARACTERS = 2**22  # text that is tokenized at a time
ENCODED_CHARACTERS = 2**19  # of these, at a time: the tokenizers library takes 100 times the memory of a text
NOTE_SECONDS = 30.0  # between two notes of what is done
SPLITS = ("train", "held_out")


class Encoder:
    """Tokens of documents, each with the end of text after it, if the tokenizer has one."""

    def __init__(self, tokenizer: Any, lengths: Lengths) -> None:
        self._tokenizer, self._lengths = tokenizer, lengths
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.dtype = token_dtype(vocabulary_size(tokenizer))

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One array per text; an empty one for a text that `lengths` leaves out."""
        made: list[np.ndarray] = []
        for batch in _batches(texts, len, ENCODED_CHARACTERS):
            # No token is shorter than a byte: most texts that are too short need not be tokenized to know it.
            chosen = [not self._lengths.least or len(text.encode()) >= self._lengths.least for text in batch]
            encoded = iter(self._encode([text for text, taken in zip(batch, chosen) if taken]))
            for taken in chosen:
                ids = next(encoded) if taken else []
                admitted = taken and self._lengths.admits(len(ids))
                made.append(np.asarray([*ids, *self._end] if admitted else [], dtype=self.dtype))
        return made

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,  # a document that writes the name of one means the name
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]


def tokenize(
    documents: Iterable[Document],
    encoder: Encoder,
    folder: Path,
    *,
    processes: int = 1,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    """Write the shards of `documents` to `folder`, where a call that was killed may have begun with it: `note_path` of the folder
    says how far.

    Args:
        documents: the same at each call.
        progress: receives the number of characters read.

    Raises:
        ValueError: there are no documents, or others than those that were begun with, or the files are shorter than noted.
        WriteError: the folder cannot be written to.
    """
    content, read = hashlib.sha256(), 0
    documents, note = iter(documents), _read_note(folder)
    with writing(folder.name, folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
    for document in islice(documents, note["documents"]):
        content.update(_hashed(document))
        read += len(document.text)
    if content.hexdigest() != note.get("text", content.hexdigest()):
        raise ValueError("the text has changed since its tokenization was begun; start again")
    progress(read)
    writers = {split: ShardWriter(folder, split, encoder.dtype, begun=note["splits"].get(split)) for split in SPLITS}
    count, noted = note["documents"], time.monotonic()
    batches = _batches(documents, lambda document: len(document.text), BATCH_CHARACTERS)
    with _mapping(encoder, processes) as encode_all:
        for batch, encoded in encode_all(batches):
            for document, ids in zip(batch, encoded, strict=True):
                writers["held_out" if document.held_out else "train"].append(ids)
                content.update(_hashed(document))
                read += len(document.text)
            count += len(batch)
            progress(read)
            if time.monotonic() - noted >= NOTE_SECONDS:
                entries = {split: writer.finished() for split, writer in writers.items()}
                write_json(note_path(folder), {"documents": count, "splits": entries, "text": content.hexdigest()})
                noted = time.monotonic()
    entries = {split: writer.finished() for split, writer in writers.items()}
    if not any(entry["documents"] for entry in entries.values()):
        raise ValueError(
            "corpus must hold text, but all its documents are empty, or shorter than min_tokens or longer than max_tokens; pass "
            "others"
        )
    write_manifest(folder, dtype=encoder.dtype, splits=entries, text=content.hexdigest())


def note_path(folder: Path) -> Path:
    """Where `tokenize` notes what it has written to the folder."""
    return folder.with_name(f"{folder.name}.json")


def _read_note(folder: Path) -> dict[str, Any]:
    """What is done; nothing where the note or the folder is missing, or the note damaged."""
    try:
        if folder.is_dir():
            return read_json_object(note_path(folder))
    except ValueError:
        pass
    return {"documents": 0, "splits": {}}


def _hashed(document: Document) -> bytes:
    return f"{'held_out' if document.held_out else 'train'} {len(document.text)} {document.text}".encode()


def _batches(items: Iterable[Any], length: Callable[[Any], int], characters: int) -> Iterator[list[Any]]:
    """Lists of items of at least so many characters, but for the last."""
    batch: list[Any] = []
    size = 0
    for item in items:
        batch.append(item)
        size += length(item)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


Encoded = Iterator[tuple[list[Document], list[np.ndarray]]]


@contextmanager
def _mapping(encoder: Encoder, processes: int) -> Iterator[Callable[[Iterator[list[Document]]], Encoded]]:
    """A function that gives each batch with its tokens, in order. Few batches are in memory at a time."""
    if processes == 1:
        yield lambda batches: ((batch, encoder([document.text for document in batch])) for batch in batches)
        return
    spawn = multiprocessing.get_context("spawn")
    with same_path(), ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=(encoder,)) as pool:
        yield partial(_map_ahead, pool, 2 * processes)


def _map_ahead(pool: ProcessPoolExecutor, ahead: int, batches: Iterator[list[Document]]) -> Encoded:
    waiting: deque[tuple[list[Document], Future]] = deque()
    for batch in chain(batches, [None] * ahead):
        if batch is not None:
            waiting.append((batch, pool.submit(_encode_in_worker, [document.text for document in batch])))
        if waiting and (batch is None or len(waiting) > ahead):
            first, future = waiting.popleft()
            yield first, future.result()


_of_worker: list[Encoder] = []


def _begin(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _of_worker.append(encoder)


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return _of_worker[0](texts)
