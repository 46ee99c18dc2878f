"""What a command prints on standard output: one JSON document with --json, and with --dry-run what it would do."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from ..terminal import show

__all__ = ["show_json", "show_plan", "tables_aside"]


def tables_aside(as_json: bool) -> AbstractContextManager[Any]:
    """In the block, what is printed goes to standard error where standard output is for a JSON document alone."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def show_json(document: Any) -> None:
    """The one JSON document on standard output of a command with --json. What is not finite is null."""
    json.dump(_finite(document), sys.stdout, indent=1, allow_nan=False)
    print()


def show_plan(plan: Any, as_json: bool = False) -> None:
    """A plan of --dry-run: one line per name and value, and that nothing was written."""
    if as_json:
        show_json(plan)
    else:
        show("\n".join([*_lines(plan), "Nothing was written."]))


def _lines(plan: Any, indent: str = "") -> Iterator[str]:
    for name, value in plan.items():
        inner = [value] if isinstance(value, Mapping) else value
        if isinstance(inner, Sequence) and inner and all(isinstance(entry, Mapping) for entry in inner):
            for entry in inner:
                yield f"{indent}{name}:"
                yield from _lines(entry, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    plain = isinstance(value, str) and value and value.isprintable()
    return value if plain else json.dumps(value, default=str, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and value - value != 0 else value
