"""torch.compile of a whole model: one graph, packed rows and loss included."""

from __future__ import annotations

import pytest
import torch

from .mixers import every_mixer
from .small import model, tokens

MIXED = ["pgdn", {"name": "softmax", "window": 5}]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def loss_and_gradients(call, lm, batch):
    lm.zero_grad()
    loss = call(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}


@pytest.mark.parametrize("first, last", [(1, 2), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_training_is_one_graph(first, last):
    torch._dynamo.reset()
    lm, ids, row = model(MIXED).train(), tokens(2, 9), tokens(1, 24)
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    given = (
        {"input_ids": ids, "labels": ids},
        {"input_ids": row, "labels": row, "cu_seqlens": torch.tensor([0, 4, 4, 15, 24])},
        {"input_ids": row, "labels": row, "cu_seq_lens_q": (edges := torch.tensor([0, 7, 24])), "cu_seq_lens_k": edges},
    )
    for batch in given[first:last]:
        got, wanted = (loss_and_gradients(call, lm, batch) for call in (compiled, lm))
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.slow
def test_decoding_is_one_graph():
    torch._dynamo.reset()
    lm, ids = model(MIXED), tokens(2, 9)
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    with torch.no_grad():
        cache = lm(ids[:, :7]).past_key_values
        steps = [compiled(ids[:, [t]], past_key_values=cache).logits for t in (7, 8)]
        torch.testing.assert_close(torch.cat(steps, 1), lm(ids).logits[:, 7:], rtol=1e-4, atol=1e-5)
        assert cache.get_seq_length() == 9


EDGES = torch.tensor([0, 4, 4, 15, 24])
HYBRIDS = ["softmax", {"name": "softmax", "window": 5}, "gdn"]


def check_packed(mixers, use_cache):
    """Outputs of packed rows, and a cache that continues them, in one graph and without one."""
    torch._dynamo.reset()
    lm, row, more, edges = model(mixers), tokens(1, 24), tokens(1, 7), torch.tensor([0, 1, 2, 5, 7], dtype=torch.int32)
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, wanted = (call(row, cu_seqlens=EDGES, use_cache=use_cache) for call in (compiled, lm))
        torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        if use_cache is False:
            assert got.past_key_values is None
            return
        wanted = lm(more, cu_seqlens=edges, past_key_values=wanted.past_key_values).logits
        copied = got.past_key_values.copy()
        for call, cache in ((lm, copied), (compiled, got.past_key_values)):
            rest = call(more, cu_seqlens=edges, past_key_values=cache)
            torch.testing.assert_close(rest.logits, wanted, rtol=1e-4, atol=1e-5)
            assert rest.past_key_values.columns == 31


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [None, False, True])
def test_packed_rows_are_one_graph_in_evaluation_mode(use_cache):
    check_packed(HYBRIDS, use_cache)


@pytest.mark.slow
@every_mixer({"name": "softmax", "window": 1})
def test_packed_rows_of_every_mixer_are_one_graph(mixer):
    check_packed([mixer], None)
    lm, row = model([mixer]).train(), tokens(1, 24)
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    for use_cache in (None, True):
        batch = {"input_ids": row, "labels": row, "cu_seqlens": EDGES, "use_cache": use_cache}
        got, wanted = (loss_and_gradients(call, lm, batch) for call in (compiled, lm))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
