"""Modules that register mixers: installed plug-ins, and those that a command names with --import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
import zlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ..checks import check_texts

__all__ = ["GROUP", "import_mixers", "load_plugins"]

GROUP = "fastweights.mixers"
_loaded = False


def load_plugins() -> None:
    """Import the modules of the entry point group `fastweights.mixers`, once in a process.

    A plug-in that fails is named in a warning of one line; the others load.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # before the imports: a plug-in may ask for the list of mixers itself
    for plugin in entry_points(group=GROUP):
        try:
            plugin.load()
        except Exception as error:
            warnings.warn(f"plug-in {plugin.name} ({plugin.value}) does not load: {_one_line(error)}", stacklevel=2)


def import_mixers(modules: Sequence[str]) -> None:
    """Import modules that register mixers, each a module name or the path of a .py file.

    Module names are looked up in the working directory too.

    Raises:
        ValueError: a module that is not there or fails.
    """
    for module in check_texts("modules", modules, what="modules or paths of .py files", empty=False):
        if module.endswith(".py") and not Path(module).is_file():
            raise ValueError(f"cannot import {module}: there is no such file")
        try:
            _import_file(Path(module)) if module.endswith(".py") else _import_name(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise ValueError(f"cannot import {module}: {_one_line(error)}") from error
            raise ValueError(
                f"cannot import {module}: there is no such module; pass the name of one, or the path of a .py file"
            ) from None
        except Exception as error:
            raise ValueError(f"cannot import {module}: {_one_line(error)}") from error


def _import_name(module: str) -> None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.import_module(module)


def _import_file(path: Path) -> None:
    path = path.resolve(strict=True)
    name = f"fastweights_import_{path.stem}_{zlib.crc32(str(path).encode()):x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
