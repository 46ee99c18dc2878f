"""The memory rules by name. Users add theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..plugins import Registry
from .framework.spec import spec_of

__all__ = ["OPS", "register_op", "register_own"]

Op = TypeVar("Op", bound=Callable[..., Any])
_REGISTRY: Registry[Callable[..., Any]] = Registry("memory rule")
OPS: Mapping[str, Callable[..., Any]] = _REGISTRY


def register_op(op: Op) -> Op:
    """Make an op of your own known by the name of its declaration, so that `fastweights.testing.CASES` holds its cases.

    Args:
        op: what `@op(SPEC)` makes of a function; this decorator stands above that one.

    Raises:
        TypeError: op has no declaration.
        ValueError: a name that is taken.
    """
    name = spec_of(op).name
    _REGISTRY.check_name(name, op)
    _REGISTRY.add(name, op, op)
    return op


def register_own(ops: Mapping[str, Callable[..., Any]]) -> None:
    """Register the library's ops, in the order of lists."""
    for op in ops.values():
        register_op(op)
