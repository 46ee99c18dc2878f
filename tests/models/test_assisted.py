"""Assisted decoding: drafts that are taken back leave no trace, whoever makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from .drafting import GREEDY, INSTALLED, MODELS_DRAFT, PROMPT, assistants, large, without_surplus
from .hybrid import small as hybrids
from .mixers import few_mixers
from .small import CLOSE, MIXED, VOCABULARY, model

SOME = ["gdn", {"name": "softmax", "window": 5}]
models_draft = pytest.mark.skipif(not MODELS_DRAFT, reason="no model drafts in transformers 5.15")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)).eval()


def count_calls(lm: Any, **options: Any) -> tuple[torch.Tensor, int]:
    calls: list[None] = []
    hook = lm.register_forward_hook(lambda *given: calls.append(None))
    try:
        return lm.generate(PROMPT, **GREEDY, **options), len(calls)
    finally:
        hook.remove()


@few_mixers(MIXED)
def test_greedy_tokens_are_those_without_an_assistant(mixer):
    lm = large(mixer)
    wanted, plain_calls = count_calls(lm)
    for name, assistant in assistants(lm).items():
        got, calls = count_calls(lm, **assistant)
        assert torch.equal(without_surplus(got, wanted), wanted), name
        if name == "draft":
            assert calls < plain_calls, "no draft was accepted"


@pytest.mark.parametrize(
    "padding, options", [((3, 0), {"prefill_chunk_size": 4}), ((0, 3), {})], ids=["left, in blocks", "right"]
)
def test_padding_and_blocks_change_no_token(padding, options):
    lm = large(SOME)
    wanted = lm.generate(PROMPT, **GREEDY)[:, PROMPT.shape[1] :]
    ids, mask = F.pad(PROMPT, padding), F.pad(torch.ones_like(PROMPT), padding)
    for name, assistant in assistants(lm).items():
        got = lm.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY, **options, **assistant)
        assert torch.equal(got, torch.cat([ids, wanted], 1)), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", *(pytest.param(x, marks=pytest.mark.slow) for x in hybrids.EVERY)])
def test_hybrids(family):
    """With windows of 4 tokens in the attention of some; as the model, as its own assistant, and as that of another model."""
    lm = hybrids.hybrid(family, "gdn", keep=(1,))
    wanted = lm.generate(PROMPT, **GREEDY)
    for name, assistant in assistants(lm).items():
        assert torch.equal(lm.generate(PROMPT, **GREEDY, **assistant), wanted), name
    ids, mask = F.pad(PROMPT, (3, 0)), F.pad(torch.ones_like(PROMPT), (3, 0))
    for name, assistant in assistants(lm).items():
        got = lm.generate(ids, attention_mask=mask, pad_token_id=0, **GREEDY, **assistant)
        assert torch.equal(got[:, 3:], wanted), name
    if not MODELS_DRAFT:
        return
    ours = large("gdn", vocab_size=hybrids.VOCABULARY)
    assert torch.equal(lm.generate(PROMPT, **GREEDY, assistant_model=ours), wanted)
    assert torch.equal(ours.generate(PROMPT, **GREEDY, assistant_model=lm), ours.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("length", [1, 3])
def test_short_prompts(length):
    lm = large(SOME)
    wanted = lm.generate(PROMPT[:, :length], **GREEDY)
    for name, assistant in assistants(lm).items():
        assert torch.equal(lm.generate(PROMPT[:, :length], **GREEDY, **assistant), wanted), name


@models_draft
def test_a_model_of_transformers_on_either_side():
    ours, theirs = large(SOME), llama()
    assert torch.equal(ours.generate(PROMPT, **GREEDY, assistant_model=theirs), ours.generate(PROMPT, **GREEDY))
    for draft in (ours, large("gdn", num_hidden_layers=1)):
        assert torch.equal(theirs.generate(PROMPT, **GREEDY, assistant_model=draft), theirs.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}], ids=["whole", "blocks"])
def test_a_given_cache_is_continued_to_the_last_token_but_one(options):
    lm = large(SOME)
    wanted = lm.generate(PROMPT, **GREEDY)
    with torch.no_grad():
        after = lm(wanted).logits[:, -1:]
        for name, assistant in assistants(lm).items():
            cache = lm(PROMPT[:, :6]).past_key_values
            got = lm.generate(PROMPT, past_key_values=cache, **GREEDY, **options, **assistant)
            assert torch.equal(without_surplus(got, wanted), wanted), name
            assert cache.recording is None and cache.columns == cache.get_seq_length() == wanted.shape[1] - 1
            torch.testing.assert_close(lm(wanted[:, -1:], past_key_values=cache).logits, after, **CLOSE)


def test_repetitive_text_takes_few_calls():
    lm = model("gdn", vocab_size=VOCABULARY + 1)
    with torch.no_grad():  # the next token follows from the last one alone, and is never the last of the vocabulary
        lm.lm_head.weight[:-1].copy_(lm.model.embed_tokens.weight[:-1].roll(1, 0))
        for block in lm.model.layers:
            block.mixer.output.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    prompt = torch.arange(VOCABULARY).repeat(1, 2)
    calls: list[int] = []
    lm.register_forward_pre_hook(lambda m, a, k: calls.append(k["input_ids"].shape[1]), with_kwargs=True)
    got = lm.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=VOCABULARY, prompt_lookup_num_tokens=9)
    assert torch.equal(got[0, -40:], torch.arange(40) % VOCABULARY)
    assert calls[:4] == [62, 11, 10, 10]  # the prompt but two tokens, then drafts of 9
    assert len(calls) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("assistant", ["lookup", "draft", "early exit"])
def test_sampling_keeps_the_distribution(assistant):
    """Pairs of tokens after a prompt, against the probabilities of the model."""
    lm = model("gdn", initializer_range=0.5, vocab_size=5)
    prompt = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    extra = assistants(lm).get(assistant)
    if extra is None:
        pytest.skip("no model drafts in transformers 5.15")
    if assistant == "lookup" and INSTALLED < (5, 15):
        pytest.skip("prompt lookup needs an eos_token_id before transformers 5.15")
    with torch.no_grad():
        first = lm(prompt).logits[0, -1].softmax(-1)
        after = lm(torch.cat([prompt.expand(5, -1), torch.arange(5)[:, None]], 1)).logits[:, -1].softmax(-1)
    wanted, draws = (first[:, None] * after).flatten().double(), 800
    torch.manual_seed(0)
    counts = torch.zeros(25)
    for _ in range(draws):
        one = lm.generate(prompt, max_new_tokens=3, do_sample=True, top_k=0, eos_token_id=None, **extra)[0, -3:-1]
        counts[one[0] * 5 + one[1]] += 1
    assert stats.chisquare(counts.double(), wanted / wanted.sum() * draws).pvalue > 1e-3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"inputs": PROMPT.repeat(2, 1)}, "only supported for batch_size = 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences has to be 1"),
        ({"use_cache": False}, "use_cache=True|requires a cache"),
        ({"inputs": None, "inputs_embeds": torch.ones(1, 4, 16)}, "inputs_embeds must be None in assisted decoding"),
    ],
    ids=["batch", "several", "no cache", "embeddings"],
)
def test_what_cannot_be_assisted(changes, message):
    options = {"inputs": PROMPT, "max_new_tokens": 3, "prompt_lookup_num_tokens": 2, "eos_token_id": 1, **changes}
    with pytest.raises((ValueError, RuntimeError), match=message):
        large("gdn").generate(**options)


def test_the_whole_prompt_is_needed():
    lm = large("gdn")
    cache = lm(PROMPT[:, :6]).past_key_values
    with pytest.raises(ValueError, match="input_ids must be the whole prompt in assisted decoding"):
        lm.generate(
            PROMPT[:, 6:], attention_mask=torch.ones_like(PROMPT), past_key_values=cache, prompt_lookup_num_tokens=2
        )


def test_virtual_tokens_are_refused():
    lm = large("gdn")
    lm.prepare_inputs_for_generation = large("gdn").prepare_inputs_for_generation  # as PEFT's prompt tuning does
    with pytest.raises(ValueError, match="cannot count the virtual tokens of prompt tuning"):
        lm.generate(PROMPT, max_new_tokens=3, prompt_lookup_num_tokens=2)
