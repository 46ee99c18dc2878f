"""Which files in a folder a command wrote, by their names, and what is at a path."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

__all__ = [
    "FILE",
    "FOLDER",
    "Own",
    "any_file",
    "check_own",
    "drop_partials",
    "is_own",
    "is_owned",
    "remove_own",
    "standing",
    "what_stands",
]

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


def standing(folder: Path, own: Own) -> Iterator[tuple[Path, Part]]:
    """What is at the names of `own`; folders before what is in them."""
    for path in sorted(folder.iterdir()) if what_stands(folder) == FOLDER else ():
        part = _part(path.name, own)
        if part is not None:
            yield path, part
            if isinstance(part, Mapping):
                yield from standing(path, part)


def check_own(name: str, folder: Path, own: Own) -> None:
    """ValueError where links, or folders for files, are at the names that a command writes in `folder`, the argument `name`."""
    for path, part in standing(folder, own):
        there, wanted = what_stands(path), FOLDER if isinstance(part, Mapping) else FILE
        if there not in (wanted, None):
            raise ValueError(
                f"{name} {folder} must have {wanted} at {path.relative_to(folder)}, but {there} is there, which is left alone; "
                "move it, or choose another output folder"
            )


def remove_own(folder: Path, own: Own) -> None:
    """Delete the files of `folder` that a command wrote, and folders in it that are then empty. Links are not followed."""
    for path, part in reversed(list(standing(folder, own))):
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
