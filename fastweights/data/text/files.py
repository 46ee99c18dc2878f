"""Text out of local files: plain text, JSON lines and Parquet, compressed with gzip or not."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...checks import check_path, error_prefix
from ...untrusted import check_file

__all__ = ["PLAIN_SUFFIXES", "TextFile", "cut_long", "field_text", "plain_pieces", "rows", "text_files"]

# The suffixes of plain text inside a folder; a file that the corpus names may have any suffix.
PROSE = "txt text md markdown rst org tex html htm"
SOURCE = "py pyi pyx c h cc cpp hpp cu cuh rs go java kt js ts jl r scala swift rb pl lua hs ml lisp el sh sql cmake"
PLAIN_SUFFIXES = frozenset(f".{suffix}" for suffix in (PROSE + " " + SOURCE).split())
ROW_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
PIECE_CHARACTERS = 2**20  # a longer file becomes several documents: no file has to fit into memory
SNIFFED_BYTES = 2**16
LONGEST_DOCUMENT = 2**21  # characters; a longer row becomes several documents, as a long file does
PARQUET_ROWS = 512  # that are decoded at a time: a row may be a book


@dataclass(frozen=True)
class TextFile:
    """A file of text. `name` is its path relative to the folder it was found in: the same on every machine."""

    path: Path
    name: str
    named: bool  # given itself, and not found in a folder

    @property
    def suffix(self) -> str:
        """The suffix without .gz."""
        plain = self.path.name.lower().removesuffix(".gz")
        return Path(plain).suffix

    @property
    def has_rows(self) -> bool:
        """Whether the file has one document per row, as JSON lines and Parquet have."""
        return self.suffix in ROW_SUFFIXES

    @property
    def is_compressed(self) -> bool:
        """Whether the text is longer than the file, which gzip or Parquet compresses."""
        return self.suffix == ".parquet" or self.path.name.lower().endswith(".gz")

    def is_text(self) -> bool:
        """Whether the first 64 KiB are UTF-8 without NUL bytes."""
        with opened(self) as file:
            start = file.read(SNIFFED_BYTES)
        try:
            codecs.getincrementaldecoder("utf-8")().decode(start)  # a character may be cut at the end
        except UnicodeDecodeError:
            return False
        return b"\0" not in start


def text_files(
    paths: Sequence[str | Path], *, skipped: frozenset[str] = frozenset(), excluded: Sequence[str | Path] = ()
) -> tuple[list[TextFile], int]:
    """The given files and the text files in the given folders, each once, sorted by name; and the number of files in folders
    that are left out because they are binary or not UTF-8. Hidden files, `__pycache__`, folders whose name is in `skipped` and
    the folders `excluded` are not looked at.

    Raises:
        ValueError: a path that does not exist, a binary or JSON file that is named itself, or no text file at all.
    """
    files: list[TextFile] = []
    binary = 0
    for given in (check_path("corpus path", path) for path in paths):
        if given.is_dir():
            found = list(_files_in(given, skipped | {"__pycache__"}, {Path(path).resolve() for path in excluded}))
            readable = [file for file in found if file.suffix == ".parquet" or file.is_text()]
            binary += len(found) - len(readable)
            files += readable
        elif given.exists():
            with error_prefix("corpus file"):
                check_file(given, None)
            file = TextFile(given, given.name, True)
            if file.suffix != ".parquet" and not file.is_text():
                raise ValueError(
                    f"corpus file {given} must be text, JSON lines or Parquet, but it is binary, or not UTF-8; pass others"
                )
            if file.suffix == ".json":
                raise ValueError(
                    f"corpus file {given} must have one row per line, as JSON lines; write it so, as .jsonl"
                )
            files.append(file)
        else:
            raise ValueError(f"corpus path {given} does not exist; pass files or folders that do")
    if not files:
        listed = ", ".join(map(str, paths))
        raise ValueError(
            f"corpus {listed} holds no text: {binary} files are binary or not UTF-8, no other has a suffix such as .txt, .md, "
            ".py, .jsonl or .parquet (or these with .gz); name files of another suffix themselves"
        )
    once = {file.path.resolve(): file for file in reversed(files)}
    return sorted(once.values(), key=lambda file: file.name), binary


def _files_in(given: Path, skipped: frozenset[str], excluded: set[Path]) -> Iterator[TextFile]:
    for folder, folders, names in os.walk(given):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in skipped and Path(folder, name).resolve() not in excluded
        ]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            file = TextFile(path, path.relative_to(given).as_posix(), False)
            if (file.has_rows or file.suffix in PLAIN_SUFFIXES) and path.is_file():
                yield file


def plain_pieces(file: TextFile) -> Iterator[str]:
    """The text of a plain file in pieces: a million characters and the rest of the line, at most a million more. Single bytes
    that are not UTF-8 become U+FFFD."""
    with opened(file) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace")
        while piece := text.read(PIECE_CHARACTERS):
            yield piece + text.readline(PIECE_CHARACTERS)


def cut_long(text: str) -> Iterator[str]:
    """The documents that a long text is cut into, without those that have no letter."""
    parts = (text[start : start + LONGEST_DOCUMENT] for start in range(0, len(text), LONGEST_DOCUMENT))
    return (part for part in parts if part.strip())


def rows(file: TextFile, text_field: str) -> Iterator[str]:
    """The texts of a file with rows.

    Raises:
        ValueError: a row without that field, or a damaged file; the message names file and row.
    """
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, text_field)
        return
    with opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield field_text(json.loads(line), text_field)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"corpus file {file.path}, line {number}: {error}") from None


def field_text(row: Any, text_field: str) -> str:
    """The text of a row, "" where it is null; ValueError for anything else."""
    if not isinstance(row, dict) or text_field not in row:
        keys = f"the keys {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"a row must be an object with text in {text_field!r}, got {keys}; set text_field")
    text = row[text_field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{text_field!r} must be text, got {type(text).__name__}; set text_field")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text_field!r} must be text that UTF-8 can write, but {error}; correct the row") from None
    return text or ""


def _parquet_rows(file: TextFile, text_field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(
            f"corpus file {file.path} needs pyarrow to be read; pip install 'fastweights[train]'"
        ) from None
    try:
        table = parquet.ParquetFile(file.path)
        if text_field not in table.schema_arrow.names:
            raise ValueError(
                f"it has no column {text_field!r} but {', '.join(table.schema_arrow.names)}; set text_field"
            )
        for batch in table.iter_batches(PARQUET_ROWS, columns=[text_field]):
            yield from (field_text(row, text_field) for row in batch.to_pylist())
    except (ArrowException, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # an OSError names the file too
        raise ValueError(f"corpus file {file.path}: {reason}") from None


@contextmanager
def opened(file: TextFile) -> Iterator[IO[bytes]]:
    """Its bytes, decompressed."""
    try:
        with gzip.open(file.path) if file.is_compressed else file.path.open("rb") as stream:
            yield stream  # type: ignore[misc]  # a GzipFile reads bytes too
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"corpus file {file.path} is a damaged gzip file: {error}") from None
