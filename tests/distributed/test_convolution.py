"""A short convolution over several processes is one over the whole sequence, its gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import short_convolution
from fastweights.testing.processes import processes

from .parts import add_up, gradients_of, own, refusal, world

TIME, CHANNELS = 12, 4
FORMS: dict[str, dict[str, Any]] = {
    "rows": {"batch": 2},
    "rows, no state": {"batch": 2, "state": False},
    "token shift": {"batch": 2, "width": 2},
    "one number": {"batch": 2, "width": 1},
    "norms": {"batch": 1, "activation": "silu", "normalize": 2, "bias": True},
    # Borders between the parts of 2 and 4 processes: at 3, 6 and 9.
    "documents": {"batch": 1, "edges": [0, 2, 2, 5, 7, 12]},
    "documents at borders": {"batch": 1, "edges": [0, 3, 6, 12], "bias": True},
    "documents shorter than the filter": {"batch": 1, "edges": [0, 5, 6, 7, 8, 10, 11, 12], "activation": "silu"},
    "an empty document at a border, no state": {"batch": 1, "edges": [0, 6, 6, 12], "state": False},
    "one document": {"batch": 1, "edges": [0, 12]},
}


def draw(form: str) -> tuple[list[Tensor], dict[str, Any]]:
    """x, weight, and bias and first window where there are any; and options."""
    options = dict(FORMS[form])
    batch, width, edges = options.pop("batch"), options.pop("width", 4), options.pop("edges", None)
    count = batch if edges is None else len(edges) - 1
    has_state, has_bias = options.pop("state", True), options.pop("bias", False)
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (batch, TIME, CHANNELS), "weight": (CHANNELS, width)}
    shapes |= {"bias": (CHANNELS,)} if has_bias else {}
    shapes |= {"initial_state": (count, width - 1, CHANNELS)} if has_state else {}
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    if edges is not None:
        options["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
    return list(drawn.values()), {**drawn, **options}


def convolve_part(form: str) -> tuple[list[Tensor], list[Tensor]]:
    cp = world()
    leaves, given = draw(form)
    y, last = short_convolution(**{**given, "x": own(given["x"], cp)}, output_final_state=True, cp_group=cp)
    again, _ = short_convolution(**{**given, "x": own(given["x"], cp)}, cp_group=cp)
    assert torch.equal(y, again)
    return [y.detach(), last.detach()], gradients_of([y, last], leaves, cp.size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_parts_are_the_whole(form: str, size: int) -> None:
    leaves, given = draw(form)
    y, last = short_convolution(**given, output_final_state=True)
    results, grads = zip(*processes(size).run(convolve_part, form))
    torch.testing.assert_close(torch.cat([of_rank[0] for of_rank in results], 1), y.detach(), rtol=1e-12, atol=1e-12)
    for _, found in results:
        assert torch.equal(found, last)
    for found, wanted in zip(add_up(list(grads)), gradients_of([y, last], leaves)):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def compile_part() -> None:
    torch.compiler.reset()  # of what this process has compiled before
    cp = world()
    for form in ("rows", "documents"):
        leaves, given = draw(form)
        part = {**given, "x": own(given["x"], cp)}

        def call(part: dict[str, Any]) -> list[Tensor]:
            return list(short_convolution(**part, output_final_state=True, cp_group=cp))

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        got, wanted = compiled(part), call(part)
        for a, b in zip([*got, *gradients_of(got, leaves)], [*wanted, *gradients_of(wanted, leaves)]):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_one_graph() -> None:
    processes(2).run(compile_part)


def refuse() -> list[str]:
    cp = world()
    x, weight = torch.randn(1, 2, 4), torch.randn(4, 4)
    return [
        refusal(lambda: short_convolution(x, weight, cp_group=cp)),
        refusal(lambda: short_convolution(x, weight[:, : 3 - cp.rank], cp_group=cp)),
        refusal(lambda: short_convolution(x, weight, cu_seqlens=torch.tensor([0, 2]), cp_group=cp)),
        refusal(lambda: short_convolution(x, weight[:, :2], activation="silu" if cp.rank else "relu", cp_group=cp)),
    ]


def test_refusals() -> None:
    first, second = processes(2).run(refuse)
    assert first[:3] == second[:3]
    assert first[0].startswith("x must have at least W-1 = 3 tokens on each process with cp_group, got 2; use fewer")
    assert first[1].startswith(
        "weight must be alike on every rank of cp_group, got float32 [4, 3] on rank 0 and float32 [4, 2]"
    )
    assert first[2] == "cu_seqlens must rise from 0 to the length 4 without a step down, got [0, 2]"
    assert first[3] == "activation must be None or 'silu', got 'relu'"
    assert second[3] == f"rank 0 of cp_group refused its arguments: {first[3]}"
