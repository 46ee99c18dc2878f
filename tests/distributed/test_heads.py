"""An op over several processes by exchanging heads returns what one process returns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops import delta_rule
from fastweights.ops.context_parallel.group import ContextParallel
from fastweights.testing import CASES
from fastweights.testing.processes import processes


def read_part(way: str) -> list[Tensor]:
    cp = ContextParallel(dist.group.WORLD, way)
    inputs = CASES["delta_rule-head"].draw(time=12, heads=3).map(lambda x: x.requires_grad_())
    part = {name: x.tensor_split(cp.size, 1)[cp.rank] for name, x in inputs.tokens.items()}
    o, S = delta_rule(**part, cp_group=cp, output_final_state=True)
    gradients = torch.autograd.grad(o.square().sum() + S.square().sum() / cp.size, list(inputs.tokens.values()))
    return [o.detach(), S.detach(), *gradients]


def test_two_processes_are_one() -> None:
    inputs = CASES["delta_rule-head"].draw(time=12, heads=3).map(lambda x: x.requires_grad_())
    o, S = delta_rule(**inputs.tokens, output_final_state=True)
    gradients = torch.autograd.grad(o.square().sum() + S.square().sum(), list(inputs.tokens.values()))
    (o0, S0, *grads0), (o1, S1, *grads1) = processes(2).run(read_part, "heads")
    torch.testing.assert_close(torch.cat([o0, o1], 1), o)
    torch.testing.assert_close(S0, S)
    torch.testing.assert_close(S1, S)
    for a, b, wanted in zip(grads0, grads1, gradients):
        torch.testing.assert_close(a + b, wanted)
