"""Exact least squares and variational linear attention by kernels, against the reference, in little time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights import ops
from fastweights.ops.shared.inverse_gram import apply_inverse_gram
from tests.contract.compare import assert_close, relative_error, values_and_gradients

from .cases import DEVICE, KERNEL_CASES, draw_states, exact, small

pytestmark = pytest.mark.kernels
CLOSE = 1e-5
RLS, VLA = "recursive_least_squares-none", "variational_linear_attention-plain"


@pytest.mark.parametrize(("name", "time", "started"), [(RLS, 70, False), (VLA, 9, True)])
def test_values_and_gradients(name: str, time: int, started: bool) -> None:
    """Two value heads per key head, two blocks of key channels, an odd number of tokens; from a first state."""
    case = KERNEL_CASES[name]
    inputs = small(case, time, heads=1, value_heads=2, key=20, value=6)
    states = draw_states(case, inputs, 1) if started else None
    got, wanted = values_and_gradients(case, inputs, states, backend="triton"), exact(case, inputs, states)
    assert_close(got[0], wanted[0], CLOSE)
    assert_close(got[1], wanted[1], CLOSE)


def test_packed_sequences_of_several_chunks() -> None:
    case, edges = KERNEL_CASES[RLS], torch.tensor([0, 66, 66, 69])
    inputs = small(case, 69, key=4, value=4)
    states = draw_states(case, inputs, 3)
    got = values_and_gradients(case, inputs, states, backend="triton", cu_seqlens=edges)
    wanted = exact(case, inputs, states, cu_seqlens=edges)
    assert_close(got[0], wanted[0], CLOSE)
    assert_close(got[1], wanted[1], CLOSE)


def directions(k: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """P_t k_t and the last P, ridge 1."""
    options = {"ridge": 1.0, "initial_state": None, "heads": 1, "dtype": k.dtype, "final": True, "cu_seqlens": None}
    return apply_inverse_gram(k, gain=torch.ones(k.shape[:3], device=k.device), backend=backend, **options)


@pytest.mark.parametrize(
    ("spread", "time"),
    [
        pytest.param(0.02, 512, id="nearly dependent keys"),
        pytest.param(None, 2048, id="any keys", marks=pytest.mark.slow),
        pytest.param(0.02, 8192, id="nearly dependent keys, 8192", marks=pytest.mark.slow),
        pytest.param(0.0, 8192, id="one key", marks=pytest.mark.slow),
    ],
)
def test_many_tokens(spread: float | None, time: int) -> None:
    """Weights of up to 8,192 beside the prior's 1, as float32 tells them apart."""
    generator = torch.Generator().manual_seed(0)
    key, noise = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, time, 1, 8, generator=generator)
    k = F.normalize(noise if spread is None else F.normalize(key, dim=-1) + spread * noise, dim=-1).to(DEVICE)
    (y, P), (wanted, wanted_P) = directions(k, "triton"), directions(k.double(), "torch")
    assert relative_error(y, wanted) <= 1e-4
    assert relative_error(P, wanted_P) <= 1e-3


def test_a_gain_of_zero_writes_nothing() -> None:
    tokens = small(KERNEL_CASES[RLS], 5).tokens
    tokens["beta"] = torch.zeros_like(tokens["beta"])
    o, (S, P) = ops.recursive_least_squares(**tokens, ridge=0.5, output_final_state=True, backend="triton")
    assert not o.any() and not S.any()
    torch.testing.assert_close(P, 2.0 * torch.eye(8, device=DEVICE).expand_as(P))


@pytest.mark.parametrize("name", ["k", "beta"])
def test_a_bad_number_reaches_later_tokens_only(name: str) -> None:
    tokens = dict(small(KERNEL_CASES[RLS], 20).tokens)
    clean, _ = ops.recursive_least_squares(**tokens, backend="triton")
    broken = tokens[name].clone()
    broken[0, 9] = float("nan")
    o, (S, P) = ops.recursive_least_squares(**{**tokens, name: broken}, output_final_state=True, backend="triton")
    torch.testing.assert_close(o[:, :9], clean[:, :9], rtol=0, atol=0)
    assert all(x.isnan().all() for x in (o[:, 9:], S, P))


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    tokens = small(KERNEL_CASES[VLA], 5).tokens
    with pytest.raises(ValueError, match="refresh_every must be None with backend 'triton'"):
        ops.variational_linear_attention(**tokens, refresh_every=2, backend="triton")
    wide = small(KERNEL_CASES[VLA], 2, key=129).tokens
    with pytest.raises(ValueError, match="at most 128 channels with backend 'triton'"):
        ops.variational_linear_attention(**wide, backend="triton")


def test_with_a_decay_the_delta_rule_alone_is_by_kernels() -> None:
    tokens = dict(small(KERNEL_CASES[RLS], 9).tokens)
    tokens["g"] = -torch.rand(tokens["beta"].shape, device=DEVICE)
    o, _ = ops.recursive_least_squares(**tokens, backend="triton")
    wanted, _ = ops.recursive_least_squares(**{name: x.double() for name, x in tokens.items()}, backend="reference")
    assert relative_error(o, wanted) <= CLOSE


def test_weights_add_up_in_float64() -> None:
    """65,536 tokens, of which float32 would lose those beside a first one of large weight."""
    from fastweights.kernels.inverse_gram.sums import scan_sums
    from fastweights.kernels.runtime.launch_plan import launch

    sums = torch.rand(1024, 1, 2, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sums[0] += 1e7
    start, end = (
        torch.ones(1, 1, 2, 2, dtype=torch.float64, device=DEVICE),
        torch.empty(1, 1, 2, 2, dtype=torch.float64, device=DEVICE),
    )
    wanted = torch.cat([start, start + sums.double().cumsum(0)])
    launch(scan_sums, (1, 1, 1), start, sums, end, None, 65_536, 1, K=2, BACK=False, BLOCK=16)
    assert relative_error(end, wanted[-1:]) <= 1e-14
    assert torch.equal(sums, wanted[:-1].float())


def test_weights_far_beyond_the_prior() -> None:
    """One key of length 300 beside a prior of 1, which float32 cannot tell from 0. Its answer is the mean."""
    key = 300 * F.normalize(torch.randn(1, 1, 1, 20, generator=torch.Generator().manual_seed(0)), dim=-1)
    v = 1 + torch.randn(1, 130, 1, 4, generator=torch.Generator().manual_seed(1))
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (key.expand(1, 130, 1, 20), key.expand(1, 130, 1, 20), v))
    beta = torch.ones(1, 130, 1, device=DEVICE)
    o, state = ops.recursive_least_squares(q, k, v, beta, scale=1.0, output_final_state=True, backend="triton")
    gradients = torch.autograd.grad(o.sum(), [q, k, v])
    assert state is not None and all(x.isfinite().all() for x in (o, *state, *gradients))
    assert relative_error(o[:, -1], v.mean(1)) <= 4e-2
