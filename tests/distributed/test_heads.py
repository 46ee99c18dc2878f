"""Ops over several processes by exchanging heads: what the contract of every op does not test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule, delta_rule_, palimpsa, variational_linear_attention
from fastweights.ops.authoring import on_heads, penalized_memory
from fastweights.ops.context_parallel.agreement import find_differences
from fastweights.ops.context_parallel.heads import choose_units
from fastweights.testing import CASES
from fastweights.testing.processes import processes

from .parts import compile_part, gradients_of, own, refusal, world


@pytest.mark.parametrize(
    ("heads", "ranks", "units"),
    [((4, 8), 2, 4), ((3, 12), 2, 6), ((3, 6), 4, 6), ((8, 1), 4, 4), ((5, 5), 2, 5), ((2,), 4, 2), ((6, 3, 1), 2, 6)],
)
def test_key_heads_are_repeated_as_often_as_it_takes(heads: tuple[int, ...], ranks: int, units: int) -> None:
    assert choose_units(heads, ranks) == units


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_rule-head", "palimpsa", "gated_kalmanet-exact"])
def test_one_graph(name: str) -> None:
    processes(2).run(compile_part, name, "heads")


def read_kinds() -> dict[str, Tensor]:
    """16-bit inputs with gates in float32, laid out as parts of a joint projection; a NaN; no numbers at all."""
    cp = world()
    case = CASES["delta_rule-head"]
    inputs = case.draw(time=8, heads=2, dtype=torch.bfloat16).tokens
    g = inputs["g"].float()
    joint = torch.stack([inputs["q"], inputs["k"], inputs["v"].new_zeros(inputs["k"].shape)], 2)
    q, k = (own(joint, cp)[:, :, i] for i in range(2))
    assert not q.is_contiguous()
    v = inputs["v"].clone()
    v[0, 5, 1, 2] = float("nan")
    o, S = delta_rule(
        q, k, own(v, cp), own(inputs["beta"], cp), own(g, cp), output_final_state=True, cp_group=cp
    )  # fmt: skip
    whole, S_whole = delta_rule(inputs["q"], inputs["k"], v, inputs["beta"], g, output_final_state=True)
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    torch.testing.assert_close(o, own(whole, cp), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(S, S_whole, rtol=0, atol=0, equal_nan=True)
    assert S.isnan().any() and not S.isnan().all()
    shapes, S_shape = delta_rule(
        **{name: own(x, cp).to("meta") for name, x in inputs.items()}, output_final_state=True, cp_group=cp
    )
    assert shapes.is_meta and (shapes.shape, S_shape.shape) == (o.shape, S.shape)


def test_kinds_of_numbers() -> None:
    processes(2).run(read_kinds)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attend_in_parts() -> str:
    cp = world()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, h, 4, generator=generator, dtype=torch.float64).requires_grad_() for h in (6, 3, 1))
    o = on_heads(attend, *(own(x, cp) for x in (q, k, v)), cp_group=cp)
    k_all, v_all = (x.repeat_interleave(6 // x.shape[2], 2) for x in (k, v))
    whole = attend(q, k_all, v_all)
    torch.testing.assert_close(o, own(whole, cp), rtol=1e-12, atol=1e-12)
    found = torch.stack(gradients_of([o], [v])).clone()
    dist.all_reduce(found)
    torch.testing.assert_close(found[0], gradients_of([whole], [v])[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(on_heads(attend, q, q, q, cp_group=None), attend(q, q, q))
    return refusal(lambda: on_heads(attend, *[q[:, :, :1]] * 3, cp_group=cp))


def test_softmax_attention() -> None:
    for message in processes(2).run(attend_in_parts):
        assert message.startswith("cp_group must have at most as many processes as there are heads, 1, got 2; use more")


def ablate() -> None:
    """A memory that layers call beside the ops, and its counter of tokens."""
    cp = world()
    inputs = CASES["variational_linear_attention-refresh"].draw(time=10)
    given = {
        "ridge": 0.1, "refresh_every": 4, "refresh": 1e-3, "eps": 1e-4, "normalize_keys": False, "normalize_writes": True,
        "initial_state": None, "output_final_state": True, "cu_seqlens": None, "backend": "auto",
    }  # fmt: skip
    q, k, v, u = inputs.tokens.values()
    whole, states = penalized_memory(q, k, v, u, **given)
    o, found = penalized_memory(*(own(x, cp) for x in (q, k, v, u)), **given, cp_group=cp)
    torch.testing.assert_close(o, own(whole, cp), rtol=1e-12, atol=1e-12)
    assert states is not None and found is not None
    torch.testing.assert_close(found, states, rtol=1e-12, atol=1e-12)


def test_ablations() -> None:
    processes(2).run(ablate)


def read_with_prior() -> list[Tensor]:
    """A parameter of the key heads, which are repeated."""
    cp = world()
    inputs = CASES["palimpsa"].draw(time=8, heads=1, value_heads=2)
    prior = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    (whole, _), (o, _) = (
        palimpsa(**tokens, prior=prior, **more)
        for tokens, more in (
            (inputs.tokens, {}),
            ({name: own(x, cp) for name, x in inputs.tokens.items()}, {"cp_group": cp}),
        )
    )
    torch.testing.assert_close(o, own(whole, cp), rtol=1e-12, atol=1e-12)
    return [*gradients_of([o], [prior]), *gradients_of([whole], [prior])]


def test_a_parameter_of_repeated_heads() -> None:
    (first, wanted), (second, _) = processes(2).run(read_with_prior)
    torch.testing.assert_close(first + second, wanted, rtol=1e-12, atol=1e-12)


def refuse() -> list[str]:
    cp = world()
    tokens = CASES["delta_rule-head"].draw(time=6, heads=2).tokens

    def call(heads: int = 2, **changed: Any) -> str:
        given = {name: x[:, :, :heads] for name, x in tokens.items()}
        group = changed.pop("cp_group", cp)
        return refusal(lambda: delta_rule(**{**given, **changed}, cp_group=group))

    bad = tokens["g"].clone()
    bad[0, 0, 0] = float(cp.rank)
    state = torch.zeros(2, 2, 8, 6, dtype=torch.float64)
    return [
        call(heads=1, cp_group=world("heads")),
        call(**{name: x[:, : 6 - cp.rank] for name, x in tokens.items()}),
        call(g=bad),
        call(g=tokens["g"] + 100),
        call(initial_state=None if cp.rank else state),
        call(initial_state=state[:, :1]),
        call(q=tokens["q"].clone().requires_grad_(cp.rank == 1)),
        call(scale=0.5 + cp.rank),
        call(cu_seqlens=torch.tensor([0, 6 + 6 * cp.rank, 12]), **{name: x[:1] for name, x in tokens.items()}),
        call(cp_group=world("state" if cp.rank else "heads")),
        refusal(lambda: delta_rule_(**{name: x[:, :1] for name, x in tokens.items()}, state=state, cp_group=cp)),
        "" if call() else "works still",
    ]


def test_every_process_refuses() -> None:
    first, second = processes(2).run(refuse)
    assert first[:2] == second[:2] and first[3:] == second[3:]
    begins = [
        "cp_group must have at most as many processes as delta_rule has value heads here, 1, got 2; use more heads",
        "q must be alike on every rank of cp_group, got float64 [2, 6, 2, 8] on rank 0 and float64 [2, 5, 2, 8] on rank 1; give",
        "rank 1 of cp_group refused its arguments: g must be a log decay, at most 0, got 1",
        "g must be a log decay, at most 0",
        "initial_state must be alike on every rank of cp_group, got float64 [2, 2, 8, 6] on rank 0 and None on rank 1",
        "initial_state must have shape [2, 2, 8, 6], got [2, 1, 8, 6]",
        "q must be alike on every rank of cp_group, got float64 [2, 6, 2, 8] on rank 0 and float64 [2, 6, 2, 8] that requires",
        "scale must be alike on every rank of cp_group, got 0.5 on rank 0 and 1.5 on rank 1",
        "cu_seqlens must be alike on every rank of cp_group, got [0, 6, 12] on rank 0 and [0, 12, 12] on rank 1",
        "way must be alike on every rank of cp_group, got 'heads' on rank 0 and 'state' on rank 1",
        "cp_group must be None for delta_rule_, whose few tokens are not divided over processes",
        "works still",
    ]
    for message, begin in zip(first, begins, strict=True):
        assert message.startswith(begin)
    assert second[2].startswith("g must be a log decay, at most 0, got 1")


def test_signature_and_docstring() -> None:
    import inspect

    assert list(inspect.signature(variational_linear_attention).parameters)[-1] == "cp_group"
    before, after = variational_linear_attention.__doc__.split("\n    cp_group: ")
    assert "\nArgs:\n" in before and "\n\nReturns:\n" in after


def test_differences_are_of_whole_values() -> None:
    """Messages show the beginning of long ones."""
    same, long = {"a": 1, "c": 2}, 100 * "x"
    records = [{**same, "b": long + "1"}, {**same, "b": long + "2"}, {"b": long + "2", "c": 2}]
    assert find_differences(records, lambda x: str(x)[:3]) == {
        "a": "1 on ranks 0, 1 and not there on rank 2",
        "b": "xxx on rank 0 and xxx on ranks 1, 2",
    }
