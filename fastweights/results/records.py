"""Records in JSON files: read as what they describe, or refused by the name of the file. A file may be a stranger's."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..untrusted import one_line, read_json_object

__all__ = ["ResultsError", "from_record", "read_object", "reading_fields"]

Made = TypeVar("Made")
REMEDY = "delete that file to have it made again"


class ResultsError(ValueError):
    """A results file cannot be used: damaged, of another version, or of another run."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ResultsError if there is none."""
    if not path.exists():
        raise ResultsError(f"result {path} does not exist; name another file")
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ResultsError(f"result {error}; {REMEDY}") from None


@contextmanager
def reading_fields(what: object) -> Iterator[None]:
    """Turns an error of code that takes fields out of a record of `what`, a file or folder, into a ResultsError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ResultsError(f"result {what} has other fields ({one_line(reason)}); {REMEDY}") from None


def from_record(kind: type[Made], record: Any, path: Path) -> Made:
    """The dataclass `kind` that a JSON object of file `path` describes, with those that its fields hold.

    Raises:
        ResultsError: its fields are others, or of another kind.
    """
    with reading_fields(path):
        hints = _read_hints(kind)  # type: ignore[arg-type]  # to mypy a type variable has no hash
        made = kind(**{name: _make_inner(value, hints.get(name), path) for name, value in record.items()})
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            if not _matches(getattr(made, field.name), hints[field.name]):
                raise TypeError(f"{field.name} is {type(getattr(made, field.name)).__name__}")
        return made


def _make_inner(value: Any, hint: Any, path: Path) -> Any:
    """The value of a field: a dataclass, or a list of them, in place of JSON objects."""
    if dataclasses.is_dataclass(hint) and not isinstance(value, hint):  # type: ignore[arg-type]
        return from_record(hint, value, path)  # type: ignore[arg-type]
    if get_origin(hint) is list and isinstance(value, list):
        return [_make_inner(entry, get_args(hint)[0], path) for entry in value]
    return value


@cache  # a file may hold thousands of records of one kind
def _read_hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, which take longer to find than all else of a record."""
    return get_type_hints(kind)


def _matches(value: object, hint: Any) -> bool:
    """Whether a value from JSON is of a kind that an annotation names."""
    kind, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, types.UnionType):
        return any(_matches(value, one) for one in inside)
    if kind is Literal:
        return value in inside
    if kind in (list, tuple):
        return isinstance(value, list) and all(_matches(entry, inside[0]) for entry in value)
    if kind in (dict, Mapping):
        return isinstance(value, dict) and all(_matches(entry, inside[1]) for entry in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
