"""Arguments of the kinds that a function's annotations name, checked in one place: TypeError for any other.

`checked` is for functions and records whose arguments have few conditions beside their kind. Values are compared by the functions
of `fastweights.checks`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from .checks import check_path, check_real, describe_value

__all__ = ["checked", "is_kind"]

Made = TypeVar("Made", bound=Callable[..., Any])
NUMBERS: dict[object, type] = {int: Integral, float: Real}
WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    Path: "a pathlib.Path",
    Tensor: "a torch.Tensor",
    type(None): "None",
}


def checked(made: Made) -> Made:
    """The function, or the class with an `__init__`, that raises TypeError for an argument of another kind than its annotation
    names. A list may stand for a tuple, an int for a float. torch.compile leaves the checks out."""
    if isinstance(made, type):
        # the fields of a dataclass may be annotated in several modules, whose names its __init__ does not know
        annotated = made if dataclasses.is_dataclass(made) else made.__init__  # type: ignore[misc]
        made.__init__ = _checked_function(made.__init__, annotated)  # type: ignore[misc]
        return made
    return _checked_function(made, made)  # type: ignore[return-value]


def _checked_function(function: Callable[..., Any], annotated: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            signature, hints = _annotations(function, annotated)
            for name, value in signature.bind(*arguments, **named).arguments.items():
                if name in hints:
                    _check(name, value, hints[name])
        return function(*arguments, **named)

    return call


@functools.cache
def _annotations(function: Callable[..., Any], annotated: Any) -> tuple[inspect.Signature, dict[str, Any]]:
    """Read at the first call, because they may name what is defined below. They are no variables of the checked function, which
    torch.compile could not put into a graph."""
    signature, hints = inspect.signature(function), get_type_hints(annotated)
    named = {one.name for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return signature, {name: hint for name, hint in hints.items() if name in named}


def _check(name: str, value: object, hint: Any) -> None:
    """TypeError for another kind than that of the annotation; ValueError for a path that no file can have and a tensor that
    few functions of torch take."""
    if not is_kind(value, hint):
        raise TypeError(f"{name} must be {_describe_kind(hint)}, got {describe_value(value)}")
    if isinstance(value, Path) or (isinstance(value, str) and Path in get_args(hint)):
        check_path(name, value)
    if isinstance(value, Tensor):
        check_real(name, value)


def is_kind(value: object, hint: Any) -> bool:
    """Whether a value is of the kind that an annotation names."""
    if isinstance(hint, TypeVar):
        return not isinstance(hint.__bound__, type) or is_kind(value, hint.__bound__)
    kind, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None:
        return value is None
    if kind in (Union, types.UnionType):
        return any(is_kind(value, one) for one in inside)
    if kind is Literal:
        return any(value is one or (isinstance(value, str) and value == one) for one in inside)
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False):
        return all(callable(getattr(value, name, None)) for name in vars(hint) if not name.startswith("_"))
    base = kind or hint
    if issubclass(base, Mapping):
        return isinstance(value, Mapping) and all(
            is_kind(entry, one) for pair in value.items() for entry, one in zip(pair, inside)
        )
    if base is not str and issubclass(base, Iterable) and kind is not None:
        return _holds_several(value, base, inside)
    return callable(value) if base is Callable else isinstance(value, base)


def _holds_several(value: object, base: type, inside: tuple[Any, ...]) -> bool:
    """Whether a value holds entries of a kind; those of a generator are not looked at."""
    if not isinstance(value, (list, tuple)):
        others = (Iterable,) if base is Iterable else (Sequence, np.ndarray) if base is Sequence else ()
        return isinstance(value, others) and not isinstance(value, (str, bytes, Mapping))
    if base is tuple and inside[-1] is not ...:
        return len(value) == len(inside) and all(map(is_kind, value, inside))
    if isinstance(inside[0], type):  # of many tokens, say, one of each class tells
        value = list(dict(zip(map(type, value), value)).values())
    return all(is_kind(entry, inside[0]) for entry in value)


def _describe_kind(hint: Any) -> str:
    if isinstance(hint, TypeVar):
        return _describe_kind(hint.__bound__)
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(map(_describe_kind, inside))
    if kind is Literal:
        return f"one of {', '.join(map(repr, inside))}"
    if kind is not None and issubclass(kind, Mapping):
        return f"a dict of {_describe_kind(inside[1])} by {_describe_kind(inside[0])}"
    if kind is Callable or hint is Callable:
        return "a function"
    if kind is not None and inside:
        return f"a list of entries that are each {_describe_kind(inside[0])}"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)) if hint is not Any else "anything")
