"""Models of transformers that are none of ours: measured in blocks through their caches, as their whole forward says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastweights.evaluation import needle_recall, perplexity_by_length
from fastweights.evaluation.answers import answer_prompts
from fastweights.evaluation.causal_models import empty_cache, final_hidden, state_size, token_logits

from .other_models import gemma, hybrid, llama
from .small import BLOCK, LONG, Numbers, questions, tokenizer

MODELS = pytest.mark.parametrize("make", [llama, gemma, hybrid])


@MODELS
def test_perplexity_is_that_of_the_whole_forward(make):
    lm = make()
    ids = torch.stack([text[:130] for text in LONG])
    rows = perplexity_by_length(lm, LONG, [20, 130], stretch=16, block=32, batch_size=2)
    logits = lm(ids).logits.double()
    for row in rows:
        losses = F.cross_entropy(logits[:, : row.length - 1].transpose(1, 2), ids[:, 1 : row.length], reduction="none")
        assert row.loss == pytest.approx(losses.mean().item(), rel=1e-5)
        assert row.last_loss == pytest.approx(losses[:, -16:].mean().item(), rel=1e-5)


@MODELS
def test_answers_asked_together_are_those_asked_alone(make):
    lm = make()
    asked = questions(lm)
    together = answer_prompts(lm, Numbers(), asked, BLOCK)
    assert together[1].exact
    for question, answer in zip(asked, together, strict=True):
        (alone,) = answer_prompts(lm, Numbers(), [question], 1000)
        assert (answer.exact, answer.continuation) == (alone.exact, alone.continuation)
        assert answer.losses == pytest.approx(alone.losses, rel=1e-4)
        prompt, wanted = Numbers()(question.prompt).input_ids, Numbers()(question.answer).input_ids
        logits = lm(torch.tensor([prompt + wanted])).logits[0, len(prompt) - 1 : -1]
        assert answer.losses == pytest.approx(F.cross_entropy(logits, torch.tensor(wanted), reduction="none").tolist())


def test_needles():
    score = needle_recall(llama(), tokenizer(), "s-niah-1", length=200, examples=3, batch_size=2)
    assert 0 <= score.found <= 1 and score.answer_loss > 0


@MODELS
def test_hidden_states_and_output_layer_make_the_logits(make):
    """With padding on the left too."""
    lm = make()
    ids = torch.stack([text[:30] for text in LONG])
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    logits = token_logits(lm, final_hidden(lm, ids, mask))
    torch.testing.assert_close(logits[1:], lm(ids[1:]).logits)
    torch.testing.assert_close(logits[:1, 11:], lm(ids[:1, 11:]).logits)
    assert not lm.model._forward_hooks


@MODELS
def test_the_harness_asks_them(make):
    harness = pytest.importorskip("fastweights.evaluation.harness_model")
    lm, words = make(), tokenizer()
    asked = harness.FastWeightsLM(lm, tokenizer=words, batch_size=2, block=BLOCK)
    rows = [(LONG[0][:9].tolist(), [3, 4]), (LONG[0][:9].tolist(), [5]), (LONG[1][:30].tolist(), [6, 7, 8])]
    scores = asked._loglikelihood_tokens([(None, prompt, answer) for prompt, answer in rows], disable_tqdm=True)
    for (prompt, answer), (score, greedy) in zip(rows, scores, strict=True):
        logits = lm(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert score == pytest.approx(-F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item(), rel=1e-4)
        assert greedy == (logits.argmax(-1).tolist() == answer)


@MODELS
def test_the_size_of_the_cache_is_counted(make):
    lm, cache = make(), None
    for length in (1, 20):
        cache = empty_cache(lm)
        final_hidden(lm, LONG[0][None, :length], past_key_values=cache)
        held = [
            layer.held.memory.values() if hasattr(layer, "held") else (layer.keys, layer.values)
            for layer in cache.layers
        ]
        assert state_size(lm, length) == sum(x.numel() for tensors in held for x in tensors)
