"""generate(): cached decoding says what the full forward says, in every mode that can be had with a memory."""

from __future__ import annotations

import pytest
import torch
from transformers import Cache, DynamicCache, GenerationConfig

from fastweights.models import FastWeightsCache

from .mixers import few_mixers
from .small import CLOSE, MIXED, PROMPTS, config, model, tokens


def held(cache: FastWeightsCache) -> int:
    return sum(x.numel() for layer in cache.layers for x in (*layer.memory.values(), *layer.context.values()))


@pytest.mark.parametrize("new", [50, pytest.param(200, marks=pytest.mark.slow)])
@few_mixers("window")
def test_tokens_after_a_prompt_of_300_equal_the_full_forward(mixer, new):
    lm = model([{"name": "softmax", "window": 40} if mixer == "window" else mixer], initializer_range=0.1)
    torch.manual_seed(0)
    with torch.no_grad():
        generated = lm.generate(
            tokens(1, 300),
            max_new_tokens=new,
            prefill_chunk_size=128,
            do_sample=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        whole = lm(generated.sequences, use_cache=False).logits
    torch.testing.assert_close(torch.stack(generated.logits, 1), whole[:, 299:-1], **CLOSE)
    if mixer not in ("softmax", "vla-softmax"):
        one = lm(tokens(1, 60)).past_key_values
        assert held(generated.past_key_values) == held(one)


@few_mixers()
def test_beams_take_their_memory_along(mixer):
    lm, ids = model([mixer], initializer_range=0.5), tokens(2, 6)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    assert torch.equal(lm.generate(ids, **options), lm.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize(
    "mode",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": False, "prefill_chunk_size": 4},
        {"num_beams": 3, "prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_a_cache_changes_no_token(mode):
    lm, ids = model(MIXED), tokens(2, 9)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        options = mode if use_cache else {k: v for k, v in mode.items() if k != "prefill_chunk_size"}
        results.append(lm.generate(ids, max_new_tokens=10, use_cache=use_cache, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("block", [None, 3])
def test_prompts_of_different_lengths(block, mode):
    lm, ids = model(MIXED), tokens(3, 12)
    together = lm.generate(ids, attention_mask=PROMPTS, max_new_tokens=8, prefill_chunk_size=block, **mode)
    for row, mask, result in zip(ids, PROMPTS.bool(), together, strict=True):
        alone = lm.generate(row[mask][None], max_new_tokens=8, **mode)
        assert torch.equal(result[12:], alone[0, mask.sum() :])


def test_a_cache_goes_on_with_several_samples_per_prompt():
    lm, ids = model("gdn"), tokens(2, 12)
    options = {"max_new_tokens": 3, "do_sample": True, "num_return_sequences": 3}
    cache = lm(ids[:, :8]).past_key_values
    with pytest.raises(ValueError, match="must hold 6 sequences"):
        lm.generate(ids, past_key_values=cache.copy(), **options)
    cache.batch_repeat_interleave(3)
    results = []
    for past in (cache, None):
        torch.manual_seed(0)
        results.append(lm.generate(ids, past_key_values=past, **options))
    assert results[0].shape == (6, 15) and torch.equal(*results)


def test_a_finished_sequence_is_filled_up():
    lm, ids = model("gdn", pad_token_id=0), tokens(3, 12)
    first = lm.generate(ids, attention_mask=PROMPTS, max_new_tokens=1, do_sample=False)[:, -1]
    ended = lm.generate(ids, attention_mask=PROMPTS, max_new_tokens=6, do_sample=False, eos_token_id=int(first[0]))
    assert ended[0, 12] == first[0] and not ended[0, 13:].any()


@pytest.mark.parametrize("ids_given", ["all", "new"])
def test_generation_goes_on_from_a_cache(ids_given):
    lm, ids = model(MIXED), tokens(2, 20)
    cache = lm(ids[:, :12]).past_key_values
    prefix = cache.copy()
    wanted = lm.generate(ids, max_new_tokens=6, do_sample=False)[:, 20:]
    for past in (cache, prefix):
        assert past.get_seq_length() == 12 and past.batch_size == 2
        given = ids if ids_given == "all" else ids[:, 12:]
        options = {} if ids_given == "all" else {"attention_mask": torch.ones(2, 20, dtype=torch.long)}
        result = lm.generate(given, past_key_values=past, max_new_tokens=6, do_sample=False, **options)
        assert torch.equal(result[:, given.shape[1] :], wanted)
        assert past.get_seq_length() == 25


def test_a_cache_that_does_not_fit_the_prompt_is_refused():
    lm, ids = model("gdn"), tokens(2, 12)
    cache = lm(ids).past_key_values
    with pytest.raises(ValueError, match="has read 12 tokens and the prompt has 12: pass the whole prompt"):
        lm.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="must hold 4 sequences, one per prompt and beam, got 2"):
        lm.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=cache, max_new_tokens=2, num_beams=2)


def test_embeddings_as_the_prompt():
    lm, ids = model(MIXED), tokens(2, 9)
    wanted = lm.generate(ids, max_new_tokens=5, do_sample=False)[:, 9:]
    embeds = lm.get_input_embeddings()(ids)
    assert torch.equal(lm.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False), wanted)


def test_embeddings_after_a_cache_are_the_whole_prompt():
    """transformers cuts off as many embeddings as the cache has read, also where they are the new ones alone."""
    lm, ids = model(MIXED), tokens(2, 20)
    cache = lm(ids[:, :8]).past_key_values
    embeds, mask = lm.get_input_embeddings()(ids), torch.ones_like(ids)
    options = {"max_new_tokens": 5, "do_sample": False}
    wanted = lm.generate(ids, **options)[:, 20:]
    given = {"inputs_embeds": embeds, "past_key_values": cache.copy(), **options}
    assert torch.equal(lm.generate(**given), wanted)
    for first in (ids, None):
        given = {"inputs": first, "inputs_embeds": embeds[:, 8:], "past_key_values": cache, **options}
        with pytest.raises(
            ValueError, match="inputs_embeds must be as long as attention_mask .* 20, got 12: pass the whole"
        ):
            lm.generate(attention_mask=mask, **given)
    with pytest.raises(ValueError, match="has read 8 tokens and the prompt has 8: pass the whole prompt"):
        lm.generate(inputs_embeds=embeds[:, :8], past_key_values=cache, **options)


@pytest.mark.parametrize("place", ["keyword", "second argument"])
def test_sizes_and_tokens_in_generation_settings_are_checked(place):
    """Those of a call too, by position or name."""
    lm, ids = model("gdn"), tokens(1, 4)
    for wrong in ({"prefill_chunk_size": -3}, {"eos_token_id": 99}):
        settings = GenerationConfig(max_new_tokens=2, **wrong)
        given, options = ([ids], {"generation_config": settings}) if place == "keyword" else ([ids, settings], {})
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            lm.generate(*given, **options)


def test_rows_of_a_cache_can_be_chosen_and_repeated():
    lm, ids, step = model(MIXED), tokens(3, 12), tokens(3, 13)[:, 12:]
    cache = lm(ids, attention_mask=PROMPTS).past_key_values
    assert isinstance(cache, Cache) and not cache.is_compileable
    wanted = lm(step, past_key_values=cache.copy()).logits
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 1], dtype=torch.int32)), [2, 0, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        changed = cache.copy()
        change(changed)
        assert changed.batch_size == len(rows)
        torch.testing.assert_close(lm(step[rows], past_key_values=changed).logits, wanted[rows])
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.is_initialized) == (-1, 0, False)
    torch.testing.assert_close(lm(ids, past_key_values=cache).logits, lm(ids).logits)


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires `trust_remote_code=True`"),
        (ValueError, {"dola_layers": "low"}, "Dola Generation requires `trust_remote_code=True`"),
        (ValueError, {"cache_implementation": "static"}, "cache_implementation must be None.* got 'static'"),
        (TypeError, {"past_key_values": DynamicCache()}, "past_key_values must be a FastWeightsCache of 2 layers"),
        (ValueError, {"max_new_tokens_": 3}, "max_new_tokens_"),
        (ValueError, {"prefill_chunk_size": 0}, "prefill_chunk_size must be"),
        (TypeError, {"prefill_chunk_size": 2.5}, "prefill_chunk_size must be"),
        (ValueError, {"num_beams": 0}, "num_beams must be"),
        (ValueError, {"num_return_sequences": -1}, "num_return_sequences must be"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_had_is_refused(error, options, message):
    with pytest.raises(error, match=message):
        model("gdn").generate(tokens(1, 5), max_new_tokens=3, **options)


def test_no_cache_while_checkpointing():
    lm, ids = model("gdn").train(), tokens()
    lm.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache False while training with gradient checkpointing"):
        lm(ids, use_cache=True)
    assert lm.eval()(ids).past_key_values is not None


def test_size_of_the_cache_is_the_state_size():
    lm = model(MIXED)
    cache = lm(tokens(1, 30)).past_key_values
    assert sum(x.numel() for layer in cache.layers for x in layer.memory.values()) == lm.state_size(30)
    assert lm.state_size(31) - lm.state_size(30) == 2 * 16  # the layer that sees everything; the window is full
    assert config(MIXED).mixers()[3] == ("softmax", {"window": 5})
