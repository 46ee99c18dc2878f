"""Run files in TOML: their tables, and dataclasses made of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..checks import check_path, closest, error_prefix
from ..untrusted import check_file, one_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["check_run_file", "from_mapping", "parse_toml", "read_toml"]

Made = TypeVar("Made")
LARGEST_RUN_FILE = 2**20  # bytes


def check_run_file(path: object, *suffixes: str) -> Path:
    """The path of a run file that exists and has one of these suffixes.

    Raises:
        ValueError: it does not, or is a pipe, a device or too large.
        TypeError: no path.
    """
    kind = f"a {' or '.join(suffixes)} file"
    file = check_path("run file", path, f"the path of {kind}")
    if file.suffix not in suffixes:
        raise ValueError(f"run file must be {kind}, got {file}")
    if not file.exists():
        raise ValueError(f"run file {file} does not exist; give the path of {kind}")
    with error_prefix("run file"):
        check_file(file, LARGEST_RUN_FILE)
    return file


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ValueError: the file cannot be read or is not valid TOML.
    """
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"run file {file} must be text in UTF-8: {error}; save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"run file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError is one; so is Python's for a number of thousands of digits
        raise ValueError(f"run file {file} is not valid TOML: {one_line(error)}") from None
    except RecursionError:
        raise ValueError(f"run file {file} must not nest tables or lists hundreds of levels deep") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a text; ValueError where it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables and lists must not nest hundreds of levels deep") from None


def from_mapping(kind: type[Made], values: Mapping[str, Any], what: str, others: Collection[str] = ()) -> Made:
    """The dataclass `kind` with `values`. what: where they stand, for messages; others: further keys that may stand there.

    Raises:
        ValueError: an unknown key (the message names the nearest) or a missing one, or a value that does not fit.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {*others, *(field.name for field in fields)}
    for key in values:
        if key not in known:
            raise ValueError(f"{what} has no key {key!r}{closest(key, known)}; it has {', '.join(sorted(known))}")
    for field in fields:
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in values:
            raise ValueError(f"{what} must have the key {field.name!r}; add it")
    return kind(**values)
