"""The memory rules by name. Users add theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..plugins import Registry
from .framework.call import Op
from .framework.spec import spec_of

__all__ = ["OPS", "register_op", "register_own"]

Registered = TypeVar("Registered", bound=Callable[..., Any])
_REGISTRY: Registry[Callable[..., Any]] = Registry("memory rule")
OPS: Mapping[str, Callable[..., Any]] = _REGISTRY


def register_op(op: Registered) -> Registered:
    """Register an op of your own under the name in its declaration. `OPS` and `fastweights.testing.CASES` then have it.

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


def register_own(values: Iterable[Any]) -> None:
    """Register the ops among the values of a module as the library's own. Lists have them in alphabetical order."""
    own = {op.spec.name: op for op in values if isinstance(op, Op)}
    for name in sorted(own):
        register_op(own[name])
