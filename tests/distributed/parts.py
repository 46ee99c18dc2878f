"""What the processes of the tests call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops.context_parallel.group import ContextParallel
from fastweights.testing import CASES


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


def compile_part(name: str, way: str) -> None:
    """An op in one graph. The group as a process group, too."""
    torch.compiler.reset()  # of other ops that this process has compiled
    cp, case = world(way), CASES[name]
    inputs = case.draw(batch=1, time=20, heads=2).map(lambda x: x.requires_grad_())
    leaves = [*inputs.tokens.values(), *inputs.parameters.values()]
    arguments = {**inputs.arguments(), **{name: own(x, cp) for name, x in inputs.tokens.items()}}

    def call(group: Any, arguments: dict[str, Any]) -> list[Tensor]:
        o, states = case.op(**arguments, output_final_state=True, cp_group=group)
        return [o, *(states if isinstance(states, tuple) else (states,))]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for more in ({}, {"cu_seqlens": torch.tensor([0, 13, 20])}):
        for group in (cp, dist.group.WORLD) if way == "heads" else (cp,):
            got, wanted = (function(group, {**arguments, **more}) for function in (compiled, call))
            floats = [[x for x in results if x.is_floating_point()] for results in (got, wanted)]
            grads = [gradients_of(results, leaves) for results in floats]
            for a, b in zip([*got, *grads[0]], [*wanted, *grads[1]]):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
