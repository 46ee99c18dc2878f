"""The names and signatures that users rely on."""

from __future__ import annotations

import inspect

import pytest

import fastweights
from fastweights import ops

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
