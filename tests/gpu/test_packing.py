"""Packed sequences on a CUDA device: nobody waits for their lengths, and other lengths need no other plan, kernel or graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.testing import OpCase
from tests.kernels.cases import KERNEL_CASES, ONE_OF_EACH_FAMILY, SOME

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
TIME = 1500
FIRST, SECOND = ([0, 100, 100, TIME], [0, 1, 1300, TIME])


def step(case: OpCase, inputs: list[Tensor], names: list[str], cu_seqlens: Tensor) -> list[Tensor]:
    """Results and the gradients of their sum."""
    o, states = case.op(**dict(zip(names, inputs)), output_final_state=True, cu_seqlens=cu_seqlens, backend="triton")
    results = [o, *(states if isinstance(states, tuple) else (states,))]
    return [*results, *torch.autograd.grad(sum(x.float().square().sum() for x in results), inputs)]


def leaves(case: OpCase) -> tuple[list[Tensor], list[str]]:
    inputs = case.draw(batch=1, time=TIME, heads=2, key=64, value=64, dtype=torch.bfloat16).map(Tensor.cuda)
    named = {**inputs.tokens, **inputs.parameters}
    return [x.requires_grad_() for x in named.values()], list(named)


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_new_lengths_cost_nothing_on_the_host(name: str) -> None:
    """No wait for the device, no new plan and no compile."""
    from fastweights.kernels.runtime import launch_plan

    case = KERNEL_CASES[name]
    inputs, names = leaves(case)
    edges = [torch.tensor(e, device="cuda") for e in (FIRST, SECOND)]
    step(case, inputs, names, edges[0])
    plans, compiled = launch_plan._plans.cache_info().currsize, len(launch_plan._compiled)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step(case, inputs, names, edges[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launch_plan._plans.cache_info().currsize == plans and len(launch_plan._compiled) == compiled
    wanted = step(case, inputs, names, edges[1].clone())
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_captured_graph_owns_what_it_reads(name: str) -> None:
    """Lengths change in place and all plans are forgotten: a replay still gives what an eager call gives."""
    from fastweights.kernels.runtime import launch_plan

    case = KERNEL_CASES[name]
    inputs, names = leaves(case)
    cu_seqlens = torch.tensor(FIRST, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(case, inputs, names, cu_seqlens)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(case, inputs, names, cu_seqlens)
    launch_plan._plans.cache_clear()
    junk = [torch.full((2**20,), 1e30, device="cuda") for _ in range(64)]  # over whatever memory was freed
    with torch.no_grad():
        cu_seqlens.copy_(torch.tensor(SECOND))
        for x in inputs:
            x.mul_(0.9)
    graph.replay()
    torch.cuda.synchronize()
    del junk
    assert all(torch.equal(a, b) for a, b in zip(captured, step(case, inputs, names, cu_seqlens)))


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_wrong_lengths_on_the_device_stay_inside_the_row(name: str) -> None:
    """They are not read, and what is computed has no meaning; but no kernel leaves its memory."""
    case = KERNEL_CASES[name]
    inputs, names = leaves(case)
    for edges in ([-5, 100, 9000, 7], [0, 900, 20, TIME], [3000, 2000, 1000, 0]):
        step(case, inputs, names, torch.tensor(edges, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", SOME)
def test_lengths_on_the_device_are_checked_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CHECK_VALUES", "1")
    case = KERNEL_CASES[name]
    inputs, names = leaves(case)
    step(case, inputs, names, torch.tensor(FIRST, device="cuda"))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        step(case, inputs, names, torch.tensor([0, 900, 20, TIME], device="cuda"))
