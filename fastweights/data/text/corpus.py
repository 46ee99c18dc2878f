"""The text of a language model: documents of train and held-out text, the same on every machine that has the files."""

from __future__ import annotations

import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...checks import check_number, check_positive, check_text, check_texts, describe_value
from ...private_huggingface import dataset_fingerprint
from .files import TextFile, field_text, plain_pieces, rows, text_files
from .splitting import Document, Length, Piece, cut, split

__all__ = ["Document", "TextCorpus", "pytorch_source"]

# Tests are left out of Python's own text: some installations come without them.
PYTHON_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
LONGEST_DOCUMENT = 2**21  # characters; a longer row becomes several documents, as a long file does


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """The source of text. Without paths and dataset, it is text that every machine has: the source and documentation of its
    Python installation (the standard library without its tests).

    Train and held-out text are split by file, rows of JSON lines, Parquet and datasets by row; which side a file or row is on
    depends on its name or number alone. Where no file or row falls to one side, as is usual with ten files, one of them is put
    there. The only file or row of a corpus is cut in two, the end is held out.

    Attributes:
        paths: files and folders: plain text (any suffix for a file that is named itself, the usual ones in a folder), .jsonl,
            .parquet, each with .gz too (Parquet compresses its own data).
        held_out: files and folders of held-out text, all else in `paths` or `dataset` then being trained on.
        excluded: folders inside those of `paths` and `held_out` that are left out.
        held_out_fraction: part of the files or rows that is held out where `held_out` names none.
        dataset, dataset_config, dataset_split: in place of paths a dataset of the Hugging Face hub, which needs the network
            unless it was fetched before, or a folder that `save_to_disk` of the `datasets` library has written.
        text_field: where a row has its text.
        max_megabytes: read no more than about this many million characters (beside those of `held_out`); None for all.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    paths: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    held_out_fraction: float = 0.05
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_field: str = "text"
    max_megabytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("paths", "held_out", "excluded"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else value
            object.__setattr__(self, name, check_texts(name, value, what="paths", empty=False))
        check_number("held_out_fraction", self.held_out_fraction, above=0, below=1)
        for name in ("dataset", "dataset_config", "dataset_split", "text_field"):
            value = getattr(self, name)
            if value is not None or name not in ("dataset", "dataset_config"):
                check_text(name, value)
        if self.dataset is not None and self.paths:
            raise ValueError(
                f"dataset must be None where paths are given, got {describe_value(self.dataset)}; choose one of them"
            )
        if self.max_megabytes is not None:
            check_positive("max_megabytes", self.max_megabytes)

    def documents(self) -> Iterator[Document]:
        """All documents in a fixed order, empty ones left out.

        Raises:
            ValueError: a path that does not exist, a binary or damaged file, no text, a dataset that cannot be loaded.
        """
        for file in self._held_out_files:
            for _, texts in _named_texts(file, self.text_field):
                yield from (Document(part, True) for text in texts for part in _parts(text))
        for document in self._split():
            if document.text.strip():
                yield document

    def texts(self) -> Iterator[str]:
        """The documents of `paths` or of the dataset, none of them cut in two to hold out its end.

        Raises:
            ValueError: as `documents`.
        """
        return (piece.text for piece in self._pieces())

    def _split(self) -> Iterator[Document]:
        """The documents of `paths` or of the dataset."""
        files = self._files
        if self.held_out:
            return (Document(text, False) for text in self.texts())
        if self.dataset is None and len(files) == 1 and not files[0].has_rows:
            return _in_two(files[0], self.held_out_fraction, self._characters)
        return split(self._pieces, self.held_out_fraction)

    @property
    def _characters(self) -> float:
        return float("inf") if self.max_megabytes is None else self.max_megabytes * 1e6

    def _pieces(self) -> Iterator[Piece]:
        """Of every file or row to read, those that are not empty."""
        left = self._characters
        for number, (name, texts) in enumerate(self._named_texts()):
            for part in itertools.chain.from_iterable(map(_parts, texts)):
                yield Piece(number, name, part)
                left -= len(part)
                if left <= 0:
                    return

    def _named_texts(self) -> Iterator[tuple[str, Iterable[str]]]:
        """The text of every file or row, with the name that decides on which side of the split it is."""
        if self.dataset is not None:
            return ((f"row {number}", [_row_text(row, self.text_field)]) for number, row in enumerate(self._dataset))
        return itertools.chain.from_iterable(_named_texts(file, self.text_field) for file in self._files)

    @property
    def fingerprint(self) -> str:
        """Changes whenever the documents may: with the settings, and with the name, place, size or time of a file."""
        files = [(file.name, *_stamp(file)) for file in [*self._files, *self._held_out_files]]
        dataset = None if self.dataset is None else dataset_fingerprint(self._dataset)
        settings = [self.held_out_fraction, self.text_field, self.max_megabytes, bool(self.held_out)]
        return hashlib.sha256(json.dumps([settings, files, dataset]).encode()).hexdigest()

    @property
    def size(self) -> int | None:
        """About how many characters its documents have, by the size of the files; None where files are compressed, and for a
        dataset."""
        files = [*self._files, *self._held_out_files]
        if self.dataset is not None or any(file.is_compressed for file in files):
            return None
        return int(min(self._characters, sum(file.path.stat().st_size for file in files)))

    def find(self) -> None:
        """Look for the files, of which those of folders are opened to see whether they are text.

        Raises:
            ValueError: one does not exist or is no file.
        """
        _ = self._found, self._found_held_out

    @property
    def unreadable_files(self) -> int:
        """How many files of the folders are left out as they are binary or not UTF-8."""
        return self._found[1] + self._found_held_out[1]

    @property
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
        name = str(self.dataset)
        try:
            import datasets
        except ImportError:
            raise ValueError(
                f"dataset {name!r} needs the `datasets` library; pip install 'fastweights[train]', or set paths to local files"
            ) from None
        try:
            if Path(name, "dataset_dict.json").is_file():  # several splits
                return datasets.load_from_disk(name)[self.dataset_split]
            if Path(name, "state.json").is_file():
                return datasets.load_from_disk(name)
            return datasets.load_dataset(name, self.dataset_config, split=self.dataset_split)
        except Exception as error:  # the library raises errors of many kinds for a wrong name and for a missing network
            raise ValueError(
                f"dataset {name!r} (config {self.dataset_config!r}, split {self.dataset_split!r}) cannot be loaded: "
                f"{error}; check the name and the network, or set paths to local files"
            ) from None


def pytorch_source(max_megabytes: float | None = None) -> TextCorpus:
    """The source text of the installed PyTorch: several times as much as the default corpus, Python's own."""
    import torch

    return TextCorpus(paths=(str(Path(torch.__file__).parent),), max_megabytes=max_megabytes)


def _named_texts(file: TextFile, text_field: str) -> Iterator[tuple[str, Iterable[str]]]:
    if file.has_rows:
        yield from ((f"{file.name}#{number}", [text]) for number, text in enumerate(rows(file, text_field)))
    else:
        yield file.name, plain_pieces(file)


def _parts(text: str) -> Iterator[str]:
    """The documents that a text is cut into, those without letters left out."""
    parts = (text[start : start + LONGEST_DOCUMENT] for start in range(0, len(text), LONGEST_DOCUMENT))
    return (part for part in parts if part.strip())


def _in_two(file: TextFile, fraction: float, most: float) -> Iterator[Document]:
    """The first `most` characters of a single file, their end held out."""

    def pieces() -> Iterator[str]:
        left = most
        for piece in plain_pieces(file):
            yield piece[: int(min(left, len(piece)))]
            left -= len(piece)
            if left <= 0:
                return

    return cut(pieces(), Length.of(pieces()), fraction)


def _row_text(row: Any, text_field: str) -> str:
    try:
        return field_text(row, text_field)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from None


def _stamp(file: TextFile) -> tuple[str, int, int]:
    status = file.path.stat()
    return str(file.path.resolve()), status.st_size, status.st_mtime_ns
