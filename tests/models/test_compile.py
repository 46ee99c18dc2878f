"""torch.compile of a whole model: one graph, packed rows and loss included."""

from __future__ import annotations

import torch

from .small import model, tokens

MIXED = ["pgdn", {"name": "softmax", "window": 5}]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def loss_and_gradients(call, lm, batch):
    lm.zero_grad()
    loss = call(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}


def test_training_is_one_graph():
    torch._dynamo.reset()
    lm, ids, row = model(MIXED).train(), tokens(2, 9), tokens(1, 24)
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    for batch in (
        {"input_ids": ids, "labels": ids},
        {"input_ids": row, "labels": row, "cu_seqlens": torch.tensor([0, 4, 4, 15, 24])},
        {"input_ids": row, "labels": row, "cu_seq_lens_q": (edges := torch.tensor([0, 7, 24])), "cu_seq_lens_k": edges},
    ):
        got, wanted = (loss_and_gradients(call, lm, batch) for call in (compiled, lm))
        torch.testing.assert_close(got, wanted, **CLOSE)


def test_decoding_is_one_graph():
    torch._dynamo.reset()
    lm, ids = model(MIXED), tokens(2, 9)
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    with torch.no_grad():
        cache = lm(ids[:, :7]).past_key_values
        steps = [compiled(ids[:, [t]], past_key_values=cache).logits for t in (7, 8)]
        torch.testing.assert_close(torch.cat(steps, 1), lm(ids).logits[:, 7:], rtol=1e-4, atol=1e-5)
        assert cache.get_seq_length() == 9
