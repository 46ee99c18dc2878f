"""The cache has two names, because transformers 5.24 calls it `cache`: the models take both, and generate() does."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from transformers.utils import logging as transformers_logging

from fastweights.models import FastWeightsCache
from fastweights.models.cache import CACHE_NAME, CACHE_NAMES

from .small import HYBRID, model, tokens


@pytest.mark.parametrize("body", [False, True], ids=["with output layer", "body"])
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_call_takes_both_names(name, body):
    lm, ids = model(HYBRID), tokens()
    called = lm.model if body else lm
    wanted = called(ids)[0]
    cache = getattr(called(ids[:, :12]), CACHE_NAME)
    rest = called(ids[:, 12:], **{name: cache})
    assert getattr(rest, CACHE_NAME) is cache and cache.columns == ids.shape[1]
    torch.testing.assert_close(rest[0], wanted[:, 12:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generation_takes_both_names(options):
    lm, ids = model(HYBRID), tokens()
    options = {"max_new_tokens": 5, "do_sample": False, **options}
    wanted = lm.generate(ids, **options)
    cache = getattr(lm(ids[:, :12]), CACHE_NAME)
    cache.batch_repeat_interleave(options.get("num_beams", 1))
    for name in CACHE_NAMES:
        assert torch.equal(lm.generate(ids, **{name: cache.copy()}, **options), wanted)


def test_two_caches_are_refused():
    lm, ids = model(), tokens()
    one, other = FastWeightsCache.empty(2), FastWeightsCache.empty(2)
    for call in (lm, lm.model, lm.generate):
        with pytest.raises(ValueError, match="cache must be None where past_key_values is given"):
            call(ids, past_key_values=one, cache=other)
    lm(ids, past_key_values=one, cache=one)


def test_transformers_warns_of_no_name(caplog, monkeypatch):
    """Its outputs and its generate() warn of the names that they no longer use."""
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    transformers_logging.warning_once.cache_clear()
    lm, ids = model(HYBRID), tokens()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        lm.generate(ids, max_new_tokens=3, do_sample=False, past_key_values=FastWeightsCache.empty(3))
        lm.generate(ids, max_new_tokens=3, do_sample=False, num_beams=2, return_dict_in_generate=True)
        lm(ids, labels=ids)
    assert "deprecated" not in caplog.text
