"""The forward of the delta rules in one pass, on a Hopper GPU, beside the kernels in plain Triton and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.ops import delta_rule
from fastweights.testing.contract.compare import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not HAS_TRITON or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU and triton",
    ),
]


def draw(rows: int, time: int, heads: int, value_heads: int, states: int) -> dict[str, Tensor]:
    torch.manual_seed(time)
    q, k = (F.normalize(torch.randn(rows, time, heads, 128, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(rows, time, value_heads, 128, device="cuda").bfloat16()
    beta, g = (torch.rand(rows, time, value_heads, device="cuda") for _ in range(2))
    state = torch.randn(states, value_heads, 128, 128, device="cuda")
    g *= 1e-3  # so little that segments depend on those before and behind them
    return {"q": q, "k": k, "v": v, "beta": beta, "g": -g, "initial_state": state}


def results(inputs: dict[str, Tensor], backend: str = "triton", **given: Any) -> list[Tensor]:
    """o, the state after, and the gradients of the inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, S = delta_rule(**leaves, **given, output_final_state=True, backend=backend)
    return [o, S, *torch.autograd.grad(o.float().square().sum() + S.float().sum(), list(leaves.values()))]


def without_gradients(inputs: dict[str, Tensor], **given: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(delta_rule(**inputs, **given, output_final_state=True, backend="triton"))


def in_plain_triton(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    from fastweights.kernels.runtime import launch_plan

    with (
        mock.patch("fastweights.kernels.chunk.memory.takes_one_pass", lambda call: False),
        mock.patch.object(launch_plan, "_plans", launch_plan.CallPlans),
    ):
        return call()


FORMS = {
    "short": (2, 37, 2, 2, None),
    "odd and grouped": (3, 555, 2, 4, None),
    "segments": (1, 5000, 4, 4, None),
    "packed": (1, 1500, 2, 4, [0, 1, 65, 65, 400, 401, 1337, 1500]),
    "packed, in segments": (1, 5000, 2, 2, [0, 1200, 1201, 4500, 5000]),
}


@pytest.mark.parametrize("form", FORMS)
def test_as_exact_as_in_plain_triton(form: str) -> None:
    rows, time, heads, value_heads, edges = FORMS[form]
    given = {} if edges is None else {"cu_seqlens": torch.tensor(edges, dtype=torch.int32, device="cuda")}
    inputs = draw(rows, time, heads, value_heads, rows if edges is None else len(edges) - 1)
    wanted = results({name: x.double() for name, x in inputs.items()}, "torch", **given)
    got, again = results(inputs, **given), results(inputs, **given)
    plain = in_plain_triton(lambda: results(inputs, **given))
    alone = without_gradients(inputs, **given)
    assert all(map(torch.equal, got, again))
    for kept, found in zip(got, alone, strict=False):
        assert relative_error(found, kept) < 2e-3  # other segments
    for x, before, right in zip(got, plain, wanted, strict=True):
        assert relative_error(x, right) < 1.5 * relative_error(before, right) + 1e-4


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "initial_state"])
def test_bad_numbers_stand_where_they_do_in_plain_triton(name: str) -> None:
    inputs = draw(1, 300, 2, 2, 4)
    given = {"cu_seqlens": torch.tensor([0, 100, 230, 231, 300], dtype=torch.int32, device="cuda")}
    place = (1, 1, 3, 9) if name == "initial_state" else (0, 130, 1, 7)
    inputs[name][place[: inputs[name].ndim]] = float("nan")
    got = without_gradients(inputs, **given)
    plain = in_plain_triton(lambda: without_gradients(inputs, **given))
    for x, before in zip(got, plain, strict=True):
        assert not x.isfinite().all() or name == "q"
        assert torch.equal(x.isfinite(), before.isfinite())
