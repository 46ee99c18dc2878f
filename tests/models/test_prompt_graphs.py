"""Short prompts that generate() reads packed, with padding behind them, here without a graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fastweights.models import decoding, generation, kept_graphs, prompt_graphs
from fastweights.models.kept_graphs import graphs_of
from tests.fast_set import fast_where

from .mixers import FEW, is_fast, some_mixers
from .small import CLOSE, MIXED, model, tokens

WINDOWS = [{"name": "softmax", "window": width} for width in (1, 5, 40)]
OPTIONS = {"max_new_tokens": 12, "do_sample": False}
GROUPED = {"name": "softmax", "num_kv_heads": 1, "rope_theta": None, "conv_size": 4}


@pytest.fixture
def read(monkeypatch):
    """Of every call, whether its prompts were captured before or are called, and whether they are captured at its end; nothing
    where they are read in another way."""
    found = []
    find = prompt_graphs.PromptReader._find
    capture = prompt_graphs.PromptReader._capture

    def noted_capture(self, *given):
        found.append("captured")
        return capture(self, *given)

    def noted_find(self, *given):
        before = len(found)
        kept = find(self, *given)
        if kept is not None and len(found) == before:
            found.append("taken" if kept.bytes else "called")
        return kept

    monkeypatch.setattr(prompt_graphs.PromptReader, "_capture", noted_capture)
    monkeypatch.setattr(prompt_graphs.PromptReader, "_find", noted_find)
    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    monkeypatch.setattr(generation, "prefill_block", lambda model, rows, length: length)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    return found


def called(lm, ids, **options):
    return lm.generate(ids, **{**OPTIONS, **options}, disable_compile=True)


def caches_of(lm, ids, **options):
    """What the layers hold after prompts, read with and without padding behind them."""
    options |= {"max_new_tokens": 1, "return_dict_in_generate": True}
    return [lm.generate(ids, disable_compile=plain, **options).past_key_values for plain in (False, True)]


@fast_where(lambda given: is_fast(given["mixer"], FEW))
@some_mixers(*WINDOWS, GROUPED)
def test_tokens_and_caches_are_those_of_prompts_alone(read, mixer):
    lm, ids = model([mixer, "gdn"], initializer_range=0.1), tokens(2, 19)
    assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    packed, plain = caches_of(lm, ids)
    assert read == ["called", "captured", "taken"]
    assert packed.columns == plain.columns == 19 and packed.position is None
    for one, other in zip(packed.layers, plain.layers, strict=True):
        assert one.describe() == other.describe()
        for name, x in {**other.memory, **other.context}.items():
            torch.testing.assert_close({**one.memory, **one.context}[name], x, **CLOSE)


FAST = ((0, "right"), (1, "left"))
PADDED = torch.tensor([[0] * 14 + [1] * 5, [1] * 19, [0] * 3 + [1] * 16])


@fast_where(lambda given: given["side"] == "left" and not given["mode"])
@pytest.mark.parametrize(
    ("mode", "side"),
    [
        pytest.param(mode, side, id=f"{mode}-{side}", marks=() if (number, side) in FAST else pytest.mark.slow)
        for number, mode in enumerate(({}, {"num_beams": 3}, {"do_sample": True}))
        for side in ("left", "right")
    ],
)
def test_padded_prompts(read, mode, side):
    lm, ids = model([*MIXED, *WINDOWS, GROUPED], initializer_range=0.5), tokens(3, 19)
    mask = PADDED if side == "left" else PADDED.flip(1)
    results = []
    for disabled in (True, False, False, False):
        torch.manual_seed(0)
        results.append(lm.generate(ids, attention_mask=mask, disable_compile=disabled, **{**OPTIONS, **mode}))
    assert all(torch.equal(x, results[0]) for x in results) and read == ["called", "captured", "taken", "taken"]
    packed, plain = caches_of(lm, ids, attention_mask=mask)
    assert torch.equal(packed.position, plain.position) and packed.columns == plain.columns
    with torch.no_grad():
        ids = tokens(3, 4)
        got, wanted = (lm(ids, past_key_values=cache).logits for cache in (packed, plain))
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.slow
def test_lengths_share_the_graphs_of_a_few_sizes(read):
    lm = model(MIXED, initializer_range=0.5)
    for length in (5, 64, 63, 65, 128, 100, 1, 2):
        assert torch.equal(lm.generate(tokens(1, length), **OPTIONS), called(lm, tokens(1, length)))
    assert read == ["called", "captured", "taken", "taken", "called", "captured", *["taken"] * 4]
    lm.generate(tokens(2, 5), **OPTIONS)
    assert read[10:] == ["called", "captured"]


def test_long_prompts_are_read_as_they_are(read, monkeypatch):
    monkeypatch.setattr(prompt_graphs, "MOST", 128)
    lm = model()
    for rows, length in ((1, 129), (2, 65), (3, 20)):
        assert torch.equal(lm.generate(tokens(rows, length), **OPTIONS), called(lm, tokens(rows, length)))
    assert not read


OTHERS = {
    "embeddings": {"inputs_embeds": True},
    "blocks": {"prefill_chunk_size": 4},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "without a graph": {"disable_compile": True},
    "without a cache": {"use_cache": False},
}


@pytest.mark.parametrize("given", OTHERS)
def test_prompts_in_other_forms(read, given):
    lm, ids, options = model(), tokens(2, 9), dict(OTHERS[given])
    if options.pop("inputs_embeds", False):
        options["inputs_embeds"] = lm.get_input_embeddings()(ids)
    lm.generate(None if "inputs_embeds" in options else ids, **OPTIONS, **options)
    assert not read


def test_a_cache_that_has_read_tokens_continues(read):
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 19)
    with torch.no_grad():
        cache = lm(ids[:, :9]).past_key_values
    assert torch.equal(lm.generate(ids, **OPTIONS, past_key_values=cache), called(lm, ids)) and not read


def test_a_changed_model_is_captured_anew(read):
    lm, ids = model(initializer_range=0.5), tokens(2, 9)
    for _ in range(3):
        lm.generate(ids, **OPTIONS)
    with torch.no_grad():
        lm.lm_head.weight.neg_()
    for _ in range(3):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert read == 2 * ["called", "captured", "taken", "taken"]


def test_what_waits_for_the_host_is_not_tried_again(read, monkeypatch):
    monkeypatch.setattr(prompt_graphs.PromptReader, "_capture", lambda self, *given: False)
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 9)
    for _ in range(3):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert read == ["called"]


def test_graphs_that_are_too_large_are_not_captured_again(read, monkeypatch):
    monkeypatch.setattr(kept_graphs, "most_bytes", lambda device: 0)
    lm, ids = model(), tokens(2, 9)
    for _ in range(4):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert read == ["called", "captured"] and not len(graphs_of(lm))


def test_prompts_without_memory_for_padding(read, monkeypatch):
    def fails(self, *given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prompt_graphs.PromptReader, "_call", fails)
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 9)
    for _ in range(3):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert read == ["called"]


def test_results_of_earlier_calls_stay_as_they_are(read):
    lm, (one, other) = model(MIXED, initializer_range=0.5), tokens(4, 9).split(2)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    lm.generate(one, **options)
    first = lm.generate(one, **options)
    held = [x for layer in first.past_key_values.layers for x in (*layer.memory.values(), *layer.context.values())]
    held.append(first.logits[0])
    before = [x.clone() for x in held]
    lm.generate(other, **options)
    assert read == ["called", "captured", "taken", "taken"] and all(map(torch.equal, held, before))


def test_inference_mode_has_graphs_of_its_own(read):
    lm, ids = model(initializer_range=0.5), tokens(2, 9)
    for inside in (True, True, False, False, True):
        with torch.inference_mode(inside):
            assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert read == ["called", "captured", "taken", "called", "captured", "taken", "taken"]
