"""Caches that take columns back: what a model says after `crop` is what it says to the tokens that remain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastweights.models import FastWeightsCache
from fastweights.models.decoding import DecodeSteps
from fastweights.models.recording import CROPS_TO_LENGTH, MERGED

from .hybrid import small as hybrids
from .mixers import few_mixers
from .small import CLOSE, MIXED, model, tokens

IDS = tokens(2, 40) + 1


def recorded(lm: Any, columns: int = 4, **options: Any) -> Any:
    """A cache that has read the first columns, and records."""
    cache = lm(IDS[:, :columns], use_cache=True, **options).past_key_values
    cache.activate_past_recording()
    return cache


def widths(lm: Any) -> list[int]:
    """How many columns each call of the body reads from now on."""
    read: list[int] = []
    lm.model.embed_tokens.register_forward_hook(lambda module, args, out: read.append(out.shape[1]))
    return read


MODELS: list[Callable[[], Any]] = [
    lambda: model([*MIXED, "rwkv7"], vocab_size=64),
    lambda: hybrids.hybrid("mistral", "gdn", keep=(1,)),
]
both = pytest.mark.parametrize("build", MODELS, ids=["ours", "hybrid"])


@few_mixers(MIXED)
@torch.no_grad()
def test_drafts_leave_no_trace(mixer):
    lm = model(mixer, vocab_size=64)
    cache, whole = recorded(lm), lm(IDS).logits
    at = 4
    for drafted, kept in ((3, 1), (3, 2), (5, 5), (1, 0), (4, 4), (2, 1), (6, 2)):
        draft = IDS[:, at : at + drafted].clone()
        draft[:, kept:] = 0
        torch.testing.assert_close(lm(draft, past_key_values=cache).logits[:, :kept], whole[:, at : at + kept], **CLOSE)
        at += kept
        cache.crop(at if CROPS_TO_LENGTH else kept - drafted)
        assert cache.get_seq_length() == at
    torch.testing.assert_close(lm(IDS[:, at:], past_key_values=cache).logits, whole[:, at:], **CLOSE)


@both
@torch.no_grad()
def test_what_remains_is_read_in_the_next_call_or_in_one_of_its_own(build):
    lm = build()
    whole, cache, read = lm(IDS).logits, recorded(lm), widths(lm)
    for step in range(4, 8):
        lm(IDS[:, step : step + 1], past_key_values=cache)
    cache.crop(-2)
    lm(IDS[:, 6:9], past_key_values=cache)
    assert read == [1, 1, 1, 1, 2 + 3] and cache.recording.checkpoint.get_seq_length() == 4
    lm(IDS[:, 9 : 9 + MERGED], past_key_values=cache)
    cache.crop(-1)
    logits = lm(IDS[:, 8 + MERGED :], past_key_values=cache).logits
    assert read[-2:] == [4 + MERGED, 32 - MERGED] and cache.recording.checkpoint.get_seq_length() == 8 + MERGED
    torch.testing.assert_close(logits, whole[:, 8 + MERGED :], **CLOSE)
    cache.crop(MERGED - 32)
    torch.testing.assert_close(lm(IDS[:, 8 + MERGED :], past_key_values=cache).logits, logits)


@both
@torch.no_grad()
def test_other_inputs_after_a_crop(build):
    """They are read after a call of the columns that remain."""
    lm = build()
    whole = lm(IDS, output_hidden_states=True)
    embeddings = lm.get_input_embeddings()(IDS[:, 6:])
    position = torch.arange(40).expand(2, -1)
    for given in ({"inputs_embeds": embeddings}, {"input_ids": IDS[:, 6:], "output_hidden_states": True}):
        for positions in ({}, {"position_ids": position[:, 6:]}):
            cache, read = recorded(lm), widths(lm)
            lm(IDS[:, 4:9], past_key_values=cache)
            cache.crop(-3)
            after = lm(**given, **positions, past_key_values=cache)
            torch.testing.assert_close(after.logits, whole.logits[:, 6:], **CLOSE)
            assert read[1] == 2 and cache.get_seq_length() == 40
    torch.testing.assert_close(after.hidden_states[-1], whole.hidden_states[-1][:, 6:], **CLOSE)
    cache = recorded(lm)
    lm(inputs_embeds=embeddings, past_key_values=cache)
    with pytest.raises(ValueError, match="at most the 0 columns that the cache has recorded, got 1"):
        cache.crop(-1)


@both
@torch.no_grad()
def test_positions_and_padding_are_read_again(build):
    lm = build()
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0  # beyond the first column that is recorded
    position = (mask.cumsum(1) - 1).clamp_min(0)
    given = {"attention_mask": mask, "position_ids": position}
    whole = lm(IDS, **given).logits

    def part(first: int, last: int) -> dict[str, Any]:
        return {
            "input_ids": IDS[:, first:last],
            "attention_mask": mask[:, :last],
            "position_ids": position[:, first:last],
        }

    cache = lm(**part(0, 4), use_cache=True).past_key_values
    cache.activate_past_recording()
    lm(**part(4, 10), past_key_values=cache)
    cache.crop(-3)
    logits = lm(**part(7, 40), past_key_values=cache).logits
    torch.testing.assert_close(logits, whole[:, 7:], **CLOSE)


@both
@torch.no_grad()
def test_rows_copies_and_errors(build):
    lm = build()
    whole, cache, rows = lm(IDS).logits[:, 7:], recorded(lm), torch.tensor([1, 0, 1])
    lm(IDS[:, 4:9], past_key_values=cache)
    cache.crop(-2)
    copied = cache.copy()
    hook = lm.get_submodule("model.layers.2").register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm(IDS[:, 7:], past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 7
    cache.reorder_cache(rows)
    torch.testing.assert_close(lm(IDS[rows, 7:], past_key_values=cache).logits, whole[rows], **CLOSE)
    cache.crop(-33)
    cache.batch_select_indices(rows[1:])
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([1, 1, 0, 0])
    torch.testing.assert_close(lm(IDS[rows, 7:], past_key_values=cache).logits, whole[rows], **CLOSE)
    torch.testing.assert_close(lm(IDS[:, 7:], past_key_values=copied).logits, whole, **CLOSE)
    cache.reset()
    assert cache.recording is None and cache.get_seq_length() == 0


@both
@torch.no_grad()
def test_how_far_a_crop_goes(build):
    lm = build()
    cache = lm(IDS[:, :4], use_cache=True).past_key_values
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="after activate_past_recording.. only"):
        cache.crop(-1)
    cache.activate_past_recording()
    assert cache.is_croppable
    lm(IDS[:, 4:9], past_key_values=cache)
    cache.crop(-2)
    cache.crop(torch.tensor(-1))
    cache.crop(100)
    assert cache.get_seq_length() == 6
    with pytest.raises(ValueError, match="at most the 2 columns that the cache has recorded, got 3"):
        cache.crop(-3)
    cache.crop(5)  # how many are kept
    cache.crop(-1)
    assert cache.get_seq_length() == 4 and cache.unread is None
    with pytest.raises(TypeError, match="tokens_to_remove"):
        cache.crop(1.5)


def test_memory_of_a_recording_is_the_state_once_more():
    lm = model("gdn", vocab_size=64)
    cache = recorded(lm, 30)
    held = cache.recording.checkpoint.layers
    now = cache.layers
    assert all(a.memory["S"] is b.memory["S"] for a, b in zip(held, now, strict=True))  # shared until the next call
    with torch.no_grad():
        for step in range(30, 38):
            lm(IDS[:, step : step + 1], past_key_values=cache)
    assert sum(x.numel() for layer in held for x in layer.memory.values()) == 2 * lm.state_size(30)
    assert cache.recording.columns.ids.shape == (2, 8) and cache.recording.columns.mask is None


def test_recording_ends_the_steps_of_single_tokens():
    lm = model(MIXED, vocab_size=64)
    with torch.no_grad():
        cache, whole = lm(IDS[:, :4]).past_key_values, lm(IDS).logits
        cache.steps = DecodeSteps(lm, 40, replayed=False)
        lm(IDS[:, 4:5], past_key_values=cache)
        assert all(layer.fixed for layer in cache.layers)
        cache.activate_past_recording()
        assert cache.steps is None and not any(layer.fixed for layer in cache.layers)
        lm(IDS[:, 5:9], past_key_values=cache)
        cache.crop(-3)
        torch.testing.assert_close(lm(IDS[:, 6:], past_key_values=cache).logits, whole[:, 6:], **CLOSE)


def test_an_empty_cache_records_from_its_first_token():
    lm, cache = model("gdn", vocab_size=64), FastWeightsCache.empty(2)
    cache.activate_past_recording()
    with torch.no_grad():
        lm(IDS[:, :5], past_key_values=cache)
        cache.crop(-3)
        assert cache.batch_size == 2 and cache.is_initialized and cache.columns == 0
        torch.testing.assert_close(lm(IDS[:, 2:], past_key_values=cache).logits, lm(IDS).logits[:, 2:], **CLOSE)
