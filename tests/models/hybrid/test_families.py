"""Hybrids of every family of transformers next to their teachers."""

from __future__ import annotations

import pytest
import torch

from fastweights.models import linearize
from tests.fast_set import fast_where

from .small import CLOSE, EVERY, hybrid, teacher, tokens

GREEDY = {"max_new_tokens": 6, "do_sample": False}
SOME = ["llama", "gemma3_text"]
FAST = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
PADDED = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])


@pytest.mark.parametrize("model_type", EVERY)
def test_with_all_attention_kept_it_is_the_teacher_bit_for_bit(model_type):
    lm, ids = teacher(model_type), tokens()
    same = linearize(lm, to="gdn", keep="all")
    whole, own = lm(ids, labels=ids), same(ids, labels=ids)
    assert torch.equal(own.logits, whole.logits) and torch.equal(own.loss, whole.loss)
    steps = (model(ids[:, :2], past_key_values=read.past_key_values) for model, read in ((lm, whole), (same, own)))
    assert torch.equal(*(step.logits for step in steps))
    padded, own = (model(ids, attention_mask=PADDED).logits for model in (lm, same))
    assert torch.equal(own[PADDED.bool()], padded[PADDED.bool()])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    packed, own = (model(ids[:1], position_ids=positions, use_cache=False).logits for model in (lm, same))
    # Documents are read apart, so that on some processors a row's sums have another order.
    torch.testing.assert_close(own, packed, rtol=1e-5, atol=1e-6)
    for mask in (None, PADDED):
        assert torch.equal(*(model.generate(ids, attention_mask=mask, **GREEDY) for model in (lm, same)))


@pytest.mark.parametrize("model_type", EVERY)
def test_a_linear_memory_is_attention_at_the_first_token(model_type):
    """Attention to one token gives its value: so does a window, bit for bit, and a linear form that has written one token and
    divides by the sum of its weights, v (q k) / (q k), up to the rounding of that."""
    lm, ids = teacher(model_type), tokens(8, 1)
    assert torch.equal(linearize(lm, to="softmax", window=1)(ids).logits, lm(ids).logits)
    student = linearize(lm, to="vla-linear")
    torch.testing.assert_close(student(ids).logits, lm(ids).logits, rtol=1e-5, atol=2e-6)
    assert not torch.allclose(student(tokens()).logits, lm(tokens()).logits, atol=1e-2)
    if model_type == "qwen3_moe":  # torch has no product of experts in double precision
        return
    lm, student = lm.double(), student.double()
    torch.testing.assert_close(student(ids).logits, lm(ids).logits, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("model_type", FAST)
@torch.no_grad()
def test_padding_documents_and_steps_change_nothing(model_type):
    lm, ids = hybrid(model_type, "pgdn"), tokens()
    whole = lm(ids).logits
    cache, parts = None, []
    for part in ids.split((5, 1, 5), 1):
        output = lm(part, past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)

    padded, mask = torch.zeros(2, 15, dtype=torch.long), torch.zeros(2, 15, dtype=torch.long)
    for row, start in enumerate((4, 2)):
        padded[row, start : start + 11], mask[row, start : start + 11] = ids[row], 1
    logits = lm(padded, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], whole.flatten(0, 1), **CLOSE)

    apart = torch.cat([lm(ids[:1, :4]).logits, lm(ids[:1, 4:]).logits], 1)
    positions = torch.tensor([[*range(4), *range(7)]])
    edges = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    flattened = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 7, "max_length_k": 7}
    for given in (
        {"cu_seqlens": edges},
        {"position_ids": positions},
        {"position_ids": positions, "attention_mask": torch.ones_like(ids[:1])},
        {"position_ids": positions, **flattened},
    ):
        torch.testing.assert_close(lm(ids[:1], **given).logits, apart, **CLOSE)


@fast_where(lambda given: given["model_type"] == "llama")
@pytest.mark.parametrize("model_type", FAST)
def test_generates_as_without_a_cache(model_type):
    lm, ids = hybrid(model_type, "pgdn"), tokens()
    for settings in ({}, {"num_beams": 3}, {"prefill_chunk_size": 4}):
        plain = lm.generate(ids, **GREEDY, use_cache=False, num_beams=settings.get("num_beams", 1))
        assert torch.equal(lm.generate(ids, **GREEDY, **settings), plain), settings
    alone = lm.generate(ids[:1, 4:], **GREEDY)
    for settings in ({}, {"prefill_chunk_size": 3}, {"num_beams": 2}):
        if "num_beams" in settings:
            alone = lm.generate(ids[:1, 4:], **GREEDY, **settings)
        assert torch.equal(lm.generate(ids, attention_mask=PADDED, **GREEDY, **settings)[:1, 4:], alone), settings
    torch.manual_seed(0)
    sampled = lm.generate(ids, attention_mask=PADDED, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    assert sampled.shape == (4, 15)


@pytest.mark.parametrize("model_type", FAST)
def test_packed_documents_have_the_gradients_of_separate_ones(model_type):
    ids = tokens(1)
    gradients = []
    for edges in ([0, 4, 11], None):
        lm = hybrid(model_type, "kda").train()
        if edges is not None:
            loss = lm(ids, labels=ids, cu_seqlens=torch.tensor(edges), num_items_in_batch=9).loss
        else:
            loss = sum(lm(part, labels=part, num_items_in_batch=9).loss for part in (ids[:, :4], ids[:, 4:]))
        loss.backward()
        gradients.append({name: p.grad for name, p in lm.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 30
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
def test_shared_and_repeated_keys_begin_as_the_same_model(model_type):
    """OLMo-2 norms the keys of all heads together, so that its repeated norm has the weights of each head once per query head."""
    shared, repeated = (hybrid(model_type, "kda", keys=keys) for keys in ("shared", "repeated"))
    torch.testing.assert_close(repeated(tokens()).logits, shared(tokens()).logits, **CLOSE)
    sizes = [len(lm.memory_layers()[0].k_proj.weight) for lm in (shared, repeated)]
    assert sizes == [24, 48] and len(repeated.model.layers[1].self_attn.k_proj.weight) == 24


def test_without_rope_a_memory_does_not_see_positions():
    lm, ids = hybrid(to="pgdn", keep="none", rope=False), tokens()
    moved = torch.arange(11)[None] + 40
    assert torch.equal(lm(ids, position_ids=moved).logits, lm(ids).logits)
    rotated = hybrid(to="pgdn", keep="none")
    assert not torch.allclose(rotated(ids, position_ids=moved).logits, rotated(ids).logits, atol=1e-4)
    assert not torch.allclose(rotated(ids).logits, lm(ids).logits, atol=1e-4)


@pytest.mark.parametrize(("memory", "activation"), [("gdn", "none"), ("lattice", "silu")])
def test_lattice_keeps_its_activation(memory, activation):
    """Without it its gradients explode."""
    assert hybrid(to=memory).memory_layers()[0].memory.options.activation == activation


def test_a_convolution_begins_as_the_identity():
    plain, convolved = (hybrid(to="gdn", conv_size=size) for size in (None, 4))
    convolved.load_state_dict(plain.state_dict(), strict=False)  # gates are drawn after the convolutions
    torch.testing.assert_close(convolved(tokens()).logits, plain(tokens()).logits, **CLOSE)
    assert convolved.num_parameters() > plain.num_parameters()


def test_the_state_is_that_of_memories_and_windows():
    lm = hybrid("gemma3_text", to="gdn", keep=(1, 2))  # windows of 4 in layers of both kinds
    memories = 2 * 4 * 12 * 12
    window = 2 * 3 * 2 * 12
    assert lm.config.layer_types[:3] == ["sliding_attention"] * 3
    assert lm.state_size(1000) == memories + 2 * window == lm.state_size(10)
    assert hybrid("llama", to="gdn").state_size(1000) == 3 * 4 * 12 * 12 + 2 * 1000 * 2 * 12
    # Mistral's window is that of the configuration, which no attention module repeats.
    assert hybrid("mistral", to="gdn").state_size(1000) == 3 * 4 * 12 * 12 + window
