"""Whether all processes may go on with a call. One that refused its arguments alone would leave the others waiting for it.

What the processes have is compared by `find_differences`, however they tell each other: here as objects through their group, on a
GPU too; before a training has a group, through the store where the processes meet (`training.language.processes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import shape_of, values_are_checked
from .group import ContextParallel

__all__ = ["check_on_all_ranks", "find_differences", "gather_objects", "name_ranks"]

Found = TypeVar("Found")
NAMED = 4  # ranks in a message


def gather_objects(own: Any, cp: ContextParallel, x: Tensor | None = None) -> list[Any]:
    """What every rank of the group gives, by rank. x: a tensor on the device of this rank; NCCL puts the objects there."""
    found: list[Any] = [None] * cp.size
    with nullcontext() if x is None else torch.cuda.device_of(x):
        dist.all_gather_object(found, own, group=cp.group)
    return found


def find_differences(
    records: Sequence[Mapping[str, Any]],
    show: Callable[[Any], str] = str,
    name: Callable[..., str] = lambda *ranks: name_ranks(ranks),
) -> dict[str, str]:
    """What differs between the records of the ranks, by name: {"torch": "2.12 on rank 0 and 2.13 on ranks 1, 2"}.

    Args:
        show: a value, for messages.
        name: ranks, for messages.
    """
    found = {}
    for key in dict.fromkeys(key for record in records for key in record):
        ranks: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            ranks.setdefault(repr(record.get(key)), []).append(rank)
        if len(ranks) > 1:
            values = [(records[which[0]].get(key), which) for which in ranks.values()]
            found[key] = " and ".join(
                f"{'not there' if value is None else show(value)} on {name(*which)}" for value, which in values
            )
    return found


def name_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Ranks for messages, and their hosts: "ranks 2, 3 (node-b)". hosts: of all ranks, as far as they are known."""
    numbers = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    of_ranks = list(dict.fromkeys(hosts[rank] for rank in ranks[:NAMED] if rank < len(hosts)))
    return f"rank{'s' * (len(ranks) > 1)} {numbers}" + (f" ({', '.join(of_ranks)})" if of_ranks else "")


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
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or not all(map(values_are_checked, tensors)):
        return check()
    found, refusal = None, None
    try:
        found = check()
    except (TypeError, ValueError) as error:
        refusal = error
    own = ({name: _describe(x) for name, x in given.items()}, None) if refusal is None else ({}, str(refusal))
    answers = gather_objects(own, cp, *tensors[:1])
    if refusal is not None:
        raise refusal
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise ValueError(f"rank {rank} of cp_group refused its arguments: {text}")
    for name, what in find_differences([described for described, _ in answers]).items():
        raise ValueError(
            f"{name} must be alike on every rank of cp_group, got {what}; give every rank parts of equal length, and the same "
            "arguments beside"
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
