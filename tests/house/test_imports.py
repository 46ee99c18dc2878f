"""What may import what: the packages are layers, and neither packages nor modules nor tests go round in circles.

Every import statement counts, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fastweights import ops
from fastweights.ops import authoring
from fastweights.training.run_files import read_toml

ROOT = Path(__file__).parents[2]

# A package may import those before it. Packages in one row stand beside each other and do not know each other.
ORDER = (
    ("_version",),
    ("private_huggingface", "private_torch"),
    ("checks", "cuda_graphs", "environment", "safe_path", "stopping", "terminal", "untrusted"),
    ("files", "kinds"),
    ("plugins",),
    ("outputs",),
    ("kernels", "data", "results"),
    ("ops",),
    ("layers",),
    ("models", "testing"),
    ("distributed",),
    ("analysis", "conversion", "evaluation", "serving"),
    ("training",),
    ("distillation",),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names that the import statements of a module mention: modules, or members of modules."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def nearest_module(name: str, modules: Mapping[str, Path]) -> str | None:
    """The module that `name` is or is a member of."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


@cache
def imports(folder: str) -> dict[str, frozenset[str]]:
    """For every module of a folder, the modules of this repository that it imports."""
    modules = {module_name(path): path for top in ("fastweights", "tests") for path in (ROOT / top).rglob("*.py")}
    found = {}
    for module, path in modules.items():
        if module.split(".")[0] == folder:
            names = imported_names(ast.parse(path.read_text("utf-8")), module, path.name == "__init__.py")
            targets = {nearest_module(name, modules) for name in names}
            found[module] = frozenset(target for target in targets if target not in (None, module))
    return found  # type: ignore[return-value]


def package_of(module: str) -> str:
    """`ops` for fastweights.ops.delta_rule; empty for fastweights itself."""
    return (module.split(".") + [""])[1]


@cache
def package_imports() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for module, targets in imports("fastweights").items():
        names = {package_of(target) for target in targets} - {package_of(module), ""}
        found.setdefault(package_of(module), set()).update(names)
    return {name: frozenset(targets) for name, targets in found.items()}


def circle(graph: Mapping[str, frozenset[str]]) -> list[str]:
    """Some circle of a graph, as the names on its way; empty where there is none."""
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            found = search(target, [*way, name])
            if found:
                return found
        done.add(name)
        return []

    return next(filter(None, (search(name, []) for name in sorted(graph))), [])


def test_every_package_has_a_place() -> None:
    assert set(package_imports()) - {""} == set(RANK)


@pytest.mark.parametrize("package", sorted(RANK))
def test_a_package_imports_only_those_below_it(package: str) -> None:
    wrong = {
        f"{module} imports {target}"
        for module, targets in imports("fastweights").items()
        for target in targets
        if package_of(module) == package != package_of(target) != "" and RANK[package_of(target)] >= RANK[package]
    }
    assert not wrong


def test_layers_use_the_public_faces_of_the_ops() -> None:
    """What a layer of a user's own may use: the public names of `fastweights.ops` and of `fastweights.ops.authoring`."""
    public = {f"{face.__name__}.{name}" for face in (ops, authoring) for name in face.__all__}
    deeper = {
        f"{path.name} imports {name}"
        for path in (ROOT / "fastweights" / "layers").rglob("*.py")
        for name in imported_names(ast.parse(path.read_text("utf-8")), module_name(path), path.name == "__init__.py")
        if package_of(name) == "ops" and name not in public
    }
    assert not deeper


def test_packages_have_no_circle() -> None:
    assert circle(package_imports()) == []


def test_modules_have_no_circle() -> None:
    """A package's __init__ imports its modules; where one of them names the package, it means a module behind it."""
    assert circle(imports("fastweights")) == []


KERNELS = "fastweights.kernels."
BELOW = {"runtime": (), "common": ("runtime",)}  # what these folders of the kernels may import; all others are families


def kernel_folder(module: str) -> str:
    """`chunk` for fastweights.kernels.chunk.memory; empty for modules that stand in no folder of the kernels."""
    folder = module.removeprefix(KERNELS).partition(".")[0]
    inside = module.startswith(KERNELS) and (ROOT / "fastweights" / "kernels" / folder).is_dir()
    return folder if inside else ""


def foreign_kernels(graph: Mapping[str, frozenset[str]]) -> set[str]:
    """The imports by which a family of kernels reaches past `common`, `runtime` and its own folder."""
    return {
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in targets
        if (own := kernel_folder(module)) and target.startswith(KERNELS)
        if kernel_folder(target) not in (own, *BELOW.get(own, tuple(BELOW)))
    }


def test_families_of_kernels_do_not_know_each_other() -> None:
    assert not foreign_kernels(imports("fastweights"))


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        ("ridge.order", True),
        ("common.delta_rule.wy", True),
        ("runtime.launch_plan", True),
        ("chunk.memory", False),
        ("availability", False),
    ],
)
def test_a_family_that_reaches_into_another_is_found(target: str, allowed: bool) -> None:
    graph = {KERNELS + "ridge.rule": frozenset([KERNELS + target])}
    assert (not foreign_kernels(graph)) is allowed
    assert foreign_kernels({KERNELS + "runtime.workspace": frozenset([KERNELS + "common.call"])})


def test_tests_do_not_import_tests() -> None:
    wrong = {
        f"{module} imports {target}"
        for module, targets in imports("tests").items()
        for target in targets
        if target.rpartition(".")[2].startswith("test_")
    }
    assert not wrong


def test_a_circle_is_found() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("cd"), "c": frozenset("d"), "d": frozenset("b")}
    assert circle(graph) == ["b", "c", "d", "b"]
    assert circle({**graph, "d": frozenset("e")}) == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("import torch.nn", ["torch.nn"]),
        ("from ..checks import check_size, closest", ["fastweights.checks.check_size", "fastweights.checks.closest"]),
        ("from . import cache", ["fastweights.layers.cache"]),
        ("def f():\n    from .. import models", ["fastweights.models"]),
        ("if TYPE_CHECKING:\n    from ...tests.layers import by_hand as b", ["tests.layers.by_hand"]),
    ],
)
def test_import_statements_are_read(text: str, expected: list[str]) -> None:
    assert list(imported_names(ast.parse(text), "fastweights.layers.gates", is_package=False)) == expected
    package = list(imported_names(ast.parse(text), "fastweights.layers", is_package=True))
    assert package == expected


# What users install themselves: the code says how where it is missing. triton comes with torch for CUDA.
OF_USERS = {"datasets", "flash-linear-attention", "triton"}
OTHER_NAMES = {"fla": "flash-linear-attention"}  # distributions that are not called as what they hold


def test_other_projects_are_dependencies() -> None:
    """Of pyproject.toml, or of one of its extras. What is installed only because another project needs it does not count."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {canonicalize_name(Requirement(one).name) for one in wanted}
    names = {
        name.partition(".")[0]
        for path in (ROOT / "fastweights").rglob("*.py")
        for name in imported_names(ast.parse(path.read_text("utf-8")), module_name(path), path.name == "__init__.py")
    }
    others = names - sys.stdlib_module_names - {"fastweights"}
    assert {canonicalize_name(OTHER_NAMES.get(name, name)) for name in others} <= declared | OF_USERS
