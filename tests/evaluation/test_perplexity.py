"""Perplexity by context length is the full forward's loss, whatever the blocks, at the memory of a block."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastweights.evaluation import perplexity_by_length
from fastweights.evaluation.perplexity import text_windows

from .small import HYBRID, LONG, model

SHORT = [torch.arange(start, start + 40) for start in (0, 100, 200)]


@pytest.mark.parametrize("mixer", ["gdn", HYBRID], ids=["gdn", "hybrid"])
def test_it_is_the_loss_of_the_full_forward(mixer):
    lm = model(mixer)
    rows = perplexity_by_length(lm, LONG, [128, 16, 64], stretch=32, block=24)
    assert [row.length for row in rows] == [16, 64, 128]
    for row in rows:
        ids = torch.stack([text[: row.length] for text in LONG])
        with torch.no_grad():
            outputs = lm(ids, labels=ids, use_cache=False)
        target = ids[:, 1:][:, -32:]
        last = F.cross_entropy(outputs.logits[:, :-1][:, -32:].flatten(0, 1), target.flatten())
        assert row.loss == pytest.approx(outputs.loss.item(), rel=1e-5)
        assert row.last_loss == pytest.approx(last.item(), rel=1e-5)
        # numpy and math may differ in the last bit.
        assert row.perplexity == pytest.approx(math.exp(row.loss), rel=1e-14)
        assert row.last_perplexity == pytest.approx(math.exp(row.last_loss), rel=1e-14)
        assert (row.texts, row.joined) == (3, 0)


def test_blocks_batches_and_kinds_of_documents_change_nothing():
    lm, lengths = model(HYBRID), [20, 100]
    wanted = [row.loss for row in perplexity_by_length(lm, LONG, lengths, block=1000)]
    arrays = [text.numpy().astype(np.uint16) for text in LONG]
    for options in ({"block": 1}, {"block": 33, "batch_size": 2}, {"batch_size": 8}):
        rows = perplexity_by_length(lm, arrays, lengths, **options)
        assert [row.loss for row in rows] == pytest.approx(wanted, rel=1e-5)


def test_logits_exist_for_one_block_at_a_time():
    lm, sizes = model(), []
    lm.lm_head.register_forward_hook(lambda module, inputs, logits: sizes.append(tuple(logits.shape[:2])))
    perplexity_by_length(lm, LONG, [129], block=32, batch_size=2)
    assert sizes == [(2, 32)] * 4 + [(1, 32)] * 4


def test_the_model_is_left_in_the_mode_it_was_in():
    lm = model().train()
    perplexity_by_length(lm, LONG, [10])
    assert lm.training and all(parameter.grad is None for parameter in lm.parameters())


def test_texts_are_long_documents_first_then_short_ones_joined():
    windows, joined = text_windows([SHORT[0], LONG[0], SHORT[1], [], SHORT[2]], 60, count=9, separator=399)
    assert joined == 2 and torch.equal(windows[0], LONG[0][:60])
    rest = torch.cat([SHORT[0], torch.tensor([399]), SHORT[1], torch.tensor([399]), SHORT[2]])
    assert torch.equal(windows[1:].flatten(), rest[:120])
    assert len(text_windows(LONG, 60, count=2)[0]) == 2
    assert text_windows(SHORT, 60, count=1)[1] == 1


def test_documents_beyond_those_needed_are_not_read():
    def documents():
        yield from LONG
        raise AssertionError("asked for more")

    assert perplexity_by_length(model(), documents(), [100], texts=3)[0].texts == 3


@pytest.mark.parametrize(
    "error, documents, lengths, options, message",
    [
        (ValueError, LONG, [], {}, "lengths must hold at least one length"),
        (ValueError, LONG, [1], {}, "lengths must be at least 2 tokens, got 1"),
        (TypeError, LONG, [2.5], {}, "lengths must be a positive whole number"),
        (ValueError, LONG, [16], {"block": 0}, "block must be a positive whole number"),
        (ValueError, LONG, [16], {"texts": 0}, "texts must be"),
        (ValueError, SHORT, [121], {}, "at least 121 tokens, the longest length, got 120 in all"),
        (ValueError, [], [16], {}, "got 0 in all"),
        (
            ValueError,
            [torch.arange(390, 410)],
            [16],
            {},
            "token ids from 0 to 399, the model's vocabulary, got 390 to 405",
        ),
        (ValueError, [torch.rand(20)], [16], {}, "rows of token ids"),
        (
            ValueError,
            [torch.ones(2, 20, dtype=torch.long)],
            [16],
            {},
            r"rows of token ids \(integers\), got shape \[2, 20\]",
        ),
    ],
)
def test_bad_input(error, documents, lengths, options, message):
    with pytest.raises(error, match=message):
        perplexity_by_length(model(), documents, lengths, **options)


def test_a_loss_that_is_not_finite_is_refused():
    lm = model()
    with torch.no_grad():
        lm.lm_head.weight[7] = math.nan
    with pytest.raises(ValueError, match="finite losses, got nan for the token at position 1"):
        perplexity_by_length(lm, LONG, [16])
