"""Atomic files: a reader sees the old content or the new content, never a part of it. Places and names that files can have."""

import errno
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from .ownership import FILE, FOLDER, Own, is_owned, remove_own, what_stands

__all__ = [
    "TENSOR_ERRORS",
    "WriteError",
    "disk_is_full",
    "file_name",
    "open_to_append",
    "partial_path",
    "publish_folder",
    "staged_folder",
    "write_bytes",
    "write_json",
    "writing",
]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TENSOR_ERRORS = (RuntimeError, SafetensorError)  # of torch and safetensors, where the disk is full


class WriteError(OSError):
    """A file could not be written. The message says which, where and why."""


def file_name(text: str) -> str:
    """The text itself where every file system accepts it, else what of it is accepted, and a checksum."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "_", text)[:80]
    return plain if plain == text else f"{plain}-{zlib.crc32(text.encode()):08x}"


def disk_is_full(error: OSError) -> bool:
    """Whether there was no space left, in place of no permission or no such folder."""
    return error.errno in FULL


@contextmanager
def writing(what: str, path: str | Path, *others: type[Exception]) -> Iterator[None]:
    """Turns a failure to write into one `WriteError` that names `what` and `path`.

    others: errors beside OSError that the libraries in the body raise for a full disk, such as `TENSOR_ERRORS`.
    """
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        if not isinstance(error, (OSError, *others)):
            raise
        raise WriteError(f"{what} could not be written to {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.strerror is None:  # NumPy counts the bytes and gives no reason
        return f"{error}; is the disk full?"
    return error.strerror + (f": {error.filename}" if error.filename else "")


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file in the same folder and `os.replace`.

    Raises:
        WriteError: the folder does not exist, cannot be written to, or is full; or a link, a pipe or a folder is at `path`,
            which is then unchanged.
    """
    partial = partial_path(path)
    with writing(path.name, path.parent):
        _refuse_other_than(FILE, path)
        try:
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. NaN and infinity raise ValueError: they are not JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def partial_path(path: Path, token: str | None = None) -> Path:
    """Where a file or folder is written before it becomes `path`; `ownership.drop_partials` knows such names. token: eight
    hexadecimal digits that several processes agree on; by default new ones."""
    return path.with_name(f".{path.name}.{token or secrets.token_hex(4)}.partial")


def open_to_append(path: Path) -> IO[str]:
    """A text file to append lines to. OSError where a link is at `path`."""
    return open(path, "a", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))


def _refuse_other_than(kind: str, path: Path) -> None:
    there = what_stands(path)
    if there not in (None, kind):
        raise OSError(errno.EEXIST, f"there is {there}", str(path))


@contextmanager
def staged_folder(path: Path, own: Own | None = None) -> Iterator[Path]:
    """A new folder to fill. It becomes `path` when the body ends. If the body fails, `path` stays unchanged. own: as for
    `publish_folder`."""
    partial = partial_path(path)
    with writing(path.name, path.parent):
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(path.name, path.parent):
            publish_folder(partial, path, own)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, path: Path, own: Own | None = None) -> None:
    """Make the folder `partial`, once all its files are on the disk, the folder `path`.

    own: the files of an earlier folder `path` that are deleted. Other files in it stay beside the new ones. None: an earlier
        folder must be empty.
    """
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    _refuse_other_than(FOLDER, path)
    if not path.exists():
        os.rename(partial, path)
    elif is_owned(path, own or {}):
        old = partial_path(path)
        os.rename(path, old)
        os.rename(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    elif own is None:
        raise FileExistsError(errno.EEXIST, "other files are there", str(path))
    else:
        remove_own(path, own)
        _join(partial, path)


def _join(partial: Path, path: Path) -> None:
    """Move the files of `partial` to `path`, but for names at which a person's own files are, such as a card that was edited."""
    for file in sorted(partial.iterdir(), key=lambda file: file.suffix != ".json"):  # first what describes the others
        if not os.path.lexists(path / file.name):
            os.rename(file, path / file.name)
    shutil.rmtree(partial)
