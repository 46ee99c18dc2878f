"""Where processes find modules: never in the current folder, which may hold a stranger's torch.py or random.py.

`python -m` puts the current folder first on the path, and so does `python -c`, by which multiprocessing starts its processes and
their server. Python 3.11 has PYTHONSAFEPATH against that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

__all__ = ["HAS_SAFE_PATH", "safe_children", "same_path"]

HAS_SAFE_PATH = sys.version_info >= (3, 11)
SAFE = {"PYTHONSAFEPATH": "1"}


@contextmanager
def safe_children() -> Iterator[None]:
    """No Python process that this one or a library starts in the block has the current folder on its path."""
    with _environment(SAFE):
        yield


@contextmanager
def same_path() -> Iterator[None]:
    """Processes that multiprocessing starts in the block, and its server, find modules where this process finds them, from their
    first import on. Without the block they would look into the current folder before."""
    with _environment(_variables()) if HAS_SAFE_PATH else _isolated():
        yield


def _variables() -> dict[str, str]:
    folders = [folder or os.getcwd() for folder in sys.path]
    return {**SAFE, "PYTHONPATH": os.pathsep.join(folder for folder in folders if os.pathsep not in folder)}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _isolated() -> Iterator[None]:
    """Python 3.10: isolated processes, which get the path of this one from multiprocessing. It has no public name for options
    of the interpreter."""
    module: Any = util
    before = module._args_from_interpreter_flags
    module._args_from_interpreter_flags = lambda: [*before(), "-I"]
    try:
        yield
    finally:
        module._args_from_interpreter_flags = before
