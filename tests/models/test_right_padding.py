"""Prompts that are padded on the right, or anywhere, are continued from their last token."""

from __future__ import annotations

import pytest
import torch

from fastweights.data.text import TextTokenizer

from .mixers import few_mixers
from .small import MIXED, model, tokens

MASK = torch.tensor([[1] * 9 + [0] * 3, [0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0], [1] * 12])
POSITIONS = (MASK.cumsum(1) - 1).masked_fill(MASK == 0, 1)  # as transformers counts them


def answers(lm, ids, mask=MASK, **options):
    """The new tokens of each prompt alone."""
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    alone = [
        lm.generate(row[own][None], **options)[0, int(own.sum()) :] for row, own in zip(ids, mask.bool(), strict=True)
    ]
    return torch.stack(alone)


@few_mixers()
def test_prompts_of_different_lengths(mixer):
    lm, ids = model([mixer], initializer_range=0.3), tokens(3, 12)
    got = lm.generate(ids, attention_mask=MASK, max_new_tokens=6, do_sample=False)
    assert torch.equal(got[:, :12], ids)  # what is returned begins with the prompts as they were given
    assert torch.equal(got[:, 12:], answers(lm, ids))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"position_ids": POSITIONS, "prefill_chunk_size": 5},
        {"attention_mask": MASK.bool(), "use_cache": False},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"prefill_chunk_size": 4},
                {"use_cache": False},
                {"position_ids": POSITIONS},
                {"position_ids": POSITIONS, "use_cache": False},
                {"attention_mask": MASK.bool()},
                {"attention_mask": MASK.float()},
                {"token_type_ids": torch.zeros_like(MASK)},
            )
        ),
    ],
    ids=str,
)
def test_every_way_of_generating(options):
    lm, ids = model(MIXED, initializer_range=0.3), tokens(3, 12)
    got = lm.generate(ids, **{"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, **options})
    assert torch.equal(got[:, 12:], answers(lm, ids, num_beams=options.get("num_beams", 1)))


def test_embeddings():
    lm, ids = model(MIXED, initializer_range=0.3), tokens(3, 12)
    embeds = lm.get_input_embeddings()(ids)
    got = lm.generate(inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, answers(lm, ids))


@pytest.mark.parametrize("given", [pytest.param("all", marks=pytest.mark.slow), "new"])
def test_after_a_cache(given):
    lm, ids = model(MIXED, initializer_range=0.3), tokens(3, 12)
    cache = lm(ids[:, :5], attention_mask=MASK[:, :5]).past_key_values
    prompt = ids if given == "all" else ids[:, 5:]
    got = lm.generate(prompt, attention_mask=MASK, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(got[:, prompt.shape[1] :], answers(lm, ids))


def test_a_mask_that_transformers_infers():
    lm, ids = model(MIXED, initializer_range=0.3, pad_token_id=0), tokens(3, 12).clamp_min(1) * MASK
    got = lm.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(got[:, 12:], answers(lm, ids))


def test_prompts_without_a_token_are_refused():
    lm, ids, mask = model(MIXED), tokens(3, 12), MASK.clone()
    mask[1] = 0
    for prompt in ({"inputs": ids}, {"inputs_embeds": lm.get_input_embeddings()(ids)}):
        with pytest.raises(
            ValueError, match="attention_mask must show at least one token of every prompt, got none in row 1"
        ):
            lm.generate(**prompt, attention_mask=mask, max_new_tokens=1)
    cache = lm(ids[:, :9]).past_key_values
    with pytest.raises(ValueError, match="got none in row 0"):  # the new columns decide
        lm.generate(ids, attention_mask=MASK, past_key_values=cache, max_new_tokens=1)


def test_tokenizers_trained_here_pad_on_the_left(tmp_path):
    tokenizer = TextTokenizer(vocab_size=300).train(["one two three " * 20])
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, TextTokenizer(path=str(tmp_path)).load()):
        batch = loaded(["one", "one two three"], padding=True, return_tensors="pt")
        assert loaded.padding_side == "left" and batch["attention_mask"][0].tolist()[-1] == 1
    (tmp_path / "tokenizer_config.json").unlink()
    assert TextTokenizer(path=str(tmp_path / "tokenizer.json")).load().padding_side == "left"
    lm = model(MIXED, vocab_size=300, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id)
    options = {"max_new_tokens": 5, "do_sample": False}
    for side in ("left", "right"):
        batch = tokenizer(["one", "one two three"], padding=True, padding_side=side, return_tensors="pt")
        got = lm.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
        assert torch.equal(got, answers(lm, batch["input_ids"], batch["attention_mask"], **options))
