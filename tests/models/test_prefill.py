"""The block of a prompt that generate() reads at a time follows the free memory, and changes no token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastweights.models import prompts
from fastweights.models.prompts import largest_block, prefill_block, token_bytes

from .live_bytes import LiveBytes
from .mixers import some_mixers
from .small import CLOSE, MIXED, PROMPTS, model, tokens


@pytest.mark.parametrize(
    "room, block",
    [
        (1000 * 10, 1000),  # one pass needs less than a block of the same size
        (1000 * 10 - 1, 256),
        (512 * 20, 1000),
        (512 * 20 - 500, 256),
        (64 * 20, 64),
        (1, 64),
        (-1, 64),
    ],
)
def test_one_pass_or_the_largest_block_that_fits(room, block):
    assert largest_block(1000, room=room, bytes_whole=10, bytes_in_block=20) == block


def test_blocks_are_powers_of_two_times_the_chunk():
    found = {largest_block(10**6, room=room, bytes_whole=1, bytes_in_block=1) for room in range(1, 10**6, 61)}
    assert found == {64 * 2**n for n in range(14)}  # up to 2^19


def free(monkeypatch, memory):
    monkeypatch.setattr(prompts, "free_memory", lambda device: memory)


def test_more_prompts_less_memory_and_wider_models_have_smaller_blocks(monkeypatch):
    lm, length = model(), 1 << 20

    def block(lm=lm, rows=1, memory=10**9):
        free(monkeypatch, memory)
        return prefill_block(lm, rows, length)

    assert block(rows=4) == block() // 4
    assert block(memory=10**9 // 2) == block() // 2
    assert block(model(hidden_size=32), memory=10**8) <= block(memory=10**8) // 2
    assert block(model(intermediate_size=4096)) < block()
    assert block(model().bfloat16()) == 2 * block()
    assert block(memory=10**12) == length


def test_on_a_cpu_blocks_are_small():
    assert prefill_block(model(), 1, 10**6) == 512


def test_keys_and_values_of_softmax_layers_are_not_free(monkeypatch):
    lm, length = model("softmax"), 10**6
    kept = lm.state_size(length) * 4
    whole = kept + 2 * length * token_bytes(lm, length, whole=True)
    for memory, fits in ((whole, True), (whole - 4, False)):
        free(monkeypatch, memory)
        assert (prefill_block(lm, 1, length) == length) == fits


@pytest.mark.parametrize(
    "options, whole, in_blocks",
    [
        ({}, 0, 5 * 1000),  # a mask, and its copy in float32
        ({"num_kv_heads": 1}, 0, 2 * 12 * 1000),  # three times the scores of two heads
        ({"window": 100}, 5 * 200, 5 * 200),
        ({"window": 100, "num_kv_heads": 1}, 2 * 12 * 200, 2 * 12 * 200),
        ({"window": 5000}, 5 * 1000, 5 * 1000),
    ],
    ids=str,
)
def test_masks_of_softmax_layers_count(options, whole, in_blocks):
    lm = model([{"name": "softmax", **options}, "gdn"], intermediate_size=256)
    widest = 12 * 256 * 4
    assert token_bytes(lm, 1000, whole=True) == widest + whole
    assert token_bytes(lm, 1000, whole=False) == widest + in_blocks


@some_mixers()
def test_the_estimate_holds(mixer):
    """By the growth with the length of a prompt, of live bytes of a forward without gradients."""
    lm = model([mixer], hidden_size=128)
    found = []
    for length in (1024, 2048):
        with torch.no_grad(), LiveBytes() as live:
            lm(tokens(1, length), logits_to_keep=1)
        found.append(live.most)
    assert 0.25 < (found[1] - found[0]) / (1024 * token_bytes(lm, 2048, whole=True)) <= 1


@pytest.fixture
def read():
    """The lengths of what a model was given."""
    lengths = []

    def note(module, args, given):
        tokens = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
        lengths.append(tokens.shape[1])

    def of(lm):
        lm.model.register_forward_pre_hook(note, with_kwargs=True)
        return lm

    return SimpleNamespace(of=of, lengths=lengths)


@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 2}], ids=str)
def test_free_memory_changes_no_token(monkeypatch, read, mode):
    lm, ids = read.of(model(MIXED)), tokens(2, 300)
    found = []
    for memory in (10**12, 1):
        free(monkeypatch, memory)
        found.append(lm.generate(ids, max_new_tokens=8, output_logits=True, return_dict_in_generate=True, **mode))
    whole, blocks = found
    assert torch.equal(whole.sequences, blocks.sequences)
    torch.testing.assert_close(torch.stack(blocks.logits), torch.stack(whole.logits), **CLOSE)
    assert read.lengths == [300, *[1] * 7, 64, 64, 64, 64, 44, *[1] * 7]


def test_padded_prompts_in_blocks_of_free_memory(monkeypatch, read):
    monkeypatch.setattr(prompts, "SMALLEST", 4)
    lm, ids = read.of(model(MIXED)), tokens(3, 12)
    free(monkeypatch, 1)
    together = lm.generate(ids, attention_mask=PROMPTS, max_new_tokens=8)
    assert read.lengths[:4] == [4, 4, 4, 1]
    for row, mask, result in zip(ids, PROMPTS.bool(), together, strict=True):
        alone = lm.generate(row[mask][None], max_new_tokens=8)
        assert torch.equal(result[12:], alone[0, mask.sum() :])


def test_a_block_of_the_callers_choice_wins(monkeypatch, read):
    free(monkeypatch, 1)
    read.of(model()).generate(tokens(1, 300), max_new_tokens=1, prefill_chunk_size=200)
    assert read.lengths == [200, 100]


@pytest.mark.parametrize("given", ["embeddings", "hidden states", "cache", "no cache"])
def test_prompts_that_are_read_in_one_pass(monkeypatch, read, given):
    lm, ids = model(MIXED), tokens(1, 150)
    prompt = {"inputs": ids}
    if given == "embeddings":
        prompt["inputs_embeds"] = lm.get_input_embeddings()(ids)
    if given == "cache":
        prompt["past_key_values"] = lm(ids[:, :20]).past_key_values
    free(monkeypatch, 1)
    read.of(lm).generate(
        **prompt,
        max_new_tokens=1,
        use_cache=given != "no cache",
        output_hidden_states=given == "hidden states",
        return_dict_in_generate=True,
    )
    assert read.lengths == [130 if given == "cache" else 150]
