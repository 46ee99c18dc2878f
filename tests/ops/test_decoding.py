"""The functions that update a state in place, and the kernel under them: the numbers of the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import ops
from fastweights.testing import OpCase, OpInputs
from tests.kernels.cases import DEVICE

from .decoding import DECODING, IN_PLACE, call_decode, draw_states, exact, in_place, largest_error

SOME = ["linear_attention-channel", "delta_rule-head-write", "preconditioned_delta_rule-head"]
some_cases = pytest.mark.parametrize("case", [DECODING[name] for name in SOME], ids=SOME)


@pytest.fixture(params=DECODING)
def case(request: pytest.FixtureRequest) -> OpCase:
    return DECODING[request.param]


EDGES = torch.tensor([0, 0, 3, 4, 4, 10])


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_equals_the_op(case: OpCase, backend: str, packed: bool) -> None:
    inputs = case.draw(batch=1 if packed else 2, time=10, heads=2, value_heads=4)
    keywords = {"cu_seqlens": EDGES} if packed else {}
    states = draw_states(case, inputs, 5 if packed else 2)
    got = in_place(case, inputs, states, backend=backend, **keywords)
    assert largest_error(got, exact(case, inputs, states, **keywords)) < 1e-12
    if packed:
        for before, after in zip(states, got[1]):
            assert torch.equal(after[[0, 3]], before[[0, 3]])


def test_steps_equal_the_sequence(case: OpCase) -> None:
    inputs = case.draw(time=40)
    held = tuple(torch.zeros_like(s) for s in draw_states(case, inputs, 2))
    outputs = [
        IN_PLACE[case.op](**inputs.at((slice(None), slice(t, t + 1))).arguments(), state=case.initial_state(held))
        for t in range(40)
    ]
    assert largest_error((torch.cat(outputs, 1), held), case(inputs, backend="reference")) < 1e-12


ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_low_precision_inputs_keep_a_float32_state(case: OpCase, dtype: torch.dtype) -> None:
    inputs = case.draw(time=3, dtype=dtype)
    states = draw_states(case, inputs, 2)
    o, held = in_place(case, inputs, states)
    assert o.dtype == dtype
    wanted, final = exact(case, inputs, states)
    rounded = case.op is ops.preconditioned_delta_rule  # its write keys pass through the dtype of k
    assert largest_error((held[0], held), (final[0], final)) < (ROUNDING[dtype] if rounded else 1e-5)
    assert largest_error((o, ()), (wanted, ())) < ROUNDING[dtype]


def refused(case: OpCase, match: str, *, time: int = 3, states: Any = None, **changed: Any) -> None:
    inputs = case.draw(time=time, batch=changed.pop("batch", 2), dtype=torch.float32)
    if states is None:
        states = case.initial_state(tuple(s.float() for s in draw_states(case, inputs, changed.pop("count", 2))))
    with pytest.raises(ValueError, match=match):
        IN_PLACE[case.op](**{**inputs.arguments(), "state": states, **changed})


def test_more_than_16_tokens_are_refused(case: OpCase) -> None:
    refused(case, "T must be at most 16 tokens per sequence, got 17; use ", time=17)
    refused(case, "at most 16 .* got 17", time=20, batch=1, cu_seqlens=torch.tensor([0, 3, 20]))


def test_gradients_are_refused(case: OpCase) -> None:
    inputs = case.draw(time=3, dtype=torch.float32)
    for name, x in {**inputs.tokens, **inputs.parameters}.items():
        leaf = x.clone().requires_grad_()
        refused(case, "must not require a gradient", **{name: leaf})
    S, *rest = (s.float() for s in draw_states(case, inputs, 2))
    learned = case.initial_state((S.requires_grad_(), *rest))
    refused(case, "S must not require a gradient|state must not require a gradient", states=learned)
    with torch.no_grad():
        IN_PLACE[case.op](**inputs.arguments(), state=learned)


def test_states_that_do_not_fit_are_refused(case: OpCase) -> None:
    S, *rest = draw_states(case, case.draw(time=3), 2)
    refused(case, "must be torch.float32", states=case.initial_state((S, *rest)))
    S, *rest = (S.float(), *(x.float() for x in rest))
    refused(case, "must have shape", states=case.initial_state((S[:1], *rest)))
    refused(case, "must have shape", states=case.initial_state((S.mT, *rest)))
    if rest:
        refused(case, r"state must be \(S, A\)", states=S)


def test_options_that_do_not_fit_are_refused(case: OpCase) -> None:
    refused(case, "backend must be one of", backend="cuda")
    refused(case, "the batch must be 1", cu_seqlens=torch.tensor([0, 3]))
    refused(case, "cu_seqlens must rise", batch=1, count=1, cu_seqlens=torch.tensor([0, 2]))
    inputs = case.draw(time=3)
    with pytest.raises(ValueError, match="float64 inputs"):
        in_place(case, inputs, draw_states(case, inputs, 2), backend="triton")


def test_center_may_be_a_number() -> None:
    case = DECODING["preconditioned_delta_rule-none"]
    inputs = case.draw(time=3)
    one = OpInputs(inputs.tokens, options={"center": -0.2})
    each = OpInputs(inputs.tokens, options={"center": torch.full((2,), -0.2, dtype=torch.float64)})
    states = draw_states(case, inputs, 2)
    assert torch.equal(in_place(case, one, states)[0], in_place(case, each, states)[0])


# The kernel

SIZES = [  # T, q/k heads, value heads, K, V
    (1, 2, 2, 16, 16),
    (3, 1, 2, 5, 40),
    (16, 1, 2, 17, 5),
    (1, 1, 1, 96, 40),
    (3, 2, 2, 1, 1),
]
# In the interpreter these take seconds: forms that are not among SOME have the third size alone in the fast set.
FORMS_AND_SIZES = [
    pytest.param(form, *size, id=f"{name}-{size}", marks=() if name in SOME or size == SIZES[2] else pytest.mark.slow)
    for name, form in DECODING.items()
    for size in SIZES
]


@pytest.mark.kernels
@pytest.mark.parametrize(("case", "time", "heads", "value_heads", "key", "value"), FORMS_AND_SIZES)
def test_kernel(case: OpCase, time: int, heads: int, value_heads: int, key: int, value: int) -> None:
    inputs = case.draw(time=time, heads=heads, value_heads=value_heads, key=key, value=value, dtype=torch.float32)
    states = draw_states(case, inputs, 2)
    got = in_place(case, inputs.map(lambda x: x.to(DEVICE)), states, backend="triton")
    assert largest_error(got, exact(case, inputs, states)) < 1e-5


@pytest.mark.kernels
@some_cases
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_kernel_on_packed_rows(case: OpCase, index: torch.dtype) -> None:
    inputs = case.draw(batch=1, time=10, heads=1, key=8, value=36, dtype=torch.float32)
    states = draw_states(case, inputs, 5)
    edges = EDGES.to(DEVICE, index)
    o, held = in_place(case, inputs.map(lambda x: x.to(DEVICE)), states, backend="triton", cu_seqlens=edges)
    assert largest_error((o, held), exact(case, inputs, states, cu_seqlens=EDGES)) < 1e-5
    for before, after in zip(states, held):
        assert torch.equal(after[[0, 3]].cpu(), before[[0, 3]].float())


@pytest.mark.kernels
@pytest.mark.parametrize("edges", [[-3, 4, 90], [0, 60, 2], [50, 55, 60], [2**40, 3, 2**40]], ids=str)
def test_kernel_stays_inside_the_row(edges: list[int]) -> None:
    """Lengths on a GPU are not checked. Whatever they say, no token outside of the row is read: those are NaN here."""
    from fastweights.kernels.recurrent.decode import decode

    around = torch.full((1, 64, 1, 8), math.nan, device=DEVICE)
    around[:, 29:35] = torch.randn(1, 6, 1, 8)
    row = around[:, 29:35]
    state = torch.zeros(2, 1, 8, 8, device=DEVICE)
    o = decode(row, row, row, state=state, scale=1.0, cu_seqlens=torch.tensor(edges, device=DEVICE))
    assert o.shape == row.shape and state.isfinite().all()


@pytest.mark.kernels
def test_kernel_into_new_states(case: OpCase) -> None:
    """The states given stay as they are, and the new ones are those of an update in place, bit by bit."""
    inputs = case.draw(time=2, heads=1, key=8, value=40, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = tuple(s.float().to(DEVICE) for s in draw_states(case, inputs, 2))
    before = tuple(s.clone() for s in states)
    new = tuple(torch.full_like(s, math.nan) for s in states)
    o = call_decode(inputs, states, new, 8**-0.5)
    assert all(torch.equal(s, b) for s, b in zip(states, before))
    wanted, held = in_place(case, inputs, states, backend="triton")
    assert torch.equal(o, wanted)
    assert all(torch.equal(n, h) for n, h in zip(new, held))


def rearranged(x: Tensor) -> list[Tensor]:
    """The same numbers in other layouts: heads before time, channels a slice of wider ones, channels strided."""
    wide = torch.cat([x, x], -1)[..., : x.shape[-1]]
    strided = x.repeat_interleave(2, -1)[..., ::2]
    return [
        x.transpose(1, 2).contiguous().transpose(1, 2),
        wide,
        strided,
        x.transpose(0, 1).contiguous().transpose(0, 1),
    ]


@pytest.mark.kernels
@some_cases
@pytest.mark.parametrize("time", [1, 3])
def test_kernel_on_any_layout(case: OpCase, time: int) -> None:
    inputs = case.draw(time=time, key=8, value=8, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 2)
    wanted, held = in_place(case, inputs, states, backend="triton")
    for layout in range(4):
        tokens = {name: rearranged(x)[layout] for name, x in inputs.tokens.items()}
        o, final = in_place(case, OpInputs(tokens, inputs.parameters), states, backend="triton")
        assert torch.equal(o, wanted)
        assert all(torch.equal(a, b) for a, b in zip(final, held))
    turned = tuple(s.to(DEVICE, torch.float32, copy=True).transpose(0, 1).contiguous().transpose(0, 1) for s in states)
    o = IN_PLACE[case.op](**inputs.arguments(), state=case.initial_state(turned), backend="triton")
    assert torch.equal(o, wanted)
    assert all(torch.equal(a, b) for a, b in zip(turned, held))


@pytest.mark.kernels
def test_kernel_forgets_at_decay_0(case: OpCase) -> None:
    inputs = case.draw(time=3, dtype=torch.float32)
    logs = {name: x.clone() for name, x in inputs.tokens.items() if name.endswith("g")}
    if not logs:
        pytest.skip("no decay")
    for x in logs.values():
        x[:, 1] = -math.inf
    forgetting = OpInputs({**inputs.tokens, **logs}, inputs.parameters)
    states = draw_states(case, inputs, 2)
    got = in_place(case, forgetting.map(lambda x: x.to(DEVICE)), states, backend="triton")
    assert largest_error(got, exact(case, forgetting, states)) < 1e-5


@pytest.mark.kernels
@some_cases
@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)], ids=str)
def test_kernel_keeps_bad_numbers_where_they_belong(case: OpCase, bad: float) -> None:
    """As the ops: o is NaN from the bad token of a head on (the value's column, the query's token) and equal elsewhere."""
    inputs = case.draw(time=3, key=5, value=6, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 2)
    clean, held = in_place(case, inputs, states, backend="triton")
    for name, x in inputs.tokens.items():
        if name.endswith("g") and bad > 0:
            continue  # a positive log decay is refused
        broken = x.clone()
        broken[(0, 1, 1) + (2,) * (x.ndim - 3)] = bad
        o, final = in_place(
            case, OpInputs({**inputs.tokens, name: broken}, inputs.parameters), states, backend="triton"
        )
        reached = torch.zeros_like(o, dtype=torch.bool)
        reached[0, 1 : 2 if name == "q" else 3, 1, 2 if name == "v" else slice(None)] = True
        assert o[reached].isnan().all(), name
        assert torch.equal(o[~reached], clean[~reached]), name
        for a, b in zip(final, held):
            own = torch.zeros_like(a, dtype=torch.bool)
            if name != "q":
                own[0, 1, ..., 2 if name == "v" and a.ndim == 4 else slice(None)] = True
            assert torch.equal(a[~own], b[~own]), name


@pytest.mark.kernels
def test_kernel_keeps_a_bad_state_in_its_column(case: OpCase) -> None:
    inputs = case.draw(time=2, key=5, value=6, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    S, *rest = draw_states(case, inputs, 2)
    clean, held = in_place(case, inputs, (S, *rest), backend="triton")
    S[0, 1, 3, 2] = math.nan
    o, final = in_place(case, inputs, (S, *rest), backend="triton")
    reached = torch.zeros_like(o, dtype=torch.bool)
    reached[0, :, 1, 2] = True
    assert o[reached].isnan().all() and torch.equal(o[~reached], clean[~reached])
    own = torch.zeros_like(final[0], dtype=torch.bool)
    own[0, 1, :, 2] = True
    assert torch.equal(final[0][~own], held[0][~own])


@pytest.mark.kernels
@some_cases
@pytest.mark.parametrize(("batch", "time"), [(0, 1), (2, 0)])
def test_kernel_without_tokens(case: OpCase, batch: int, time: int) -> None:
    inputs = case.draw(batch=batch, time=time, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, batch)
    o, held = in_place(case, inputs, states, backend="triton")
    assert o.shape == inputs.tokens["v"].shape
    assert all(torch.equal(after.cpu(), before.float()) for before, after in zip(states, held))
