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
from typing import Any

from safetensors import SafetensorError

__all__ = [
    "PARTIAL_FILES",
    "TENSOR_ERRORS",
    "WriteError",
    "check_place",
    "committed_results",
    "disk_is_full",
    "file_name",
    "publish_folder",
    "staged_folder",
    "write_bytes",
    "write_json",
    "writing",
]

PARTIAL_FILES = ".*.partial"  # glob of the files that a process leaves when it is killed while writing
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TENSOR_ERRORS = (RuntimeError, SafetensorError)  # of torch and safetensors, where the disk is full


class WriteError(OSError):
    """A file could not be written. The message says which, where and why."""


def check_place(name: str, folder: Path) -> None:
    """ValueError unless `folder`, the argument `name`, is a folder that can be written to or can be made."""
    above = folder.absolute()
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"{name} {folder} must be in a folder that can be written to, and {above} is none; name another place"
        )


def committed_results(packaged: Path, name: str) -> Path:
    """Results that the library comes with: in a wheel the folder `packaged`, which pyproject.toml adds to it; in a checkout the
    folder of this name in benchmarks/results."""
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "benchmarks" / "results" / name


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
        WriteError: the folder does not exist, cannot be written to, or is full. `path` is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with writing(path.name, path.parent):
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


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill. It replaces `path` when the body ends. If the body fails, `path` stays unchanged."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with writing(path.name, path.parent):
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(path.name, path.parent):
            publish_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, path: Path) -> None:
    """Make the folder `partial`, once all its files are on the disk, the folder `path`."""
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    if path.exists():
        os.replace(path, old)
    os.replace(partial, path)
    shutil.rmtree(old, ignore_errors=True)
