"""The pool of states of vLLM on a GPU, driven by a scheduler in small: one captured step serves every token, whatever rows the
sequences have, and the rows of padding are neither read nor written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastweights.layers import MIXERS, LayerCache, Mixer, build_mixer
from fastweights.serving.vllm.drafts import plan_drafts

from ..serving.pools import Pool, read_at_once, read_in_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MEMORIES = [name for name in MIXERS if name not in ("softmax", "vla-softmax")]
OPTIONS = {"vla-deltanet": {"normalize_qk": True}}  # its memory grows without end otherwise
CLOSE = {torch.float32: {"rtol": 1e-3, "atol": 1e-3}, torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2}}


def layer(name: str, dtype: torch.dtype) -> Mixer:
    torch.manual_seed(0)
    return build_mixer(name, hidden_size=128, num_heads=2, **OPTIONS.get(name, {})).to("cuda", dtype).eval()


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that replays a call, whose output keeps its place."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()

    def replay() -> Tensor:
        graph.replay()
        return y

    return replay


@torch.no_grad()
def replayed(pool: Pool, x_NTD: Tensor, rows: list[int], padding: int = 3) -> Tensor:
    """The outputs of single tokens by one CUDA graph for more sequences than there are."""
    count, time, width = x_NTD.shape
    x_ND = torch.zeros(count + padding, width, device="cuda", dtype=x_NTD.dtype)
    places = torch.zeros(count + padding, dtype=torch.int32, device="cuda")  # all padding while it is captured
    decode = captured(lambda: pool.pooled.decode(x_ND, places))
    places[:count] = torch.tensor(rows, device="cuda")
    read = []
    for token in range(time):
        x_ND[:count] = x_NTD[:, token]
        read.append(decode()[:count, None].clone())
    return torch.cat(read, 1)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_captured_step_reads_in_the_pool(name: str, dtype: torch.dtype) -> None:
    mixer, prompt = layer(name, dtype), 70
    pool, x_NTD = Pool(mixer), torch.randn(2, prompt + 12, 128, device="cuda", dtype=dtype)
    first = read_in_steps(pool, x_NTD[:, :prompt], [(64, 0), (1, 40), (5, 30)], [4, 1])  # mixed lengths, one has begun
    rest = replayed(pool, x_NTD[:, prompt:], [4, 1])
    torch.testing.assert_close(torch.cat([first, rest], 1), read_at_once(mixer, x_NTD), **CLOSE[dtype])
    assert pool.is_untouched(0, 2, 3, 5)


@pytest.mark.parametrize("regular", [False, True], ids=["any", "regular"])
@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_a_captured_step_takes_drafts_back(name: str, regular: bool) -> None:
    """Each step reads three tokens of two sequences, one to three of which are right."""
    mixer = layer(name, torch.float32)
    pool, x_NTD = Pool(mixer, count=9), torch.randn(2, 40, 128, device="cuda")
    rows_NS = torch.tensor([[4, 1, 7], [2, 8, 5], [0, 0, 0]], dtype=torch.int32, device="cuda")
    edges = torch.tensor([0, 3, 6, 6], dtype=torch.int32, device="cuda")
    x_TD, given_NS, accepted_N = (
        torch.zeros(9, 128, device="cuda"),
        torch.zeros_like(rows_NS),
        torch.ones_like(edges[1:]),
    )
    verify = captured(lambda: pool.pooled.verify(x_TD, plan_drafts(9, given_NS, accepted_N, edges, regular)))
    given_NS.copy_(rows_NS)
    started = torch.zeros(2, dtype=torch.bool, device="cuda")
    first_TD = pool.pooled.prefill(x_NTD[:, :2].flatten(0, 1), rows_NS[:2, 0], started, edges[:3] // 3 * 2)
    read, done = [[y_TD] for y_TD in first_TD.split(2)], [2, 2]
    for step in range(12):
        right = [step % 3 + 1, step // 2 % 3 + 1]
        for n in range(2):
            x_TD[3 * n : 3 * n + 3] = 1.0
            x_TD[3 * n : 3 * n + right[n]] = x_NTD[n, done[n] : done[n] + right[n]]
        y_TD = verify()
        for n in range(2):
            read[n].append(y_TD[3 * n : 3 * n + right[n]].clone())
            accepted_N[n] = right[n]
            done[n] += right[n]
    wanted = read_at_once(mixer, x_NTD)
    for n, parts in enumerate(read):
        torch.testing.assert_close(torch.cat(parts), wanted[n, : done[n]], **CLOSE[torch.float32])
    assert pool.is_untouched(0, 3, 6)


@pytest.mark.parametrize("name", ["gdn", "kda", "palimpsa-m", "lattice", "ttt", "rls", "mesa"])
@torch.no_grad()
def test_a_step_in_the_pool_has_the_bits_of_one_by_itself(name: str) -> None:
    """The same kernels on the same numbers: outputs, states and the last inputs of the convolutions."""
    mixer, rows = layer(name, torch.bfloat16), [4, 1, 2]
    pool, x_NTD = Pool(mixer), torch.randn(3, 24, 128, device="cuda", dtype=torch.bfloat16)
    read_in_steps(pool, x_NTD[:, :16], [(16, 16, 16)], rows)
    pools = pool.pooled.pools.memory, pool.pooled.pools.context
    own = LayerCache(*({part: x[rows].clone() for part, x in held.items()} for held in pools))
    places = torch.tensor(rows, device="cuda", dtype=torch.int32)
    for token in range(16, 24):
        y_ND = pool.pooled.decode(x_NTD[:, token].contiguous(), places)
        assert torch.equal(y_ND, mixer(x_NTD[:, token, None].contiguous(), own)[:, 0])
    for held, pooled in zip((own.memory, own.context), pools, strict=True):
        assert all(torch.equal(x, pooled[part][rows]) for part, x in held.items())
    assert pool.is_untouched(0, 3, 5)


@pytest.mark.parametrize("name", ["gdn", "pgdn", "palimpsa-d", "gka", "lattice"])
def test_a_captured_step_with_states_in_16_bits(name: str) -> None:
    mixer = layer(name, torch.bfloat16)
    pool, x_NTD = Pool(mixer, state_dtype=torch.bfloat16), torch.randn(2, 30, 128, device="cuda", dtype=torch.bfloat16)
    first = read_in_steps(pool, x_NTD[:, :18], [(18, 0), (0, 18)], [4, 1])
    rest = replayed(pool, x_NTD[:, 18:], [4, 1])
    torch.testing.assert_close(torch.cat([first, rest], 1), read_at_once(mixer, x_NTD), **CLOSE[torch.bfloat16])
    assert pool.is_untouched(0, 2, 3, 5)


@pytest.mark.parametrize("name", ["gdn", "pgdn", "palimpsa-d", "gka", "lattice", "pla"])
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    mixer = layer(name, torch.bfloat16)
    pool, x_NTD = Pool(mixer), torch.randn(2, 20, 128, device="cuda", dtype=torch.bfloat16)
    read_in_steps(pool, x_NTD[:, :16], [(16, 16)], [4, 1])
    rows, started = torch.tensor([4, 1, 0], device="cuda"), torch.tensor([True, True], device="cuda")
    edges = torch.tensor([0, 8, 20], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            pool.pooled.decode(x_NTD[0, :3], rows)
            pool.pooled.prefill(x_NTD[0], rows[:2], started, edges)
    finally:
        torch.cuda.set_sync_debug_mode("default")
