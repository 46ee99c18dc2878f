"""One answer however it is computed: by kernels or in sequence, whole or in segments, packed or apart, alone or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastweights import ops
from fastweights.testing import OpCase, OpInputs
from fastweights.testing.cases import accepts
from fastweights.testing.contract.compare import assert_close, relative_error, replace_tokens, values_and_gradients
from tests.contract.golden import FILES, load
from tests.fast_set import slow

from .cases import (
    DEVICE,
    KERNEL_CASES,
    REPEATED,
    SLOW,
    SOME,
    draw_states,
    exact,
    others_slow,
    small,
    some_cases,
    some_slow,
)

pytestmark = pytest.mark.kernels
CLOSE = 1e-5  # float32; found are 3e-6 at most
# Its solutions are up to 50 times longer where no key is than where the memory is read, and so is their rounding.
CLOSE_OF = {"gated_kalmanet": 3e-5}

SPECS = {case.spec.name: case.spec for case in KERNEL_CASES.values()}
GOLDEN = [
    path
    for path in FILES
    if path.stem.split("-")[0] in SPECS and accepts(SPECS[path.stem.split("-")[0]], load(path)[0]["kwargs"])
]


FAST_GOLDEN = (
    *("linear_attention-channel", "delta_rule-scalar-write", "delta_rule-channel-write", "precondition_keys"),
    *("preconditioned_delta_rule-channel", "recursive_least_squares"),
)


@pytest.mark.parametrize(
    "path",
    [pytest.param(x, id=x.stem, marks=() if x.stem in FAST_GOLDEN else pytest.mark.slow) for x in GOLDEN],
)
def test_golden(path: Path) -> None:
    static, arrays = load(path)
    arguments = {
        name[4:]: torch.tensor(x, dtype=torch.float32, device=DEVICE, requires_grad=True)
        for name, x in arrays.items() if name.startswith("arg.")
    }  # fmt: skip
    o, state = getattr(ops, static["op"])(**arguments, **static["kwargs"], output_final_state=True, backend="triton")
    names = [name[4:] for name in arrays if name.startswith("out.") and name != "out.variance"]
    results = (o, *(state if isinstance(state, tuple) else (state,)))
    for name, result in zip(names, [x for x in results if x.is_floating_point()], strict=True):
        assert relative_error(result.detach().cpu(), torch.tensor(arrays[f"out.{name}"])) <= CLOSE, name
    (o * torch.tensor(arrays["do"], device=DEVICE)).sum().backward()
    for name, x in arguments.items():
        if f"grad.{name}" in arrays:
            assert relative_error(x.grad.cpu(), torch.tensor(arrays[f"grad.{name}"])) <= CLOSE, name


def check(case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...] | None = None, **keywords: Tensor) -> None:
    """Values and gradients, those of the states included, are the reference's."""
    got = values_and_gradients(case, inputs, states, backend="triton", **keywords)
    for g, w in zip(got, exact(case, inputs, states, **keywords)):
        assert_close(g, w, CLOSE_OF.get(case.spec.name, CLOSE))


WIDTHS = {
    1: (8, 6, True),
    2: (1, 1, False),
    63: (5, 17, True),
    64: (16, 4, False),
    65: (20, 33, True),
    130: (8, 6, False),
}


def sizes_for(name: str) -> tuple[int, ...]:
    """The lengths of the fast set."""
    return (2, 65) if name in SOME else () if name in (*SLOW, *REPEATED) else (65,)


@pytest.mark.parametrize(
    ("case", "time", "key", "value", "started"),
    [
        pytest.param(form, time, *rest, id=f"{name}-{time}", marks=() if time in sizes_for(name) else pytest.mark.slow)
        for name, form in KERNEL_CASES.items()
        for time, rest in WIDTHS.items()
    ],
)
def test_chunked_is_sequential(case: OpCase, time: int, key: int, value: int, started: bool) -> None:
    inputs = small(case, time, key=key, value=value, seed=time)
    check(case, inputs, draw_states(case, inputs, 1) if started else None)


@others_slow("delta_rule-head-write", "precondition_keys")
def test_side_by_side_segments(case: OpCase, short_segments: None) -> None:
    """Of several sequences: one of three segments, an empty one and short ones."""
    inputs = small(case, 137)
    check(case, inputs, draw_states(case, inputs, 4), cu_seqlens=torch.tensor([0, 130, 130, 131, 137]))


@some_slow("linear_attention-none", "preconditioned_delta_rule-channel", "precondition_keys")
def test_sequences_of_whole_segments(case: OpCase, short_segments: None) -> None:
    """The tables have places for more segments than such sequences fill."""
    inputs = small(case, 131)
    check(case, inputs, draw_states(case, inputs, 3), cu_seqlens=torch.tensor([0, 64, 128, 131]))


@some_slow("linear_attention-none", "preconditioned_delta_rule-channel")
def test_side_by_side_segments_of_a_row(case: OpCase, short_segments: None) -> None:
    check(case, small(case, 200))


@pytest.mark.parametrize(
    ("name", "time"),
    [
        pytest.param("linear_attention-channel", 1100, marks=pytest.mark.slow),
        pytest.param("delta_rule-head", 1100, marks=pytest.mark.slow),
        pytest.param("precondition_keys", 2100, marks=pytest.mark.slow),
    ],
)
def test_long_sequence(name: str, time: int) -> None:
    """Cut into segments as the sizes have it; with more chunks than the preconditioner's scan takes at once."""
    case = KERNEL_CASES[name]
    check(case, small(case, time, key=4))


def test_segments_are_the_whole(case: OpCase) -> None:
    """Without gradients short pieces are read token by token."""
    inputs = small(case, 70)
    whole, final = case(inputs, backend="triton")
    outputs, states = [], None
    for start, stop in [(0, 3), (3, 64), (64, 65), (65, 70)]:
        keywords = {} if states is None else {"initial_state": case.initial_state(states)}
        o, states = case(inputs.at((slice(None), slice(start, stop))), backend="triton", **keywords)
        outputs.append(o)
    assert_close([torch.cat(outputs, 1), *states], [whole, *final], CLOSE)


@pytest.mark.parametrize("lengths", [[5, 70, 1, 30], *slow([0, 64, 0, 3])], ids=str)
@some_cases
def test_packed_is_separate(case: OpCase, lengths: list[int]) -> None:
    inputs = small(case, sum(lengths))
    edges = torch.tensor([0, *lengths]).cumsum(0)
    o, finals = case(inputs, cu_seqlens=edges.to(DEVICE), backend="triton")
    for n, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist())):
        alone, final = case(inputs.at((slice(None), slice(start, stop))), backend="triton")
        assert_close([o[:, start:stop], *(s[n : n + 1] for s in finals)], [alone, *final], CLOSE)


@some_slow("preconditioned_delta_rule-channel")
def test_alone_is_in_a_batch(case: OpCase) -> None:
    """Bit by bit."""
    inputs = small(case, 20, batch=3)
    o, states = case(inputs, backend="triton")
    for n in range(3):
        alone, final = case(inputs.at(slice(n, n + 1)), backend="triton")
        assert torch.equal(alone, o[n : n + 1])
        assert all(torch.equal(f, s[n : n + 1]) for f, s in zip(final, states))


@others_slow("linear_attention-none", "delta_rule-head-write")
def test_grouped_heads(case: OpCase) -> None:
    """Gates of the value heads, and write keys."""
    inputs = small(case, 20, heads=2, value_heads=4)
    if "write_key" in inputs.tokens:
        factors = torch.linspace(0.8, 1.0, 4, device=DEVICE)[:, None]
        inputs = replace_tokens(inputs, write_key=inputs.tokens["write_key"].repeat_interleave(2, 2) * factors)
    check(case, inputs)


@some_slow("preconditioned_delta_rule-channel")
def test_gates_of_key_heads(case: OpCase) -> None:
    if "v" not in case.tokens:
        pytest.skip("nothing says that there are more heads")
    inputs = small(case, 20, heads=2, value_heads=4)
    wide = {name: x for name, x in inputs.tokens.items() if x.shape[2] == 4 and name != "v"}
    check(case, replace_tokens(inputs, **{name: x[:, :, ::2] for name, x in wide.items()}))


@some_cases
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"time": 0}, {"batch": 0, "time": 0}], ids=str)
def test_empty(case: OpCase, sizes: dict[str, int]) -> None:
    inputs = small(case, **{"batch": 2, "time": 5, **sizes})
    full = case(small(case, 1), backend="triton")
    (o, *states), gradients = values_and_gradients(case, inputs, backend="triton")
    assert o.shape == (*next(iter(inputs.tokens.values())).shape[:2], *full[0].shape[2:])
    assert [s.shape[1:] for s in states] == [s.shape[1:] for s in full[1]]
    assert [s.shape[0] for s in states] == [sizes.get("batch", 2)] * len(states)
    assert not any(s.any() for s in states)
    assert all(g.isfinite().all() for g in gradients)


@some_cases
@pytest.mark.parametrize("time", [*slow(5), 20])
def test_states_pass_through_without_tokens(case: OpCase, time: int) -> None:
    """Empty sequences between others keep the state that they began with, and pass its gradient on."""
    inputs = small(case, time)
    states = draw_states(case, inputs, 3)
    check(case, inputs, states, cu_seqlens=torch.tensor([0, 0, time, time]))


@some_cases
@pytest.mark.parametrize("time", [5, 20])
def test_no_state_unless_asked(case: OpCase, time: int) -> None:
    inputs = small(case, time)
    o, state = case.op(**inputs.arguments(), backend="triton")
    assert state is None
    wanted, states = case(inputs, backend="triton")
    assert torch.equal(o, wanted)
    assert all(s.dtype == torch.float32 for s in states)


@some_slow("linear_attention-none", "preconditioned_delta_rule-channel", "precondition_keys")
def test_any_layout(case: OpCase) -> None:
    """Heads before time, strided channels, a view that begins in the middle of 16 bytes, one token repeated: the same numbers bit
    by bit, the same gradients."""
    inputs = small(case, 20, heads=2)
    layouts = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ]

    def results(layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tokens = {name: layout(x.detach()).requires_grad_() for name, x in inputs.tokens.items()}
        o, states = case(OpInputs(tokens, inputs.parameters), backend="triton")
        do = layout(torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o))
        return [o, *states, *torch.autograd.grad(o, list(tokens.values()), do, materialize_grads=True)]

    wanted = results(torch.clone)
    for layout in layouts:
        assert all(torch.equal(a, b) for a, b in zip(results(layout), wanted, strict=True))
    spread = inputs.at((slice(None), slice(0, 1))).map(lambda x: x.expand(-1, 20, *x.shape[2:]) if x.ndim > 2 else x)
    for g, w in zip(values_and_gradients(case, spread, backend="triton"), exact(case, spread)):
        assert_close(g, w, CLOSE)
