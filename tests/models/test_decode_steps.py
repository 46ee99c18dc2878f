"""generate() by steps of one token over fixed caches, as they are captured on a GPU: the same tokens, logits and caches."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers.generation import MaxLengthCriteria

from fastweights.layers.probe import probe
from fastweights.layers.softmax_attention import SoftmaxAttention
from fastweights.models import FastWeightsCache, decoding, generation, kept_graphs
from tests.fast_set import fast_where

from .live_bytes import LiveBytes
from .mixers import FEW, is_fast, some_mixers
from .small import CLOSE, HYBRID, MIXED, PROMPTS, model, tokens

WINDOW = {"name": "softmax", "window": 5}


@pytest.fixture
def by_steps(monkeypatch):
    """A function that calls generate() once as ever and once by steps, and gives both results. Nothing is captured here."""

    def both(lm, *inputs, cache=None, steps=None, **options):
        results = []
        for serves in (False, True):
            monkeypatch.setattr(generation, "can_replay", lambda model, serves=serves: serves)
            given = {} if cache is None else {"past_key_values": cache.copy()}
            torch.manual_seed(0)
            results.append(lm.generate(*inputs, return_dict_in_generate=True, output_logits=True, **given, **options))
        assert len(taken) == (options["max_new_tokens"] - 1 if steps is None else steps)
        taken.clear()
        return results

    taken = []
    call = decoding.DecodeSteps.__call__

    def count(self, *given):
        taken.append(given)
        return call(self, *given)

    monkeypatch.setattr(decoding.DecodeSteps, "__call__", count)
    monkeypatch.setattr(decoding, "FEWEST", 1)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    return both


def assert_same(calls, steps, exact_cache=True):
    assert torch.equal(calls.sequences, steps.sequences)
    torch.testing.assert_close(torch.stack(steps.logits), torch.stack(calls.logits), **CLOSE)
    before, after = calls.past_key_values, steps.past_key_values
    assert before.columns == after.columns and after.steps is None
    for one, other in zip(before.layers, after.layers, strict=True):
        assert (
            not other.fixed and one.memory.keys() == other.memory.keys() and one.context.keys() == other.context.keys()
        )
        for held, kept in ((one.memory, other.memory), (one.context, other.context)):
            for name, x in held.items():
                torch.testing.assert_close(kept[name], x, **CLOSE)


@fast_where(lambda given: is_fast(given["mixer"], FEW))
@some_mixers(WINDOW)
def test_every_mixer(by_steps, mixer):
    lm = model([mixer, "gdn"], initializer_range=0.1)
    assert_same(*by_steps(lm, tokens(2, 9), max_new_tokens=12, do_sample=True))


@pytest.mark.parametrize(
    "mode",
    [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}, {"num_beams": 3, "do_sample": True}],
    ids=str,
)
def test_several_sequences_per_prompt(by_steps, mode):
    calls, steps = by_steps(model(MIXED, initializer_range=0.5), tokens(2, 9), max_new_tokens=10, **mode)
    assert torch.equal(calls.sequences, steps.sequences)


@pytest.mark.parametrize("block", [None, 1, 3])
def test_prompts_of_different_lengths(by_steps, block):
    """Blocks of one token of the prompt may be padding, so they are no steps."""
    options = {"attention_mask": PROMPTS, "prefill_chunk_size": block, "do_sample": False}
    calls, steps = by_steps(model(MIXED), tokens(3, 12), max_new_tokens=8, **options)
    assert_same(calls, steps)
    assert torch.equal(calls.past_key_values.position, steps.past_key_values.position)


@pytest.mark.parametrize("new", [2, 30])
def test_a_cache_that_was_given_goes_on(by_steps, new):
    """Its tensors are not written to, and calls after generate() continue where that ended."""
    lm, ids = model([*HYBRID, WINDOW]), tokens(2, 20)
    cache = lm(ids[:, :12]).past_key_values
    held = [x.clone() for layer in cache.layers for x in layer.memory.values()]
    calls, steps = by_steps(lm, ids, cache=cache, max_new_tokens=new, do_sample=False)
    assert_same(calls, steps)
    assert all(map(torch.equal, held, (x for layer in cache.layers for x in layer.memory.values())))
    more = [lm(ids[:, :7], past_key_values=one.past_key_values).logits for one in (calls, steps)]
    torch.testing.assert_close(*more, **CLOSE)


@pytest.mark.parametrize("left_out", [0, 3])
def test_a_copy_made_between_steps_keeps_its_point(by_steps, monkeypatch, left_out):
    """Steps write into the tensors of the cache that they continue."""
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :left_out] = 0
    cache, copies = FastWeightsCache.empty(len(MIXED)), []
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}

    def stop(ids, scores, **_):
        if ids.shape[1] == 14:
            copies.append(cache.copy())
        return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    wanted = lm.generate(ids, past_key_values=cache, stopping_criteria=[stop], **options)
    (copied,) = copies
    assert copied.columns == 13 and copied.steps is None
    options |= {"attention_mask": torch.cat([mask, mask.new_ones(2, 5)], 1), "max_new_tokens": 7}
    assert torch.equal(lm.generate(wanted[:, :14], past_key_values=copied, **options), wanted)


def other_forms(lm, ids, mask):
    """The prompt in the forms that generate() takes besides its ids: embeddings, and a cache of its beginning with the rest."""
    cache = lm(ids[:, :12], attention_mask=mask[:, :12]).past_key_values
    embeddings = lm.get_input_embeddings()(ids)
    return [
        ([], {"inputs_embeds": embeddings}),
        ([ids], {"inputs_embeds": embeddings}),
        ([ids[:, 12:]], {"cache": cache}),
    ]


FORMS, MODES = ("embeddings", "embeddings and ids", "cache and new ids"), ({}, {"do_sample": True}, {"num_beams": 2})
# In the fast set are every form and every mode, and rows with and without padding; all three meet in the slow set.
CALLS = [
    pytest.param(
        form, padded, mode, id=f"{mode}-{padded}-{FORMS[form]}",
        marks=() if form == number and padded == (form != 1) else pytest.mark.slow,
    )
    for number, mode in enumerate(MODES)
    for padded in (False, True)
    for form in range(len(FORMS))
]  # fmt: skip


@fast_where(lambda given: not given["mode"])
@pytest.mark.parametrize(("form", "padded", "mode"), CALLS)
def test_slots_are_reserved_for_all_of_a_prompt_whatever_its_form(by_steps, form, padded, mode):
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 30)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :7] = 0
    given, options = other_forms(lm, ids, mask)[form]
    if "num_beams" in mode and "cache" in options:
        options["cache"].batch_repeat_interleave(mode["num_beams"])
    calls, steps = by_steps(
        lm, *given, attention_mask=mask, max_new_tokens=50, **options, **{"do_sample": False, **mode}
    )
    assert torch.equal(calls.sequences, steps.sequences)
    if "num_beams" not in mode:
        assert_same(calls, steps)


@pytest.mark.parametrize("form", ["ids", "inputs_embeds"])
def test_a_prompt_longer_than_what_comes_is_read_by_steps_too(by_steps, form):
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 30)
    given = [ids] if form == "ids" else []
    options = {} if form == "ids" else {form: lm.get_input_embeddings()(ids)}
    assert_same(*by_steps(lm, *given, max_new_tokens=10, do_sample=False, **options))
    assert_same(*by_steps(lm, *given, max_length=40, steps=9, do_sample=False, **options))


def test_what_goes_on_beyond_its_length_is_called(by_steps):
    """A criterion of the caller's own takes the place of the one that stops there."""
    longer = {"max_new_tokens": 10, "stopping_criteria": [MaxLengthCriteria(40)]}
    assert_same(*by_steps(model(MIXED, initializer_range=0.5), tokens(2, 9), steps=10, do_sample=False, **longer))


@pytest.mark.parametrize("work", ["fixed_cache", "free_cache"])
def test_caches_are_replaced_a_layer_at_a_time(monkeypatch, by_steps, work):
    """No more than the keys of one layer are in memory twice, where the steps are too large to be kept."""
    monkeypatch.setattr(kept_graphs, "most_bytes", lambda device: 0)
    lm, before, alive = model(["softmax"] * 4), [], []
    replace = getattr(SoftmaxAttention, work)

    def noted(self, cache, *given):
        before.append(weakref.ref(cache.memory["keys"]))
        alive.append(sum(keys() is not None for keys in before))
        return replace(self, cache, *given)

    monkeypatch.setattr(SoftmaxAttention, work, noted)
    by_steps(lm, tokens(2, 9), max_new_tokens=4, do_sample=False)
    assert alive == [1] * 4


def test_fixed_keys_are_made_once():
    lm = model("softmax")
    cache, layer = lm(tokens(2, 9)).past_key_values.layers[0], lm.model.layers[0].mixer
    with LiveBytes() as live:
        fixed = layer.fixed_cache(cache, 6)
    assert {x.shape[1] for x in fixed.memory.values()} == {15}
    assert live.most == sum(x.nbytes for held in (fixed.memory, fixed.context) for x in held.values())


@fast_where(lambda given: given["full"] == 3)
@pytest.mark.parametrize("mixer", [MIXED, pytest.param(["softmax"] * 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("full", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_without_memory_for_the_slots_layers_are_called(monkeypatch, by_steps, mixer, full):
    lm = model(mixer, initializer_range=0.5)
    layer = lm.model.layers[full].mixer
    fixed_cache = type(layer).fixed_cache

    def fails(self, *given):
        if self is layer:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return fixed_cache(self, *given)

    monkeypatch.setattr(type(layer), "fixed_cache", fails)
    with pytest.warns(UserWarning, match="without a CUDA graph, because memory does not hold the slots") as warned:
        assert_same(*by_steps(lm, tokens(2, 9), max_new_tokens=30, steps=0, do_sample=False))
    assert len(warned) == 1


@pytest.mark.parametrize("new, steps", [(7, 0), (8, 7)])
def test_few_tokens_are_not_worth_a_capture(by_steps, monkeypatch, new, steps):
    monkeypatch.setattr(decoding, "FEWEST", 8)
    by_steps(model(), tokens(1, 4), max_new_tokens=new, steps=steps)


@pytest.mark.parametrize(
    "options", [{"disable_compile": True}, {"output_hidden_states": True, "return_dict_in_generate": True}]
)
def test_what_is_asked_for_in_other_ways_is_no_step(monkeypatch, options):
    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    monkeypatch.setattr(generation, "DecodeSteps", None)  # which a call would fail with
    model().generate(tokens(1, 4), max_new_tokens=12, **options)


def test_a_model_on_the_cpu_is_not_captured():
    assert not decoding.can_replay(model())


def test_a_call_that_fails_leaves_an_ordinary_cache(by_steps, monkeypatch):
    """From which another call continues."""
    lm, ids = model(MIXED, initializer_range=0.5), tokens(2, 9)
    wanted = lm.generate(ids, max_new_tokens=12, do_sample=False)
    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    cache = FastWeightsCache.empty(len(MIXED))

    def fail(ids, scores, **_):
        if ids.shape[1] == 14:
            raise ZeroDivisionError
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(ZeroDivisionError):
        lm.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, stopping_criteria=[fail])
    assert cache.columns == 13 and cache.steps is None and not any(layer.fixed for layer in cache.layers)
    mask = torch.ones(2, 14, dtype=torch.long)
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    assert torch.equal(lm.generate(wanted[:, :14], past_key_values=cache, **options), wanted)


@pytest.fixture
def on_gpu(monkeypatch):
    """A model that has generated, and then says that it is on a GPU."""
    lm = model(MIXED)
    lm.generate(tokens(1, 4), max_new_tokens=2)
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    assert decoding.can_replay(lm)
    return lm


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("name", ["", "model", "model.layers.1", "model.layers.1.mixer.q_proj", "lm_head"])
def test_a_model_with_hooks_is_not_captured(on_gpu, name, kind):
    """A replay would not run them."""
    hook = getattr(on_gpu.get_submodule(name), kind)(lambda *given: None)
    assert not decoding.can_replay(on_gpu)
    hook.remove()
    assert decoding.can_replay(on_gpu)


def test_a_model_that_accelerate_has_wrapped_is_not_captured(on_gpu):
    add_hook_to_module(on_gpu.model.layers[0], ModelHook())
    assert not decoding.can_replay(on_gpu)


def test_a_model_in_training_or_under_autocast_is_not_captured(on_gpu, monkeypatch):
    on_gpu.train()
    assert not decoding.can_replay(on_gpu)
    on_gpu.eval()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert not decoding.can_replay(on_gpu)


def test_a_model_with_an_open_probe_is_not_captured(on_gpu):
    with probe(on_gpu, "q"):
        assert not decoding.can_replay(on_gpu)
    assert decoding.can_replay(on_gpu)
