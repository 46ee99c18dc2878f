"""Tensors of more than 2^31 numbers, and more sequences than a grid's second axis holds: places need 64 bits.

The last rows of a batch lie beyond 2^31 numbers. They give the bits that they give alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.ops.gated_norm import gated_rms_norm
from fastweights.ops.gated_writes import gated_writes
from fastweights.ops.precondition import precondition_queries
from fastweights.ops.residual_norm import residual_norm
from fastweights.ops.ring_attention import ring_attention
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.silu_product import silu_product
from fastweights.testing import CASES, OpCase, OpInputs
from tests.kernels.cases import KERNEL_CASES, ONE_OF_EACH_FAMILY, draw_states
from tests.ops.decoding import IN_PLACE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
ROWS, TIME, HEADS, VALUE = 2048, 1024, 8, 128  # the first ROWS hold 2^31 numbers
ALONE = 128  # rows: of fewer, kernels cut sequences into segments to keep a GPU busy, which changes the order of sums
# Rows before the last ones, key and value channels. Where there are matrices [chunks, heads, K, K], half as many rows give them
# 2^31 numbers.
MEMORIES = {
    "linear_attention-head": (ROWS, 128, VALUE),
    "delta_rule-head-write": (ROWS, 128, VALUE),
    "preconditioned_delta_rule-channel": (ROWS, 64, VALUE),
    "elementwise_longhorn": (ROWS, 64, VALUE),
    "palimpsa": (ROWS, 64, VALUE),
    "lattice-decode": (ROWS, 32, VALUE),
    "lattice-encode-decay": (ROWS, 32, VALUE),
    "output_normalized_ttt": (ROWS, 64, VALUE),
    "gated_kalmanet-chebyshev": (ROWS, 64, VALUE),
    "mesa": (ROWS, 64, VALUE),
    "recursive_least_squares-none": (ROWS // 2, 128, VALUE),
    "variational_linear_attention-refresh": (ROWS // 2, 128, VALUE),
}
# Rows before the last ones, key and value channels of queries and keys with 2^31 numbers, the GB that a test takes, and whether
# it computes gradients. Values are narrow and some gradients left out for want of memory.
KEYS = {
    "linear_attention-channel": (ROWS, 128, 16, 80, True),
    "precondition_keys": (ROWS, 128, 128, 80, True),
    "preconditioned_delta_rule-head": (ROWS, 128, 16, 80, True),
    "elementwise_longhorn": (2 * ROWS, 64, 16, 80, False),
    "palimpsa": (2 * ROWS, 64, 16, 80, True),
    "lattice-decode": (4 * ROWS, 32, 32, 100, False),
    "lattice-encode-decay": (4 * ROWS, 32, 32, 100, False),
    "output_normalized_ttt": (ROWS, 128, 16, 80, True),
    "gated_kalmanet-chebyshev": (2 * ROWS, 64, 16, 80, False),
    "mesa": (2 * ROWS, 64, 16, 80, False),
    "recursive_least_squares-none": (2 * ROWS, 64, 16, 80, False),
    "variational_linear_attention-refresh": (2 * ROWS, 64, 16, 110, False),
}
MANY = 65_536 + ALONE  # sequences
DECODED = (
    "delta_rule-head-write", "preconditioned_delta_rule-channel", "palimpsa", "lattice-decode", "output_normalized_ttt",
    "gated_kalmanet-chebyshev", "recursive_least_squares-none", "variational_linear_attention-refresh", "elementwise_longhorn",
)  # fmt: skip


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest) -> Iterator[None]:
    """The largest of these tests take 120 GB, those with an argument `gigabytes` as many."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    gigabytes = params.get("gigabytes", 130)
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs a GPU with {gigabytes} GB of free memory")
    yield
    torch.cuda.empty_cache()


def many_rows(x: Tensor, rows: int) -> Tensor:
    """[rows + ALONE, ...]: the first row of x again and again, then the others in turn, so that places mixed up show."""
    others = x[1:].cuda()
    return torch.cat(
        [x[:1].cuda().expand(rows, *x.shape[1:]), others.repeat(ALONE // len(others), *[1] * (x.ndim - 1))]
    )


def last_rows(x: Tensor) -> Tensor:
    return x[-ALONE:].clone()


def same_bits(got: list[Tensor], alone: list[Tensor]) -> None:
    assert len(got) == len(alone) > 0
    for index, (x, y) in enumerate(zip(got, alone)):
        assert y.isfinite().all() and y.any(), index
        assert torch.equal(x[-ALONE:], y), index


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, *shape, generator=generator).bfloat16()


@pytest.mark.parametrize("name", MEMORIES)
def test_memories(name: str) -> None:
    check_memory(name, *MEMORIES[name])


@pytest.mark.parametrize(
    ("name", "rows", "key", "value", "gigabytes", "gradients"), [(name, *KEYS[name]) for name in KEYS], ids=KEYS
)
def test_queries_and_keys(name: str, rows: int, key: int, value: int, gigabytes: int, gradients: bool) -> None:
    check_memory(name, rows, key, value, gradients)


def check_memory(name: str, rows: int, key: int, value: int, gradients: bool = True) -> None:
    """Whether the last rows have the outputs and gradients that they have alone."""
    case = CASES[name]
    few = case.draw(batch=5, time=TIME, heads=HEADS, key=key, value=value, dtype=torch.bfloat16)
    towards = many_rows(drawn(TIME, HEADS, value, seed=1), rows if gradients else 0)

    def run(inputs: OpInputs, towards: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_(gradients) for x in inputs.tokens.values()]
        o, _ = case.op(**inputs.arguments(), backend="triton")
        return [o.detach(), *(torch.autograd.grad(o, leaves, towards) if gradients else ())]

    inputs = OpInputs(
        {k: many_rows(x, rows) for k, x in few.tokens.items()}, few.map(Tensor.cuda).parameters, few.options
    )
    ends = OpInputs({k: last_rows(x) for k, x in inputs.tokens.items()}, inputs.parameters, few.options)
    alone = run(ends, last_rows(towards))
    same_bits([x[-ALONE:].clone() for x in run(inputs, towards)], alone)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_many_sequences(name: str, packed: bool) -> None:
    """More than 65,535, with states and their gradients."""
    case = KERNEL_CASES[name]
    few = case.draw(batch=5, time=3, heads=1, key=16, value=16, dtype=torch.bfloat16)
    states = tuple(x.cuda() for x in draw_states(case, few, 5))

    def run(case: OpCase, count: int) -> list[Tensor]:
        tokens = {name: last_rows(many_rows(x, ALONE)) for name, x in few.tokens.items()}
        tokens = {name: torch.cat([x[:1].expand(count - ALONE, *x.shape[1:]), x]) for name, x in tokens.items()}
        started = [many_rows(x, count - ALONE).requires_grad_(x.is_floating_point()) for x in states]
        lengths = {"cu_seqlens": torch.arange(0, 3 * count + 1, 3, device="cuda")} if packed else {}
        if packed:
            tokens = {name: x.flatten(0, 1)[None] for name, x in tokens.items()}
        leaves = [x.requires_grad_() for x in tokens.values()]
        inputs = OpInputs(tokens, few.map(Tensor.cuda).parameters, few.options)
        o, final = case(inputs, initial_state=case.initial_state(tuple(started)), backend="triton", **lengths)
        results = [x for x in (o, *final) if x.is_floating_point()]
        leaves += [x for x in started if x.requires_grad]
        gradients = torch.autograd.grad(sum(x.float().sum() for x in results), leaves)
        per_token = [x[0].unflatten(0, (-1, 3)) if packed else x for x in (o, *gradients[: len(tokens)])]
        return [x.detach()[-ALONE:] for x in (*per_token, *final, *gradients[len(tokens) :])]

    for got, alone in zip(run(case, MANY), run(case, ALONE), strict=True):
        assert alone.isfinite().all() and torch.equal(got, alone)


@pytest.mark.parametrize("name", DECODED)
def test_state_pools(name: str) -> None:
    """States of more than 2^31 numbers that are updated in place: head after head of all sequences, so that strides are large."""
    case, heads, size = CASES[name], 17, 128
    rows = 2**31 // ((heads - 1) * size * size)
    inputs = case.draw(batch=ALONE, time=1, heads=heads, key=size, value=size, dtype=torch.bfloat16).map(Tensor.cuda)
    states = tuple(x.cuda() for x in draw_states(case, inputs, ALONE))
    pools = [
        x.new_zeros(*x.shape[1:2], rows + ALONE, *x.shape[2:]).transpose(0, 1)
        if x.ndim > 1
        else x.new_zeros(rows + ALONE)
        for x in states
    ]
    for pool, x in zip(pools, states):
        pool[-ALONE:] = x
    indices = torch.arange(rows, rows + ALONE, device="cuda")
    decode = IN_PLACE.get(case.spec.name, case.op.in_place)
    alone = decode(**inputs.arguments(), state=case.initial_state(states), backend="triton")
    o = decode(**inputs.arguments(), state=case.initial_state(tuple(pools)), state_indices=indices, backend="triton")
    same_bits([o, *pools], [alone, *states])


def test_strided_tokens_of_decoding() -> None:
    """The last token of queries that lie head after head, of more than 2^31 numbers."""
    case, heads, size = CASES["delta_rule-head"], 130, 128
    inputs = case.draw(batch=1, time=1, heads=heads, key=size, value=size, dtype=torch.bfloat16).map(Tensor.cuda)
    (state,) = (x.cuda() for x in draw_states(case, inputs, 1))
    q = inputs.tokens["q"].new_zeros(1, heads, 2**31 // (size * (heads - 1)) + 1, size)
    q[:, :, -1:] = inputs.tokens["q"].transpose(1, 2)
    decode = IN_PLACE["delta_rule"]
    wanted = decode(**inputs.arguments(), state=state.clone(), backend="triton")
    last = q.transpose(1, 2)[:, -1:]
    assert torch.equal(decode(**{**inputs.arguments(), "q": last}, state=state.clone(), backend="triton"), wanted)


def test_short_convolution() -> None:
    x, towards = (many_rows(drawn(TIME, HEADS * VALUE, seed=seed), ROWS) for seed in (0, 1))
    weight = torch.randn(HEADS * VALUE, 4, device="cuda")

    def run(x: Tensor, towards: Tensor) -> list[Tensor]:
        x.requires_grad_()
        y, _ = short_convolution(x, weight, activation="silu", normalize=VALUE, backend="triton")
        return [y.detach(), *torch.autograd.grad(y, [x], towards)]

    same_bits(run(x, towards), run(last_rows(x), last_rows(towards)))


def test_short_convolution_of_packed_rows() -> None:
    x, towards = (many_rows(drawn(TIME, HEADS * VALUE, seed=seed), ROWS) for seed in (0, 1))
    weight = torch.randn(HEADS * VALUE, 4, device="cuda")

    def run(x: Tensor, towards: Tensor) -> list[Tensor]:
        edges = torch.arange(0, x.shape[0] * TIME + 1, TIME, device="cuda")
        x, towards = x.flatten(0, 1)[None].requires_grad_(), towards.flatten(0, 1)[None]
        y, _ = short_convolution(x, weight, activation="silu", cu_seqlens=edges, backend="triton")
        return [z[0].unflatten(0, (-1, TIME)) for z in (y.detach(), *torch.autograd.grad(y, [x], towards))]

    same_bits(run(x, towards), run(last_rows(x), last_rows(towards)))


def test_convolution_step() -> None:
    from fastweights.kernels.pointwise.convolution_step import step

    channels, kept = 8192, 4
    rows = 2**31 // (channels * kept)
    x, states = many_rows(drawn(channels, 1), rows), many_rows(drawn(channels, kept, seed=1), rows)
    weight = torch.randn(channels, kept, device="cuda").bfloat16()
    ends = last_rows(states)
    alone = step(last_rows(x), ends, weight, None, True)
    same_bits([step(x, states, weight, None, True), states], [alone, ends])


@pytest.mark.parametrize("gigabytes", [30])
@pytest.mark.parametrize("pooled", [False, True], ids=["windows", "pools"])
def test_convolution_of_single_tokens(pooled: bool, gigabytes: int) -> None:
    from fastweights.kernels.pointwise import TokenConvolution
    from fastweights.kernels.pointwise.token_convolution import convolve_token

    channels, kept = 8192, 3
    rows = 2**31 // (channels * kept) + 1
    x, windows = many_rows(drawn(1, channels), rows), many_rows(drawn(kept, channels, seed=1), rows)
    weight = torch.randn(channels, kept + 1, device="cuda").bfloat16()

    def run(x: Tensor, windows: Tensor, indices: Tensor | None = None) -> list[Tensor]:
        outputs, ends = convolve_token([TokenConvolution(x, weight, None, windows, VALUE)], True, 1e-6, True, indices)
        return outputs + ends

    alone = run(last_rows(x), last_rows(windows))
    indices = torch.arange(rows, rows + ALONE, device="cuda") if pooled else None
    same_bits(run(last_rows(x) if pooled else x, windows, indices), alone)


@pytest.mark.parametrize("gigabytes", [20])
def test_unit_vectors(gigabytes: int) -> None:
    from fastweights.kernels.pointwise.l2_normalize import l2_normalize

    x = many_rows(drawn(TIME, HEADS, VALUE), ROWS)
    same_bits([l2_normalize(x, 1e-6)], [l2_normalize(last_rows(x), 1e-6)])


@pytest.mark.parametrize("gigabytes", [20])
def test_steps_in_a_joint_projection(gigabytes: int) -> None:
    from fastweights.kernels.pointwise.step_decay import step_decay

    width, heads = 4112, 16
    joint, per_head = many_rows(drawn(1, width), 2**31 // width + 1), torch.randn(heads, device="cuda")

    def run(joint: Tensor) -> list[Tensor]:
        return list(step_decay(joint[:, :, width - heads :], per_head, per_head, 1e-3, 0.1))

    same_bits(run(joint), run(last_rows(joint)))


@pytest.mark.parametrize("gigabytes", [20])
def test_cross_entropy(gigabytes: int) -> None:
    from fastweights.kernels.pointwise.cross_entropy import backward, forward

    vocabulary = 32_000
    z = many_rows(drawn(vocabulary), 2**31 // vocabulary + 1)
    target = torch.arange(len(z), device="cuda") % vocabulary

    def run(z: Tensor, target: Tensor) -> list[Tensor]:
        log_sums, losses = forward(z, target, -100)
        return [log_sums, losses, backward(z, target, log_sums, torch.ones((), device="cuda"), -100)]

    same_bits(run(z, target), run(last_rows(z), last_rows(target)))


POINTWISE: dict[str, Callable[..., Iterable[Tensor]]] = {
    "gated norm": lambda x, z, s, weight: [gated_rms_norm(x, weight, z, backend="triton")],
    "gated writes": lambda x, z, s, weight: gated_writes(x, s, z, s, backend="triton"),
    "residual norm": lambda x, z, s, weight: residual_norm(x, z, weight, backend="triton"),
    "SwiGLU": lambda x, z, s, weight: [silu_product(x, z, backend="triton")],
}


@pytest.mark.parametrize("what", POINTWISE)
def test_around_memories(what: str) -> None:
    shape = (TIME, HEADS, VALUE)
    x, z, towards = (many_rows(drawn(*shape, seed=seed), ROWS) for seed in range(3))
    s, weight = many_rows(drawn(*shape[:2], seed=3), ROWS), torch.randn(VALUE, device="cuda")

    def run(x: Tensor, z: Tensor, s: Tensor, towards: Tensor) -> list[Tensor]:
        leaves = [y.requires_grad_() for y in ((x, z, s) if what == "gated writes" else (x, z))]
        results = list(POINTWISE[what](x, z, s, weight))
        return [y.detach() for y in results] + list(torch.autograd.grad(results, leaves, [towards] * len(results)))

    given = x, z, s, towards
    same_bits(run(*given), run(*(last_rows(y) for y in given)))


def test_preconditioned_queries() -> None:
    q, k, towards = (many_rows(drawn(TIME, HEADS, VALUE, seed=seed), ROWS) for seed in range(3))
    g = -many_rows(drawn(TIME, HEADS, seed=3), ROWS).abs()

    def run(q: Tensor, k: Tensor, g: Tensor, towards: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in (q, k, g)]
        y, _ = precondition_queries(q, k, g, torch.ones_like(g), ridge=1.0, backend="triton")
        return [y.detach(), *torch.autograd.grad(y, leaves, towards)]

    given = q, k, g, towards
    same_bits(run(*given), run(*(last_rows(x) for x in given)))


def test_ring_of_softmax_attention() -> None:
    """With so many heads the slots of a row are not split, also where rows are few: a split would change the order of the sum."""
    slots, heads = 2048, 32
    rows = 2**31 // (slots * heads * VALUE)
    q, k, v = (many_rows(drawn(1, heads, VALUE, seed=seed), rows) for seed in range(3))
    keys, values = (many_rows(drawn(slots, heads, VALUE, seed=seed), rows) for seed in (3, 4))
    seen = torch.full((rows + ALONE,), slots + 100, device="cuda")

    def run(*given: Tensor) -> list[Tensor]:
        q, k, v, keys, values, seen = given
        o, _, _ = ring_attention(q, k, v, keys, values, seen, seen.clone(), None, 10_000.0)
        return [o, keys, values]

    given = q, k, v, keys, values, seen
    alone = run(*(last_rows(x) for x in given))
    same_bits(run(*given), alone)
