"""The output folders of trainings: each belongs to one piece of work, is held by one process at a time, and is refused for any
other work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from ..files import (
    FOLDER,
    Own,
    WriteError,
    any_file,
    check_own,
    disk_is_full,
    drop_partials,
    remove_own,
    what_stands,
    write_json,
)
from ..outputs import check_place, has_keys, hold_lock
from ..untrusted import one_line, read_json_object

__all__ = ["OwnedFolder", "as_stored"]

MOMENT = 1.0  # seconds, in which the other processes of one training check the folder too
DELETED = "deleted"  # in the marker of work that is gone


class OwnedFolder:
    """A folder that belongs to one piece of work, and holds nothing else. Subclasses say what work that is.

    Attributes:
        MARKER: name of the JSON file that describes the work.
        KEYS: some that the marker of every version has.
        WORK: what messages call the work: "experiment", "training".
        OWN: what the work writes beside the marker.
        IGNORED: keys of the markers of earlier versions that no longer matter.
        LONGER: the setting for the length of the work, and what to do instead of raising it.
        results: where the results of all parts of the work are, with their tables and plots.
    """

    MARKER: ClassVar[str]
    KEYS: ClassVar[tuple[str, ...]]
    WORK: ClassVar[str]
    OWN: ClassVar[Own]
    IGNORED: ClassVar[tuple[str, ...]] = ()
    LONGER: ClassVar[tuple[str, str]]

    def __init__(self, path: Path) -> None:
        self.path, self.marker, self._lock = path, path / self.MARKER, path / ".lock"
        self.results = path / "results.json"

    def describe(self, work: Any) -> dict[str, Any]:
        """What the numbers of a piece of work depend on, as JSON holds it."""
        raise NotImplementedError

    @staticmethod
    def is_known(path: Path) -> bool:
        """Whether something is the work's where there is no marker."""
        return False

    def check(self, work: Any, *, overwrite: bool) -> None:
        """ValueError where the folder would be refused for `work`, as far as that is known before it begins. Writes nothing."""
        self._refuse_other_files()
        if what_stands(self._lock) is not None:
            with hold_lock("output", self.path, self._lock, wait=MOMENT):
                pass
        if self.marker.exists() and not overwrite:
            wanted = self.describe(work)
            self._refuse_other_work(wanted, wanted)

    @contextmanager
    def held_for(
        self, wanted: Mapping[str, Any], *, overwrite: bool, check: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Lock the folder for the work that `wanted` describes, new or continued. With `overwrite` the files of earlier work are
        deleted, and it is always new. check: called before earlier work is continued, may refuse it.

        Raises:
            ValueError: the folder cannot be written to, is in use by another process, has a link on its way or in it, or holds
                other files; or, without `overwrite`, other work or a damaged marker. Its files are then unchanged.
        """
        with self.locked():
            if overwrite:  # the marker stays to the last: without it a kill would leave files of nobody
                remove_own(self.path, self.OWN)
            elif self.marker.exists():
                self._refuse_other_work(wanted)
                if check is not None:
                    check()
            write_json(self.marker, wanted)
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process, as while its plots are drawn. It is made if it does not exist. What a killed process
        left of files is deleted."""
        self._refuse_other_files()
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold_lock("output", self.path, self._lock))
            except OSError as error:
                if disk_is_full(error):
                    raise WriteError(f"the output could not be written to {self.path}: {error.strerror}") from None
                raise ValueError(
                    f"output must be a folder that can be written to, but {self.path} cannot: {error.strerror}; "
                    "choose another output folder"
                ) from None
            self._refuse_other_files()  # that have come until it was locked
            drop_partials(self.path, {**self.OWN, self.marker.name: any_file})
            yield

    def remove(self) -> None:
        """Delete what the work wrote in the folder."""
        with self.locked():
            remove_own(self.path, self.OWN)
            if all(path in (self.marker, self._lock) for path in self.path.iterdir()):
                self.marker.unlink(missing_ok=True)
            elif self.marker.exists():  # beside other files it says that the folder may be used again, for any work
                write_json(self.marker, {**json.loads(self.marker.read_bytes()), DELETED: True})

    def _refuse_other_files(self) -> None:
        for place in (self.path, *self.path.absolute().parents):
            if place.exists() and not place.is_dir():
                raise ValueError(f"output must be a folder, but {place} is a file; choose another output folder")
        check_place("output", self.path)
        if what_stands(self.path) != FOLDER:
            return
        check_own("output", self.path, {**self.OWN, self.marker.name: any_file})
        if what_stands(self.marker) is None:
            for path in sorted(self.path.iterdir()):
                if not path.name.startswith(".") and not self.is_known(path):
                    raise ValueError(
                        f"output must be a new or empty folder or one of an earlier {self.WORK}, but {self.path} holds "
                        f"{path.name!r} and no {self.marker.name}; choose another output folder"
                    )
        elif not has_keys(self.marker, *self.KEYS):
            raise ValueError(
                f"{self.marker} is damaged, or not of a {self.WORK}; choose another output folder, or delete this one"
            )

    def _refuse_other_work(self, wanted: Mapping[str, Any], compared: Iterable[str] | None = None) -> None:
        remedy = f"choose another output folder, or pass overwrite to delete that {self.WORK}"
        there = read_json_object(self.marker)
        if DELETED in there:
            return
        differences = {
            name: f"{name} is {_shown(there, name)} there and {_shown(wanted, name)} here"
            for name in ({**wanted, **there} if compared is None else compared)
            if there.get(name) != wanted.get(name) and name not in self.IGNORED
        }
        length, instead = self.LONGER
        earlier = there.get(length)
        if list(differences) == [length] and isinstance(earlier, int) and wanted[length] > earlier:
            remedy = f"{instead}; or {remedy}"
        if differences:
            raise ValueError(
                f"output {self.path} holds another {self.WORK}: {', '.join(differences.values())}; {remedy}"
            )


def _shown(record: Mapping[str, Any], name: str) -> str:
    return one_line(json.dumps(record[name])) if name in record else "not set"


def as_stored(value: Any) -> Any:
    """As it comes back from JSON (tuples become lists)."""
    return json.loads(json.dumps(value))
