"""Files of commands: written whole or not at all, known again by their names and checksums, and deleted only where they are the
command's own.

A reader sees the old content of a file or the new content, never a part of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from .untrusted import read_json_object

__all__ = [
    "CHECKSUMS",
    "FILE",
    "FOLDER",
    "TENSOR_ERRORS",
    "Own",
    "WriteError",
    "any_file",
    "check_own",
    "damage",
    "disk_is_full",
    "drop_partials",
    "file_entry",
    "file_hash",
    "file_name",
    "is_own",
    "is_owned",
    "open_to_append",
    "partial_path",
    "publish_folder",
    "remove_own",
    "staged_folder",
    "list_own",
    "what_stands",
    "write_bytes",
    "write_checksums",
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
    """Where a file or folder is written before it becomes `path`; `drop_partials` knows such names. token: eight
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


# What a command writes in a folder, by names with the wildcards of fnmatch. For a folder: what it writes in that one. For a file:
# a function that says whether a file of that name is the command's.
Own = Mapping[str, "Part"]
Part = Mapping[str, Any] | Callable[[Path], bool]

PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")  # what a process leaves that is killed while it writes
FILE, FOLDER = "a file", "a folder"


def what_stands(path: Path) -> str | None:
    """What is at a path, for messages; a link is not followed."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a pipe or a device")


def any_file(path: Path) -> bool:
    """Every file of the name is the command's."""
    return True


def _part(name: str, own: Own) -> Part | None:
    return next((part for pattern, part in own.items() if fnmatchcase(name, pattern)), None)


def list_own(folder: Path, own: Own) -> Iterator[tuple[Path, Part]]:
    """What is in the folder at the names of `own`: a folder first, then what is in it."""
    for path in sorted(folder.iterdir()) if what_stands(folder) == FOLDER else ():
        part = _part(path.name, own)
        if part is not None:
            yield path, part
            if isinstance(part, Mapping):
                yield from list_own(path, part)


def check_own(name: str, folder: Path, own: Own) -> None:
    """ValueError where links, or folders for files, are at the names that a command writes in `folder`, the argument `name`."""
    for path, part in list_own(folder, own):
        there, wanted = what_stands(path), FOLDER if isinstance(part, Mapping) else FILE
        if there not in (wanted, None):
            raise ValueError(
                f"{name} {folder} must have {wanted} at {path.relative_to(folder)}, but {there} is there, which is left alone; "
                "move it, or choose another output folder"
            )


def remove_own(folder: Path, own: Own) -> None:
    """Delete the files of `folder` that a command wrote, and folders in it that are then empty. Links are not followed."""
    for path, part in reversed(list(list_own(folder, own))):
        there = what_stands(path)
        if isinstance(part, Mapping):
            if there == FOLDER and not any(path.iterdir()):
                path.rmdir()
        elif there == FILE and part(path):
            path.unlink()


def is_owned(folder: Path, own: Own) -> bool:
    """Whether a command wrote everything in `folder`."""
    return all(is_own(path, _part(path.name, own)) for path in folder.iterdir())


def is_own(path: Path, part: Part | None) -> bool:
    """Whether what is at a path is the command's, by what it writes at this name."""
    if isinstance(part, Mapping):
        return what_stands(path) == FOLDER and is_owned(path, part)
    return part is not None and what_stands(path) == FILE and part(path)


def drop_partials(folder: Path, own: Own) -> None:
    """Delete what a killed process left of files and folders of these names, in `folder` and in the command's folders in it."""
    for path in sorted(folder.iterdir()) if what_stands(folder) == FOLDER else ():
        there, partial, part = what_stands(path), PARTIAL.fullmatch(path.name), _part(path.name, own)
        if partial and _part(partial[1], own) is not None:
            if there == FILE:
                path.unlink()
            elif there == FOLDER:
                shutil.rmtree(path)
        elif isinstance(part, Mapping):
            drop_partials(path, part)


CHECKSUMS = "checksums.json"
BLOCK = 2**22  # bytes read at a time: a file may be larger than memory


def write_checksums(folder: Path, known: Mapping[str, Any] | None = None) -> None:
    """Write the sizes and SHA-256 hashes of all files in `folder`, and in the folders within it, to `CHECKSUMS`.

    known: the `file_entry` of files that are not to be read again, by their paths in the folder.
    """
    files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
    known = known or {}
    write_json(folder / CHECKSUMS, {name: known.get(name) or file_entry(file) for name, file in files.items()})


def file_entry(file: Path) -> dict[str, Any]:
    """What `CHECKSUMS` has about a file."""
    return {"bytes": file.stat().st_size, "sha256": file_hash(file)}


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
