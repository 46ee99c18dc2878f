"""The functions that update a state in place, and the kernel under them: the numbers of the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights import ops
from fastweights.testing import OpCase, OpInputs
from tests.fast_set import fast_where, slow
from tests.kernels.cases import DEVICE, REPEATED

from .decoding import (
    BY_KERNEL,
    DECODING,
    IN_PLACE,
    call_decode,
    draw_states,
    exact,
    has_kernel,
    in_float32,
    in_place,
    largest_error,
)

SOME = [
    "linear_attention-channel", "delta_rule-head-write", "preconditioned_delta_rule-head", "palimpsa_posterior",
    "lattice-decode-decay", "output_normalized_ttt", "gated_kalmanet-chebyshev", "mesa",
    "variational_linear_attention-refresh",
]  # fmt: skip
SLOW = ("mesa", "gated_kalmanet-chebyshev")  # iteration after iteration in the interpreter: in the fast set at one size
FAST = set(SOME) - set(SLOW)


def fast_cases(*fast: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(DECODING[name], id=name, marks=() if name in fast else pytest.mark.slow) for name in SOME]
    )


some_cases = fast_cases(*FAST)
few_cases = fast_cases(
    "linear_attention-channel", "delta_rule-head-write", "lattice-decode-decay", "output_normalized_ttt"
)


@pytest.fixture(params=DECODING)
def case(request: pytest.FixtureRequest) -> OpCase:
    return DECODING[request.param]


@pytest.fixture(params=[pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in BY_KERNEL])
def by_kernel(request: pytest.FixtureRequest) -> OpCase:
    return BY_KERNEL[request.param]


EDGES = torch.tensor([0, 0, 3, 4, 4, 10])


@fast_where(lambda given: given["backend"] != "reference")
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
    states = draw_states(case, inputs, 2)
    held = tuple(s.clone() for s in states)
    outputs = [
        IN_PLACE[case.spec.name](
            **inputs.at((slice(None), slice(t, t + 1))).arguments(), state=case.initial_state(held)
        )
        for t in range(40)
    ]
    assert largest_error((torch.cat(outputs, 1), held), exact(case, inputs, states)) < 1e-12


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
        states = case.initial_state(tuple(in_float32(s) for s in draw_states(case, inputs, changed.pop("count", 2))))
    with pytest.raises(ValueError, match=match):
        IN_PLACE[case.spec.name](**{**inputs.arguments(), "state": states, **changed})


def test_more_than_16_tokens_are_refused(case: OpCase) -> None:
    refused(case, "T must be at most 16 tokens per sequence, got 17; use ", time=17)
    refused(case, "at most 16 .* got 17", time=20, batch=1, cu_seqlens=torch.tensor([0, 3, 20]))


def test_gradients_are_refused(case: OpCase) -> None:
    inputs = case.draw(time=3, dtype=torch.float32)
    for name, x in {**inputs.tokens, **inputs.parameters}.items():
        leaf = x.clone().requires_grad_()
        refused(case, "must not require a gradient", **{name: leaf})
    S, *rest = (in_float32(s) for s in draw_states(case, inputs, 2))
    learned = case.initial_state((S.requires_grad_(), *rest))
    refused(case, "state( [SMH])? must not require a gradient", states=learned)
    with torch.no_grad():
        IN_PLACE[case.spec.name](**inputs.arguments(), state=learned)


def test_states_that_do_not_fit_are_refused(case: OpCase) -> None:
    S, *rest = draw_states(case, case.draw(time=3), 2)
    refused(case, "must be torch.float32", states=case.initial_state((S, *rest)))
    S, *rest = (in_float32(S), *(in_float32(x) for x in rest))
    refused(case, "must have shape", states=case.initial_state((S[:1], *rest)))
    refused(case, "must have shape", states=case.initial_state((S[..., 1:], *rest)))
    if rest:
        refused(case, rf"state must be \({', '.join(case.states)}\)", states=S)


def test_options_that_do_not_fit_are_refused(case: OpCase) -> None:
    refused(case, "backend must be one of", backend="cuda")
    refused(case, "the batch must be 1", cu_seqlens=torch.tensor([0, 3]))
    refused(case, "cu_seqlens must rise", batch=1, count=1, cu_seqlens=torch.tensor([0, 2]))
    inputs = case.draw(time=3)
    kernel = case.spec.recurrent
    served = kernel is None or has_kernel(case) or not kernel.only
    why = "float64 inputs" if served else "solver must be 'chebyshev' or 'conjugate_gradient'"
    if "triton" not in case.spec.backends:
        why = "backend 'triton' is missing"
    with pytest.raises(ValueError, match=why):
        in_place(case, inputs, draw_states(case, inputs, 2), backend="triton")


def test_center_may_be_a_number() -> None:
    case = DECODING["preconditioned_delta_rule-none"]
    inputs = case.draw(time=3)
    one = OpInputs(inputs.tokens, options={"center": -0.2})
    each = OpInputs(inputs.tokens, options={"center": torch.full((2,), -0.2, dtype=torch.float64)})
    states = draw_states(case, inputs, 2)
    assert torch.equal(in_place(case, one, states)[0], in_place(case, each, states)[0])


# Pools of states

INDICES = torch.tensor([4, -1, 0, 2, -7])


def drawn_pool(case: OpCase, packed: bool) -> tuple[OpInputs, tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs of five sequences, a pool of seven states, and the keywords of a packed call."""
    inputs = case.draw(batch=1 if packed else 5, time=10 if packed else 3, heads=1, value_heads=2, dtype=torch.float32)
    return inputs, draw_states(case, inputs, 7), {"cu_seqlens": EDGES} if packed else {}


def check_pool(case: OpCase, inputs: OpInputs, pool: tuple[Tensor, ...], got: Any, packed: dict[str, Tensor]) -> None:
    """Sequences with an index have the numbers of the op from their states, others zeros; other states keep their bits."""
    o, after = got
    held = INDICES >= 0
    wanted, final = exact(case, inputs, tuple(s[INDICES.clamp_min(0)] for s in pool), **packed)
    tokens = held.repeat_interleave(EDGES.diff())[None] if packed else held[:, None].expand(o.shape[:2])
    o = o.cpu()
    assert (o[~tokens] == 0).all() and o[tokens].any()
    assert largest_error((o[tokens], ()), (wanted[tokens], ())) < 1e-5
    for new, old, w in zip(after, pool, final):
        new, rows = new.cpu(), INDICES[held]
        assert largest_error((new[rows], ()), (w[held], ())) < 1e-5
        others = torch.ones(len(old), dtype=torch.bool).index_fill(0, rows, False)
        assert torch.equal(new[others], in_float32(old[others]))


@fast_where(lambda given: given["backend"] != "reference")
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_pool_of_states(case: OpCase, backend: str, packed: bool) -> None:
    inputs, pool, keywords = drawn_pool(case, packed)
    got = in_place(case, inputs, pool, backend=backend, state_indices=INDICES, **keywords)
    check_pool(case, inputs, pool, got, keywords)


def test_state_indices_that_do_not_fit_are_refused(case: OpCase) -> None:
    refused(case, r"state_indices must be int32 or int64 \[2\]", state_indices=torch.tensor([0, 1, 2]), count=3)
    refused(case, "state_indices must be int32 or int64", state_indices=torch.tensor([0.0, 1.0]))
    refused(case, "less than the number of states in the pool, 3, got 3", state_indices=torch.tensor([0, 3]), count=3)
    refused(case, "state_indices must not repeat", state_indices=torch.tensor([1, 1]), count=3)
    refused(case, "must be a pool of at least one state", state_indices=torch.tensor([-1, -1]), count=0)
    refused(case, "state_indices must be on the device", state_indices=torch.zeros(2, dtype=torch.long, device="meta"))
    inputs = case.draw(time=3)
    with pytest.raises(TypeError, match="state_indices must be an integer tensor"):
        in_place(case, inputs, draw_states(case, inputs, 2), state_indices=[0, 1])


def test_expanded_states_are_refused(case: OpCase) -> None:
    """They hold one number where several would be written."""
    inputs = case.draw(time=3, dtype=torch.float32)
    states = tuple(in_float32(s[:1]).expand(2, *s.shape[1:]) for s in draw_states(case, inputs, 2))
    refused(case, "must have a place in memory for each number", states=case.initial_state(states))


# The row that a sequence reads, and those of the states after its three tokens. The second and the last one read none; the third
# and the fourth write over what they have read. Rows 1, 3, 5 and 6 belong to nobody.
KEPT = torch.tensor([[4, 7, 8, 9], [-1, 10, 11, -1], [0, 0, -1, 12], [2, 13, 14, 2], [-3, -1, -1, -1]])
KEPT_EDGES = torch.tensor([0, 3, 5, 7, 10, 10])


def drawn_kept(case: OpCase, packed: bool) -> tuple[OpInputs, tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs of the sequences of KEPT, a pool of 15 states, and the keywords of a packed call."""
    inputs = case.draw(batch=1 if packed else 5, time=10 if packed else 3, heads=1, value_heads=2, dtype=torch.float32)
    return inputs, draw_states(case, inputs, 15), {"cu_seqlens": KEPT_EDGES} if packed else {}


def check_kept(case: OpCase, inputs: OpInputs, pool: tuple[Tensor, ...], got: Any, packed: bool) -> None:
    """The outputs of each sequence, and in the row of each of its tokens the state of the op after so many of its tokens. Rows
    without a token keep their bits."""
    o, after = got[0].cpu(), [x.cpu() for x in got[1]]
    untouched = torch.ones(15, dtype=torch.bool)
    for n, (read, *kept) in enumerate(KEPT.tolist()):
        first, last = KEPT_EDGES[n : n + 2].tolist() if packed else (0, 3)
        tokens = (slice(0, 1) if packed else slice(n, n + 1), slice(first, last))
        if read < 0:
            assert not o[tokens].any()
            continue
        states = tuple(s[read : read + 1] for s in pool)
        for t in range(last - first):
            wanted, final = exact(case, inputs.at((tokens[0], slice(first, first + t + 1))), states)
            assert largest_error((o[tokens][:, t], ()), (wanted[:, t], ())) < 1e-5
            if kept[t] >= 0:
                untouched[kept[t]] = False
                assert (
                    largest_error(
                        (after[0][kept[t]], tuple(x[kept[t]] for x in after)), (final[0][0], tuple(x[0] for x in final))
                    )
                    < 1e-5
                )
    assert all(torch.equal(new[untouched], in_float32(old[untouched])) for new, old in zip(after, pool))


@fast_where(lambda given: given["backend"] != "reference")
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_state_after_each_token_is_kept(case: OpCase, backend: str, packed: bool) -> None:
    inputs, pool, keywords = drawn_kept(case, packed)
    got = in_place(case, inputs, pool, backend=backend, state_indices=KEPT, **keywords)
    check_kept(case, inputs, pool, got, packed)


def test_rows_of_states_that_do_not_fit_are_refused(case: OpCase) -> None:
    refused(case, "and one for each of its 3 tokens", state_indices=torch.tensor([[0, 1, 2], [3, 4, 5]]), count=6)
    refused(
        case,
        "less than the number of states in the pool, 8, got 8",
        state_indices=torch.arange(1, 9).view(2, 4),
        count=8,
    )
    twice = torch.tensor([[0, 1, 2, 3], [4, 5, 2, 6]])
    refused(case, "state_indices must not repeat", state_indices=twice, count=8)
    crossed = torch.tensor([[0, 1, 2, 3], [3, 4, 5, 6]])
    refused(case, "the row 3 to read that another one overwrites", state_indices=crossed, count=8)


def test_two_sequences_go_on_from_one_state(case: OpCase) -> None:
    inputs = case.draw(time=3, dtype=torch.float32)
    pool = draw_states(case, inputs, 8)
    got = in_place(case, inputs, pool, state_indices=torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]]))
    o, final = exact(case, inputs, tuple(s[[0, 0]] for s in pool))
    assert largest_error((got[0], tuple(x[[3, 6]] for x in got[1])), (o, final)) < 1e-5


@pytest.mark.parametrize("name", ["delta_rule-head-write", *slow("variational_linear_attention-refresh")])
def test_kept_states_in_a_traced_graph(name: str) -> None:
    case = DECODING[name]
    inputs = case.draw(batch=2, time=3, dtype=torch.float32)
    pool, rows = draw_states(case, inputs, 9), torch.tensor([[0, 1, 2, 0], [4, 5, -1, 8]])
    o, wanted = in_place(case, inputs, pool, state_indices=rows)
    held = tuple(map(in_float32, pool))
    compiled = torch.compile(IN_PLACE[case.spec.name], fullgraph=True, backend="eager")
    with torch.no_grad():
        got = compiled(**inputs.arguments(), state=case.initial_state(held), state_indices=rows)
    assert largest_error((got, held), (o, wanted)) < 1e-6


class AsksNothing(TorchDispatchMode):
    """Refuses what the host would wait for a device for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


def test_kept_states_are_found_without_asking_the_device(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of PyTorch, whose work a CUDA graph can then capture."""
    for module in ("fastweights.checks", "fastweights.ops.framework.checks", "fastweights.ops.framework.nonfinite"):
        monkeypatch.setattr(f"{module}.values_can_be_read", lambda x: False)  # as on a GPU
    inputs = case.draw(batch=2, time=3, dtype=torch.float32)
    pool, rows = draw_states(case, inputs, 9), torch.tensor([[0, 1, 2, 0], [4, 5, -1, 8]])
    with AsksNothing():
        in_place(case, inputs, pool, backend="torch", state_indices=rows)


def test_kept_states_of_no_tokens(case: OpCase) -> None:
    inputs = case.draw(time=0, dtype=torch.float32)
    pool = draw_states(case, inputs, 3)
    o, after = in_place(case, inputs, pool, state_indices=torch.tensor([[0, 1], [2, -1]]))
    assert o.shape[1] == 0 and all(torch.equal(new, in_float32(old)) for new, old in zip(after, pool))


def test_kept_states_of_no_sequences(case: OpCase) -> None:
    inputs = case.draw(batch=0, time=2, dtype=torch.float32)
    pool = draw_states(case, inputs, 3)
    o, after = in_place(case, inputs, pool, state_indices=torch.zeros(0, 3, dtype=torch.long))
    assert len(o) == 0 and all(torch.equal(new, in_float32(old)) for new, old in zip(after, pool))


# The kernel

SIZES = [  # T, q/k heads, value heads, K, V
    (1, 2, 2, 16, 16),
    (3, 1, 2, 5, 40),
    (16, 1, 2, 17, 5),
    (1, 1, 1, 96, 40),
    (3, 2, 2, 1, 1),
]
# In the interpreter these take seconds. In the fast set the delta rule has all sizes, the others have one, and
# forms none whose kernel another one launches with more inputs.
WITH_FEWER_INPUTS = (*REPEATED, "palimpsa", "gated_kalmanet-constant_ridge", "variational_linear_attention-plain")
FAST_SIZES = {
    **dict.fromkeys(set(WITH_FEWER_INPUTS) - FAST, ()), "delta_rule-head-write": SIZES
}  # fmt: skip
FORMS_AND_SIZES = [
    pytest.param(
        form, *size, id=f"{name}-{size}", marks=() if size in FAST_SIZES.get(name, SIZES[1:2]) else pytest.mark.slow
    )
    for name, form in BY_KERNEL.items()
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
@pytest.mark.parametrize("index", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.slow)], ids=str)
def test_kernel_on_packed_rows(case: OpCase, index: torch.dtype) -> None:
    inputs = case.draw(batch=1, time=10, heads=1, key=8, value=36, dtype=torch.float32)
    states = draw_states(case, inputs, 5)
    edges = EDGES.to(DEVICE, index)
    o, held = in_place(case, inputs.map(lambda x: x.to(DEVICE)), states, backend="triton", cu_seqlens=edges)
    assert largest_error((o, held), exact(case, inputs, states, cu_seqlens=EDGES)) < 1e-5
    for before, after in zip(states, held):
        assert torch.equal(after[[0, 3]].cpu(), in_float32(before[[0, 3]]))


@pytest.mark.kernels
@few_cases
@pytest.mark.parametrize(
    ("packed", "index"),
    [
        pytest.param(False, torch.int32, id="rows"),
        pytest.param(True, torch.int64, id="packed", marks=pytest.mark.slow),  # the fast set has these with kept states
    ],
)
def test_kernel_on_a_pool(case: OpCase, packed: bool, index: torch.dtype) -> None:
    inputs, pool, keywords = drawn_pool(case, packed)
    moved = {name: x.to(DEVICE) for name, x in keywords.items()}
    got = in_place(
        case,
        inputs.map(lambda x: x.to(DEVICE)),
        pool,
        backend="triton",
        state_indices=INDICES.to(DEVICE, index),
        **moved,
    )
    check_pool(case, inputs, pool, got, keywords)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("packed", "index"),
    [
        pytest.param(False, torch.int32, id="rows", marks=pytest.mark.slow),
        pytest.param(True, torch.int64, id="packed"),
    ],
)
def test_kernel_keeps_the_state_after_each_token(by_kernel: OpCase, packed: bool, index: torch.dtype) -> None:
    inputs, pool, keywords = drawn_kept(by_kernel, packed)
    moved = {name: x.to(DEVICE) for name, x in keywords.items()}
    inputs_there, indices = inputs.map(lambda x: x.to(DEVICE)), KEPT.to(DEVICE, index)
    got = in_place(by_kernel, inputs_there, pool, backend="triton", state_indices=indices, **moved)
    check_kept(by_kernel, inputs, pool, got, packed)


@pytest.mark.kernels
@few_cases
def test_kernel_on_rows_of_a_wider_pool(case: OpCase) -> None:
    """The rows of a pool may lie apart, as where several layers share its memory; it is written where it is."""
    inputs, pool, _ = drawn_pool(case, False)
    inputs = inputs.map(lambda x: x.to(DEVICE))
    wide = tuple(torch.zeros(7, 2, *s.shape[1:], dtype=in_float32(s).dtype, device=DEVICE) for s in pool)
    for both, s in zip(wide, pool):
        both[:, 1] = s
    rows = tuple(both[:, 1] for both in wide)
    o = IN_PLACE[case.spec.name](
        **inputs.arguments(), state=case.initial_state(rows), backend="triton", state_indices=INDICES.to(DEVICE)
    )
    check_pool(case, inputs.map(Tensor.cpu), pool, (o, rows), {})
    assert all((both[:, 0] == 0).all() for both in wide)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name", ["delta_rule-head-write", *slow("linear_attention-channel", "preconditioned_delta_rule-head")]
)
def test_kernel_on_a_pool_with_values_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads [V, K], as vLLM has them, are updated where they lie."""
    from fastweights.kernels.recurrent.launching import PlacedState

    def finish(placed: PlacedState) -> None:
        assert placed.target is placed.wanted

    monkeypatch.setattr(PlacedState, "finish", finish)
    case = DECODING[name]
    inputs = case.draw(batch=5, time=3, heads=1, value_heads=2, key=12, value=36, dtype=torch.float32)
    pool = draw_states(case, inputs, 7)
    turned = tuple(
        in_float32(s.to(DEVICE)).mT.contiguous().mT if s.ndim == 4 else in_float32(s.to(DEVICE)) for s in pool
    )
    o = IN_PLACE[case.spec.name](
        **inputs.map(lambda x: x.to(DEVICE)).arguments(), state=case.initial_state(turned), backend="triton",
        state_indices=INDICES.to(DEVICE),
    )  # fmt: skip
    check_pool(case, inputs, pool, (o, turned), {})


@pytest.mark.kernels
@some_cases
def test_kernel_leaves_states_outside_of_the_pool_alone(case: OpCase) -> None:
    """Indices on a GPU are not checked. One past the end of the pool counts as none."""
    from fastweights.kernels.recurrent import RecurrentCall

    inputs = case.draw(batch=2, time=1, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    around = tuple(in_float32(s).to(DEVICE) for s in draw_states(case, inputs, 5))
    before = tuple(s.clone() for s in around)
    pool = dict(zip(case.states, (s[:3] for s in around)))
    options = {"scale": 1.0, "bound": 1.5, "eps": 1e-6, "normalize": True, "l1": 0.0, "refresh": 1e-3, **inputs.options}
    indices = torch.tensor([3, 2**40], device=DEVICE)
    o = case.spec.recurrent.decode(
        RecurrentCall({**inputs.tokens, **inputs.parameters}, pool, options, None, None, indices)
    )
    assert all(not x.any() for x in (o if isinstance(o, tuple) else (o,)))
    assert all(torch.equal(a, b) for a, b in zip(around, before))


@pytest.mark.kernels
def test_kernel_takes_a_prior_that_is_a_number() -> None:
    """With the bits of a tensor that is full of it, which need not be filled for every token."""
    case = DECODING["palimpsa"]
    inputs = case.draw(batch=2, time=1, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 2)
    found = []
    for prior in (0.7, torch.full((2,), 0.7, device=DEVICE)):
        held = tuple(in_float32(s).to(DEVICE) for s in states)
        o = IN_PLACE["palimpsa"](**inputs.tokens, prior=prior, state=held, backend="triton")
        found.append((o, *held))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("name, option", [("palimpsa", "prior"), ("preconditioned_delta_rule-head", "center")])
def test_kernel_reads_a_parameter_in_its_own_dtype(name: str, option: str) -> None:
    """With the bits of the same parameter in float32, into which it need not be converted for every token."""
    case = DECODING[name]
    inputs = case.draw(batch=2, time=1, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states, low = draw_states(case, inputs, 2), torch.tensor([0.7, 1.3], dtype=torch.bfloat16, device=DEVICE)
    found = []
    for given in (low, low.float(), low.double()):
        given_too = OpInputs(inputs.tokens, options={**inputs.options, option: given})
        o, held = in_place(case, given_too, states, backend="triton")
        found.append((o, *held))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("edges", [[-3, 4, 90], [0, 60, 2], [50, 55, 60], [2**40, 3, 2**40]], ids=str)
def test_kernel_stays_inside_the_row(edges: list[int]) -> None:
    """Lengths on a GPU are not checked. Whatever they say, no token outside of the row is read: those are NaN here."""
    from fastweights.kernels.recurrent import RecurrentCall
    from fastweights.kernels.recurrent.delta_rule import decode

    around = torch.full((1, 64, 1, 8), math.nan, device=DEVICE)
    around[:, 29:35] = torch.randn(1, 6, 1, 8)
    row = around[:, 29:35]
    state = torch.zeros(2, 1, 8, 8, device=DEVICE)
    inputs = dict.fromkeys("qkv", row)
    o = decode(RecurrentCall(inputs, {"S": state}, {"scale": 1.0}, None, torch.tensor(edges, device=DEVICE)))
    assert o.shape == row.shape and state.isfinite().all()


@pytest.mark.kernels
def test_kernel_into_new_states(by_kernel: OpCase) -> None:
    """The states given stay as they are, and the new ones are those of an update in place, bit by bit."""
    case = by_kernel
    inputs = case.draw(time=2, heads=1, key=8, value=40, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = tuple(in_float32(s).to(DEVICE) for s in draw_states(case, inputs, 2))
    before = tuple(s.clone() for s in states)
    new = tuple(torch.full_like(s, math.nan if s.is_floating_point() else -1) for s in states)
    o = call_decode(case, inputs, states, new)
    assert all(torch.equal(s, b) for s, b in zip(states, before))
    wanted, held = in_place(case, inputs, states, backend="triton")
    if case.spec.name == "palimpsa_posterior":
        o = torch.cat([o[0], o[1].sqrt()], -1)
    assert torch.equal(o, wanted)
    assert all(torch.equal(n, h) for n, h in zip(new, held))


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["gated_kalmanet-chebyshev", "mesa"])
def test_kernel_takes_the_symmetric_part_of_a_gram_matrix(name: str) -> None:
    """As the ops do; a sequence without tokens keeps its matrix to the last bit."""
    case = DECODING[name]
    inputs = case.draw(batch=1, time=3, heads=1, key=6, value=5, dtype=torch.float32)
    H, U = draw_states(case, inputs, 2)
    H = H + 0.2 * torch.randn(H.shape, generator=torch.Generator().manual_seed(3), dtype=H.dtype)
    edges = torch.tensor([0, 3, 3])
    o, held = in_place(case, inputs.map(lambda x: x.to(DEVICE)), (H, U), backend="triton", cu_seqlens=edges.to(DEVICE))
    wanted, final = exact(case, inputs, (H, U), cu_seqlens=edges)
    assert largest_error((o, [x[:1] for x in held]), (wanted, [x[:1] for x in final])) < 1e-5
    assert torch.equal(held[0][1].cpu(), H[1].float())


@pytest.mark.slow
@pytest.mark.kernels
def test_conjugate_gradients_end_once_they_have_converged() -> None:
    """o after any number of iterations that is enough is the same bits."""
    case = DECODING["mesa"]
    inputs = case.draw(batch=1, time=4, heads=2, key=32, value=256, dtype=torch.float16).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 1)
    few, enough, more = (
        in_place(case, OpInputs(inputs.tokens, inputs.parameters, {"iterations": n}), states, backend="triton")[0]
        for n in (2, 10, 14)
    )
    assert torch.equal(enough, more) and not torch.equal(few, enough)


@pytest.mark.kernels
@few_cases
def test_op_of_few_tokens_runs_the_kernel(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the op itself, with the states that it begins with and with given ones, which stay as they are."""
    from fastweights.ops.framework import few_tokens

    ran: list[Any] = []
    plain = few_tokens.recurrent.run
    monkeypatch.setattr(few_tokens, "takes_kernels", lambda *arguments: True)
    monkeypatch.setattr(few_tokens.recurrent, "run", lambda this, *x: ran.append(this.spec) or plain(this, *x))
    inputs = case.draw(time=3, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    same = inputs.map(lambda x: x.cpu().double())
    assert largest_error(case(inputs), case(same, backend="reference")) < 1e-5
    states = tuple(in_float32(s).to(DEVICE) for s in draw_states(case, inputs, 2))
    before = tuple(s.clone() for s in states)
    got = case(inputs, initial_state=case.initial_state(states))
    started = tuple((s.double() if s.is_floating_point() else s).cpu() for s in before)
    assert largest_error(got, exact(case, inputs, started)) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(states, before))
    runs = 1 + case.spec.recurrent.starts
    assert ran.count(case.spec) == runs
    case(inputs.map(Tensor.requires_grad_))
    assert ran.count(case.spec) == runs


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
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            DECODING[name],
            id=name,
            marks=() if name in ("delta_rule-head-write", "palimpsa_posterior") else pytest.mark.slow,
        )
        for name in SOME
    ],
)
@pytest.mark.parametrize("time", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_kernel_on_any_layout(case: OpCase, time: int) -> None:
    inputs = case.draw(time=time, key=8, value=8, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 2)
    wanted, held = in_place(case, inputs, states, backend="triton")
    for layout in range(4):
        tokens = {name: rearranged(x)[layout] for name, x in inputs.tokens.items()}
        o, final = in_place(case, OpInputs(tokens, inputs.parameters, inputs.options), states, backend="triton")
        assert torch.equal(o, wanted)
        assert all(torch.equal(a, b) for a, b in zip(final, held))
    turned = tuple(in_float32(s).to(DEVICE, copy=True) for s in states)
    turned = tuple(s.transpose(0, 1).contiguous().transpose(0, 1) if s.ndim > 1 else s for s in turned)
    o = IN_PLACE[case.spec.name](**inputs.arguments(), state=case.initial_state(turned), backend="triton")
    assert torch.equal(o, wanted)
    assert all(torch.equal(a, b) for a, b in zip(turned, held))


@pytest.mark.kernels
def test_kernel_forgets_at_decay_0(by_kernel: OpCase) -> None:
    case = by_kernel
    inputs = case.draw(time=3, dtype=torch.float32)
    logs = {name: x.clone() for name, x in inputs.tokens.items() if name.endswith("g")}
    if not logs:
        pytest.skip("no decay")
    for x in logs.values():
        x[:, 1] = -math.inf
    forgetting = OpInputs({**inputs.tokens, **logs}, inputs.parameters, inputs.options)
    states = draw_states(case, inputs, 2)
    got = in_place(case, forgetting.map(lambda x: x.to(DEVICE)), states, backend="triton")
    assert largest_error(got, exact(case, forgetting, states)) < 1e-5


def check_bad_numbers(case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], clean: Any) -> None:
    """o is NaN exactly where the op says so and equal elsewhere; states are equal where the op's are no NaN."""
    o, final = in_place(case, inputs, states, backend="triton")
    wanted, wanted_final = exact(case, inputs, states)
    bad = wanted.isnan().to(o.device)
    assert bad.any() and not bad.all()
    assert o[bad].isnan().all() and torch.equal(o[~bad], clean[0][~bad])
    for a, b, w in zip(final, clean[1], wanted_final):
        own = w.isnan().to(a.device)
        assert torch.equal(a[~own], b[~own])


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["lattice-decode-decay", "lattice-encode-decay", "lattice-similarity-free"])
def test_kernel_keeps_slots_that_have_no_direction_to_turn(name: str) -> None:
    """A slot of zeros stays; slots keep their direction at a token that forgets all and writes nothing, and with k = v = 0."""
    case = DECODING[name]
    inputs = case.draw(time=4, dtype=torch.float32)
    states = draw_states(case, inputs, 2)
    states[0][:, :, 1] = 0
    states[0][0, 0, 2] *= 1e-4
    inputs.tokens["gamma"][:, 1] = 0
    if "decay" in inputs.tokens:
        inputs.tokens["decay"][:, 1] = 0
    for x in ("k", "v"):
        inputs.tokens[x][:, 2] = 0
    o, (S,) = in_place(case, inputs.map(lambda x: x.to(DEVICE)), states, backend="triton")
    assert largest_error((o, (S,)), exact(case, inputs, states)) < 1e-5
    assert not S[:, :, 1].any()
    if case.case.options.get("normalize", True):
        lengths = S.norm(dim=-1).cpu()
        assert torch.allclose(lengths[:, :, [0, 2]], torch.ones(2, 2, 2), atol=1e-6)


@pytest.mark.kernels
def test_kernel_writes_an_empty_memory() -> None:
    """An answer of zeros has no direction: the first write of output-normalised TTT is the delta rule's."""
    case = DECODING["output_normalized_ttt"]
    inputs = case.draw(time=3, dtype=torch.float32)
    states = tuple(torch.zeros_like(s) for s in draw_states(case, inputs, 2))
    got = in_place(case, inputs.map(lambda x: x.to(DEVICE)), states, backend="triton")
    assert got[1][0].any()
    assert largest_error(got, exact(case, inputs, states)) < 1e-5


@pytest.mark.kernels
@few_cases
@pytest.mark.parametrize("bad", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)], ids=str)
def test_kernel_keeps_bad_numbers_where_they_belong(case: OpCase, bad: float) -> None:
    """As the ops: o is NaN from the bad token of a head on (the value's column, the query's token) and equal elsewhere."""
    inputs = case.draw(time=3, key=5, value=6, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 2)
    clean = in_place(case, inputs, states, backend="triton")
    for name, x in inputs.tokens.items():
        if name.endswith("g") and bad > 0:
            continue  # a positive log decay is refused
        broken = x.clone()
        broken[(0, 1, 1) + (2,) * (x.ndim - 3)] = bad
        check_bad_numbers(
            case, OpInputs({**inputs.tokens, name: broken}, inputs.parameters, inputs.options), states, clean
        )


@pytest.mark.kernels
def test_kernel_keeps_a_bad_state_where_it_belongs(by_kernel: OpCase) -> None:
    case = by_kernel
    inputs = case.draw(time=2, key=5, value=6, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, 2)
    clean = in_place(case, inputs, states, backend="triton")
    for place in range(len(states)):
        if not states[place].is_floating_point():
            continue
        broken = tuple(s.clone() for s in states)
        broken[place][(0, 1, 3, 2)[: states[place].ndim]] = math.nan
        check_bad_numbers(case, inputs, broken, clean)


@pytest.mark.kernels
@some_cases
@pytest.mark.parametrize(("batch", "time"), [(0, 1), (2, 0)])
def test_kernel_without_tokens(case: OpCase, batch: int, time: int) -> None:
    inputs = case.draw(batch=batch, time=time, dtype=torch.float32).map(lambda x: x.to(DEVICE))
    states = draw_states(case, inputs, batch)
    o, held = in_place(case, inputs, states, backend="triton")
    assert o.shape[:3] == inputs.tokens["v"].shape[:3]
    assert all(torch.equal(after.cpu(), in_float32(before)) for before, after in zip(states, held))
