"""Rows of text that is read, tokenized and packed while a training goes on, and continued where it stopped."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from .corpus import TextCorpus
from .datasets_library import row_text
from .files import cut_long
from .mixing import Mixture
from .packing import Row
from .tokenizing import Encoder

__all__ = ["StreamedRows", "TextUsedUp"]

State = dict[str, Any]
SMALLER = 4  # windows at the start, each half of the next: a training can begin soon


class TextUsedUp(ValueError):
    """A training needs more text than `epochs` lets it read."""


class _Windows:
    """The documents of one source and part, shuffled and tokenized window by window, pass after pass over the text.

    A position is where a window begins: {"epoch", "window": number of windows before, "dataset": state of the rows}.
    """

    def __init__(self, corpus: TextCorpus, encoder: Encoder, *, seed: int, part: int, parts: int) -> None:
        self._corpus, self._encoder = corpus, encoder
        self._seed, self._part, self._parts = seed, part, parts
        self.move_to({"epoch": 0, "window": 0, "dataset": None})

    def move_to(self, position: State) -> None:
        """Read the window at this position next. Files that are open are closed."""
        self.position = position
        self._rows: Any = None
        self._iterator: Iterator[Any] = iter(())

    def read(self) -> tuple[State, list[np.ndarray]]:
        """A window: its position, and its documents that are trained on, which may be none."""
        at, texts = self.position, []
        left = self._corpus.shuffle_megabytes * 1e6 * 2.0 ** min(0, at["window"] - SMALLER)
        if self._rows is None:
            self._open()
        ended = True
        for row in self._iterator:
            for text in cut_long(row_text(row, self._corpus.text_field)):
                if not self._corpus.holds_out(text):
                    texts.append(text)
                    left -= len(text)
            if left <= 0:
                ended = False
                break
        if ended:
            self.move_to({"epoch": at["epoch"] + 1, "window": at["window"] + 1, "dataset": None})
        else:
            self.position = {**at, "window": at["window"] + 1, "dataset": self._rows.state_dict()}
        random = np.random.Generator(np.random.Philox(key=[self._seed, (self._part << 32) + at["window"]]))
        shuffled = [texts[place] for place in random.permutation(len(texts))]
        return at, [ids for ids in self._encoder(shuffled) if len(ids)]

    def _open(self) -> None:
        limit, epoch = self._corpus.epochs, self.position["epoch"]
        if limit is not None and epoch >= limit:
            raise TextUsedUp(
                f"the text is used up: epochs = {limit} lets it be read {limit} times, and the training needs more; raise epochs "
                "in [corpus], and the same command continues from the last checkpoint"
            )
        self._rows = self._corpus.stream(self._part, self._parts)
        if self.position["dataset"] is not None:
            self._rows.load_state_dict(self.position["dataset"])
        self._iterator = iter(self._rows)


class _PackedStream:
    """Endless rows of one source and part. Its state is {"at": position of the window, "document": number of its next document,
    "offset": tokens of this document that were in rows before}."""

    def __init__(self, windows: _Windows, pool: ThreadPoolExecutor, length: int) -> None:
        self._windows, self._pool, self._length = windows, pool, length
        self._at = windows.position
        self._documents: list[np.ndarray] = []
        self._document = self._offset = 0
        self._next: Future | None = None

    def state(self) -> State:
        return {"at": self._at, "document": self._document, "offset": self._offset}

    def load(self, state: Mapping[str, Any]) -> None:
        if self._next is not None:
            self._next.result()
        self._windows.move_to(state["at"])
        self._at, self._documents = self._windows.read()
        self._document, self._offset = state["document"], state["offset"]
        self._next = None

    def close(self) -> None:
        self._windows.move_to(self._windows.position)

    def read(self) -> Row:
        pieces: list[np.ndarray] = []
        starts, have = [0], 0
        while have < self._length:
            if self._document >= len(self._documents):
                self._advance()
            ids = self._documents[self._document]
            piece = ids[self._offset : self._offset + self._length - have]
            if have and not self._offset:
                starts.append(have)
            pieces.append(piece.astype(np.int64))
            have += len(piece)
            self._offset += len(piece)
            if self._offset == len(ids):
                self._document, self._offset = self._document + 1, 0
        return np.concatenate(pieces), np.asarray(starts, np.int64)

    def _advance(self) -> None:
        """Take the next window with documents, and let the one after it be read meanwhile."""
        first = self._windows.position["epoch"] if self._next is None else self._at["epoch"]
        while True:
            future = self._next or self._pool.submit(self._windows.read)
            self._next = None
            self._at, self._documents = future.result()
            self._document = 0
            self._next = self._pool.submit(self._windows.read)
            if self._documents:
                return
            if self._at["epoch"] > first + 1:
                raise ValueError(
                    "corpus must hold text to train on, but all its documents are held out, or shorter than min_tokens or longer "
                    "than max_tokens; pass others"
                )


def _close(pool: ThreadPoolExecutor, streams: list[_PackedStream]) -> None:
    """Ends reading: files that are open when Python exits would be closed too late, with errors."""
    pool.shutdown(wait=False, cancel_futures=True)  # garbage may be collected in its thread
    for stream in streams:
        stream.close()


class StreamedRows(torch.utils.data.Dataset[Row]):
    """`count` rows of text that is streamed, of all processes together. They can be read in their order alone: a process gets the
    next row of its own, whatever the index.

    Row r of the training is of part r modulo `parts`; process p of n reads rows p, p + n, p + 2 n, ... Fewer processes with
    larger batches read the same rows in a step, as long as the parts stay the same.

    Args:
        first: the row of the training to begin with, a multiple of `parts`. Rows before it are read and left out.
        ahead: how many rows a process may have read when `state` is asked for an earlier one.
    """

    def __init__(
        self,
        corpus: TextCorpus,
        tokenizer: Any,
        *,
        length: int,
        seed: int,
        count: int,
        parts: int,
        first: int = 0,
        process: int = 0,
        processes: int = 1,
        ahead: int = 0,
    ) -> None:
        self.count, self._first, self._parts = count, first, parts
        self._process, self._processes = process, processes
        self.mixture = Mixture(corpus.weights, seed)
        tokenizer = copy.deepcopy(tokenizer)  # which the training may save meanwhile
        pool = ThreadPoolExecutor(1)  # one for all: a tokenizer cannot be used by several threads
        self._streams = {
            (part, number): _PackedStream(
                _Windows(single, Encoder(tokenizer, single.lengths), seed=seed, part=part, parts=parts), pool, length
            )
            for part in range(process, parts, processes)
            for number, single in enumerate(corpus.singles)
        }
        weakref.finalize(self, _close, pool, list(self._streams.values()))
        self._row = 0  # of the training, of all processes
        self._states: deque[tuple[int, dict[tuple[int, int], State]]] = deque(maxlen=ahead + 1)
        self._note()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        while self._row < self._first:
            self._read()
        return self._read()

    def _read(self) -> Row:
        row = self._row + self._process
        source, _ = self.mixture.place(row)
        made = self._streams[row % self._parts, source].read()
        self._row += self._processes
        self._note((row % self._parts, source))
        return made

    def state(self, rows: int) -> list[State]:
        """Where this process was when all together had read so many rows: an entry for each of its parts and sources.

        Raises:
            RuntimeError: it has read more than `ahead` rows since.
        """
        for row, states in self._states:
            if row == rows:
                return [{"part": part, "source": source, **state} for (part, source), state in states.items()]
        raise RuntimeError(
            f"rows must be read at most {self._states.maxlen} ahead of a checkpoint, got {self._row - rows}"
        )

    def load(self, rows: int, states: list[State]) -> None:
        """Continue after so many rows, from the states of all processes."""
        for entry in states:
            stream = self._streams.get((entry["part"], entry["source"]))
            if stream is not None:
                stream.load(entry)
        self._row = rows
        self._states.clear()
        self._note()

    def _note(self, changed: tuple[int, int] | None = None) -> None:
        """Remember where every stream is. changed: the only one that has moved since the last note."""
        if changed is None:
            now = {place: stream.state() for place, stream in self._streams.items()}
        else:
            now = {**self._states[-1][1], changed: self._streams[changed].state()}
        self._states.append((self._row, now))
