"""Questions that are asked together get the answers that each gets alone."""

from __future__ import annotations

import pytest
import torch

from fastweights.evaluation import needle_recall, ruler_recall
from fastweights.evaluation.answers import Question, answer_prompts, score_answers

from ..models.mixers import every_mixer
from .small import BLOCK, HYBRID, TEXT, Numbers, model, questions, tokenizer

WORDS = tokenizer()


def assert_same(together, alone):
    for one, other in zip(together, alone, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-4)
        assert (one.exact, one.continuation) == (other.exact, other.continuation)


@every_mixer(HYBRID, {"name": "softmax", "window": 5}, fast=set())
def test_answers_are_those_of_each_prompt_alone(mixer):
    lm = model(mixer if isinstance(mixer, list) else [mixer], initializer_range=0.2)
    asked = questions(lm)
    alone = [answer_prompts(lm, Numbers(), [question], BLOCK)[0] for question in asked]
    assert [answer.exact for answer in alone] == [False, True, False, False, False]
    assert_same(answer_prompts(lm, Numbers(), asked, BLOCK), alone)
    assert_same(answer_prompts(lm, Numbers(), asked[4:0:-3], BLOCK), alone[4:0:-3])  # of one length: no padding
    assert score_answers(lm, Numbers(), iter(asked), BLOCK, 2) == pytest.approx(
        score_answers(lm, Numbers(), asked, BLOCK), abs=1e-4
    )


@pytest.mark.parametrize("several", [False, True])
def test_a_text_that_ends_is_not_filled_up(several):
    """The token that ends a text is one that only the first model answer holds; no padding is added to it."""
    lm = model(initializer_range=0.5)
    asked = questions(lm)
    first, *others = (answer_prompts(lm, Numbers(), [question], BLOCK)[0].continuation.split() for question in asked)
    end = int(first[2])
    lm.generation_config.eos_token_id = [399, end] if several else end
    alone = [answer_prompts(lm, Numbers(), [question], BLOCK)[0] for question in asked]
    assert len(alone[0].continuation.split()) == first.index(str(end)) + 1 < max(map(len, others))
    assert_same(answer_prompts(lm, Numbers(), asked, BLOCK), alone)


def test_a_prompt_may_end_with_the_token_that_fills_up():
    """It is not taken for padding."""
    lm, ids = model(initializer_range=0.5), torch.tensor([[5, 7, 0]])
    (answer,) = answer_prompts(lm, Numbers(), [Question("5 7 0", "1", ["1"])], BLOCK)
    said = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=17, do_sample=False)[0, 3:]
    assert answer.continuation == Numbers().decode(said, True)


def test_exact_answers_are_not_generated(monkeypatch):
    lm = model(initializer_range=0.5)
    asked = [questions(lm)[1]] * 2
    monkeypatch.setattr(lm, "generate", None)
    assert [(answer.exact, answer.continuation) for answer in answer_prompts(lm, Numbers(), asked, BLOCK)] == [
        (True, "")
    ] * 2


@pytest.mark.parametrize("recall", [needle_recall, ruler_recall])
def test_batches_of_a_measure(recall, monkeypatch):
    """`batch_size` prompts are read together, the last ones in a smaller batch."""
    lm, rows = model(initializer_range=0.5), []
    generate = lm.generate
    monkeypatch.setattr(lm, "generate", lambda ids, **options: rows.append(len(ids)) or generate(ids, **options))
    task = (
        {"task": "s-niah-1", "length": 220} if recall is needle_recall else {"task": "vt", "length": 400, "text": TEXT}
    )
    alone = recall(lm, WORDS, **task, examples=3)
    together = recall(lm, WORDS, **task, examples=3, batch_size=2)
    assert rows == [1, 1, 1, 2, 1]
    assert together.answer_loss == pytest.approx(alone.answer_loss, abs=1e-4)
    assert (together.found, together.exact) == (alone.found, alone.exact)
