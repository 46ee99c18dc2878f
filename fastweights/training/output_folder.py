"""An output folder that belongs to one piece of work: held by one process at a time, refused for any other work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from ..files import PARTIAL_FILES, WriteError, disk_is_full, write_json

__all__ = ["OwnedFolder", "as_stored"]


class OwnedFolder:
    """A folder whose file `marker` describes the work that it belongs to.

    Args:
        path: the folder.
        marker: name of a JSON file.
        work: what messages call the work: "experiment", "training".
        known: names of other files that may be there before the marker is.
        longer: the setting for the length of the work, and what to do instead of raising it.
    """

    def __init__(
        self, path: Path, marker: str, work: str, known: tuple[str, ...] = (), longer: tuple[str, str] | None = None
    ) -> None:
        self.path, self.marker = path, path / marker
        self._work, self._known, self._longer = work, known, longer

    def check(self, wanted: Mapping[str, Any], *, overwrite: bool) -> None:
        """Refuse early what `held_for` would refuse later, from the known part of the work's description. Writes nothing."""
        self._refuse_other_files()
        if self.marker.exists() and not overwrite:
            self._refuse_other_work(wanted, wanted)

    @contextmanager
    def held_for(
        self,
        wanted: Mapping[str, Any],
        *,
        clear: Callable[[], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Lock the folder for the work that `wanted` describes, new or continued. With `clear`, which deletes the files of
        earlier work, it is always new. check: called before earlier work is continued, may refuse it.

        Raises:
            ValueError: the folder cannot be written to, is in use by another process, or holds other files; or, without
                `clear`, other work or a damaged marker. Its files are then unchanged.
        """
        self._refuse_other_files()
        with self._locked():
            if clear is not None:
                clear()
            elif self.marker.exists():
                self._refuse_other_work(wanted)
                if check is not None:
                    check()
            write_json(self.marker, wanted)
            yield

    def _refuse_other_files(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"output must be a folder, but {self.path} is a file; choose another output folder")
        for parent in self.path.absolute().parents:
            if parent.exists() and not parent.is_dir():
                raise ValueError(f"output must be a folder, but {parent} is a file; choose another output folder")
        if self.path.is_dir() and not self.marker.exists():
            names = (entry.name for entry in self.path.iterdir())
            others = sorted(name for name in names if not name.startswith(".") and name not in self._known)
            if others:
                raise ValueError(
                    f"output must be a new or empty folder or one of an earlier {self._work}, but {self.path} holds "
                    f"{others[0]!r} and no {self.marker.name}; choose another output folder"
                )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path / ".lock").acquire(timeout=0)
        except filelock.Timeout:
            raise ValueError(f"output {self.path} is in use by another process; wait until it has ended") from None
        except OSError as error:
            if disk_is_full(error):
                raise WriteError(f"the output could not be written to {self.path}: {error.strerror}") from None
            raise ValueError(
                f"output must be a folder that can be written to, but {self.path} cannot: {error.strerror}; "
                "choose another output folder"
            ) from None
        with lock:
            for partial in (*self.path.glob(PARTIAL_FILES), *self.path.glob(f"*/{PARTIAL_FILES}")):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
            yield

    def _refuse_other_work(self, wanted: Mapping[str, Any], compared: Iterable[str] | None = None) -> None:
        remedy = f"choose another output folder, or pass overwrite to delete that {self._work}"
        try:
            there = json.loads(self.marker.read_bytes())
            differences = {
                name: f"{name} is {_shown(there, name)} there and {_shown(wanted, name)} here"
                for name in ({**wanted, **there} if compared is None else compared)
                if there.get(name) != wanted.get(name)
            }
        except (ValueError, TypeError, AttributeError):
            raise ValueError(f"{self.marker} is damaged; {remedy}") from None
        length, instead = self._longer or ("", "")
        if list(differences) == [length] and wanted[length] > there[length]:
            remedy = f"{instead}; or {remedy}"
        if differences:
            raise ValueError(
                f"output {self.path} holds another {self._work}: {', '.join(differences.values())}; {remedy}"
            )


def _shown(record: Mapping[str, Any], name: str) -> str:
    return json.dumps(record[name]) if name in record else "not set"


def as_stored(value: Any) -> Any:
    """As it comes back from JSON (tuples become lists)."""
    return json.loads(json.dumps(value))
