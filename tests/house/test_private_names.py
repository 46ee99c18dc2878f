"""Private names of torch, triton, transformers, accelerate, PEFT and datasets stand in one file each, as the head of each says.

Read are the names that the code mentions, and the classes that it derives from theirs: what these define or override of them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fastweights
from fastweights import private_huggingface, private_torch

PACKAGE = Path(fastweights.__file__).parent
FENCES = ("private_torch.py", "private_huggingface.py", "kernels/runtime/private_api.py")
PATHS = sorted(path for path in PACKAGE.rglob("*.py") if str(path.relative_to(PACKAGE)) not in FENCES)

OTHERS = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
)
CONVENTIONS = {**private_torch.CONVENTIONS, **private_huggingface.CONVENTIONS}
# Modules of triton that are private without an underscore, and a field of its compiled kernels.
OF_TRITON = re.compile(r"triton\.runtime|triton\.compiler|triton\.backends|from triton import knobs|packed_metadata")
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # public in spite of their names
IN_CONFIGURATIONS = {"_attn_implementation", "_commit_hash", "_name_or_path"}  # keys of config.json
OF_METACLASSES = {"_abc_impl", "_backward_cls", "_is_protocol"}
# Of Python, where multiprocessing and typing have no public way, and of vLLM, in the versions that serving/vllm admits.
# `_thread` and `os._exit` are documented in spite of their names.
OF_VLLM = {"_all_lora_classes", "_attention_ops", "_token_lora_indices", "_update_metadata_for_cudagraph_capture"}
OF_GLUON = {"_reinterpret"}  # of tiles in shared memory, in the versions that kernels/runtime/gluon.py admits
ELSEWHERE = {"_args_from_interpreter_flags", "_exit", "_inheriting", "_is_protocol", "_thread", *OF_VLLM, *OF_GLUON}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def mentioned(tree: ast.AST) -> Iterator[str]:
    """Private names that the code takes of something: attributes, imports, and strings, by which getattr and vars() take them."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (part for part in [*(node.module or "").split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield from (part for part in node.value.split(".") if " " not in node.value)


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that the code itself makes: functions, classes, variables, attributes of self and cls, arguments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def foreign(tree: ast.AST, own: set[str]) -> set[str]:
    """Private names that a module takes and that the library does not define."""
    return (
        set(filter(is_private, mentioned(tree))) - own - NAMED_TUPLES - ELSEWHERE - IN_CONFIGURATIONS - set(CONVENTIONS)
    )


@cache
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text("utf-8")) for path in PATHS}


def test_the_code_mentions_no_private_name() -> None:
    own = {name for tree in trees().values() for name in defined(tree)}
    found = {
        f"{path.relative_to(PACKAGE)}: {name}" for path, tree in trees().items() for name in sorted(foreign(tree, own))
    }
    assert not found


def test_the_code_mentions_no_private_module_of_triton() -> None:
    assert not [str(path.relative_to(PACKAGE)) for path in PATHS if OF_TRITON.search(path.read_text("utf-8"))]


def private_of_others(kind: type) -> set[str]:
    """Private names of other libraries' classes that a class has among its bases."""
    return {
        name
        for base in kind.__mro__[1:]
        if base.__module__.split(".")[0] in OTHERS
        for name in [*vars(base), *inspect.get_annotations(base)]
        if is_private(name)
    }


def overridden(kind: type) -> set[str]:
    """Private names of other libraries that a class gives another meaning."""
    return {name for name in vars(kind) if is_private(name)} & private_of_others(kind) - set(
        CONVENTIONS
    ) - OF_METACLASSES


@cache
def classes() -> list[type]:
    """Those of every module that can be imported here: vLLM and flash-linear-attention may be missing."""
    found: dict[type, None] = {}
    for path in PATHS:
        module: Any
        try:
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            module = import_module(".".join(part for part in parts if part != "__init__"))
        except (ImportError, ValueError):  # serving/vllm says by a ValueError that vLLM is not there
            continue
        found |= {
            one: None for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__
        }
    return list(found)


def test_no_class_overrides_a_private_name() -> None:
    found = {f"{kind.__module__}.{kind.__name__}: {name}" for kind in classes() for name in overridden(kind)}
    assert not found


def test_conventions_are_those_of_the_libraries() -> None:
    """What no class of theirs has any more is no convention."""
    known = set().union(*map(private_of_others, classes()))
    assert set(CONVENTIONS) <= known


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("module._forward_hooks", {"_forward_hooks"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("from torch._C import _cuda_getDevice as device", {"_C", "_cuda_getDevice"}),
        ("import_module('torch._inductor.compile_fx')", {"_inductor"}),
        ("'_hf_hook' in vars(module)", {"_hf_hook"}),
        ("super()._prefill()", {"_prefill"}),
        ("self._own(place._replace(x=1))", set()),
        ("from ._options import x", set()),
    ],
)
def test_names_are_found(text: str, wanted: set[str]) -> None:
    assert foreign(ast.parse(text), {"_own"}) == wanted


def test_overridden_names_are_found() -> None:
    from torch import nn

    class Ours(nn.Module):
        def _load_from_state_dict(self, *args: Any) -> None: ...

        def _apply(self, *args: Any) -> Any: ...

        def _step(self) -> None: ...

    assert overridden(Ours) == {"_load_from_state_dict"}


def test_a_class_is_refused_whose_base_lacks_a_private_method() -> None:
    class Generation:
        def _prefill(self) -> None: ...

    with pytest.raises(ImportError, match="Model needs the method _prepare_cache_for_generation of transformers"):
        type("Model", (private_huggingface.GenerationHooks, Generation), {})
