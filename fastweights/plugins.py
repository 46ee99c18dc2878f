"""What users add to the library by name: registries, and the modules that fill them.

Such a module is an installed plug-in, or one that a command names with --import.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .checks import check_text, check_texts

__all__ = ["GROUPS", "Registry", "import_mixers", "load_plugins", "note_registration", "users_have_registered"]

GROUPS = ("fastweights.ops", "fastweights.mixers", "fastweights.tasks")  # of entry points
REMEDY = "pass the name of a module, or the path of a .py file"
_loaded = False
_registered = 0  # how often something was registered in this process
Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry]):
    """What is registered of one kind, by name.

    Plug-ins are loaded when a list or an unknown name is asked for, so that what is the library's own never waits for them.

    Args:
        kind: what messages call it, such as "mixer".
        order: names in the order of lists; others follow in the order of registration, the library's before those of users.

    Attributes:
        specs: what is registered so far.
    """

    made: ClassVar[list[Registry[Any]]] = []  # every registry of this process

    def __init__(self, kind: str, order: Sequence[str] = ()) -> None:
        self.kind, self.order = kind, order
        self.specs: dict[str, Entry] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._defined_here: set[str] = set()
        self.made.append(self)

    def __getitem__(self, name: str) -> Entry:
        if name not in self.specs:
            load_plugins()
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        first = [name for name in self.order if name in self.specs]
        return iter(dict.fromkeys([*first, *self.own_names(), *self.specs]))

    def __len__(self) -> int:
        load_plugins()
        return len(self.specs)

    def own_names(self) -> list[str]:
        """The names registered so far that are the library's: those of `order`, and of what is defined in this package and
        registered itself. A mixer of users may be a layer of the library under a name of theirs."""
        return [name for name in self.specs if name in self.order or name in self._defined_here]

    def check_characters(self, name: str) -> None:
        """Refuse a name that is not of letters, digits, ".", "_" and "-"."""
        if not re.fullmatch(r"[A-Za-z0-9._-]+", check_text("name", name, what=f"the name of a {self.kind}")):
            raise ValueError(f"name must be of letters, digits, '.', '_' and '-', got {name!r}")

    def check_name(self, name: str, defined: Any) -> None:
        """Refuse such a name for the class or function `defined`, and one that another has. What is defined again, as in a
        notebook, takes its own place."""
        self.check_characters(name)
        if name in self.specs and self._places[name] != _place(defined):
            raise ValueError(f"{self.kind} {name!r} is taken by {'.'.join(self._places[name])}; choose another name")

    def add(self, name: str, entry: Entry, defined: Any) -> None:
        """Register what stands for the class or function `defined`, whose name is checked."""
        self.specs[name], self._places[name] = entry, _place(defined)
        if entry is defined and defined.__module__.startswith(f"{__package__}."):
            self._defined_here.add(name)
        note_registration()


def _place(defined: Any) -> tuple[str, str]:
    return defined.__module__, defined.__qualname__


def users_have_registered() -> bool:
    """Whether any registry holds something that is not the library's."""
    load_plugins()
    return any(len(registry.own_names()) < len(registry.specs) for registry in Registry.made)


def load_plugins() -> None:
    """Import the modules of the entry point groups `GROUPS`, once in a process.

    A plug-in that fails is named in a warning of one line; the others load.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # before the imports: a plug-in may ask for a list itself
    # A module that registers several things may stand in several groups.
    modules = {plugin.value: plugin for group in GROUPS for plugin in entry_points(group=group)}
    for plugin in modules.values():
        try:
            plugin.load()
        except Exception as error:
            warnings.warn(f"plug-in {plugin.name} ({plugin.value}) does not load: {_one_line(error)}", stacklevel=2)


def note_registration() -> None:
    """Count something that is registered."""
    global _registered
    _registered += 1


class _Missing(Exception):
    """There is no such module. The message says what is there."""


def import_mixers(modules: Sequence[str]) -> None:
    """Import modules that register mixers, tasks or ops, each a module name or the path of a .py file.

    A module is looked up among those that are installed, then in the current folder, which does not get on the path: other files
    there stay unknown.

    Raises:
        ValueError: a module that is not there, fails, ends the process or registers nothing.
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
                f"cannot import {module}: it registers no mixer, task or op; register one there with "
                "fastweights.layers.register_mixer, fastweights.data.register_task or fastweights.ops.register_op"
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
