"""Collectives, their gradients and their nodes in traced graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.ops.context_parallel.collectives import all_gather, all_to_all, reduce_scatter
from fastweights.ops.context_parallel.exchange import deal, to_heads, to_tokens
from fastweights.ops.context_parallel.group import ContextParallel, as_context_parallel
from fastweights.testing.processes import processes

from .parts import refusal, world


def numbers(rank: int, count: int) -> Tensor:
    return (100.0 * rank + torch.arange(count, dtype=torch.float64)).requires_grad_()


def exchange() -> dict[str, Any]:
    """Uneven parts: rank 0 keeps one number and sends two, rank 1 sends none."""
    cp = world()
    sent, received = ([1, 2], [1, 0]) if cp.rank == 0 else ([0, 3], [2, 3])
    x = numbers(cp.rank, 3)
    found = all_to_all(x, sent, received, cp)
    (back,) = torch.autograd.grad(found, x, 10 * found)
    gathered = all_gather(x, cp)
    weights = torch.stack([gathered[0] + cp.rank, gathered[1]]).detach()
    (summed,) = torch.autograd.grad(gathered, x, weights)
    scattered = reduce_scatter(weights, cp)
    second = torch.autograd.grad(all_gather(x, cp).square().sum(), x, create_graph=True)[0]
    return {
        "found": found.detach(), "back": back, "x": x.detach(), "gathered": gathered.detach(), "summed": summed,
        "scattered": scattered, "second": torch.autograd.grad(second.sum(), x)[0],
    }  # fmt: skip


def test_gradients_go_the_other_way() -> None:
    first, second = processes(2).run(exchange)
    assert first["found"].tolist() == [0.0] and second["found"].tolist() == [1.0, 2.0, 100.0, 101.0, 102.0]
    for one in (first, second):
        assert torch.equal(one["back"], 10 * one["x"])
        assert torch.equal(one["gathered"], torch.stack([first["x"], second["x"]]))
        assert torch.equal(one["summed"], one["scattered"])
        assert torch.equal(one["second"], torch.full((3,), 4.0, dtype=torch.float64))  # two ranks square it
    assert torch.equal(first["summed"], 2 * first["x"] + 1) and torch.equal(second["summed"], 2 * second["x"])


def check_nodes() -> None:
    cp, x = world(), torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    narrow = torch.randn(2, 4, 6, dtype=torch.float32, requires_grad=True)
    library = torch.ops.fastweights
    options = (3, cp.size, cp.rank, cp.name)
    for node, arguments in {
        library.to_heads: ([x, narrow], *options),
        library.to_tokens: ([x[:, :, : deal(3, 2)[cp.rank]].detach().requires_grad_()], *options),
        library.all_gather: ([x], cp.size, cp.name),
        library.reduce_scatter: ([x], cp.size, cp.name),
        library.all_to_all: ([x], [1, 1], [1, 1], cp.name),
    }.items():
        utilities = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
        torch.library.opcheck(node.default, arguments, test_utils=utilities)


@pytest.mark.slow
def test_nodes_are_what_torch_expects() -> None:
    processes(2).run(check_nodes)


def round_trip() -> bool:
    """Bits of several dtypes travel together, NaN and infinity among them, from tensors that are not contiguous."""
    cp = world()
    torch.manual_seed(cp.rank)
    q = torch.randn(2, 3, 5, 4).to(torch.bfloat16).transpose(0, 1).contiguous().transpose(0, 1)
    g = torch.randn(5, 3, 2).permute(2, 1, 0)
    q[0, 0, 0, 0], g[1, 2, 4] = float("nan"), float("-inf")
    tensors = [q, g, torch.randn(2, 3, 10, 2, dtype=torch.float64)]
    on_heads = to_heads(tensors, 5, cp)
    assert [x.shape for x in on_heads] == [(2, 6, 3 - cp.rank, 4), (2, 6, 3 - cp.rank), (2, 6, 6 - 2 * cp.rank, 2)]
    same = [torch.equal(a, b) for a, b in zip(to_tokens(on_heads, 5, cp)[1:], tensors[1:])]
    empty = to_heads([x[:, :0] for x in tensors], 5, cp)
    assert [x.shape[1] for x in [*empty, *to_tokens(empty, 5, cp)]] == [0] * 6
    return all(same) and torch.equal(to_tokens(on_heads, 5, cp)[0].nan_to_num(7.0), q.nan_to_num(7.0))


def test_an_exchange_and_back_changes_no_bit() -> None:
    assert processes(2).run(round_trip) == [True, True]


def make_groups() -> list[str]:
    alone = [dist.new_group([rank]) for rank in range(2)]
    mine, other = alone[dist.get_rank()], alone[1 - dist.get_rank()]
    assert as_context_parallel(mine) is None and as_context_parallel(None) is None
    cp = as_context_parallel(dist.group.WORLD)
    assert cp == world() and (cp.rank, cp.size) == (dist.get_rank(), 2) and cp.group is dist.group.WORLD
    with pytest.raises(TypeError, match=r"group must be a torch.distributed.ProcessGroup, got str"):
        ContextParallel("gloo")  # type: ignore[arg-type]
    return [refusal(lambda: ContextParallel(other)), refusal(lambda: world("ring"))]


def test_groups() -> None:
    for not_member, other_way in processes(2).run(make_groups):
        assert not_member.startswith("group must have this process as a member, got a group of others")
        assert other_way == "way must be one of auto, heads, state, got 'ring'"
    with pytest.raises(ValueError, match=r"group must be a process group that is initialised, and none is; call torch"):
        ContextParallel(None)  # type: ignore[arg-type]
