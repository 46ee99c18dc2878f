"""The memory rules by name. Users add theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..checks import describe_value
from ..plugins import Registry
from .framework.spec import spec_of

__all__ = ["OPS", "register_op", "register_own"]

Op = TypeVar("Op", bound=Callable[..., Any])
_REGISTRY: Registry[Callable[..., Any]] = Registry("memory rule", ())
OPS: Mapping[str, Callable[..., Any]] = _REGISTRY


def register_op(op: Op) -> Op:
    """Make an op of your own known by the name of its declaration, so that `fastweights.testing.CASES` holds its cases.

    Args:
        op: a function that has an `OpSpec`, see docs/own_rule.md.

    Raises:
        TypeError: no such function.
        ValueError: a name that is taken.
    """
    try:
        name = spec_of(op).name
    except (AttributeError, KeyError, StopIteration):
        raise TypeError(
            f"op must be a function whose module holds an OpSpec of its name, got {describe_value(op)}"
        ) from None
    _REGISTRY.check_name(name, op)
    _REGISTRY.add(name, op, op)
    return op


def register_own(ops: Mapping[str, Callable[..., Any]]) -> None:
    """Register the library's ops, in the order of lists."""
    _REGISTRY.own = tuple(ops)
    for op in ops.values():
        register_op(op)
