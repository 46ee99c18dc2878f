"""Where commands write: only where nothing or their own earlier output is, never through links, one process at a time."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Any

import filelock

from .files import FILE, FOLDER, Own, any_file, check_own, drop_partials, file_hash, is_own, list_own, what_stands
from .untrusted import read_json_object

__all__ = [
    "check_file",
    "check_folder",
    "check_place",
    "claim_files",
    "claim_folder",
    "described_files",
    "has_keys",
    "lock_path",
    "listed_files",
    "hold_lock",
    "default_output",
    "refuse_links",
]


def check_place(name: str, path: Path) -> None:
    """ValueError unless the file or folder `path`, the argument `name`, is or can be made in a folder that can be written to, and
    no link leads to it."""
    refuse_links(name, path)
    above = path.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(
            f"{name} must be in a folder that can be written to, and {above} is none, got {path}; name another place"
        )


def refuse_links(name: str, path: Path) -> None:
    """ValueError where `path`, the argument `name`, is a link, or leads through one. Links of the system are followed: those in
    the root folder, and on the way to the home folder, the folder for temporary files and the current one."""
    if not str(path).strip():
        raise ValueError(f"{name} must be the path of a file or folder, got {str(path)!r}; name one")
    if path.parts[:1] and path.parts[0].startswith("~"):
        raise ValueError(
            f"{name} must not begin with ~, which only a shell reads as a home folder, got {path}; write the folder out"
        )
    whole = path.absolute()
    for place in (*reversed(whole.parents), whole):
        if place.is_symlink() and place not in _system_places() and place.parent != Path(place.anchor):
            raise ValueError(
                f"{name} {path} must not lead through a link, but {place} is one; pass the place itself, "
                f"{os.path.realpath(whole)}, or choose another"
            )


def _system_places() -> set[Path]:
    known = (os.path.expanduser("~"), tempfile.gettempdir(), os.environ.get("PWD", "."))
    places = [Path(place).absolute() for place in known]
    return {*places, *(parent for place in places for parent in place.parents)}


def default_output(model: Path, name: str) -> Path:
    """The path `name` in a model's folder, where a command writes without --output. A link to the folder is followed."""
    place = model.resolve()
    return (model if place == model.absolute() else place) / name


def check_file(name: str, path: Path, wrote: Callable[[Path], bool], work: str) -> None:
    """ValueError unless nothing is at `path`, the argument `name`, or a file that the command wrote.

    Args:
        wrote: whether the command wrote the file.
        work: what messages call its work: "evaluation".
    """
    there = what_stands(path)
    if there == FOLDER:
        raise ValueError(f"{name} must be a file, but {path} is a folder; choose a name for a file in it")
    refuse_links(name, path)
    if there is not None and not (there == FILE and wrote(path)):
        raise ValueError(
            f"{name} must be a new file or that of an earlier {work}, but {path} is {there} that no {work} wrote; choose "
            "another name"
        )


def has_keys(path: Path, *keys: str, **values: Any) -> bool:
    """Whether a file holds a JSON object with all these keys, and with these values."""
    try:
        found = read_json_object(path)
    except ValueError:
        return False
    return all(key in found for key in keys) and all(found.get(key) == value for key, value in values.items())


@contextmanager
def claim_files(
    name: str, files: Mapping[Path, Callable[[Path], bool]], work: str, *, overwrite: bool
) -> Iterator[None]:
    """Lock the paths of files for this process, once they are free or hold what an earlier command wrote.

    Args:
        files: by path, whether an earlier command wrote the file there.
        name, work: as for `check_file`.
        overwrite: delete what earlier commands wrote there.

    Raises:
        ValueError: something else is at one of the paths, or another process holds one. Nothing has changed.
    """

    def check() -> None:
        for path, wrote in files.items():
            check_file(name, path, wrote, work)
            check_place(name, path)

    check()  # before the lock, whose folder may be the only thing that cannot be written
    with ExitStack() as stack:
        for path in files:
            stack.enter_context(lock_path(name, path))
        check()
        for path in files if overwrite else ():
            path.unlink(missing_ok=True)
        yield


def lock_path(name: str, path: Path) -> AbstractContextManager[None]:
    """Lock a path for this process. The lock is a file in this user's folder for temporary files, so that the path's own folder
    stays as it is. Processes of other machines do not see it."""
    folder = Path(tempfile.gettempdir(), f"fastweights-locks-{os.getuid() if hasattr(os, 'getuid') else 0}")
    folder.mkdir(mode=0o700, exist_ok=True)
    state = os.lstat(folder)
    if not stat.S_ISDIR(state.st_mode) or hasattr(os, "getuid") and state.st_uid != os.getuid():
        raise ValueError(f"{name} {path} cannot be locked, as {folder} is not a folder of this user; set TMPDIR")
    real = os.path.join(os.path.realpath(path.parent), path.name)
    return hold_lock(name, path, folder / sha256(os.fsencode(real)).hexdigest()[:32])


@contextmanager
def hold_lock(name: str, path: Path, lock: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock file `lock` of `path`, the argument `name`.

    Args:
        wait: seconds for which another process may hold it; -1 for as long as it does.

    Raises:
        ValueError: another process holds it; or something else is at `lock`, which opening it would empty.
    """
    there = what_stands(lock)
    if there is not None and (there != FILE or lock.stat().st_size):
        raise ValueError(f"{name} {path} cannot be locked, as {lock} is {there} and no lock; move it")
    try:
        lock_of_file = filelock.FileLock(lock).acquire(timeout=wait)
    except filelock.Timeout:
        raise ValueError(f"{name} {path} is in use by another process; wait until it has ended") from None
    with lock_of_file:
        yield


def listed_files(folder: Path) -> dict[str, str]:
    """The hashes of the files in a folder, for "files" in the JSON file that describes it: a later command then knows its own."""
    return {path.name: file_hash(path) for path in sorted(folder.iterdir()) if what_stands(path) == FILE}


def described_files(description: Path, *keys: str, earlier: Iterable[str] = ()) -> dict[str, Callable[[Path], bool]]:
    """What a command wrote in a folder, by the JSON file `description` in it, which has these keys and lists files by their
    hashes. Empty where there is no such description. earlier: the files of a version that made no list, by name."""
    if not has_keys(description, *keys):
        return {}
    files = read_json_object(description).get("files")
    own: dict[str, Callable[[Path], bool]]
    if isinstance(files, dict):
        own = {escape(name): partial(_has_hash, digest) for name, digest in files.items()}
    else:
        own = {escape(name): any_file for name in earlier}
    return {**own, description.name: any_file} if own else {}


def _has_hash(digest: object, path: Path) -> bool:
    return file_hash(path) == digest


def check_folder(name: str, folder: Path, find_own: Callable[[], Own], work: str) -> Own:
    """What an earlier command wrote in the folder `folder`, the argument `name`, which another one may replace.

    Args:
        find_own: what an earlier command wrote there; nothing where it did not.
        work: what messages call what wrote it: "inspection".

    Raises:
        ValueError: it is no folder, or holds something and no earlier work; a file of that has changed since; or a link leads to
            it.
    """
    there, wanted = what_stands(folder), "must be a folder to fill: it must not exist or be an empty folder"
    if there not in (None, FOLDER):
        raise ValueError(f"{name} {wanted}, but {folder} is {there}; choose another name")
    check_place(name, folder)
    own = find_own()
    check_own(name, folder, own)
    inside = sorted(folder.iterdir()) if there else []
    if inside and not own:
        raise ValueError(
            f"{name} {wanted} or that of an earlier {work}, but {folder} holds {inside[0].name!r}; choose another folder"
        )
    changed = [path.name for path, part in list_own(folder, own) if not is_own(path, part)]
    if changed:
        raise ValueError(
            f"{name} {folder} holds {changed[0]!r}, which is not as the {work} wrote it; move it, or choose another folder"
        )
    return own


@contextmanager
def claim_folder(name: str, folder: Path, find_own: Callable[[], Own], work: str) -> Iterator[Own]:
    """Lock a folder for this process, which `publish_folder` then replaces. Arguments and result as for `check_folder`.

    Raises:
        ValueError: as `check_folder`, or another process holds it. Nothing has changed.
    """
    check_folder(name, folder, find_own, work)
    with lock_path(name, folder):
        drop_partials(folder.parent, {escape(folder.name): find_own()})
        yield check_folder(name, folder, find_own, work)
