"""Drafted tokens that are read packed, with padding behind them, here without a graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastweights.models import assisted, decoding, draft_graphs, generation, kept_graphs
from fastweights.models.draft_graphs import DraftReader
from fastweights.models.kept_graphs import describe_model, graphs_of
from tests.fast_set import fast_where

from .drafting import GREEDY, PROMPT, assistants, large, without_surplus
from .mixers import every_mixer
from .small import CLOSE, model, tokens

MEMORIES = ["gdn", "lattice", "rwkv7"]
WINDOWS = [{"name": "softmax", "window": width} for width in (1, 5, 40)]
GROUPED = {"name": "softmax", "num_kv_heads": 1, "rope_theta": None, "conv_size": 4}
HYBRID = ["gdn", *WINDOWS, GROUPED, "softmax"]
both = pytest.mark.parametrize("mixer", [MEMORIES, HYBRID], ids=["memories", "hybrid"])


class Seen:
    """What readers did: the widths that they captured, how many tokens each call read, None where it was read in another way,
    and how often a state was copied to where the readings begin."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.read: list[int | None] = []
        self.filled = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    read, capture, copy_all = DraftReader.read, DraftReader._capture, draft_graphs.copy_all
    call = DraftReader._call

    def overwriting_call(self: DraftReader, kept: Any) -> None:
        """As a replay does, into the tensors of the call before."""
        before = [kept.hidden, *kept.ends]
        call(self, kept)
        if before[0] is not None:
            copy_all(before, [kept.hidden, *kept.ends])
            kept.hidden, kept.ends = before[0], before[1:]

    def noted_read(self: DraftReader, ids: torch.Tensor, *given: Any) -> Any:
        hidden = read(self, ids, *given)
        found.read.append(None if hidden is None else ids.shape[1])
        return hidden

    def noted_capture(self: DraftReader, kept: Any) -> bool:
        found.captured.append(kept.ids.shape[1])
        return capture(self, kept)

    def noted_copies(into: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        found.filled += given[0].untyped_storage().nbytes() == given[0].nbytes  # a state, not a part of what was read
        copy_all(into, given)

    monkeypatch.setattr(DraftReader, "read", noted_read)
    monkeypatch.setattr(DraftReader, "_call", overwriting_call)
    monkeypatch.setattr(DraftReader, "_capture", noted_capture)
    monkeypatch.setattr(draft_graphs, "copy_all", noted_copies)
    monkeypatch.setattr(assisted, "can_replay", lambda lm: True)
    monkeypatch.setattr(generation, "can_replay", lambda lm: True)
    monkeypatch.setattr(generation, "prefill_block", lambda lm, rows, length: length)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    monkeypatch.setattr(assisted, "DraftReader", partial(DraftReader, replayed=False))
    return found


@fast_where(lambda given: given["mixer"] == HYBRID)
@every_mixer(MEMORIES, HYBRID, fast=set())
def test_greedy_tokens_are_those_without_an_assistant(seen, mixer):
    lm = large(mixer)
    wanted = lm.generate(PROMPT, **GREEDY)
    for name, assistant in assistants(lm).items():
        got = lm.generate(PROMPT, **GREEDY, **assistant)
        assert torch.equal(without_surplus(got, wanted), wanted), name
    assert seen.read and None not in seen.read
    assert 0 < seen.filled < len(seen.read)


@both
@torch.no_grad()
def test_hidden_states_and_caches_are_those_of_the_model(seen, monkeypatch, mixer):
    """Also where the caches of an earlier reading are read after a later one, and where slots are too few."""
    monkeypatch.setattr(draft_graphs, "SLOTS", 90)
    lm, ids = model(mixer, initializer_range=0.1), tokens(1, 60)
    reader = DraftReader(lm, lambda: describe_model(lm), replayed=False)
    caches = [lm.model(ids[:, :3], use_cache=True).past_key_values]
    whole = lm.model(ids).last_hidden_state
    for first, last in ((3, 4), (4, 20), (20, 51), (51, 55)):
        caches.append(caches[-1].copy())
        got = reader.read(ids[:, first:last], None, caches[-1])
        torch.testing.assert_close(got, whole[:, first:last], **CLOSE)
        assert caches[-1].columns == last
    assert seen.captured == [16, 64, *([16] if mixer is HYBRID else [])]
    for cache in caches:
        at = cache.columns
        reader.leave_slots(cache)
        rest = lm.model(ids[:, at:], past_key_values=cache).last_hidden_state
        torch.testing.assert_close(rest, whole[:, at:], **CLOSE)


@fast_where(lambda given: given["padding"] == (0, 3))
@pytest.mark.parametrize(
    ("padding", "mixer"),
    [
        pytest.param((3, 0), MEMORIES, id="left-memories"),
        pytest.param((3, 0), HYBRID, id="left-hybrid", marks=pytest.mark.slow),
        pytest.param((0, 3), MEMORIES, id="right-memories", marks=pytest.mark.slow),
        pytest.param((0, 3), HYBRID, id="right-hybrid"),
    ],
)
def test_padded_prompts(seen, padding, mixer):
    lm = large(mixer)
    wanted = lm.generate(PROMPT, **GREEDY)[:, PROMPT.shape[1] :]
    ids, mask = F.pad(PROMPT, padding), F.pad(torch.ones_like(PROMPT), padding)
    for name, assistant in assistants(lm).items():
        got = lm.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY, **assistant)
        assert torch.equal(got, torch.cat([ids, wanted], 1)), name
    assert seen.read and None not in seen.read


@torch.no_grad()
def test_what_is_read_by_the_model(seen):
    """Padding among the tokens, several sequences, many tokens, and the beginning of a sequence."""
    lm, mask = large("gdn"), torch.ones(1, 9, dtype=torch.long)
    reader = DraftReader(lm, lambda: describe_model(lm), replayed=False)
    cache = lm.model(tokens(1, 4), use_cache=True).past_key_values
    assert reader.read(tokens(1, 5), mask, cache.copy()) is not None
    mask[0, 6] = 0
    assert reader.read(tokens(1, 5), mask, cache.copy()) is None
    assert reader.read(tokens(1, 65), None, cache.copy()) is None
    assert reader.read(tokens(1, 5), None, draft_graphs.FastWeightsCache.empty(2)) is None
    cache.batch_repeat_interleave(2)
    assert reader.read(tokens(2, 5), None, cache) is None


def test_captured_readings_serve_later_calls_until_a_weight_changes(seen):
    lm, options = large("gdn"), {**GREEDY, "prompt_lookup_num_tokens": 3}
    for _ in range(2):
        lm.generate(PROMPT, **options)
    assert seen.captured == [16] and len(graphs_of(lm)) == 2  # and that of the prompt
    with torch.no_grad():
        lm.lm_head.weight.neg_()
    assert torch.equal(lm.generate(PROMPT, **options), lm.generate(PROMPT, **GREEDY))
    assert seen.captured == [16, 16]
    read = len(seen.read)
    lm.generate(PROMPT, disable_compile=True, **options)
    assert len(seen.read) == read


def test_a_layer_that_waits_for_the_host_is_not_tried_again(seen, monkeypatch):
    monkeypatch.setattr(DraftReader, "_capture", lambda self, kept: seen.captured.append(0))
    lm = large("gdn")
    for _ in range(2):
        assert torch.equal(lm.generate(PROMPT, **GREEDY, prompt_lookup_num_tokens=3), lm.generate(PROMPT, **GREEDY))
    assert seen.captured == [0] and set(seen.read) == {None}


def test_what_cannot_be_kept_is_not_captured_again(seen, monkeypatch):
    monkeypatch.setattr(kept_graphs, "most_bytes", lambda device: 1000)
    lm = large("gdn")
    assert torch.equal(lm.generate(PROMPT, **GREEDY, prompt_lookup_num_tokens=3), lm.generate(PROMPT, **GREEDY))
    assert seen.captured == [16] and seen.read[1:] == [None] * (len(seen.read) - 1)


@both
def test_a_cache_is_an_ordinary_one_afterwards(seen, mixer):
    lm = model(mixer, initializer_range=0.1)
    result = lm.generate(PROMPT, **GREEDY, prompt_lookup_num_tokens=3, return_dict_in_generate=True)
    cache = result.past_key_values
    assert cache.drafts is None and cache.recording is None and seen.read
    assert not any("filled" in layer.context for layer in cache.layers)
    longer = F.pad(result.sequences, (0, 2), value=5)
    with torch.no_grad():
        after = lm(longer[:, cache.columns :], past_key_values=cache).logits
        torch.testing.assert_close(after, lm(longer).logits[:, -after.shape[1] :], **CLOSE)
