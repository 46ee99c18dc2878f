"""The text of a language model: documents of train and held-out text, the same on every machine that has the files."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...checks import check_number, check_positive, check_text, check_texts, describe_value
from ...kinds import checked
from .files import TextFile, field_text, plain_pieces, rows, text_files

__all__ = ["Document", "TextCorpus", "pytorch_source"]

# Tests are left out of Python's own text: some installations come without them.
PYTHON_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
LONGEST_DOCUMENT = 2**21  # characters; a longer row becomes several documents, as a long file does


@checked
@dataclass(frozen=True)
class Document:
    """One text, and whether it is kept from training."""

    text: str
    held_out: bool


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """The source of text. Without paths and dataset, it is text that every machine has: the source and documentation of its
    Python installation (the standard library without its tests).

    Train and held-out text are split by file, rows of JSON lines, Parquet and datasets by row; which side a file or row is on
    depends on its name or number alone. The only plain text file of a corpus is cut in two, the end is held out.

    Attributes:
        paths: files and folders: plain text (any suffix for a file that is named itself, the usual ones in a folder), .jsonl,
            .parquet, each with .gz too (Parquet compresses its own data).
        held_out: files and folders of held-out text, all else in `paths` or `dataset` then being trained on.
        excluded: folders inside those of `paths` and `held_out` that are left out.
        held_out_fraction: part of the files or rows that is held out where `held_out` names none.
        dataset, dataset_config, dataset_split: a dataset of the Hugging Face hub in place of paths; needs the `datasets`
            library, and the network unless the dataset was fetched before.
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
        left = self._characters
        for document in self._all():
            for start in range(0, len(document.text), LONGEST_DOCUMENT):
                text = document.text[start : start + LONGEST_DOCUMENT]
                if text.strip():
                    yield Document(text, document.held_out)
                    if not (self.held_out and document.held_out):
                        left -= len(text)
                if left <= 0:
                    return

    @property
    def _characters(self) -> float:
        return float("inf") if self.max_megabytes is None else self.max_megabytes * 1e6

    def _all(self) -> Iterator[Document]:
        for file in self._held_out_files:
            yield from (Document(text, True) for _, text in _texts(file, self.text_field))
        files = self._files
        if self.dataset is not None:
            for number, row in enumerate(self._dataset):
                yield Document(_row_text(row, self.text_field), self._is_held_out(f"row {number}"))
        elif len(files) == 1 and not self.held_out and not files[0].has_rows:
            yield from _cut(files[0], 1 - self.held_out_fraction, self._characters)
        else:
            for file in files:
                for name, text in _texts(file, self.text_field):
                    yield Document(text, self._is_held_out(name))

    def _is_held_out(self, name: str) -> bool:
        if self.held_out:
            return False
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        return place < self.held_out_fraction

    @property
    def fingerprint(self) -> str:
        """Changes whenever the documents may: with the settings, and with the name, place, size or time of a file."""
        files = [(file.name, *_stamp(file)) for file in [*self._files, *self._held_out_files]]
        dataset = None if self.dataset is None else self._dataset._fingerprint
        settings = [self.held_out_fraction, self.text_field, self.max_megabytes, bool(self.held_out)]
        return hashlib.sha256(json.dumps([settings, files, dataset]).encode()).hexdigest()

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
        try:
            import datasets
        except ImportError:
            raise ValueError(
                f"dataset {self.dataset!r} needs the `datasets` library; pip install datasets, or set paths to local files"
            ) from None
        try:
            return datasets.load_dataset(self.dataset, self.dataset_config, split=self.dataset_split)
        except Exception as error:  # the library raises errors of many kinds for a wrong name and for a missing network
            raise ValueError(
                f"dataset {self.dataset!r} (config {self.dataset_config!r}, split {self.dataset_split!r}) cannot be loaded: "
                f"{error}; check the name and the network, or set paths to local files"
            ) from None


def pytorch_source(max_megabytes: float | None = None) -> TextCorpus:
    """The source text of the installed PyTorch: several times as much as the default corpus, Python's own."""
    import torch

    return TextCorpus(paths=(str(Path(torch.__file__).parent),), max_megabytes=max_megabytes)


def _texts(file: TextFile, text_field: str) -> Iterator[tuple[str, str]]:
    """The documents of a file, each with the name that decides on which side of the split it is."""
    if file.has_rows:
        for number, text in enumerate(rows(file, text_field)):
            yield f"{file.name}#{number}", text
    else:
        for piece in plain_pieces(file):
            yield file.name, piece


def _cut(file: TextFile, fraction: float, most: float) -> Iterator[Document]:
    """Cuts the first `most` characters of a single file in two: after `fraction` of them, at the next line end if it is near."""
    left = int(min(most, sum(map(len, plain_pieces(file)))))
    train = round(fraction * left)
    for piece in plain_pieces(file):
        piece = piece[:left]
        near = (train + len(piece)) // 2
        place = 0 if train <= 0 else piece.find("\n", train, near) + 1 or train
        yield Document(piece[:place], False)
        yield Document(piece[place:], True)
        left -= len(piece)
        train -= len(piece)


def _row_text(row: Any, text_field: str) -> str:
    try:
        return field_text(row, text_field)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from None


def _stamp(file: TextFile) -> tuple[str, int, int]:
    status = file.path.stat()
    return str(file.path.resolve()), status.st_size, status.st_mtime_ns
