"""The decoding kernels on a CUDA device at the sizes of a model: the same numbers as the reference, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastweights.layers import LayerCache, build_mixer
from fastweights.testing import CASES, OpCase, OpInputs
from tests.ops.decoding import (
    BY_KERNEL,
    DECODING,
    IN_PLACE,
    draw_states,
    exact,
    in_float32,
    in_place,
    largest_error,
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 100


def on_gpu(case: OpCase, **sizes: int) -> OpInputs:
    return case.draw(**sizes, dtype=torch.bfloat16).map(Tensor.cuda)


def walk(case: OpCase, inputs: OpInputs, states: tuple[Tensor, ...], tokens: int) -> tuple[Tensor, ...]:
    """o and the states after the whole sequence, `tokens` at a time."""
    held = tuple(in_float32(s.cuda()) for s in states)
    outputs = [
        IN_PLACE[case.spec.name](
            **inputs.at((slice(None), slice(t, t + tokens))).arguments(),
            state=case.initial_state(held),
            backend="triton",
        )
        for t in range(0, STEPS, tokens)
    ]
    return torch.cat(outputs, 1), *held


@pytest.mark.parametrize("name", BY_KERNEL)
def test_many_steps(name: str, record_property: Callable[[str, object], None]) -> None:
    case = CASES[name]
    inputs = on_gpu(case, batch=64, time=STEPS, heads=16, key=128, value=128)
    states = draw_states(case, inputs, 64)
    wanted, final = case(
        inputs.map(Tensor.double),
        initial_state=case.initial_state(tuple(s.cuda() for s in states)),
        backend="reference",
    )
    one, again, four = (walk(case, inputs, states, tokens) for tokens in (1, 1, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, again))
    for results in (one, four):
        errors = [float(((got - w).abs() / (1 + w.abs())).max()) for got, w in zip(results, (wanted, *final))]
        record_property("errors of o and the states", errors)
        assert errors[0] < 1e-2
        # Free slots drift in float32.
        assert max(errors[1:]) < (1e-5 if case.case.options.get("normalize", True) else 1e-4)


@pytest.mark.parametrize("sizes", [(64, 64), (100, 72), (256, 256)], ids=str)
@pytest.mark.parametrize("name", DECODING)
def test_packed_rows(name: str, sizes: tuple[int, int]) -> None:
    case = CASES[name]
    lengths = torch.arange(51) % 17
    edges = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    inputs = on_gpu(case, batch=1, time=int(edges[-1]), heads=2, value_heads=4, key=sizes[0], value=sizes[1])
    states = draw_states(case, inputs, len(lengths))
    o, held = in_place(case, inputs, states, cu_seqlens=edges.cuda())
    wanted, final = exact(case, inputs, states, cu_seqlens=edges)
    recurrent = case.spec.recurrent
    decoded = name in BY_KERNEL and (recurrent.widest is None or sizes[0] <= recurrent.widest)
    assert largest_error((o, ()), (wanted, ())) < 1e-2
    # A backend's products are 16-bit.
    assert largest_error((held[0], held), (final[0], final)) < (1e-5 if decoded else 2e-2)
    for before, after in zip(states, held):
        assert torch.equal(after[lengths == 0].cpu(), in_float32(before[lengths == 0]))


@pytest.mark.parametrize("name", BY_KERNEL)
def test_in_a_cuda_graph(name: str) -> None:
    """Nothing waits for the device: the call can be captured, and every replay is a step."""
    case = CASES[name]
    inputs = on_gpu(case, batch=1, time=5, heads=2, key=64, value=64)
    edges = torch.tensor([0, 2, 5]).cuda()
    states = draw_states(case, inputs, 2)
    o, held = in_place(case, inputs, states, cu_seqlens=edges)
    kept = tuple(in_float32(s.cuda()) for s in states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = IN_PLACE[case.spec.name](**inputs.arguments(), state=case.initial_state(kept), cu_seqlens=edges)
    graph.replay()
    assert torch.equal(captured, o) and all(torch.equal(a, b) for a, b in zip(kept, held))


@pytest.mark.parametrize("name", BY_KERNEL)
def test_pool_in_a_cuda_graph(name: str) -> None:
    """Indices are read on the device: other numbers in the same tensor choose other states at the next replay."""
    case = CASES[name]
    inputs = on_gpu(case, batch=3, time=1, heads=2, key=64, value=64)
    pool = tuple(in_float32(s.cuda()) for s in draw_states(case, inputs, 9))
    before = tuple(s.clone() for s in pool)
    indices = torch.tensor([-1, -1, -1], device="cuda")
    call = {"state": case.initial_state(pool), "state_indices": indices}
    graph = torch.cuda.CUDAGraph()
    IN_PLACE[case.spec.name](**inputs.arguments(), **call)
    with torch.cuda.graph(graph):
        captured = IN_PLACE[case.spec.name](**inputs.arguments(), **call)
    indices.copy_(torch.tensor([7, -1, 2]))
    graph.replay()
    o, held = in_place(case, inputs, tuple(s[[7, 0, 2]] for s in before))
    assert torch.equal(captured[[0, 2]], o[[0, 2]]) and not captured[1].any()
    for new, old, h in zip(pool, before, held):
        assert torch.equal(new[[7, 2]], h[[0, 2]])
        others = [0, 1, 3, 4, 5, 6, 8]
        assert torch.equal(new[others], old[others])


# One token alone is read by one launch, not two; the compiler joins products and sums otherwise where there are several tokens.
ROUND_OTHERWISE = ("gated_kalmanet", "mesa", "delta_product", "dplr_delta_rule", "lattice")


@pytest.mark.parametrize("tokens", [1, 6, 11])
@pytest.mark.parametrize("name", BY_KERNEL)
def test_states_after_each_token_in_a_cuda_graph(name: str, tokens: int) -> None:
    """The numbers of tokens read one by one, in most rules the same bits, with the state of each in the row that the last values
    of the indices name."""
    case, count = CASES[name], 40
    rounds = case.spec.name in ROUND_OTHERWISE

    def same(x: Tensor, y: Tensor, error: float) -> bool:
        return torch.allclose(x, y, error, error) if rounds else torch.equal(x, y)

    inputs = on_gpu(case, batch=3, time=tokens, heads=2, key=128, value=128)
    pool = tuple(in_float32(s.cuda()) for s in draw_states(case, inputs, count))
    before = tuple(s.clone() for s in pool)
    rows = torch.full((3, 1 + tokens), -1, device="cuda")
    call = {"state": case.initial_state(pool), "state_indices": rows}
    IN_PLACE[case.spec.name](**inputs.arguments(), **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = IN_PLACE[case.spec.name](**inputs.arguments(), **call)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: rows.numel()].view(3, -1)
    chosen[0, 0] = chosen[0, -1]  # written over by its own last token
    chosen[1] = -1
    rows.copy_(chosen)
    graph.replay()
    wanted = tuple(s.clone() for s in before)
    held = tuple(s[chosen[:, 0].clamp_min(0).cuda()] for s in before)
    for t in range(tokens):
        at = (slice(None), slice(t, t + 1))
        o = IN_PLACE[case.spec.name](**inputs.at(at).arguments(), state=case.initial_state(held))
        assert same(captured[at][[0, 2]], o[[0, 2]], 1e-2) and not captured[1].any()
        for place, state in zip(wanted, held):
            place[chosen[[0, 2], 1 + t].cuda()] = state[[0, 2]]
    assert all(same(new, w, 1e-4) for new, w in zip(pool, wanted))


@pytest.mark.parametrize(
    "name", ["recursive_least_squares-none", "variational_linear_attention-refresh", "lattice-encode-decay", "mesa"]
)
def test_states_of_heads_that_no_kernel_takes_in_a_cuda_graph(name: str) -> None:
    """The op itself reads these token by token, without waiting for the device."""
    case = CASES[name]
    inputs = on_gpu(case, batch=2, time=3, heads=2, key=256, value=64)
    pool = tuple(in_float32(s.cuda()) for s in draw_states(case, inputs, 9))
    rows = torch.tensor([[0, 1, 2, 0], [4, 5, -1, 8]], device="cuda")
    o, held = in_place(case, inputs, pool, state_indices=rows)
    call = {"state": case.initial_state(pool), "state_indices": rows}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = IN_PLACE[case.spec.name](**inputs.arguments(), **call)
    graph.replay()
    assert torch.equal(captured, o) and all(torch.equal(x, y) for x, y in zip(pool, held))


@pytest.mark.parametrize("mixer", ["palimpsa-d", "palimpsa-m", "lattice", "ttt", "gka", "mesa", "gdn", "rls", "vla"])
def test_layers_decode_by_the_kernel(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token after token with a cache, each in one recurrent kernel: the numbers of the whole sequence."""
    from fastweights.ops.framework.few_tokens import recurrent

    ran: list[object] = []
    plain = recurrent.run
    monkeypatch.setattr(recurrent, "run", lambda *arguments: ran.append(plain) or plain(*arguments))
    torch.manual_seed(0)
    layer = build_mixer(mixer, hidden_size=64, num_heads=2, head_dim=32).cuda()
    x = torch.randn(3, 24, 64, device="cuda")
    cache = LayerCache()
    with torch.no_grad():
        whole = layer(x)
        assert not ran
        parts = [layer(x[:, :17], cache), *(layer(x[:, t : t + 1], cache) for t in range(17, 24))]
    assert len(ran) == 7
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
