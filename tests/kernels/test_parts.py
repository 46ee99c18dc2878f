"""The kernels of the delta rules on parts of sequences, over two processes that pass states."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops.context_parallel import documents
from fastweights.ops.context_parallel.group import ContextParallel
from fastweights.testing import CASES
from fastweights.testing.cases import OpCase, OpInputs
from fastweights.testing.contract.compare import assert_close, random_states
from fastweights.testing.processes import processes

pytestmark = pytest.mark.kernels
# Rows and documents in one segment each, and in several.
FORMS: dict[str, tuple[int, list[int] | None]] = {
    "rows": (150, None),
    "documents": (256, [0, 40, 41, 200, 256]),
    "segments": (1280, None),
    "documents in segments": (1280, [0, 3, 1200, 1280]),
}


def draw(name: str, form: str) -> tuple[OpCase, OpInputs, dict[str, Any], list[Tensor]]:
    case, (time, edges) = CASES[name], FORMS[form]
    batch = 2 if time == 150 else 1
    inputs = case.draw(batch=batch, time=time, heads=1, value_heads=2, key=16, value=16, dtype=torch.float32)
    inputs = inputs.map(lambda x: x.requires_grad_())
    given = {} if edges is None else {"cu_seqlens": torch.tensor(edges)}
    states = tuple(x.requires_grad_() for x in random_states(case, inputs, backend="torch", **given))
    more = {**given, "initial_state": case.initial_state(states)}
    return case, inputs, more, [*inputs.tokens.values(), *inputs.parameters.values(), *states]


def differentiate(o: Tensor, states: tuple[Tensor, ...], leaves: list[Tensor], ranks: int = 1) -> list[Tensor]:
    total = o.sin().sum() + torch.stack([x.sin().sum() / ranks for x in states]).sum()
    return list(torch.autograd.grad(total, leaves, materialize_grads=True))


def read_part(name: str, form: str) -> tuple[list[Tensor], list[Tensor]]:
    cp = ContextParallel(dist.group.WORLD, "state")
    case, inputs, given, leaves = draw(name, form)
    time = FORMS[form][0] // cp.size
    part = inputs.at((slice(None), slice(cp.rank * time, (cp.rank + 1) * time)))
    if "cu_seqlens" in given:
        given["cu_seqlens"] = documents.begin_row(given["cu_seqlens"])
    with mock.patch.object(documents, "Documents", wraps=documents.Documents) as made:
        o, states = case(part, **given, backend="triton", cp_group=cp)
        gradients = differentiate(o, states, leaves, cp.size)
    assert made.call_count == ("cu_seqlens" in given)  # forward and backward
    return [o.detach(), *(x.detach() for x in states)], gradients


@pytest.mark.slow
@pytest.mark.parametrize("form", [x if x == "documents" else pytest.param(x, marks=pytest.mark.slow) for x in FORMS])
@pytest.mark.parametrize(
    "name",
    [
        "delta_rule-head",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("delta_rule-channel-write", "preconditioned_delta_rule-none")
        ),
    ],
)
def test_two_processes(name: str, form: str) -> None:
    case, inputs, given, leaves = draw(name, form)
    o, states = case(inputs, **given, backend="torch")
    (results, grads), (others, more_grads) = processes(2).run(read_part, name, form)
    assert_close([torch.cat([results[0], others[0]], 1), *results[1:]], [o, *states], 2e-5)
    assert_close([a + b for a, b in zip(grads, more_grads)], differentiate(o, states, leaves), 2e-5)
