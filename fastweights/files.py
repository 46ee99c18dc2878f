"""Atomic files: a reader sees the old content or the new content, never a part of it."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["PARTIAL_FILES", "publish_folder", "staged_folder", "write_bytes", "write_json"]

PARTIAL_FILES = ".*.partial"  # glob of the files that a process leaves when it is killed while writing


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file in the same folder and `os.replace`.

    Raises:
        OSError: the folder does not exist, cannot be written to, or is full. `path` is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
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
    """A new folder to fill. It replaces `path` when the body ends. If the body fails, `path` stays
    unchanged."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
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
