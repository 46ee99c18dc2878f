"""Installed plug-ins that register mixers."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points

__all__ = ["GROUP", "load_plugins", "one_line"]

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
            warnings.warn(f"plug-in {plugin.name} ({plugin.value}) does not load: {one_line(error)}", stacklevel=2)


def one_line(error: BaseException) -> str:
    """The kind of an error and what it says."""
    kind, message = type(error).__name__, " ".join(str(error).split())
    return f"{kind}: {message}" if message else kind
