"""The end of an answer, seen one token late: the same tokens and random numbers, and nothing late where others would see it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import TextStreamer
from transformers.generation import StoppingCriteria, StoppingCriteriaList, utils

from fastweights.models import decoding, generation, late_end
from fastweights.models.late_end import LateEnd, can_end_late
from tests.fast_set import fast_where

from .small import model, tokens


class Event:
    """Of a CPU, which waits for nothing."""

    def __init__(self, **options):
        pass

    def record(self):
        pass

    synchronize = record


@pytest.fixture(params=["flag", "deferred"])
def late(monkeypatch, request):
    """Whether an end was seen late, of every call, which all end as on a GPU: by the loop of early versions of transformers,
    which does not look at the flag, or by that of later ones (5.17), which can defer the look."""
    found = []
    finish = LateEnd.finish

    def noted(self, sequences):
        result = finish(self, sequences)
        found.append(result.shape[1] < self.columns)
        return result

    monkeypatch.setattr(LateEnd, "finish", noted)
    monkeypatch.setattr(generation, "can_end_late", lambda device, *given: can_end_late(torch.device("cuda"), *given))
    monkeypatch.setattr(generation, "can_replay", lambda model: True)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    has_means = hasattr(utils, "DeferredStopCheck")
    if request.param == "deferred":
        if not has_means:
            pytest.skip("this version of transformers defers nothing")
        monkeypatch.setattr(torch, "Event", Event)
    elif has_means:
        monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(lambda *given, **more: False))
        monkeypatch.setattr(utils.StopCheck, "__call__", lambda self, unfinished, *given: unfinished.max() == 0)
    return found


def ends_of(lm, ids, new):
    """Token ids that the answers have at some places."""
    answers = lm.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, disable_compile=True)
    return answers[:, ids.shape[1] :]


@fast_where(lambda given: given["rows"] == (1 if given["place"] in (0, 18) else 3) and given["place"] != 1)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 5, 18, 19])
def test_an_answer_that_ends_is_as_long_as_ever(late, rows, place, request):
    """At its first token, before steps begin, at their first, in the middle, before the last and at the last."""
    lm, ids, new = model(["gdn", "rls"], initializer_range=0.1), tokens(rows, 9), 20
    eos = ends_of(lm, ids, new)[:, place].unique().tolist()
    late.clear()
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    wanted = lm.generate(ids, disable_compile=True, **options)
    got = lm.generate(ids, **options)
    assert torch.equal(got, wanted) and got.is_contiguous()
    columns = wanted.shape[1] - 9
    # Deferred, the look is late from the first token on; otherwise from the first that steps decode.
    first = 1 if request.node.callspec.params["late"] == "deferred" else 2
    assert late == [False, first <= columns < new]


def test_random_numbers_go_on_as_if_nothing_was_drawn_too_many(late, monkeypatch):
    """The generator of a CPU stands for that of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    monkeypatch.setattr(late_end, "Flag", bool)
    init = LateEnd.__init__

    def on_gpu(self, *given):
        init(self, *given)
        self.device = torch.device("cuda")

    monkeypatch.setattr(LateEnd, "__init__", on_gpu)
    lm, ids = model(["gdn"], initializer_range=0.1), tokens(2, 9)
    drawn = {}
    for disabled in (True, False):
        torch.manual_seed(0)
        options = {"max_new_tokens": 40, "do_sample": True, "eos_token_id": [0, 1, 2, 3], "pad_token_id": 0}
        drawn[disabled] = [lm.generate(ids, disable_compile=disabled, **options).tolist() for _ in range(8)]
    assert drawn[True] == drawn[False] and any(late[8:]) and not any(late[:8])


def test_an_end_by_length_is_not_seen_late(late):
    lm, ids = model(["gdn"]), tokens(2, 9)
    got = lm.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert got.shape[1] == 21 and late == [False]


class Counting(StoppingCriteria):
    """Counts how often it is asked, and ends an answer at a length."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __call__(self, input_ids, scores, **more):
        self.asked += 1
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("mode", ["dict", "streamer", "criterion", "processor", "prefix", "cache", "beams"])
def test_nobody_sees_a_token_too_many(late, mode):
    """Where a caller would see it, the end is seen at once."""
    lm, ids = model(["gdn"], initializer_range=0.1), tokens(1, 9)
    eos = ends_of(lm, ids, 20)[0, 10].item()
    late.clear()
    put, counting = [], Counting(25)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    streamer = TextStreamer.__new__(TextStreamer)
    streamer.put, streamer.end = put.append, lambda: None
    cache = lm(ids[:, :-1], use_cache=True).past_key_values
    more = {
        "dict": {"return_dict_in_generate": True},
        "streamer": {"streamer": streamer},
        "criterion": {"stopping_criteria": StoppingCriteriaList([counting])},
        "processor": {"logits_processor": [lambda ids, scores: put.append(ids) or scores]},
        "prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: put.append(ids) or [*range(32)]},
        "cache": {"past_key_values": cache},
        "beams": {"num_beams": 2},
    }[mode]
    lm.generate(ids, **options, **more)
    assert not any(late)
    if mode == "criterion":
        assert counting.asked == min(16, (ends_of(lm, ids, 20)[0] == eos).nonzero()[0].item() + 1)


def test_on_a_cpu_the_end_is_seen_at_once(monkeypatch):
    monkeypatch.setattr(LateEnd, "__init__", None)
    lm, ids = model(["gdn"]), tokens(1, 9)
    assert lm.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None).shape[1] == 13
    settings = {"generation_config": lm.generation_config}
    assert not can_end_late(torch.device("cpu"), settings, {})


def test_the_loop_takes_arguments_by_place_and_by_name():
    lm, ids = model(["gdn"]), tokens(1, 9)

    def by_place(lm, input_ids, logits_processor, stopping_criteria, generation_config, **more):
        return lm._sample(input_ids, logits_processor, stopping_criteria, generation_config, **more)

    def by_name(lm, input_ids, **more):
        return lm._sample(input_ids=input_ids, **more)

    wanted = lm.generate(ids, max_new_tokens=4, do_sample=False)
    for loop in (by_place, by_name):
        assert torch.equal(lm.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=loop), wanted)
