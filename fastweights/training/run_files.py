"""Run files in TOML: their tables, dataclasses made of them, and settings that a command line replaces, as with
`--set model.num_heads=8`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..checks import check_path, check_texts, closest, describe_value, error_prefix
from ..untrusted import check_file, one_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Override",
    "check_run_file",
    "from_mapping",
    "override_settings",
    "parse_overrides",
    "parse_toml",
    "read_fields",
    "read_toml",
]

Made = TypeVar("Made")
Override = tuple[tuple[str, ...], Any]
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


def read_fields(made: Any) -> dict[str, Any]:
    """The values of a dataclass by field, from which `from_mapping` makes it again."""
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Keys and values of settings, each KEY=VALUE with a dotted key and a value in TOML. Other values are text: quotation marks,
    which shells take away, may be left out.

    Raises:
        ValueError: a text of another form, or a list or table that is not TOML.
    """
    return [
        _parse_override(text) for text in check_texts("overrides", texts, what="settings such as model.num_heads=8")
    ]


def override_settings(values: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """The tables of a run file with these settings replaced or added. Entries of lists have their numbers as keys, from 0 on.

    Raises:
        ValueError: a key within something that is no table or list, or an entry that a list does not have.
    """
    for key, value in overrides:
        values = _replace_setting(values, key, value, ".".join(key))
    return dict(values)


def _parse_override(text: str) -> Override:
    key, equals, value = text.partition("=")
    try:
        table = parse_toml(f"{key} = 0") if equals and "\n" not in key else {}
    except ValueError:
        table = {}
    path: list[str] = []
    while isinstance(table, dict) and len(table) == 1:
        ((part, table),) = table.items()
        path.append(part)
    if not path or not key.strip():
        raise ValueError(f"--set must be KEY=VALUE with a dotted key, such as model.num_heads=8, got {text!r}")
    return tuple(path), _parse_value(text, value.strip())


def _parse_value(text: str, value: str) -> Any:
    try:
        parsed = parse_toml(f"value = {value}")
    except ValueError:
        if value.startswith(("[", "{", '"', "'")):
            raise ValueError(f'--set must have a value in TOML, such as ["gdn", "pgdn"], got {text!r}') from None
        return value
    return parsed["value"] if len(parsed) == 1 else value  # a line end begins further keys


def _replace_setting(values: Any, key: Sequence[str], value: Any, name: str) -> Any:
    if not key:
        return value
    first, *rest = key
    if isinstance(values, Mapping):
        return {**values, first: _replace_setting(values.get(first, {} if rest else None), rest, value, name)}
    if isinstance(values, (list, tuple)):
        known = [str(number) for number in range(len(values))]
        if first not in known:
            raise ValueError(f"--set {name}: the list has the entries {', '.join(known) or 'none'}, got {first!r}")
        return [
            _replace_setting(old, rest, value, name) if number == first else old for number, old in zip(known, values)
        ]
    raise ValueError(f"--set {name}: {first!r} must be a key of a table, but there is {describe_value(values)}")
