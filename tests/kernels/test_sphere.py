"""Lattice by kernels. In the interpreter a token takes tens of milliseconds, so the fast set holds one
short case of each fact; the slow set runs every form through the tests that all kernels share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON, INTERPRETED
from fastweights.ops import lattice
from fastweights.testing.contract.compare import relative_error, replace_tokens, values_and_gradients
from tests.fast_set import slow
from tests.ops.kernel_launches import plans_anew

from .cases import DEVICE, KERNEL_CASES, draw_states, exact, small

if HAS_TRITON:
    import triton
    import triton.language as tl

    from fastweights.kernels.chunk.memory import MEMORY, KernelInputs
    from fastweights.kernels.runtime.launch_plan import CallPlans, LaunchPlan, PlanKey, Recorder
    from fastweights.kernels.runtime.workspace import TensorSpec
    from fastweights.kernels.sphere import decode_steps, rule

    @triton.jit
    def root_too_large(x, dtype: tl.constexpr):
        return 1.001 * tl.rsqrt(x)


pytestmark = pytest.mark.kernels
BLOCK = 16  # tokens from one kept state to the next


@pytest.fixture
def plans() -> Iterator[None]:
    with plans_anew():
        yield


def check(
    name: str, time: int, started: bool, cu_seqlens: Tensor | None = None, longer: Iterable[float] = (), **sizes: int
) -> None:
    """longer: by how much the values of the first tokens are than drawn."""
    case = KERNEL_CASES[name]
    inputs = small(case, time, **sizes)
    v = inputs.tokens["v"].clone()
    for t, factor in enumerate(longer):
        v[:, t] *= factor
    inputs = replace_tokens(inputs, v=v)
    count = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    states = draw_states(case, inputs, count) if started else None
    keywords = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    got = values_and_gradients(case, inputs, states, backend="triton", **keywords)
    for found, wanted in zip(got, exact(case, inputs, states, **keywords)):
        for g, w in zip(found, wanted, strict=True):
            assert relative_error(g, w) <= 1e-5


@pytest.mark.parametrize(
    ("name", "started"),
    [
        ("lattice-decode-decay", True), pytest.param("lattice-decode-free", True, marks=pytest.mark.slow),
        ("lattice-encode-decay", True), pytest.param("lattice-encode-free", False, marks=pytest.mark.slow),
        pytest.param("lattice-similarity", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_values_and_gradients(name: str, started: bool) -> None:
    """Over the edge of a block, with a last part of a block that is not whole."""
    check(name, BLOCK + 2, started)


@pytest.mark.parametrize("name", [pytest.param("lattice-decode-free", marks=pytest.mark.slow), "lattice-decode-decay"])
@pytest.mark.parametrize("first", [3, *slow(BLOCK + 1)])
def test_packed_sequences(name: str, first: int) -> None:
    """One of a few tokens, or of a block and a token, an empty one, one of a token; with groups of heads."""
    check(name, first + 1, True, torch.tensor([0, first, first, first + 1]), heads=1, value_heads=2)


@pytest.mark.parametrize(("key", "value"), [(5, 20), *(pytest.param(20, x, marks=pytest.mark.slow) for x in (5, 36))])
def test_any_width(key: int, value: int) -> None:
    """Rows that are read number by number, and by fours; the last over two warps and two groups of channels per thread."""
    check("lattice-decode", 3, True, key=key, value=value)


@pytest.mark.slow
def test_chunks_of_packed_sequences() -> None:
    """One of a block and a token, an empty one, one of a token; with groups of heads and two tiles of slots."""
    cu_seqlens = torch.tensor([0, 17, 17, 18])
    check("lattice-encode-decay", 18, True, cu_seqlens, heads=1, value_heads=2, key=36, value=6)


def without_launches(monkeypatch: pytest.MonkeyPatch, *left_out: Any) -> None:
    record = Recorder.launch

    def launch(self: Recorder, kernel: Any, *arguments: Any, **options: Any) -> None:
        if kernel not in left_out:
            record(self, kernel, *arguments, **options)

    monkeypatch.setattr(Recorder, "launch", launch)


@pytest.mark.slow
def test_chunks_alone(monkeypatch: pytest.MonkeyPatch, plans: None) -> None:
    """Without the passes from token to token that stand by."""
    without_launches(monkeypatch, rule.pass_tokens, rule.pass_tokens_back)
    check("lattice-encode-decay", BLOCK + 2, True)


def step_bytes(launches: Any, options: tuple[Any, ...], x: Any) -> int:
    """What a forward and backward allocate by their plans at the peak, which is in the backward."""
    shapes = tuple(None if each is None else (each.shape, each.dtype) for each in x)
    plans = CallPlans(PlanKey(launches, type(x), shapes, torch.device("cpu"), options, final=False, keep_saved=True))
    _, (o, *others), saved = plans.recorded
    given = [o] + [None] * len(others)
    recorded, found = plans._record_backward(given, state_grads=False)
    back = LaunchPlan(recorded, (*plans.inputs, *saved, *given), found, torch.device("cpu"))
    return sum(each.bytes for each in (o, *saved, *back.outputs) if each is not None) + back.workspace_bytes


@pytest.mark.skipif(not INTERPRETED, reason="the plans are made without compiling")
@pytest.mark.parametrize("objective", ["encode", "similarity"])
def test_memory_of_a_training_step(objective: str) -> None:
    """At most 2.4 times the gated delta rule's: f and w of the steps are not kept for the backward."""
    vectors, gates = (TensorSpec((4, 2048, 8, *more), torch.bfloat16) for more in ((128,), ()))
    found = step_bytes(rule.SPHERE, (objective, True), rule.SphereInputs(*[vectors] * 3, gates, gates))
    gated = KernelInputs(*[vectors] * 3, gates, TensorSpec(gates.shape, torch.float32))
    assert found <= 2.4 * step_bytes(MEMORY, (128**-0.5, 0.0, 0.0), gated)


@pytest.mark.slow
def test_where_coefficients_grow(monkeypatch: pytest.MonkeyPatch, plans: None) -> None:
    """Long steps along a value that slots are close to: coefficients would cancel. Tokens are passed one by one in that head, and
    only there."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, BLOCK + 4, 2, n, generator=generator) for n in (4, 4, 6))
    v[:, :, 1] = torch.eye(6)[1] + 1e-3 * v[:, :, 1]

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(DEVICE, dtype).requires_grad_() for x in (q, k, v, torch.ones(1, BLOCK + 4, 2))]
        o, _ = lattice(*inputs, objective="encode", backend=backend)
        return [o, *torch.autograd.grad(o.square().sum(), inputs)]

    wanted, got = results("reference", torch.float64), results("triton", torch.float32)
    assert all(relative_error(g, w) <= 1e-4 for g, w in zip(got, wanted))
    without_launches(monkeypatch, rule.pass_tokens, rule.pass_tokens_back)
    with plans_anew():
        alone = results("triton", torch.float32)
    for g, a, w in zip(got, alone, wanted):
        assert torch.equal(g[:, :, 0], a[:, :, 0])
        assert relative_error(a[:, :, 1], w[:, :, 1]) > 3e-5 > relative_error(g[:, :, 1], w[:, :, 1])


@pytest.mark.slow  # tests/ops/test_decoding.py has the same in the fast set
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["lattice-encode-decay", "lattice-decode"])
def test_bad_numbers(name: str, bad: float) -> None:
    """They reach what follows in their head, and nothing else; a query its own token alone. No state is infinite."""
    case = KERNEL_CASES[name]
    inputs = small(case, 4, heads=2).map(Tensor.requires_grad_)  # without gradients so few tokens are decoded
    clean, _ = case(inputs, backend="triton")
    for input_name, x in inputs.tokens.items():
        broken = x.detach().clone()
        broken[(0, 1, 1) + (2,) * (x.ndim - 3)] = bad
        if input_name == "decay" and bad > 1:
            continue  # refused
        o, (S,) = case(replace_tokens(inputs, **{input_name: broken}), backend="triton")
        assert torch.equal(o[:, :, 0], clean[:, :, 0]) and torch.equal(o[:, :1], clean[:, :1]), input_name
        assert o[0, 1, 1].isnan().all(), input_name
        assert o[0, 2:, 1].isnan().all() or input_name == "q", input_name
        assert S[0, 0].isfinite().all() and not S.isinf().any(), input_name
        if input_name == "q":
            assert torch.equal(o[:, 2:], clean[:, 2:])


@pytest.mark.parametrize("objective", slow("encode", "decode", "similarity"))
def test_slots_keep_their_length_whatever_comes(objective: str) -> None:
    """Values and keys of zeros, values along a slot, a slot of zeros, long steps: nothing is NaN, lengths stay 1 or 0."""
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(1, 24, 1, 4, generator=generator) for _ in range(2))
    v = F.normalize(torch.randn(1, 24, 1, 8, generator=generator), dim=-1)
    v[:, 3], k[:, 5], v[:, 7], v[:, 9:20] = 0, 0, torch.eye(8)[1], torch.eye(8)[2]
    S = torch.eye(4, 8)[None, None].clone()
    S[..., 3, :] = 0
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v, torch.full((1, 24, 1), 3.0), S)]
    o, final = lattice(
        *inputs[:4], objective=objective, initial_state=inputs[4], output_final_state=True, backend="triton"
    )
    assert o.isfinite().all()
    torch.testing.assert_close(final.norm(dim=-1)[0, 0].cpu(), torch.tensor([1.0, 1.0, 1.0, 0.0]), rtol=1e-5, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum() + final.sum(), inputs))


@pytest.mark.slow
def test_steps_that_cannot_be_undone() -> None:
    """Long values turn slots until little is left of them (f near 0): the states of that block are found from its first, those of
    the next block undone."""
    check("lattice-decode-decay", BLOCK + 2, True, longer=[30.0] * BLOCK)


def test_every_block_has_its_own_way_back() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2 * BLOCK, 1, n, generator=generator) for n in (4, 4, 8))
    v[:, :BLOCK] *= 300
    inputs = [x.to(DEVICE).requires_grad_() for x in (q, k, v, torch.full((1, 2 * BLOCK, 1), 0.01))]
    o, _ = lattice(*inputs, objective="decode", backend="triton")
    (steep,) = [x for x in o.grad_fn.saved_tensors if x is not None and x.dtype == torch.int32]
    assert steep[:, 0].any(1).tolist() == [True, False]


def test_a_slot_that_a_token_replaces() -> None:
    """f = 0: gamma b is the decay, here 1."""
    k, v = torch.ones(1, 3, 1, 1), torch.tensor([2.0, 1.0]).expand(1, 3, 1, 2)
    start = torch.tensor([[[[1.0, 0.0]]]])

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(DEVICE, dtype).clone().requires_grad_() for x in (k, k, v, torch.ones(1, 3, 1))]
        o, S = lattice(*inputs, initial_state=start.to(DEVICE), output_final_state=True, backend=backend)
        return [o, S, *torch.autograd.grad(o.square().sum(), inputs)]

    for g, w in zip(results("triton", torch.float32), results("reference", torch.float64)):
        torch.testing.assert_close(g.double(), w.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rounding_does_not_grow_from_block_to_block() -> None:
    """b is of the slots of length 1: what their length is off by grew several times over in each block otherwise."""
    case = KERNEL_CASES["lattice-encode"]
    inputs = small(case, 100)
    state = draw_states(case, inputs, 1)
    with torch.no_grad():
        o, _ = case(inputs, backend="triton", initial_state=case.initial_state(state))
    (wanted, _), _ = exact(case, inputs, state)
    assert relative_error(o[:, -10:], wanted[:, -10:]) <= 1e-5


@pytest.mark.skipif(not INTERPRETED, reason="a function of a kernel is replaced")
def test_slots_get_their_length_back(monkeypatch: pytest.MonkeyPatch, plans: None) -> None:
    """At the end of every block of tokens, as the hardware's roots are off by up to 2^-22 in every token."""
    monkeypatch.setattr(decode_steps, "inverse_root", root_too_large)
    x = torch.ones(1, BLOCK, 1, 2, requires_grad=True)  # without gradients so few tokens are decoded
    _, S = lattice(x, x, x, x[..., 0], objective="decode", output_final_state=True, backend="triton")
    torch.testing.assert_close(S.detach().norm(dim=-1), torch.ones(1, 1, 2), rtol=1e-6, atol=0)


def test_what_the_kernels_do_not_serve_is_refused() -> None:
    def inputs(key: int, value: int) -> list[Tensor]:
        return [torch.ones(1, 2, 1, n, device=DEVICE) for n in (key, key, value)] + [torch.ones(1, 2, 1, device=DEVICE)]

    with pytest.raises(
        ValueError, match="at most 128 channels with backend 'triton'.*got 144; use backend 'torch' or 'auto'"
    ):
        lattice(*inputs(16, 144), backend="triton")
    with pytest.raises(ValueError, match="l1 must be 0.0 with backend 'triton'"):
        lattice(*inputs(4, 4), l1=0.1, backend="triton")
    with pytest.raises(ValueError, match="initial_state must be given where there are more slots"):
        lattice(*inputs(5, 4), backend="triton")
