"""The names and signatures that users rely on."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest

import fastweights
from fastweights import layers, ops
from fastweights.ops import authoring

from .public_signatures import SHAPES, SIGNATURES


def plain_signature(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))[1:-1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert plain_signature(getattr(ops, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstring_states_the_contract(name: str) -> None:
    text = inspect.getdoc(getattr(ops, name))
    for part in ("$$", "Args:", "Returns:", "Raises:", SHAPES.get(name, "[B, T,")):
        assert part in text, part


def test_package_names() -> None:
    for name in fastweights.__all__:
        assert hasattr(fastweights, name)


@pytest.mark.parametrize("face", [ops, authoring, layers], ids=lambda face: face.__name__)
def test_type_checkers_take_the_names_for_public(face: ModuleType) -> None:
    """Each is imported as itself: `from .x import name as name`. The others begin with an underscore."""
    imports = [node for node in ast.parse(inspect.getsource(face)).body if isinstance(node, ast.ImportFrom)]
    names = [(name.name, name.asname) for node in imports for name in node.names]
    assert len(names) > 15
    assert not [name for name, alias in names if alias != name and not (alias or "").startswith("_")]
