"""A recall task in words has the task's associations, in tokens that are words of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from fastweights.data import IGNORE_INDEX, make_task
from fastweights.evaluation import TaskInWords, word_recall, word_tokens

from .small import model, tokenizer

TASK = make_task("mqar", pairs=3, length=20, vocab_size=16, random_non_queries=False)


def test_symbols_are_different_words():
    words, tokens = tokenizer(), word_tokens(tokenizer(), 16)
    texts = [words.decode([token]).strip() for token in tokens]
    assert all(text.isalpha() and len(text) >= 2 for text in texts)
    assert len({text.casefold() for text in texts}) == 16
    assert torch.equal(tokens, tokens.sort().values)


def test_each_symbol_becomes_its_token_behind_the_first_tokens():
    tokens = 100 + torch.randperm(16)
    ids, labels = TaskInWords(TASK, tokens, [7, 9]).batch("test", seed=3, index=1, batch_size=5)
    plain = TASK.batch("test", seed=3, index=1, batch_size=5)
    assert torch.equal(ids[:, :2], torch.tensor([[7, 9]] * 5)) and (labels[:, :2] == IGNORE_INDEX).all()
    assert torch.equal(ids[:, 2:], tokens[plain.input_ids])
    asked = plain.labels != IGNORE_INDEX
    assert torch.equal(labels[:, 2:] != IGNORE_INDEX, asked) and asked.sum() == 15
    assert torch.equal(labels[:, 2:][asked], tokens[plain.labels[asked]])


def test_a_vocabulary_with_too_few_words_is_refused():
    with pytest.raises(ValueError, match="symbols must be at most .* got 399; take fewer"):
        word_tokens(tokenizer(), 399)


@pytest.mark.parametrize("task", ["mqar", "mqar-shuffled", "copy", "palindrome"])
def test_accuracy_is_over_the_whole_vocabulary(task):
    lm, words = model(), word_tokens(tokenizer(), 20)
    with torch.no_grad():  # a model that says words only, so that it is right by chance now and then
        lm.lm_head.weight[[token for token in range(400) if token not in words]] = 0
    result = word_recall(lm, tokenizer(), task, length=40, pairs=4, symbols=20, examples=100)
    assert (result.task, result.length, result.chance) == (task, 40, 0.25)
    options = {"random_non_queries": False} if task == "mqar" else {}
    plain = make_task(task, pairs=4, length=40, vocab_size=20, **options)
    ids, labels = plain.batch("test", seed=0, index=0, batch_size=100)
    asked = labels != IGNORE_INDEX
    with torch.no_grad():
        right = lm(words[ids]).logits[asked].argmax(-1) == words[labels[asked]]
    assert 0 < result.accuracy < 0.5
    assert result.accuracy == pytest.approx(right.float().mean().item())


def test_unknown_tasks_are_refused():
    with pytest.raises(
        ValueError,
        match="recall task in words must be one of 'mqar', 'mqar-shuffled', 'copy', 'palindrome', got 'mqar-ood'",
    ):
        word_recall(model(), tokenizer(), "mqar-ood")
