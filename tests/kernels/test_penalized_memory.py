"""What variational linear attention does with its write directions by kernels: unit keys, the delta rule, the divisor."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights import ops
from fastweights.ops.variational_linear_attention import penalized_memory
from fastweights.testing.contract.compare import assert_close, relative_error

from .cases import DEVICE, KERNEL_CASES, small

pytestmark = pytest.mark.kernels
REFRESHED = KERNEL_CASES["variational_linear_attention-refresh"]


def results(backend: str, tokens: dict[str, Tensor], **options: bool) -> tuple[list[Tensor], list[Tensor]]:
    """o, S and z, and the gradients in the inputs and in a first z, where keys and write keys may have any length."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    given = {name: x.to(dtype).detach().requires_grad_() for name, x in tokens.items()}
    heads, key, value = tokens["v"].shape[2], tokens["k"].shape[3], tokens["v"].shape[3]
    z = torch.linspace(0.5, 1.5, heads * key, dtype=dtype, device=DEVICE).view(1, heads, key).requires_grad_()
    S = torch.zeros(1, heads, key, value, dtype=dtype, device=DEVICE)
    u, count = given.get("u"), torch.full((1,), 3, device=DEVICE)
    A = [] if u is None else [torch.eye(key, dtype=dtype, device=DEVICE).expand(1, heads, -1, -1)]
    o, state = penalized_memory(
        given["q"], given["k"], given["v"], u, ridge=2.0, refresh_every=5, refresh=1e-2, eps=1e-4, **options,
        initial_state=(S, *A, z, count), output_final_state=True, cu_seqlens=None, backend=backend,
    )  # fmt: skip
    assert state is not None
    loss = (o * torch.linspace(-1, 1, o.numel(), device=DEVICE).view_as(o)).sum() + state["z"].square().sum()
    leaves = [*given.values(), z]
    return [o.detach(), state["S"].detach(), state["z"].detach()], list(torch.autograd.grad(loss, leaves))


FAST = [(True, True, True), (False, False, False)]


@pytest.mark.parametrize(
    ("keys", "writes", "penalty"),
    [pytest.param(*x, marks=() if x in FAST else pytest.mark.slow) for x in product([True, False], repeat=3)],
)
def test_lengths_and_penalty(keys: bool, writes: bool, penalty: bool) -> None:
    tokens = {
        name: 0.3 * x if name == "k" else x for name, x in small(REFRESHED, 9, heads=1, value_heads=2).tokens.items()
    }
    if not penalty:
        del tokens["u"]
    options = {"normalize_keys": keys, "normalize_writes": writes}
    got, wanted = results("triton", tokens, **options), results("reference", tokens, **options)
    assert_close(got[0], wanted[0], 1e-5)
    assert_close(got[1], wanted[1], 1e-5)


def test_states_hold_more_than_rounded_write_keys() -> None:
    """After one token S is alpha v^T, whose alpha has 11 bits where it is an operand of 16-bit products."""
    tokens = {name: x.half() for name, x in small(REFRESHED, 1, key=16, value=8).tokens.items()}
    _, (S, *_) = ops.variational_linear_attention(**tokens, output_final_state=True, backend="triton")
    exactly = {name: x.double() for name, x in tokens.items()}
    _, (wanted, *_) = ops.variational_linear_attention(**exactly, output_final_state=True, backend="reference")
    assert relative_error(S, wanted) <= 1e-6


@pytest.mark.slow
def test_gradients_that_cancel_are_not_rounded_in_between() -> None:
    """Positive keys are alike: P^T dO changes slowly from token to token, and T^T of it takes differences."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 192, 1, 16, generator=generator) for _ in range(5)]
    q, k = (F.elu(x) + 1 for x in drawn[:2])
    v, u, do = drawn[2], F.normalize(drawn[3], dim=-1) / 4, drawn[4]

    def gradient_of_v(dtype: torch.dtype, backend: str) -> Tensor:
        given = [x.to(DEVICE, torch.float16).to(dtype).requires_grad_() for x in (q, k, v, u)]
        o, _ = ops.variational_linear_attention(*given, refresh_every=20, backend=backend)
        return torch.autograd.grad(o, given[2], do.to(DEVICE, torch.float16).to(dtype))[0]

    got, wanted = gradient_of_v(torch.float16, "triton"), gradient_of_v(torch.float64, "torch")
    assert relative_error(got, wanted) <= 4e-4  # 6e-4 with P, T and P^T dO in 16 bits


def test_a_divisor_below_its_least() -> None:
    """It counts as eps, and nothing reaches the gradients through it."""
    tokens = dict(small(REFRESHED, 3).tokens)
    tokens["q"] = 1e-6 * tokens["q"]
    leaves = {name: x.detach().requires_grad_() for name, x in tokens.items()}
    o, _ = ops.variational_linear_attention(**leaves, eps=1e-2, backend="triton")
    exactly = {name: x.detach().double().requires_grad_() for name, x in tokens.items()}
    wanted, _ = ops.variational_linear_attention(**exactly, eps=1e-2, backend="reference")
    assert_close([o.detach()], [wanted.detach()], 1e-5)
    got = torch.autograd.grad(o.sum(), list(leaves.values()))
    assert_close(list(got), list(torch.autograd.grad(wanted.sum(), list(exactly.values()))), 1e-5)


def test_keys_add_up_over_many_chunks() -> None:
    """z at the starts of 70 chunks, found 32 at a time, and from the last chunk to the first."""
    from fastweights.kernels.inverse_gram.unit_keys import scan_rows
    from fastweights.kernels.runtime.launch_plan import launch

    sums = torch.rand(70, 1, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for back in (False, True):
        states, start, end = (
            torch.empty_like(sums),
            torch.ones(1, 1, 3, device=DEVICE),
            torch.empty(1, 1, 3, device=DEVICE),
        )
        launch(scan_rows, (1, 1), start, sums, states, end, None, 70 * 64, 1, K=3, PK=16, BACK=back)
        ordered = sums.flip(0) if back else sums
        wanted = torch.cat([start, start + ordered.cumsum(0)])
        assert relative_error(states.flip(0) if back else states, wanted[:-1]) <= 1e-6
        assert relative_error(end, wanted[-1:]) <= 1e-6
