"""A continuation is what generate() gives, from any prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import TextStreamer

from fastweights.evaluation import continue_text
from fastweights.evaluation.continuation import TimedStreamer

from .small import model, tokenizer

WORDS = tokenizer()


def test_greedy_is_the_models_most_likely_continuation():
    lm = model().train()
    ids = WORDS("The import statement", return_tensors="pt").input_ids
    wanted = []
    with torch.no_grad():
        for _ in range(6):
            wanted.append(
                lm.eval()(torch.cat([ids, torch.tensor([wanted], dtype=torch.long)], 1)).logits[0, -1].argmax()
            )
    text = continue_text(lm.train(), WORDS, "The import statement", max_new_tokens=6, greedy=True)
    assert text == WORDS.decode(wanted) and lm.training


def test_samples_are_those_of_the_seed():
    texts = [continue_text(model(), WORDS, "The", max_new_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    narrow = continue_text(model(), WORDS, "The", max_new_tokens=12, seed=1, top_p=1e-6)
    assert narrow == continue_text(model(), WORDS, "The", max_new_tokens=12, greedy=True)


@pytest.mark.parametrize("block", [None, 2])
def test_the_prompt_is_read_in_the_blocks_asked_for(block):
    lm, lengths = model(), []
    lm.model.register_forward_pre_hook(
        lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    text = continue_text(lm, WORDS, "The import statement is", max_new_tokens=1, greedy=True, block=block)
    prompt = len(WORDS("The import statement is").input_ids)
    assert lengths == ([prompt] if block is None else [2] * (prompt // 2) + [1] * (prompt % 2))
    assert text == continue_text(model(), WORDS, "The import statement is", max_new_tokens=1, greedy=True)


def test_drafts_change_no_token():
    wanted = continue_text(model(), WORDS, "The import", max_new_tokens=12, greedy=True)
    calls, lm, draft = [], model(), model().train()
    draft.register_forward_hook(lambda *given: calls.append(1))
    assert continue_text(lm, WORDS, "The import", max_new_tokens=12, greedy=True, draft=draft) == wanted
    assert calls and draft.training
    assert continue_text(lm, WORDS, "The import", max_new_tokens=12, greedy=True, prompt_lookup=2) == wanted


def test_drafts_refused():
    other = model()
    other.resize_token_embeddings(8)
    with pytest.raises(ValueError, match="draft must have the vocabulary of the model, .* got 8"):
        continue_text(model(), WORDS, "The", draft=other)
    with pytest.raises(ValueError, match="draft must be None where prompt_lookup is given"):
        continue_text(model(), WORDS, "The", draft=model(), prompt_lookup=2)


def test_the_speed_counts_every_token_of_a_draft(monkeypatch):
    times = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    streamer = TimedStreamer(WORDS)
    for put in (torch.ones(1, 5), torch.ones(1, 2), torch.ones(1, 6)):
        streamer.put(put.long())
    monkeypatch.undo()
    assert streamer.speed() == "8 tokens, the first after 1,000 ms, then 3.0 per second"


def test_it_stops_at_the_end_of_text():
    lm = model()
    with torch.no_grad():
        lm.lm_head.weight.zero_()  # all tokens equally likely: the first, the end of text, is taken
    assert continue_text(lm, WORDS, "The", greedy=True) == ""


@pytest.mark.parametrize("prompt", ["", "<|end|>"])
def test_an_empty_prompt_begins_a_text(prompt):
    with torch.no_grad():
        first = model()(torch.tensor([[0]])).logits[0, -1].argmax()
    assert continue_text(model(), WORDS, prompt, max_new_tokens=1, greedy=True) == WORDS.decode(first)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"top_p": 1.5}, "top_p must be a finite number, more than 0 and at most 1, got 1.5"),
        ({"block": 0}, "block must be"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        continue_text(model(), WORDS, "The", **options)


def test_greedy_has_no_use_for_the_settings_of_sampling():
    wanted = continue_text(model(), WORDS, "The", max_new_tokens=6, greedy=True)
    assert continue_text(model(), WORDS, "The", max_new_tokens=6, greedy=True, temperature=0.0, top_p=0.0) == wanted


def test_beams_that_the_model_folder_asks_for_play_no_part():
    lm = model()
    lm.generation_config.num_beams = 4
    streamer = TextStreamer(WORDS)
    text = continue_text(lm, WORDS, "The", max_new_tokens=6, greedy=True, streamer=streamer)
    assert text == continue_text(model(), WORDS, "The", max_new_tokens=6, greedy=True)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_model_with_damaged_weights_is_refused(greedy):
    lm = model()
    with torch.no_grad():
        lm.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="model must give finite logits"):
        continue_text(lm, WORDS, "The", greedy=greedy)


def test_a_tokenizer_without_a_start_needs_a_prompt():
    words = tokenizer()
    words.eos_token = None
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        continue_text(model(), words, "")
