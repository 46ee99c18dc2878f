"""Triton's interpreter looks through all of triton.language in every call of a function of a kernel: a fifth of its time."""

from __future__ import annotations

import inspect
from typing import Any


def remember_builtins() -> None:
    """It looks once for the names of what it replaces, which are the same ones in every call."""
    from triton.language import core
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_attr", "_patch_builtin", "_LangPatchScope")):
        return  # another version of Triton
    names: dict[Any, list[str]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            names[pkg] = [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]
        for name in names[pkg]:
            member = getattr(pkg, name)
            if core.is_builtin(member):  # not yet replaced
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
