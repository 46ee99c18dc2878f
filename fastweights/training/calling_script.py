"""Processes started by a script that has no `if __name__ == "__main__":`.

multiprocessing runs the script again in every process that it starts, for what the script defines. Without that line the script
would start its training once more there. Such a script is not run again; only where it may have registered mixers or tasks of its
own, it is run up to its first call of a function of this library that does the work, such as `run_recall`.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ..plugins import users_have_registered
from ..safe_path import same_path

__all__ = ["prepared", "starting_processes", "work_begins"]

LINE = 'if __name__ == "__main__":'
_running = False  # whether this process runs the script, for what it registers


class _WorkReached(BaseException):
    """The script has come to its work, which another process does."""


def work_begins(function: str) -> None:
    """Called first in every function that does the work of a script.

    Raises:
        RuntimeError: a process that starts runs the script again, as it has the line but not above this call.
    """
    if _running:
        raise _WorkReached
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"{function} must not be called where a process only imports the script that calls it; put the call under "
            f"`{LINE}`"
        )


@contextmanager
def starting_processes() -> Iterator[None]:
    """Processes that multiprocessing starts in the block do not run a script without the line, and find modules where this
    process finds them."""
    if _running:
        raise _WorkReached
    main = sys.modules["__main__"]
    if _script() is not None or _is_typed(main):
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        with same_path():
            yield
    finally:
        sys.modules["__main__"] = main


def prepared(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a process that starts in `starting_processes`, which hides the script: ask for it before. The process knows
    the mixers and tasks that the script registered."""
    script = _script()
    return function if script is None or not users_have_registered() else _Prepared(function, str(script))


@dataclass(frozen=True)
class _Prepared:
    function: Callable[..., Any]
    script: str

    def __call__(self, *arguments: Any) -> Any:
        _run_until_work(self.script)
        return self.function(*arguments)


def _script() -> Path | None:
    """The script that this process runs, where it is a file without the line."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    path = None if file is None else Path(file).resolve()
    return path if path is not None and path.is_file() and _lacks_the_line(path) else None


def _lacks_the_line(path: Path) -> bool:
    """Whether a script, which may have any suffix, compares its name with nothing. One that is compiled is taken to do so."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return False
    compared = (side for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators))
    return not any(isinstance(side, ast.Name) and side.id == "__name__" for side in compared)


def _is_typed(main: ModuleType) -> bool:
    """Whether its code came from standard input, of which Python makes the name of a file."""
    file = getattr(main, "__file__", None)
    return file is not None and main.__spec__ is None and not Path(file).is_file()


def _run_until_work(script: str) -> None:
    global _running
    name = "__mp_main__"  # as multiprocessing calls it
    spec = importlib.util.spec_from_file_location(name, script, loader=SourceFileLoader(name, script))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = sys.modules["__main__"] = importlib.util.module_from_spec(spec)
    _running = True
    try:
        spec.loader.exec_module(module)
    except _WorkReached:
        pass
    finally:
        _running = False
