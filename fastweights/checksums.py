"""Checksums of the files of a folder, written when the folder is made and compared before it is used."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .files import write_json
from .untrusted import read_json_object

__all__ = ["CHECKSUMS", "damage", "file_hash", "write_checksums"]

CHECKSUMS = "checksums.json"
BLOCK = 2**22  # bytes read at a time: a file may be larger than memory


def write_checksums(folder: Path) -> None:
    """Write the sizes and SHA-256 hashes of all files in `folder`, and in the folders within it, to `CHECKSUMS`."""
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    entries = {name: {"bytes": file.stat().st_size, "sha256": file_hash(file)} for name, file in files.items()}
    write_json(folder / CHECKSUMS, entries)


def damage(folder: Path, *, content: bool = True) -> str | None:
    """What differs from the time when the checksums were written, in words; None if nothing does.

    Args:
        content: read all files; without, only their sizes are compared.
    """
    if not (folder / CHECKSUMS).exists():
        return f"it has no {CHECKSUMS}"
    try:
        entries = read_json_object(folder / CHECKSUMS)
        expected = [(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    for name, size, _ in expected:  # sizes first: they cost nothing
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes, where {size:,} were written"
    for name, _, digest in expected if content else ():
        try:
            same = file_hash(folder / name) == digest
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if not same:
            return f"{name} has changed since it was written"
    return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file, which may be larger than memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
