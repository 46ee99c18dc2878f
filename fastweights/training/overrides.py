"""Settings of a run file that a command line replaces: `--set model.num_heads=8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import check_texts, describe_value
from .toml_file import parse_toml

__all__ = ["Override", "overridden", "parse_overrides"]

WHAT = "settings such as model.num_heads=8"
Override = tuple[tuple[str, ...], Any]


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Keys and values of settings, each KEY=VALUE with a dotted key and a value in TOML. Other values are text: quotation marks,
    which shells take away, may be left out.

    Raises:
        ValueError: a text of another form, or a list or table that is not TOML.
    """
    return [_parsed(text) for text in check_texts("overrides", texts, what=WHAT)]


def overridden(values: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """The tables of a run file with these settings replaced or added. Entries of lists have their numbers as keys, from 0 on.

    Raises:
        ValueError: a key within something that is no table or list, or an entry that a list does not have.
    """
    for key, value in overrides:
        values = _replaced(values, key, value, ".".join(key))
    return dict(values)


def _parsed(text: str) -> Override:
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
    return tuple(path), _value(text, value.strip())


def _value(text: str, value: str) -> Any:
    try:
        parsed = parse_toml(f"value = {value}")
    except ValueError:
        if value.startswith(("[", "{", '"', "'")):
            raise ValueError(f'--set must have a value in TOML, such as ["gdn", "pgdn"], got {text!r}') from None
        return value
    return parsed["value"] if len(parsed) == 1 else value  # a line end begins further keys


def _replaced(values: Any, key: Sequence[str], value: Any, name: str) -> Any:
    if not key:
        return value
    first, *rest = key
    if isinstance(values, Mapping):
        return {**values, first: _replaced(values.get(first, {} if rest else None), rest, value, name)}
    if isinstance(values, (list, tuple)):
        known = [str(number) for number in range(len(values))]
        if first not in known:
            raise ValueError(f"--set {name}: the list has the entries {', '.join(known) or 'none'}, got {first!r}")
        return [_replaced(old, rest, value, name) if number == first else old for number, old in zip(known, values)]
    raise ValueError(f"--set {name}: {first!r} must be a key of a table, but there is {describe_value(values)}")
