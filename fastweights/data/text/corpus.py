"""The text of a language model: documents of train and held-out text, the same on every machine that has the files."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ...checks import (
    LARGEST_COUNT,
    check_flag,
    check_list,
    check_positive,
    check_size,
    check_text,
    check_tokens,
    describe_value,
)
from ...private_huggingface import dataset_fingerprint
from .datasets_library import load_rows, row_text, rows_of_files, split_rows, stream_texts
from .files import TextFile, cut_long, plain_pieces, rows, text_files
from .source import TextSource, write_record
from .splitting import Document, Length, Lengths, Piece, cut, hash_fraction, split

__all__ = ["Document", "TextCorpus", "TextSource", "pytorch_source"]

# Tests are left out of Python's own text: some installations come without them.
PYTHON_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, kw_only=True)
class TextCorpus(TextSource):
    """The text of a training: one source (see `TextSource`), or several with weights. Without paths, dataset and sources, it is
    text that every machine has: the source and documentation of its Python installation (the standard library without its
    tests).

    Plain files are assigned to train or held-out text as a whole; JSON lines, Parquet files and datasets are divided row by
    row. The name of a file, or the number of a row, decides its side. Where one side would stay empty, as is usual with ten
    files, one file or row is moved there. A corpus of a single file or row is cut in two, and its end is held out. With
    `streaming` a hash of each document's text decides.

    Attributes:
        sources: several sources. Each row of training comes from one of them. In every 1000 rows their shares are those of
            their `weight`. Settings of text then belong to the sources; only `excluded` may be given here, and holds for all of
            them.
        streaming: read the text during the training: nothing is tokenized or fetched as a whole beforehand.
        parts: with streaming, number of parts that the text is read in, each by one process; None for the number of processes.
            A multiple of that number lets a training continue with more processes. Each part has files of its own where the
            number of files is a multiple of `parts`, and every `parts`-th row otherwise.
        shuffle_megabytes: with streaming, documents are shuffled within windows of this many million characters.
        held_out_megabytes: with streaming, the first held-out documents are measured, about this many million characters.
        epochs: how often text may be read at most; None for as often as the training needs.
        skip_tokens: number of tokens to leave out at the start, in the order that a training with this length and seed reads.
        continue_from: folder of a training on the same text. This one starts after all the text that the last checkpoint there
            has read.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    sources: tuple[TextSource, ...] = ()
    streaming: bool = False
    parts: int | None = None
    shuffle_megabytes: float = 4.0
    held_out_megabytes: float = 1.0
    epochs: int | None = None
    skip_tokens: int | str = 0
    continue_from: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("streaming", self.streaming)
        for name in ("shuffle_megabytes", "held_out_megabytes"):
            check_positive(name, getattr(self, name))
        for name in ("parts", "epochs"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), high=LARGEST_COUNT)
        object.__setattr__(self, "skip_tokens", check_tokens("skip_tokens", self.skip_tokens, low=0))
        if self.continue_from is not None:
            check_text("continue_from", self.continue_from, what="the folder of a training", empty=False)
            if self.skip_tokens:
                raise ValueError(
                    f"skip_tokens must be 0 with continue_from, which says where to start, got {self.skip_tokens}"
                )
        if not self.streaming and self.parts is not None:
            raise ValueError(
                f"parts must be None without streaming, got {self.parts}; set streaming = true, or leave it out"
            )
        given = check_list("sources", self.sources, "sources, tables [[corpus.sources]] in a run file")
        sources = tuple(TextSource(**source) if isinstance(source, Mapping) else source for source in given)
        object.__setattr__(self, "sources", sources)
        self._check_sources()
        if self.streaming and any(source.max_megabytes is not None for source in (self, *sources)):
            raise ValueError(
                "max_megabytes must be None with streaming, which reads no more than the training; leave it out"
            )

    def _check_sources(self) -> None:
        if not all(type(source) is TextSource for source in self.sources):
            raise TypeError(f"sources must be TextSource, tables in a run file, got {describe_value(self.sources)}")
        own = [
            field.name
            for field in fields(TextSource)
            if field.name != "excluded" and getattr(self, field.name) != field.default
        ]
        if self.sources and own:
            raise ValueError(f"{own[0]} must be left out beside sources; set it for each of them that it is for")
        if self.weight != 1:
            raise ValueError(f"weight must be that of an entry of sources, got {self.weight:g} for the whole corpus")

    @cached_property
    def singles(self) -> list[TextCorpus]:
        """One corpus per source; the corpus itself without sources."""
        if not self.sources:
            return [self]
        made = []
        for source in self.sources:
            settings = {field.name: getattr(source, field.name) for field in fields(TextSource)}
            settings |= {"excluded": (*source.excluded, *self.excluded), "weight": 1.0, "sources": ()}
            made.append(replace(self, **settings))
        return made

    @property
    def weights(self) -> list[float]:
        """The weights of `singles`."""
        return [source.weight for source in self.sources] or [1.0]

    def from_start(self) -> TextCorpus:
        """The same corpus without `skip_tokens` and `continue_from`."""
        return replace(self, skip_tokens=0, continue_from=None)

    def record(self) -> dict[str, Any]:
        """The settings that the rows of a training depend on, as a run folder keeps them. Settings that were added later are
        left out where they have their defaults."""
        sources = [write_record(source, TextSource) for source in self.sources]
        return {**write_record(self, TextCorpus), **({"sources": sources} if sources else {})}

    @property
    def lengths(self) -> Lengths:
        """How many tokens a document must have to be read."""
        return Lengths(self.min_tokens, self.max_tokens)

    def documents(self) -> Iterator[Document]:
        """All documents in a fixed order, without empty ones. `min_tokens` and `max_tokens` are not applied here.

        Raises:
            ValueError: a path that does not exist, a binary or damaged file, no text, a dataset that cannot be loaded.
        """
        if self.sources:
            for single in self.singles:
                yield from single.documents()
            return
        yield from self._documents_of_files()
        for document in self._split():
            if document.text.strip():
                yield document

    def held_out_documents(self) -> Iterator[Document]:
        """The held-out documents, as `documents` gives them. Where `held_out` names files, only these are read.

        Raises:
            ValueError: as `documents`.
        """
        for single in self.singles:
            named = single.held_out and single._documents_of_files()
            yield from named or (document for document in single.documents() if document.held_out)

    def texts(self) -> Iterator[str]:
        """The texts of `paths` or of the dataset before the split: none of them is cut in two.

        Raises:
            ValueError: as `documents`.
        """
        if self.sources:
            return chain.from_iterable(single.texts() for single in self.singles)
        if self.streaming:
            return stream_texts(self.stream(), self.text_field)
        return (piece.text for piece in self._pieces())

    def stream(self, part: int = 0, parts: int = 1) -> Any:
        """An IterableDataset of the `datasets` library: the rows of one of `parts` parts of a single source, train and held-out
        text together. `stream_texts` makes documents of them.

        Raises:
            ValueError: as `documents`; or no `datasets` library.
        """
        if self.dataset is not None:
            return split_rows(load_rows(self, streaming=True, shards=parts), part, parts)
        return split_rows(rows_of_files(self._files, self.text_field), part, parts)

    def holds_out(self, text: str) -> bool:
        """With streaming, whether a document of `paths` or of the dataset is held out: by a hash of its text."""
        return not self.held_out and hash_fraction(text) < self.held_out_fraction

    def _documents_of_files(self) -> Iterator[Document]:
        for file in self._held_out_files:
            for _, texts in _named_texts(file, self.text_field):
                yield from (Document(part, True) for text in texts for part in cut_long(text))

    def _split(self) -> Iterator[Document]:
        """The documents of `paths` or of the dataset."""
        files = self._files
        if self.streaming:
            return (Document(text, self.holds_out(text)) for text in self.texts())
        if self.held_out:
            return (Document(text, False) for text in self.texts())
        if self.dataset is None and len(files) == 1 and not files[0].has_rows:
            return _cut_in_two(files[0], self.held_out_fraction, self._characters)
        return split(self._pieces, self.held_out_fraction)

    @property
    def _characters(self) -> float:
        return float("inf") if self.max_megabytes is None else self.max_megabytes * 1e6

    def _pieces(self) -> Iterator[Piece]:
        """The pieces of all files and rows up to `max_megabytes`, without empty ones."""
        left = self._characters
        for number, (name, texts) in enumerate(self._named_texts()):
            for part in chain.from_iterable(map(cut_long, texts)):
                yield Piece(number, name, part)
                left -= len(part)
                if left <= 0:
                    return

    def _named_texts(self) -> Iterator[tuple[str, Iterable[str]]]:
        """Every file or row: the name whose hash decides its side of the split, and its text."""
        if self.dataset is not None:
            return ((f"row {number}", [row_text(row, self.text_field)]) for number, row in enumerate(self._dataset))
        return chain.from_iterable(_named_texts(file, self.text_field) for file in self._files)

    @property
    def fingerprint(self) -> str:
        """A hash that changes whenever the documents may have changed: with the settings, and with the name, place, size or
        time of a file. For a streamed dataset it changes with the settings alone."""
        if self.sources:
            return _hash([single.fingerprint for single in self.singles])
        files = [(file.name, *_stamp(file)) for file in [*self._files, *self._held_out_files]]
        settings = [self.held_out_fraction, self.text_field, self.max_megabytes, bool(self.held_out)]
        if self.streaming:
            names = (self.dataset, self.dataset_config, self.dataset_split, self.data_files, self.revision)
            settings += ["streaming", self.held_out_megabytes, names]
        if self.min_tokens or self.max_tokens is not None:
            settings += [self.min_tokens, self.max_tokens]
        known = None if self.dataset is None or self.streaming else dataset_fingerprint(self._dataset)
        return _hash([settings, files, known])

    @property
    def content(self) -> list[Any]:
        """With streaming, names and sizes of the local files, which the record of a training keeps in place of a hash of the
        text."""
        return [[file.name, file.path.stat().st_size] for file in self._files]

    @property
    def size(self) -> int | None:
        """About how many characters the documents have, estimated from the sizes of the files; None for compressed files and
        for a dataset."""
        if self.sources:
            sizes = [single.size for single in self.singles]
            return None if None in sizes else sum(size for size in sizes if size is not None)
        files = [*self._files, *self._held_out_files]
        if self.dataset is not None or any(file.is_compressed for file in files):
            return None
        return int(min(self._characters, sum(file.path.stat().st_size for file in files)))

    @property
    def is_local(self) -> bool:
        """Whether all text is in local files."""
        return all(single.dataset is None for single in self.singles)

    def find(self) -> None:
        """Find the files. Those in folders are opened to see whether they are text.

        Raises:
            ValueError: a path that does not exist or is no file.
        """
        for single in self.singles:
            _ = single._found, single._found_held_out

    @property
    def unreadable_files(self) -> int:
        """Number of files in the folders that are left out because they are binary or not UTF-8."""
        return sum(single._found[1] + single._found_held_out[1] for single in self.singles)

    @cached_property
    def _files(self) -> list[TextFile]:
        held_out = {file.path.resolve() for file in self._held_out_files}
        return [file for file in self._found[0] if file.path.resolve() not in held_out]

    @property
    def _held_out_files(self) -> list[TextFile]:
        return self._found_held_out[0]

    @cached_property
    def _found(self) -> tuple[list[TextFile], int]:
        if self.dataset is not None:
            return [], 0
        if self.paths:
            return text_files(self.paths, excluded=self.excluded)
        return text_files([sysconfig.get_path("stdlib")], skipped=PYTHON_SKIPPED)

    @cached_property
    def _found_held_out(self) -> tuple[list[TextFile], int]:
        return text_files(self.held_out, excluded=self.excluded) if self.held_out else ([], 0)

    @cached_property
    def _dataset(self) -> Any:
        return load_rows(self)


def pytorch_source(max_megabytes: float | None = None) -> TextCorpus:
    """The source text of the installed PyTorch, which is several times as long as Python's own, the default corpus."""
    import torch

    return TextCorpus(paths=(str(Path(torch.__file__).parent),), max_megabytes=max_megabytes)


def _named_texts(file: TextFile, text_field: str) -> Iterator[tuple[str, Iterable[str]]]:
    if file.has_rows:
        yield from ((f"{file.name}#{number}", [text]) for number, text in enumerate(rows(file, text_field)))
    else:
        yield file.name, plain_pieces(file)


def _cut_in_two(file: TextFile, fraction: float, most: float) -> Iterator[Document]:
    """The first `most` characters of a single file, with their end as held-out text."""

    def pieces() -> Iterator[str]:
        left = most
        for piece in plain_pieces(file):
            yield piece[: int(min(left, len(piece)))]
            left -= len(piece)
            if left <= 0:
                return

    return cut(pieces(), Length.measure(pieces()), fraction)


def _stamp(file: TextFile) -> tuple[str, int, int]:
    status = file.path.stat()
    return str(file.path.resolve()), status.st_size, status.st_mtime_ns


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
