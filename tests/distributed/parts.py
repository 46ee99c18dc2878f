"""What the processes of the tests call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops.context_parallel.group import ContextParallel


def world(way: str = "auto") -> ContextParallel:
    return ContextParallel(dist.group.WORLD, way)


def own(x: Tensor, cp: ContextParallel) -> Tensor:
    """This process's part of x [B, T, ...]."""
    return x.tensor_split(cp.size, 1)[cp.rank]


def refusal(call: Callable[[], Any]) -> str:
    """The message of the ValueError that the call raises; "" where it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def gradients_of(outputs: list[Tensor], leaves: list[Tensor], size: int = 1) -> list[Tensor]:
    """Of a sum over the outputs, of which the first is this process's own and the others are those of all `size` processes."""
    total = outputs[0].sin().sum() + sum(x.sin().sum() / size for x in outputs[1:])
    return list(torch.autograd.grad(total, leaves, materialize_grads=True))


def add_up(parts: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(of_ranks).sum(0) for of_ranks in zip(*parts)]
