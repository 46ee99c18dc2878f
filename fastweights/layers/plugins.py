"""Modules that register mixers: installed plug-ins, and those that a command names with --import."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
import zlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path

from ..checks import check_texts

__all__ = ["GROUP", "import_mixers", "load_plugins", "note_registration"]

GROUP = "fastweights.mixers"
REMEDY = "pass the name of a module, or the path of a .py file"
_loaded = False
_registered = 0  # how often a mixer or rule was registered in this process


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


def note_registration() -> None:
    """Count a mixer, or the rule of one, that is registered."""
    global _registered
    _registered += 1


class _Missing(Exception):
    """There is no such module. The message says what is there."""


def import_mixers(modules: Sequence[str]) -> None:
    """Import modules that register mixers, each a module name or the path of a .py file.

    A module is looked up among those that are installed, then in the current folder, which does not get on the path: other files
    there stay unknown.

    Raises:
        ValueError: a module that is not there, fails, ends the process or registers neither a mixer nor a rule.
    """
    for module in check_texts("modules", modules, what="modules or paths of .py files", empty=False):
        load_plugins()  # which may import the module themselves
        before = _registered
        try:
            loaded = _import_file(Path(module)) if module.endswith(".py") else _import_name(module)
        except _Missing as missing:
            raise ValueError(f"cannot import {module}: {missing}; {REMEDY}") from None
        except (Exception, SystemExit) as error:
            why = _one_line(error).replace(f"({Path(module).name}, line", "(line")  # Python names the file again
            raise ValueError(f"cannot import {module}: {why}") from error
        if loaded is not None and _registered == before:
            del sys.modules[loaded]
            raise ValueError(
                f"cannot import {module}: it registers no mixer; register one there with fastweights.layers.register_mixer"
            )


def _import_name(name: str) -> str | None:
    """The name of the module; None where it was there before."""
    if name in sys.modules:
        return None
    missing = _Missing("it is a folder" if Path(name).is_dir() else "there is no such module")
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        raise missing
    top = name.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        spec = PathFinder.find_spec(top, [str(Path.cwd())])
        if spec is None or (spec.loader is None and top == name):
            raise missing
        _load(spec)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise missing from None
    return name


def _import_file(path: Path) -> str | None:
    """The name that the file has among modules; None where it was there before."""
    if not path.is_file():
        raise _Missing("it is a folder" if path.is_dir() else "there is no such file")
    path = path.resolve(strict=True)
    name = f"fastweights_import_{path.stem}_{zlib.crc32(str(path).encode()):x}"
    if name in sys.modules:
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    _load(spec)
    return name


def _load(spec: ModuleSpec) -> None:
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        if spec.loader is not None:  # a folder of modules without __init__.py has none
            spec.loader.exec_module(sys.modules[spec.name])
    except BaseException:
        del sys.modules[spec.name]
        raise


def _one_line(error: BaseException) -> str:
    """The kind of an error and what it says."""
    kind, message = type(error).__name__, " ".join(str(error).split())
    return f"{kind}: {message}" if message else kind
