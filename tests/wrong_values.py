"""Wrong values of every kind, and for an annotation those of them that may be right."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from transformers import GPT2Config

__all__ = ["UNTOLD", "VALUES", "may_fit"]

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "-1": lambda: -1,
    "10^30": lambda: 10**30,
    "10^5000": lambda: 10**5000,
    "2.5": lambda: 2.5,
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "True": lambda: True,
    "text": lambda: "no such thing",
    "long text": lambda: "x" * 10**6,
    "half a character": lambda: "\udcff",
    "no text": lambda: "",
    "bytes": lambda: b"bytes",
    "a path": lambda: Path("missing"),
    "a long path": lambda: Path("x" * 10**4),
    "an empty list": list,
    "a list of objects": lambda: [object()],
    "a list in a list": lambda: [[[]]],
    "an empty dict": dict,
    "a dict of objects": lambda: {object(): object()},
    "a set": lambda: {1.5},
    "an object": object,
    "a class": lambda: int,
    "a function": lambda: lambda *arguments, **named: None,
    "a module": lambda: nn.Linear(2, 2),
    "another config": GPT2Config,
    "a tensor": lambda: torch.ones(2, 3),
    "a tensor of whole numbers": lambda: torch.ones(2, 3, dtype=torch.int64),
    "an empty tensor": lambda: torch.ones(0),
    "a complex tensor": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "a sparse tensor": lambda: torch.ones(2, 3).to_sparse(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a tensor on meta": lambda: torch.ones(2, 3, device="meta"),
}
# What a callable's annotation does not tell from a function, which it may be called as or not.
UNTOLD = {"a module", "a class"}
_TENSORS = {"a tensor", "a tensor of whole numbers", "an empty tensor"}
_FIT: dict[Any, set[str]] = {
    type(None): {"None"},
    int: {"-1", "10^30", "10^5000"},
    float: {"-1", "10^30", "10^5000", "2.5", "NaN", "infinity"},
    bool: {"True"},
    str: {"text", "long text", "half a character", "no text"},
    Path: {"a path", "a long path"},
    Tensor: _TENSORS,
    nn.Module: {"a module"},
    object: set(VALUES),
    Any: set(VALUES),
}


def may_fit(hint: Any) -> set[str]:
    """The values that may be right for an argument of this annotation; whether they are, the function decides."""
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return set().union(*map(may_fit, inside))
    if kind is Literal:
        return set()
    if hint in _FIT:
        return _FIT[hint]
    base = kind or hint
    if base is Callable or hint is Callable:
        return {"a function"}
    if not isinstance(base, type):
        return set()
    if issubclass(base, Mapping):
        return {"an empty dict"} | ({"a dict of objects"} if inside and set(inside) <= {Any, object} else set())
    if base is type:
        return {"a class"}
    if issubclass(base, Iterable) and inside:
        entries = may_fit(inside[0])
        several = {"an empty list"} | ({"a list of objects"} if "an object" in entries else set())
        nested = {"a list in a list"} if "an empty list" in entries else set()
        return several | nested | ({"a set", "another config", *_TENSORS} if base is Iterable else set())
    return set()
