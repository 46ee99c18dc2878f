"""Whether all processes may go on with a call. One that refused its arguments alone would leave the others waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import shape_of, values_are_checked
from .group import ContextParallel

__all__ = ["check_on_all_ranks"]

Found = TypeVar("Found")


def check_on_all_ranks(cp: ContextParallel, check: Callable[[], Found], given: Mapping[str, Any]) -> Found:
    """What check() returns, once no rank of the group refuses its arguments and all have the same kinds of them.

    The ranks ask each other on the CPU, and on a GPU only with FASTWEIGHTS_CHECK_VALUES=1, because that waits for the device.
    Otherwise each checks its own.

    Args:
        check: raises ValueError or TypeError.
        given: the arguments by the names that messages give them. Tensors of floats must have one shape, all others be equal.

    Raises:
        ValueError: another rank refused its arguments, or they differ.
    """
    flat = [x for group in given.values() for x in (group if isinstance(group, (tuple, list)) else (group,))]
    if torch.compiler.is_compiling() or not all(values_are_checked(x) for x in flat if isinstance(x, Tensor)):
        return check()
    found, refusal = None, None
    try:
        found = check()
    except (TypeError, ValueError) as error:
        refusal = error
    own = ({name: _describe(x) for name, x in given.items()}, None) if refusal is None else ({}, str(refusal))
    answers: list[Any] = [None] * cp.size
    dist.all_gather_object(answers, own, group=cp.group)
    if refusal is not None:
        raise refusal
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise ValueError(f"rank {rank} of cp_group refused its arguments: {text}")
    first = answers[0][0]
    for rank, (described, _) in enumerate(answers):
        for name in first | described:
            a, b = first.get(name), described.get(name)
            if a != b:
                raise ValueError(
                    f"{name} must be alike on every rank of cp_group, got {a} on rank 0 and {b} on rank {rank}; give every rank "
                    "parts of equal length, and the same arguments beside"
                )
    return found  # type: ignore[return-value]


def _describe(x: Any) -> str:
    """What the ranks must agree in: whether a gradient is needed, too, as the backward exchanges likewise."""
    if isinstance(x, (tuple, list)):
        return ", ".join(map(_describe, x))
    if not isinstance(x, Tensor):
        return repr(x)
    if not x.is_floating_point():
        return str(x.tolist())
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    return f"{str(x.dtype).removeprefix('torch.')} {shape_of(x)}{' that requires a gradient' * has_gradient}"
