"""What mkdocstrings asks griffe for: ops get their `cp_group` while the library is imported, and their forms in place are made
there, so these signatures and docstrings stand in no file."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from fastweights import ops

EMPTY = inspect.Parameter.empty
# Where each stands: an op in the module that defines it, a form in place in the package that exports it.
PLACES = {name: getattr(ops, name).__module__ for name in ops.OPS}
PLACES |= {f"{name}_": ops.__name__ for name in ops.OPS if hasattr(ops, f"{name}_")}


class ImportedOps(griffe.Extension):
    """Shows ops, and forms in place such as `delta_rule_ = delta_rule.in_place`, as the functions that they are."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        for name, place in PLACES.items():
            if place == mod.path:
                mod.set_member(name, described(name, mod.members[name].lineno))


def described(name: str, line: int | None) -> griffe.Function:
    function = getattr(ops, name)
    signature = inspect.signature(function)
    parameters = [
        griffe.Parameter(
            one.name,
            annotation=None if one.annotation is EMPTY else str(one.annotation),
            kind=griffe.ParameterKind[one.kind.name.lower()],
            default=None if one.default is EMPTY else repr(one.default),
        )
        for one in signature.parameters.values()
    ]
    return griffe.Function(
        name,
        parameters=griffe.Parameters(*parameters),
        returns=str(signature.return_annotation),
        docstring=griffe.Docstring(inspect.getdoc(function) or "", parser="google"),
        lineno=line,
        endlineno=line,
    )
