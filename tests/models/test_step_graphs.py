"""Steps of decoding that later calls of generate() take over, here without a graph: what they read is always the call's own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch

from fastweights.models import decoding, generation, kept_graphs, prompt_graphs
from fastweights.models.kept_graphs import graphs_of
from tests.fast_set import fast_where

from .mixers import FEW, is_fast, some_mixers
from .small import MIXED, PROMPTS, model, tokens

WINDOW = {"name": "softmax", "window": 5}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def started(monkeypatch):
    """Of every call by steps, whether it began a step of its own."""
    began = []
    begin, start = decoding.DecodeSteps.begin, decoding.DecodeSteps._start

    def noted_start(self, *given):
        began.append(False)
        return start(self, *given)

    def noted_begin(self, *given):
        began[-1] = True
        return begin(self, *given)

    monkeypatch.setattr(decoding.DecodeSteps, "_start", noted_start)
    monkeypatch.setattr(decoding.DecodeSteps, "begin", noted_begin)
    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    monkeypatch.setattr(prompt_graphs, "MOST", 0)
    return began


def called(lm, ids, **options):
    return lm.generate(ids, **{**OPTIONS, **options}, disable_compile=True)


@fast_where(lambda given: is_fast(given["mixer"], FEW))
@some_mixers(WINDOW)
def test_the_second_call_takes_the_step_of_the_first(started, mixer):
    lm, (one, other) = model([mixer, "gdn"], initializer_range=0.1), tokens(4, 9).split(2)
    wanted = called(lm, other)
    lm.generate(one, **OPTIONS)
    assert torch.equal(lm.generate(other, **OPTIONS), wanted)
    assert started == [True, False] and len(graphs_of(lm)) == 1


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"attention_mask": PROMPTS[:, -9:]}], ids=["beams", "padded"])
def test_other_kinds_of_call_take_it_too(started, mode):
    lm, (one, other) = model(MIXED, initializer_range=0.5), tokens(6, 9).split(3)
    wanted = called(lm, other, **mode)
    lm.generate(one, **OPTIONS, **mode)
    assert torch.equal(lm.generate(other, **OPTIONS, **mode), wanted)
    assert started == [True, False]


@pytest.mark.parametrize(("first", "then", "taken"), [(12, 5, True), (12, 12, True), (5, 12, False)])
def test_keys_find_place_in_a_step_with_as_many_slots(started, first, then, taken):
    lm, ids = model(["softmax", WINDOW, "gdn"], initializer_range=0.5), tokens(2, 9)
    wanted = called(lm, ids[:, :then], max_new_tokens=8)
    lm.generate(ids[:, :first], **{**OPTIONS, "max_new_tokens": 8})
    assert torch.equal(lm.generate(ids[:, :then], **{**OPTIONS, "max_new_tokens": 8}), wanted)
    assert started == [True, not taken]


@pytest.mark.slow
def test_other_numbers_of_sequences_have_steps_of_their_own(started, monkeypatch):
    monkeypatch.setattr(kept_graphs, "MOST", 2)
    lm = model()
    for rows in (1, 2, 1, 2, 3, 1):
        assert torch.equal(lm.generate(tokens(rows, 5), **OPTIONS), called(lm, tokens(rows, 5)))
    assert started == [True, True, False, False, True, True] and len(graphs_of(lm)) == 2


CHANGES = {
    "a weight": lambda lm: lm.model.layers[0].mixer.qkv.q_proj.weight.neg_(),
    "a new weight": lambda lm: setattr(lm.lm_head, "weight", torch.nn.Parameter(-lm.lm_head.weight.detach())),
    "a setting": lambda lm: setattr(lm.model.norm, "eps", 10.0),
    "a layer": lambda lm: lm.model.layers.__setitem__(0, copy.deepcopy(lm.model.layers[1])),
    "training": lambda lm: lm.train().eval(),
    "on request": lambda lm: lm.release_step_graphs(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_a_new_step(started, change):
    lm = model(initializer_range=0.5)
    lm.generate(tokens(2, 9), **OPTIONS)
    with torch.no_grad():
        CHANGES[change](lm)
    assert torch.equal(lm.generate(tokens(2, 9), **OPTIONS), called(lm, tokens(2, 9)))
    assert started == [True, True] and len(graphs_of(lm)) == 1


def test_padded_prompts_have_a_step_beside_that_of_others(started):
    lm, ids = model(["softmax", "gdn"], initializer_range=0.5), tokens(3, 9)
    mask = {"attention_mask": PROMPTS[:, -9:]}
    for padded in (False, True, False, True):
        given = mask if padded else {}
        assert torch.equal(lm.generate(ids, **OPTIONS, **given), called(lm, ids, **given))
    assert started == [True, True, False, False]


def test_what_a_call_left_in_slots_harms_no_later_one(started):
    lm, ids = model(["softmax", "gdn"], initializer_range=0.5), tokens(2, 9)
    lm.generate(ids, **OPTIONS)
    (kept,) = graphs_of(lm)._kept
    for x in kept.layers[0].memory.values():
        x.fill_(torch.nan)
    assert torch.equal(lm.generate(ids[:, :5], **OPTIONS), called(lm, ids[:, :5])) and started == [True, False]


def test_modules_of_other_packages_are_not_judged(started):
    class Scaled(torch.nn.Linear):
        pass

    lm = model()
    lm.model.layers[0].mixer.output.o_proj.__class__ = Scaled
    for _ in range(2):
        lm.generate(tokens(2, 9), **OPTIONS)
    assert started == [True, True] and not len(graphs_of(lm))


def test_weights_without_a_version_are_not_judged(started):
    with torch.inference_mode():
        lm = model()
        for _ in range(2):
            lm.generate(tokens(2, 9), **OPTIONS)
    assert started == [True, True] and not len(graphs_of(lm))


def test_a_cache_that_was_returned_stays_as_it_is(started):
    lm, (one, other) = model(MIXED, initializer_range=0.5), tokens(4, 9).split(2)
    cache = lm.generate(one, **OPTIONS, return_dict_in_generate=True).past_key_values
    held = [x.clone() for layer in cache.layers for x in (*layer.memory.values(), *layer.context.values())]
    lm.generate(other, **OPTIONS)
    after = [x for layer in cache.layers for x in (*layer.memory.values(), *layer.context.values())]
    assert started == [True, False] and all(map(torch.equal, held, after))


def test_a_call_within_a_call_has_a_step_of_its_own(started):
    lm, ids = model(initializer_range=0.5), tokens(2, 9)
    wanted, inner = called(lm, ids), []

    def ask(given, scores, **_):
        if given.shape[1] == 14:
            inner.append(lm.generate(ids.flip(1), **OPTIONS))
        return torch.zeros(len(given), dtype=torch.bool)

    lm.generate(ids, **OPTIONS)
    assert torch.equal(lm.generate(ids, **OPTIONS, stopping_criteria=[ask]), wanted)
    assert torch.equal(inner[0], called(lm, ids.flip(1))) and started == [True, False, True]


def test_a_call_that_fails_leaves_a_step_that_serves(started):
    lm, ids = model(initializer_range=0.5), tokens(2, 9)

    def fail(given, scores, **_):
        if given.shape[1] == 14:
            raise ZeroDivisionError
        return torch.zeros(len(given), dtype=torch.bool)

    with pytest.raises(ZeroDivisionError):
        lm.generate(ids, **OPTIONS, stopping_criteria=[fail])
    assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids)) and started == [True, False]


def test_steps_that_are_too_large_are_not_kept(started, monkeypatch):
    lm = model()
    lm.generate(tokens(2, 9), **OPTIONS)
    one = graphs_of(lm).bytes
    assert one >= 2 * lm.state_size(1) * 4  # the states of two sequences in float32
    lm.generate(tokens(1, 9), **OPTIONS)
    assert len(graphs_of(lm)) == 2
    monkeypatch.setattr(kept_graphs, "most_bytes", lambda device: one + one // 4)
    lm.generate(tokens(1, 9), **OPTIONS)
    assert len(graphs_of(lm)) == 1
    monkeypatch.setattr(kept_graphs, "most_bytes", lambda device: one // 4)
    lm.generate(tokens(2, 9), **OPTIONS)
    assert started == [True, True, False, True]


def test_copies_have_none_and_the_end_of_the_model_ends_them(started):
    lm = model()
    lm.generate(tokens(2, 9), **OPTIONS)
    assert not len(graphs_of(copy.deepcopy(lm))) and not len(graphs_of(pickle.loads(pickle.dumps(lm))))
    kept = weakref.ref(graphs_of(lm))
    del lm
    gc.collect()
    assert kept() is None
