"""What mkdocstrings asks griffe for: the ops in place are made while the library is imported, so their signatures and docstrings
stand in no file."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from fastweights import ops

EMPTY = inspect.Parameter.empty


class InPlaceOps(griffe.Extension):
    """Shows `delta_rule_ = delta_rule.in_place` as the function that it is."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.path != ops.__name__:
            return
        for name in (f"{name}_" for name in ops.OPS if hasattr(ops, f"{name}_")):
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
