"""The pool of states: a layer reads there what it reads by itself, in any pieces, and writes into rows of its sequences only."""

from __future__ import annotations

import pytest
import torch

from fastweights.kernels import availability
from fastweights.layers import MIXERS, LayerCache, build_mixer
from fastweights.layers.norms import RMSNorm
from fastweights.layers.registry import ORDER
from fastweights.layers.shared_input import normalize_for
from fastweights.ops import linear_rows
from fastweights.ops.framework.pool_rows import write_rows
from fastweights.serving.vllm.drafts import plan_drafts
from fastweights.serving.vllm.pool import Layout
from tests.fast_set import fast_where
from tests.kernels.cases import DEVICE
from tests.models.mixers import FAST, FEW

from .pools import Pool, read_at_once, read_in_steps, read_with_drafts

MEMORIES = [name for name in MIXERS if name not in ("softmax", "vla-softmax")]
# Those of users are in the fast set.
FAST_MEMORIES = [pytest.param(x, marks=() if x in FAST or x not in ORDER else pytest.mark.slow) for x in MEMORIES]
# It reads the token before in the layer itself, beside the op.
GATHERED = ("rwkv7",)
# Tokens of two sequences: one begins alone, the other while it reads one token more, and pieces of any length together.
MIXED = [(4, 0), (1, 3), (3, 1), (1, 1), (2, 5)]


@pytest.mark.parametrize("name", FAST_MEMORIES)
def test_a_layer_reads_in_the_pool_what_it_reads_by_itself(name):
    mixer = build_mixer(name, hidden_size=32, num_heads=2).double().eval()
    assert name not in ORDER or mixer.decodes_in_pool == (name not in GATHERED)
    pool, x_NTD = Pool(mixer), torch.randn(2, 12, 32, dtype=torch.float64)
    read = read_in_steps(pool, x_NTD, MIXED, [4, 1])
    torch.testing.assert_close(read, read_at_once(mixer, x_NTD), rtol=1e-9, atol=1e-9)
    assert pool.is_untouched(0, 2, 3, 5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gka", {"sketch": 8}), ("gka", {"sketch": 8, "alpha_connection": True}), ("pgdn", {"num_v_heads": 4}),
        ("palimpsa-m", {"num_groups": 1}), ("kda", {"conv_size": None}), ("lattice", {"head_dim": 32}),
        ("vla", {"adaptive": False}), ("pgdn", {"preconditioner": "both"}), ("gdn", {"learn_write_key": True}),
        ("palimpsa-d", {"metaplastic_threshold": 2.0, "variance_gate": True}),
    ],
)  # fmt: skip
def test_options_that_change_the_states(name, options):
    mixer = build_mixer(name, hidden_size=32, num_heads=2, **options).double().eval()
    x_NTD = torch.randn(3, 9, 32, dtype=torch.float64)
    read = read_in_steps(Pool(mixer), x_NTD, [(5, 0, 2), (1, 3, 3)], [5, 3, 2])
    torch.testing.assert_close(read, read_at_once(mixer, x_NTD), rtol=1e-9, atol=1e-9)


@fast_where(lambda given: given["regular"] == (given["name"] in FEW))
@pytest.mark.parametrize("regular", [False, True], ids=["any", "regular"])
@pytest.mark.parametrize("name", FAST_MEMORIES)
def test_drafted_tokens_are_taken_back(name, regular):
    mixer = build_mixer(name, hidden_size=32, num_heads=2).double().eval()
    pool, x_NTD = Pool(mixer, count=9), torch.randn(2, 14, 32, dtype=torch.float64)
    rows_NS = torch.tensor([[4, 1, 7], [2, 8, 5]], dtype=torch.int32)
    read = read_with_drafts(pool, x_NTD, rows_NS, regular=regular)
    torch.testing.assert_close(read, read_at_once(mixer, x_NTD), rtol=1e-9, atol=1e-9)
    assert pool.is_untouched(0, 3, 6)


def test_a_rehearsal_of_drafts_comes_with_counts_of_0():
    """As vLLM runs a model before the first request. An index of -1 ends the process on a GPU."""
    pool, counts_N = Pool(build_mixer("gdn", hidden_size=32, num_heads=2).eval()), torch.zeros(2, dtype=torch.int32)
    rows_NS, edges = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    with torch.no_grad():
        y_TD = pool.pooled.verify(torch.randn(4, 32), plan_drafts(4, rows_NS, counts_N, edges))
    assert y_TD.isfinite().all() and pool.is_untouched(0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(("state_dtype", "error"), [(None, 1e-5), (torch.bfloat16, 0.02)], ids=["own", "16 bits"])
def test_long_drafts_and_states_in_16_bits_are_read_token_by_token(state_dtype, error):
    mixer = build_mixer("gdn", hidden_size=32, num_heads=2).eval()
    rows_NS, x_NTD = torch.arange(1, 37, dtype=torch.int32).view(2, 18), torch.randn(2, 24, 32)
    read, wanted = read_with_drafts(Pool(mixer, 38, state_dtype), x_NTD, rows_NS), read_at_once(mixer, x_NTD)
    assert (read - wanted).norm() < error * wanted.norm()


@pytest.mark.slow
@pytest.mark.kernels
# One convolution, and two with one window.
@pytest.mark.parametrize("name", ["palimpsa-m", pytest.param("lattice", marks=pytest.mark.slow)])
def test_the_kernels_read_in_the_pool(name):
    plain, mixer = (
        build_mixer(name, hidden_size=32, num_heads=2, backend=backend).to(DEVICE).eval()
        for backend in ("torch", "triton")
    )
    mixer.load_state_dict(plain.state_dict())
    pool, x_NTD = Pool(plain), torch.randn(1, 3, 32, device=DEVICE)
    pool.pooled.mixer = mixer
    read = read_in_steps(pool, x_NTD, [(1,)], [4])
    torch.testing.assert_close(read, read_at_once(plain, x_NTD), rtol=1e-3, atol=1e-4)
    assert pool.is_untouched(0, 1, 2, 3, 5)
    rows_NS = torch.tensor([[5, 3], [1, 2]], dtype=torch.int32, device=DEVICE)
    for regular in (False, True):
        read = read_with_drafts(pool, x_NTD.repeat(2, 2, 1), rows_NS, regular=regular)
        torch.testing.assert_close(read, read_at_once(plain, x_NTD.repeat(2, 2, 1)), rtol=1e-3, atol=1e-4)
    assert pool.is_untouched(0)


@pytest.mark.kernels
@torch.no_grad()
def test_products_that_the_norm_has_computed_are_used_in_the_pool(monkeypatch):
    mixer = build_mixer("gdn", hidden_size=32, num_heads=2).to(DEVICE).eval()
    norm, x_N1D = RMSNorm(32, eps=1e-6).to(DEVICE), torch.randn(2, 1, 32, device=DEVICE)
    rows = torch.tensor([4, 1], dtype=torch.int32, device=DEVICE)
    first, second, third = (Pool(mixer).pooled for _ in range(3))
    wanted = first.decode(norm(x_N1D)[:, 0], rows)
    monkeypatch.setattr(linear_rows, "takes_kernels", lambda asked, x: availability.takes_kernels("triton", x))
    _, normed_N1D = normalize_for(mixer, norm, x_N1D, None)
    torch.testing.assert_close(second.decode_apart(normed_N1D, rows)[:, 0], wanted, rtol=1e-3, atol=1e-4)
    for product in normed_N1D._products.values():
        product.zero_()
    assert not third.decode_apart(normed_N1D, rows).any()


@pytest.mark.kernels
@torch.no_grad()
def test_products_that_the_norm_has_computed_are_used_for_drafts(monkeypatch):
    mixer = build_mixer("gdn", hidden_size=32, num_heads=2).to(DEVICE).eval()
    norm, x_T1D = RMSNorm(32, eps=1e-6).to(DEVICE), torch.randn(6, 1, 32, device=DEVICE)
    rows_NS = torch.tensor([[4, 1, 7], [2, 8, 5]], dtype=torch.int32, device=DEVICE)
    edges = torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
    step = plan_drafts(6, rows_NS, torch.ones_like(edges[1:]), edges, regular=True)
    first, second, third = (Pool(mixer, count=9).pooled for _ in range(3))
    wanted = first.verify(norm(x_T1D)[:, 0], step._replace(regular=False))
    monkeypatch.setattr(linear_rows, "takes_kernels", lambda asked, x: availability.takes_kernels("triton", x))
    _, normed_T1D = normalize_for(mixer, norm, x_T1D, None)
    torch.testing.assert_close(second.verify_apart(normed_T1D, step)[:, 0], wanted, rtol=1e-3, atol=1e-4)
    for product in normed_T1D._products.values():
        product.zero_()
    assert not third.verify_apart(normed_T1D, step).any()


@torch.no_grad()
def test_rows_for_too_few_tokens_are_refused_before_anything_is_written():
    mixer = build_mixer("gdn", hidden_size=32, num_heads=2).eval()
    cache = mixer.state_spec()
    cache.apply(lambda state: torch.zeros(5, *state.shape[1:]))
    cache.rows = torch.tensor([[1, 3]])
    with pytest.raises(ValueError, match=r"cache.rows must have a column .* each of its 3 tokens, got \[1, 2\]"):
        mixer(torch.randn(1, 3, 32), cache)
    assert not any(x.any() for x in (*cache.memory.values(), *cache.context.values()))


def test_a_pool_takes_no_gradients():
    mixer = build_mixer("gdn", hidden_size=32, num_heads=2)
    pool = Pool(mixer)
    with pytest.raises(ValueError, match="under torch.no_grad"):
        pool.pooled.decode(torch.zeros(1, 32), torch.tensor([2]))
    assert pool.is_untouched(*range(6))


@pytest.mark.parametrize("rows", [[-1, 3, -1, 0], [-1, -1], [2, 1], []], ids=str)
def test_rows_are_written_without_knowing_how_many_there_are(rows):
    pool, new = torch.randn(5, 2, 3), torch.randn(len(rows), 2, 3)
    wanted = pool.clone()
    for row, x in zip(rows, new, strict=True):
        if row >= 0:
            wanted[row] = x
    write_rows(pool, new, torch.tensor(rows, dtype=torch.int32))
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("name", ["pgdn", "palimpsa-d", "gka", "lattice", "vla"])
def test_states_in_16_bits_take_half_and_change_the_outputs_little(name):
    torch.manual_seed(0)
    mixer = build_mixer(name, hidden_size=32, num_heads=2).eval()
    pool, x_NTD = Pool(mixer, state_dtype=torch.bfloat16), torch.randn(2, 30, 32)
    assert Layout(mixer.state_spec(), torch.bfloat16).memory_size == Layout(mixer.state_spec()).memory_size // 2
    read, wanted = read_in_steps(pool, x_NTD, [(12, 3), *MIXED[1:]], [4, 1]), read_at_once(mixer, x_NTD)
    assert 0 < (read - wanted).norm() < 0.02 * wanted.norm()
    assert pool.is_untouched(0, 2, 3, 5)


def test_a_row_is_used_again():
    mixer = build_mixer("lattice", hidden_size=32, num_heads=2).double().eval()
    pool = Pool(mixer)
    for _ in range(2):  # the second sequence finds the state of the first one in its row
        x_NTD = torch.randn(1, 6, 32, dtype=torch.float64)
        torch.testing.assert_close(read_in_steps(pool, x_NTD, [(3,)], [2]), read_at_once(mixer, x_NTD))


def test_a_learned_first_state_follows_its_weights():
    mixer = build_mixer("ttt", hidden_size=32, num_heads=2, learned_state=True).double().eval()
    pool, x_NTD = Pool(mixer), torch.randn(1, 6, 32, dtype=torch.float64)
    read_in_steps(pool, x_NTD, [(3,)], [2])
    with torch.no_grad():
        for x in mixer.parameters():
            x.add_(torch.randn_like(x))
    pool.pooled.weights_changed()
    torch.testing.assert_close(read_in_steps(pool, x_NTD, [(3,)], [2]), read_at_once(mixer, x_NTD))


@pytest.mark.parametrize("name", ["lattice", "vla"])
def test_a_rehearsal_runs_both_calls_and_changes_no_state(name):
    mixer = build_mixer(name, hidden_size=32, num_heads=2).eval()
    pool, calls = Pool(mixer), []
    mixer.register_forward_pre_hook(lambda _, given: calls.append((given[0].shape[:2], len(given))))
    pool.pooled.rehearse()
    assert ((2, 1), 2) in calls and ((1, 70), 3) in calls  # one token each of two sequences; and packed ones
    assert pool.is_untouched(*range(6))


def test_tensors_are_aligned_and_apart():
    spec = LayerCache(
        {"S": torch.empty(1, 3, dtype=torch.bfloat16)}, {"seen": torch.empty(1), "q": torch.empty(1, 5, 2)}
    )
    layout = Layout(spec)
    ends = [place.offset + torch.Size(place.shape).numel() * place.dtype.itemsize for place in layout.places]
    assert all(place.offset % 16 == 0 for place in layout.places)
    assert layout.memory_size % 64 == layout.size % 64 == 0  # of blocks one after another
    assert all(end <= after.offset for end, after in zip(ends, layout.places[1:])) and ends[-1] <= layout.size
