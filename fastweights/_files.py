"""Atomic files: a reader sees the old content or the new content, never a part of it."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

__all__ = ["PARTIAL_FILES", "write_bytes", "write_json"]

PARTIAL_FILES = ".*.partial"  # glob of what a process killed while writing leaves behind


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file in the same folder and `os.replace`.

    Raises:
        OSError: the folder does not exist, cannot be written to, or is full. `path` is then as it was.
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
