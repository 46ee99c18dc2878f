"""Exact least squares and variational linear attention by kernels, against the reference, in little time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights import ops
from fastweights.ops.shared.inverse_gram import apply_inverse_gram
from fastweights.testing.contract.compare import assert_close, relative_error

from .cases import DEVICE, KERNEL_CASES, check_against_reference, draw_states, small

pytestmark = pytest.mark.kernels
CLOSE = 1e-5
RLS, VLA = "recursive_least_squares-none", "variational_linear_attention-plain"
REFRESHED = "variational_linear_attention-refresh"  # every 20 tokens


@pytest.mark.parametrize(
    ("name", "time", "started"),
    [
        (RLS, 9, False),
        pytest.param(RLS, 70, False, marks=pytest.mark.slow),
        pytest.param(VLA, 9, True, marks=pytest.mark.slow),
        (REFRESHED, 70, True),
    ],
)
def test_values_and_gradients(name: str, time: int, started: bool) -> None:
    """Two value heads per key head, two blocks of key channels, an odd number of tokens; from a first state."""
    case = KERNEL_CASES[name]
    inputs = small(case, time, heads=1, value_heads=2, key=20, value=6)
    states = draw_states(case, inputs, 1) if started else None
    check_against_reference(case, inputs, states, CLOSE)


@pytest.mark.slow
@pytest.mark.usefixtures("short_segments")
def test_many_segments_add_no_rounding() -> None:
    """Without a decay a memory keeps what the joins of its segments round: S was 9e-4 off with 16-bit transitions."""
    generator, time = torch.Generator().manual_seed(0), 2048
    q, k = (F.normalize(torch.randn(1, time, 1, 16, generator=generator), dim=-1) for _ in range(2))
    v, beta = torch.randn(1, time, 1, 16, generator=generator), torch.randn(1, time, 1, generator=generator).sigmoid()

    def final_memory(dtype: torch.dtype, backend: str) -> Tensor:
        given = [x.to(DEVICE, torch.float16).to(dtype) for x in (q, k, v)]
        _, state = ops.recursive_least_squares(*given, beta.to(DEVICE), output_final_state=True, backend=backend)
        assert state is not None
        return state[0]

    assert relative_error(final_memory(torch.float16, "triton"), final_memory(torch.float64, "torch")) <= 5e-4


@pytest.mark.parametrize("name", [pytest.param(RLS, marks=pytest.mark.slow), REFRESHED])
def test_packed_sequences_of_several_chunks(name: str) -> None:
    """With a refresh each sequence counts its own tokens, from those that came before the call."""
    case, edges = KERNEL_CASES[name], torch.tensor([0, 66, 66, 69])
    inputs = small(case, 69, key=4, value=4)
    states = draw_states(case, inputs, 3)
    check_against_reference(case, inputs, states, CLOSE, cu_seqlens=edges)


def test_sixteen_bits() -> None:
    """The delta rule then takes 16-bit operands; with states before and after."""
    case = KERNEL_CASES[REFRESHED]
    inputs = small(case, 40, key=16, value=8).map(Tensor.half)
    states = draw_states(case, inputs, 1)
    with torch.no_grad():
        o, final = case(inputs, initial_state=states, backend="triton")
    exactly = inputs.map(lambda x: x.cpu().double())
    doubled = tuple(s.cpu().double() if s.is_floating_point() else s.cpu() for s in states)
    wanted, wanted_final = case(exactly, initial_state=doubled, backend="reference")
    assert_close([o], [wanted.to(DEVICE)], 1e-3)
    assert_close(list(final), [x.to(DEVICE) for x in wanted_final], 1e-3)


def directions(k: Tensor, backend: str, every: int | None = None) -> tuple[Tensor, Tensor]:
    """P_t k_t and the last P, ridge 1; with a refresh of .001 at every such token."""
    options = {"ridge": 1.0, "initial_state": None, "heads": 1, "dtype": k.dtype, "final": True, "cu_seqlens": None}
    if every is not None:
        due = (torch.arange(k.shape[1], device=k.device) + 1) % every == 0
        return apply_inverse_gram(k, k, refresh=1e-3 * due.double()[None, :, None], backend=backend, **options)
    return apply_inverse_gram(k, gain=torch.ones(k.shape[:3], device=k.device), backend=backend, **options)


@pytest.mark.parametrize(
    ("spread", "time", "every"),
    [
        pytest.param(0.02, 512, None, id="nearly dependent keys", marks=pytest.mark.slow),
        pytest.param(0.02, 256, 20, id="nearly dependent keys, refreshed"),
        pytest.param(None, 2048, None, id="any keys", marks=pytest.mark.slow),
        pytest.param(0.02, 8192, None, id="nearly dependent keys, 8192", marks=pytest.mark.slow),
        pytest.param(0.0, 8192, None, id="one key", marks=pytest.mark.slow),
        pytest.param(0.0, 8192, 20, id="one key, refreshed", marks=pytest.mark.slow),
    ],
)
def test_many_tokens(spread: float | None, time: int, every: int | None) -> None:
    """Weights of up to 8,192 beside the prior's 1, as float32 tells them apart."""
    generator = torch.Generator().manual_seed(0)
    key, noise = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, time, 1, 8, generator=generator)
    k = F.normalize(noise if spread is None else F.normalize(key, dim=-1) + spread * noise, dim=-1).to(DEVICE)
    (y, P), (wanted, wanted_P) = directions(k, "triton", every), directions(k.double(), "torch", every)
    assert relative_error(y, wanted) <= 1e-4
    assert relative_error(P, wanted_P) <= 1e-3


def test_a_gain_of_zero_writes_nothing() -> None:
    tokens = small(KERNEL_CASES[RLS], 5).tokens
    tokens["beta"] = torch.zeros_like(tokens["beta"])
    o, (S, P) = ops.recursive_least_squares(**tokens, ridge=0.5, output_final_state=True, backend="triton")
    assert not o.any() and not S.any()
    torch.testing.assert_close(P, 2.0 * torch.eye(8, device=DEVICE).expand_as(P))


@pytest.mark.parametrize(
    ("form", "name"), [*(pytest.param(RLS, x, marks=pytest.mark.slow) for x in ("k", "beta")), (REFRESHED, "u")]
)
def test_a_bad_number_reaches_later_tokens_only(form: str, name: str) -> None:
    case = KERNEL_CASES[form]
    inputs = small(case, 20)
    clean, _ = case(inputs, backend="triton")
    broken = inputs.tokens[name].clone()
    broken[0, 9] = float("nan")
    o, (S, P, *_) = case(replace(inputs, tokens={**inputs.tokens, name: broken}), backend="triton")
    torch.testing.assert_close(o[:, :9], clean[:, :9], rtol=0, atol=0)
    assert all(x.isnan().all() for x in (o[:, 9:], S, P))


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    wide = small(KERNEL_CASES[VLA], 2, key=129).tokens
    with pytest.raises(ValueError, match="at most 128 channels with backend 'triton'"):
        ops.variational_linear_attention(**wide, backend="triton")


@pytest.mark.parametrize("every", [1, 3])
def test_several_refreshes_inside_a_chunk(every: int) -> None:
    """Each adds to what the tokens after it find, and to the write key of its own token."""
    k = F.normalize(torch.randn(1, 24, 1, 8, generator=torch.Generator().manual_seed(0)), dim=-1).to(DEVICE)
    (y, A), (wanted, wanted_A) = directions(k, "triton", every), directions(k.double(), "reference", every)
    assert relative_error(y, wanted) <= 1e-6
    assert relative_error(A, wanted_A) <= 1e-6


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
    launch(scan_sums, (1, 1, 1), start, sums, end, None, 65_536, 1, K=2, LENGTH=64, BACK=False, BLOCK=16)
    assert relative_error(end, wanted[-1:]) <= 1e-14
    assert torch.equal(sums, wanted[:-1].float())


@pytest.mark.slow
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


def test_penalties_far_beyond_the_prior() -> None:
    """Newton's iteration does not reach the inverse of such a chunk, so that its tokens are taken one after the other."""
    key = F.normalize(torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    noise = torch.randn(1, 40, 1, 8, generator=torch.Generator().manual_seed(1))
    u = (300 * (key + 1e-4 * noise)).to(DEVICE)
    _, P = directions(u, "triton", 20)
    _, wanted = directions(u.double(), "torch", 20)
    assert relative_error(P, wanted) <= 1e-3
