"""The studies use only what the library offers to others: no private module or name, and of its commands the face for authors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fastweights_studies
import pytest

PACKAGE = Path(fastweights_studies.__file__).parent


def private_imports(text: str) -> set[str]:
    """What a module imports of the library that is not for others."""
    return {name for name in imported_names(ast.parse(text)) if is_private(name)}


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def is_private(name: str) -> bool:
    package, *inside = name.split(".")
    return package == "fastweights" and (
        any(part.startswith("_") for part in inside) or inside[:1] == ["cli"] and inside[1:2] != ["authoring"]
    )


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_private_is_imported(path: Path) -> None:
    assert not private_imports(path.read_text())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from fastweights.cli._options import values", {"fastweights.cli._options.values"}),
        ("def f():\n    from fastweights.data import _draws", {"fastweights.data._draws"}),
        ("import fastweights.cli._help", {"fastweights.cli._help"}),
        ("from fastweights.cli.plugins import add_commands", {"fastweights.cli.plugins.add_commands"}),
        ("from fastweights.cli.authoring import values", set()),
        ("from fastweights_studies.commands._options import Workers\nfrom ._options import Workers", set()),
    ],
)
def test_private_imports_are_found(text: str, found: set[str]) -> None:
    assert private_imports(text) == found
