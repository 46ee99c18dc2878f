"""The kernels around the memories in a decoding step, at the sizes of real layers, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.kernels.pointwise import FEW_ROWS
from fastweights.layers.attention import rotate, rotation
from fastweights.ops.framework.few_tokens import overwriting_states
from fastweights.ops.l2_normalize import l2_normalize
from fastweights.ops.linear_rows import Normed, Product, linear_rows, multiply_rows
from fastweights.ops.ring_attention import ring_attention
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.short_convolution.token import TokenConvolution, convolve_token
from fastweights.ops.step_decay import step_decay

from ..ops.key_energies import FORMS, by_kernel, token_by_token

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
# RMS of the difference over RMS of the float64 result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error <= TOLERANCE[dtype], f"{error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_linear_rows(rows, dtype):
    """Every kind, twice the same bits, and for a row with few others the bits that it has among more."""
    x, residual = draw(rows, 1, 1024, dtype=dtype), draw(rows, 1, 2816, dtype=dtype, seed=9)
    w = [draw(2816, 1024, dtype=dtype, seed=i) / 32 for i in range(3)]
    bias, rate = draw(2816, seed=4), draw(8, seed=5)
    exact = [F.linear(x.double(), one.double()) for one in w]
    step = F.softplus(exact[0] + bias.double())
    cases = [
        ({}, w, exact),
        ({"kind": "add", "other": residual}, w[:1], [residual.double() + exact[0]]),
        ({"kind": "swiglu"}, w[:2], [F.silu(exact[0]) * exact[1]]),
        ({"kind": "sigmoid", "largest": 2.0}, w[:1], [2 * exact[0].sigmoid()]),
        ({"kind": "decay", "bias": bias, "other": rate}, w[:1], [-rate.double().exp().repeat_interleave(352) * step]),
    ]
    for options, weights, wanted in cases:
        got, again = (linear_rows(x, *weights, **options) for _ in range(2))
        fewest = 1 if rows <= FEW_ROWS else FEW_ROWS + 1
        fewer = {**options, "other": residual[:fewest]} if options.get("kind") == "add" else options
        first = linear_rows(x[:fewest], *weights, **fewer)
        for y, same, one, z in zip(got, again, first, wanted, strict=True):
            assert torch.equal(y, same) and torch.equal(y[:fewest], one)
            near(y, z, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_linear_rows_of_norms(rows, dtype):
    """Of a residual stream with a branch, and of heads with a gate."""
    x, other = draw(rows, 1, 1024, dtype=dtype), draw(rows, 1, 1024, dtype=dtype, seed=1)
    w, scale = draw(2816, 1024, dtype=dtype, seed=2) / 32, draw(1024, seed=3).abs()
    s = x.double() + other.double()
    got = multiply_rows(x, [Product(w), Product(w, "sigmoid")], Normed(scale, 1e-6, other))
    n = F.rms_norm(s, (1024,), scale.double(), 1e-6)
    y = F.linear(n, w.double())
    for one, wanted in zip([got.s, got.n, *got.results], [s, n, y, y.sigmoid()], strict=True):
        near(one, wanted, dtype)
    (got,) = multiply_rows(x, [Product(w)], Normed(scale[:128], 1e-6, gate=other, width=128)).results
    n = F.rms_norm(x.double().unflatten(2, (8, 128)), (128,), scale[:128].double(), 1e-6).flatten(2)
    near(got, F.linear(n * F.silu(other.double()), w.double()), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_convolutions_of_a_token(dtype):
    parts = [
        TokenConvolution(
            draw(8, 1, 1024, dtype=dtype, seed=i), draw(1024, 4, seed=3 + i), None, draw(8, 3, 1024, dtype=dtype, seed=6 + i),
            None if i == 2 else 128,
        )
        for i in range(3)
    ]  # fmt: skip
    wanted = [
        short_convolution(
            one.x.double(), one.weight.double(), activation="silu", normalize=one.head, initial_state=one.window.double(),
            output_final_state=True, backend="torch",
        )
        for one in parts
    ]  # fmt: skip
    with overwriting_states():
        made, windows = convolve_token(parts, True)
    for one, y, window, (exact, kept) in zip(parts, made, windows, wanted, strict=True):
        near(y, exact, dtype)
        assert window is one.window and torch.equal(window.double(), kept)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_convolutions_of_a_token_in_pools(dtype, shared):
    """The bits of windows by themselves; other rows stay as they are. Two convolutions may share a window."""
    rows = torch.tensor([5, -1, 900, 2], device="cuda", dtype=torch.int32)
    x, pool = draw(4, 1, 1024, dtype=dtype, seed=0), draw(1000, 3 * 1024 + 64, dtype=dtype, seed=1)
    pool = pool[:, : 3 * 1024].view(1000, 3, 1024)
    pools = [pool, pool] if shared else [pool, pool.clone()]
    weights = [draw(1024, 4, seed=2 + i) for i in range(2)]
    windows = [one[rows.clamp_min(0)].masked_fill((rows < 0)[:, None, None], 0) for one in pools]
    wanted, after = convolve_token([TokenConvolution(x, w, None, e, 128) for w, e in zip(weights, windows)], True)
    held = [one.clone() for one in pools]
    made, kept = convolve_token([TokenConvolution(x, w, None, e, 128) for w, e in zip(weights, pools)], True, rows=rows)
    for y, exact, new, old, one in zip(made, wanted, after, held, kept, strict=True):
        assert torch.equal(y, exact)
        old[rows[rows >= 0].long()] = new[rows >= 0]
        assert torch.equal(one, old)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "batch, heads, of_keys, slots, place",
    [(1, 8, 8, 2176, 2047), (8, 8, 2, 700, 5000), (64, 8, 8, 500, 300), (1, 16, 1, 70_000, 69_999)],
    ids=str,
)
def test_attention_to_a_ring(batch, heads, of_keys, slots, place, dtype):
    q, k, v = (draw(batch, 1, n, 128, dtype=dtype, seed=i) for i, n in enumerate((heads, of_keys, of_keys)))
    keys, values = (draw(batch, slots, of_keys, 128, dtype=dtype, seed=3 + i) for i in range(2))
    place_N = torch.full((batch,), place, device="cuda")
    padding = (place_N - slots // 2).clamp_min(0)
    cos, sin = (x.double() for x in rotation((place_N - padding)[:, None], 128, 1e4, torch.float32))
    exact = [x.double() for x in (keys, values)]
    for ring, new in zip(exact, (rotate(k.double(), cos, sin), v.double()), strict=True):
        ring[:, place % slots] = new[:, 0]
    slot = torch.arange(slots, device="cuda")
    seen = place - (place - slot) % slots >= padding[:, None]
    wanted = F.scaled_dot_product_attention(
        rotate(q.double(), cos, sin).transpose(1, 2), *(x.transpose(1, 2) for x in exact), attn_mask=seen[:, None, None],
        enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    held = keys.clone(), values.clone()
    o, *_ = ring_attention(q, k, v, keys, values, place_N - padding, place_N, padding, 1e4)
    near(o, wanted, dtype)
    near(keys, exact[0], dtype)
    again, *_ = ring_attention(q, k, v, *held, place_N - padding, place_N, padding, 1e4)
    assert torch.equal(o, again)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8, 128), (256, 1, 8, 100), (3, 4096)], ids=str)
def test_vectors_of_length_1(shape, dtype):
    x = draw(*shape, dtype=dtype)
    near(l2_normalize(x), x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt(), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (256, 1, 24), (2, 3000, 16)], ids=str)
def test_step_sizes_and_decays(shape, dtype):
    joint = 4 * draw(*shape[:2], 40 + shape[2], dtype=dtype, seed=0)
    step, bias, A_log = joint[:, :, 40:], draw(shape[2], seed=1), draw(shape[2], seed=2)
    dt, g = step_decay(step, bias, A_log, 1e-3, 3.0)
    wanted = F.softplus(step.double() + bias.double(), threshold=80).clamp(1e-3, 3.0)
    near(dt, wanted, torch.float32)
    near(g, -A_log.double().exp() * wanted, torch.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_key_energies_in_a_captured_step(form, dtype):
    """Rows are read on the device: a replay reads and writes those that the tensor holds then, and a negative one is none."""
    q, k = (draw(4, 1, 8, 128, dtype=dtype, seed=i) for i in range(2))
    g, beta = (draw(4, 1, 8, seed=2 + i) for i in range(2))
    x = {"k": k, "g": -g.abs(), "beta": beta.sigmoid()}
    x |= {"q": q} if form == "queries" else {"center": draw(8, seed=4)}
    pool = draw(50, 8, 160, seed=5).abs()[:, :, :128]
    rows, held = torch.full((4,), -1, device="cuda"), pool.clone()
    by_kernel(form, x, pool, None, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = by_kernel(form, x, pool, None, rows)
    assert torch.equal(pool, held)
    rows.copy_(torch.tensor([40, -1, 3, 0]))
    graph.replay()
    wanted, final = token_by_token(form, x, held[rows.clamp_min(0)], None)
    real = rows >= 0
    near(o[real], wanted.cuda()[real], dtype)
    assert not o[~real].any()
    torch.testing.assert_close(pool[rows[real]].double(), final.cuda()[real], rtol=1e-5, atol=1e-6)
    held[rows[real]] = pool[rows[real]]
    assert torch.equal(pool, held)
