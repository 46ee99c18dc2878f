"""What a command prints on standard output: one JSON document with --json, and with --dry-run what it would do."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ..terminal import show

__all__ = ["one_document", "show_json", "show_plan", "show_plots"]


@contextmanager
def one_document(as_json: bool) -> Iterator[Callable[[Any], None]]:
    """The function that takes the JSON document of a command with --json, which is printed after the block. What the block, a
    module that --import names or a process started there prints goes to standard error."""
    if not as_json:
        yield show_json
        return
    documents: list[Any] = []
    with redirect_stdout(sys.stderr), _processes_redirected():
        yield documents.append
    for document in documents:
        show_json(document)


@contextmanager
def _processes_redirected() -> Iterator[None]:
    """Processes that are started in the block, and libraries in other languages, have standard error as standard output."""
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def show_json(document: Any) -> None:
    """A JSON document on standard output. What is not finite is null."""
    show(json.dumps(_finite(document), indent=1, allow_nan=False))


def show_plan(plan: Any) -> None:
    """A plan of --dry-run: one line per name and value, and that nothing was written."""
    show("\n".join([*_lines(plan), "Nothing was written."]))


def show_plots(what: str, draw: Callable[[], Iterable[Path]], advice: str = ", then give the same command") -> None:
    """Draw plots and name their files; where matplotlib is missing, say so.

    Args:
        what: "Plots" or "Plot".
        advice: what else to do beside installing it.
    """
    try:
        show(f"{what}: " + ", ".join(map(str, draw())))
    except ImportError:
        show(f"No {what.lower()}: matplotlib is missing; pip install 'fastweights[viz]'{advice}", error=True)


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
