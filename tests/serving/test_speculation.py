"""Speculative decoding in vLLM: with drafts of any kind, right and wrong, it writes the tokens that it writes without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastweights.layers import MIXERS
from fastweights.serving.vllm.versions import has_room_for_drafts

from .engine import (
    CLOSE,
    CLOSE_OF,
    HYBRIDS,
    NGRAM,
    QUICK,
    VOCABULARY,
    counted_preemptions,
    drafted_by,
    engine,
    failing_pool,
    generated,
    in_pieces,
    largest_error,
    model,
    observed_steps,
    of_mixer,
    prompts,
    small_pool,
    verifies_drafts,
    vllm,
    written,
)

pytestmark = verifies_drafts
TOKENS = 30


def speculating(folder: Path, **settings: Any) -> AbstractContextManager[Any]:
    return engine(folder, disable_log_stats=False, **{"speculative_config": NGRAM, **settings})


def accepted(llm: Any) -> list[int]:
    """How many drafted tokens were right, by their place in a draft."""
    (metric,) = (x for x in llm.get_metrics() if x.name == "vllm:spec_decode_num_accepted_tokens_per_pos")
    return metric.values


def check_same(
    own: Any, llm: Any, asked: list[list[int]], *ways: AbstractContextManager[None], close: float = CLOSE
) -> None:
    """With drafts that are right, wrong, short and missing, in each of these ways."""
    wanted = generated(own, asked, TOKENS)
    with drafted_by([ids + tokens for ids, tokens in zip(asked, wanted, strict=True)]):
        for way in ways or (nullcontext(),):
            with way:
                outputs = written(llm, asked, TOKENS)
            assert [list(output.token_ids) for output in outputs] == wanted
            assert largest_error(own, asked, outputs) < close
    assert accepted(llm)[2] > 0


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS],
)
def test_every_mixer(name, tmp_path):
    own, close = model(of_mixer(name)), CLOSE_OF.get(name, CLOSE)
    own.save_pretrained(tmp_path)
    with speculating(tmp_path) as llm, counted_preemptions(llm) as given_way:
        check_same(own, llm, prompts(), nullcontext(), in_pieces(llm, 10), failing_pool(llm), close=close)
    assert given_way


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name, tmp_path):
    """Also where sequences give way because the pool is full, in the middle of a draft."""
    own = model(HYBRIDS[name])
    own.save_pretrained(tmp_path)
    with speculating(tmp_path, max_model_len=512) as llm, counted_preemptions(llm) as given_way:
        check_same(own, llm, prompts(), nullcontext(), in_pieces(llm, 10))
        assert not given_way
        block = llm.llm_engine.vllm_config.cache_config.block_size
        memories = sum(isinstance(mixer, str) and mixer != "softmax" for mixer in HYBRIDS[name])
        with small_pool(llm, 2 * (len(HYBRIDS[name]) + 3 * memories)):
            check_same(own, llm, prompts([block - short for short in (3, 2, 1, 8, 4)]))
    assert len(set(given_way)) > 1


@pytest.mark.parametrize("mixer", ["gdn", ["gdn", "softmax", "vla"]], ids=["one memory", "hybrid"])
def test_equally_many_drafts(mixer, tmp_path, monkeypatch):
    """For CUDA graphs, as if there were some of up to 12 tokens here. With four sequences a step would have more."""
    from fastweights.serving.vllm import scheduling

    monkeypatch.setattr(scheduling, "find_largest_graph", lambda config: 12)
    own = model(mixer)
    own.save_pretrained(tmp_path)
    with speculating(tmp_path) as llm, observed_steps() as seen:
        check_same(own, llm, prompts())
    decodes = [step.counts for step in seen if not any(step.reads_prompt)]
    few, many = ([set(counts) for counts in decodes if (len(counts) == 4) is full] for full in (False, True))
    assert few and all(counts == {4} for counts in few)
    assert any(len(counts) > 1 for counts in many)


def test_the_largest_graph():
    from vllm.config import CompilationConfig, CUDAGraphMode

    from fastweights.serving.vllm.scheduling import find_largest_graph

    def find(mode: Any, largest: int | None) -> int:
        compiled = CompilationConfig(cudagraph_mode=mode)
        compiled.max_cudagraph_capture_size = largest
        return find_largest_graph(SimpleNamespace(compilation_config=compiled))

    assert find(CUDAGraphMode.FULL_DECODE_ONLY, 48) == find(CUDAGraphMode.FULL_AND_PIECEWISE, 48) == 48
    assert find(CUDAGraphMode.NONE, 48) == find(CUDAGraphMode.PIECEWISE, 48) == find(CUDAGraphMode.FULL, None) == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="vLLM has no kernel for CPUs that copies the states of drafts"
)
@pytest.mark.parametrize("mixer", ["gdn", ["gdn", "softmax", "vla"]], ids=["one memory", "hybrid"])
def test_prefix_caching(mixer, tmp_path):
    """A prompt that was read before is read from its last full block on, also the states that drafts have left there."""
    if mixer == "gdn" and not has_room_for_drafts():
        pytest.skip("refused")
    own = model(mixer)
    own.save_pretrained(tmp_path)
    first, other = prompts((200, 150))
    asked = [first, first[:150] + other[:30], first[:64] + other, other[:10] + first[:100]]
    with speculating(tmp_path, enable_prefix_caching=True, block_size=32, max_num_batched_tokens=64) as llm:
        check_same(own, llm, asked)
        check_same(own, llm, asked[::-1], nullcontext(), failing_pool(llm))
        settings = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        again = llm.generate([{"prompt_token_ids": first}], settings, use_tqdm=False)
    assert again[0].num_cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": False},
        {"speculative_config": {**NGRAM, "num_speculative_tokens": 18}},
    ],
    ids=["compiled", "long drafts"],
)
def test_forms_of_the_engine(settings, tmp_path):
    own = model(["gdn", "softmax", "vla"])
    own.save_pretrained(tmp_path)
    with speculating(tmp_path, **settings) as llm:
        check_same(own, llm, prompts())


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [NGRAM, {"method": "suffix", "num_speculative_tokens": 4}], ids=["ngram", "suffix"])
def test_drafts_from_the_text(drafts, tmp_path):
    """As vLLM makes them. With such weights a token nearly determines the next one, so that answers repeat themselves."""
    if drafts["method"] == "suffix" and find_spec("arctic_inference") is None:
        pytest.skip("needs arctic-inference")
    own, asked = model("gdn"), prompts((3, 17, 64))
    with torch.no_grad():
        own.get_input_embeddings().weight.mul_(10)
    own.save_pretrained(tmp_path)
    with speculating(tmp_path, speculative_config=drafts) as llm:
        outputs = written(llm, asked, TOKENS)
    assert [list(output.token_ids) for output in outputs] == generated(own, asked, TOKENS)
    assert accepted(llm)[0] > 0


@pytest.mark.slow
def test_drafts_of_another_model(tmp_path):
    """A model of softmax layers alone drafts for one that has memories beside them, which change little."""
    draft, own = model(["softmax"]), model(["softmax", "gdn", "gdn"])
    own.load_state_dict(draft.state_dict(), strict=False)
    with torch.no_grad():
        for name, weight in own.named_parameters():
            if "layers.1." in name or "layers.2." in name:
                weight.mul_(0.3)
    for folder, one in (("draft", draft), ("own", own)):
        one.save_pretrained(tmp_path / folder)
    drafts = {"model": str(tmp_path / "draft"), "method": "draft_model", "num_speculative_tokens": 3}
    with speculating(tmp_path / "own", speculative_config=drafts) as llm:
        outputs = written(llm, prompts(), TOKENS)
    assert [list(output.token_ids) for output in outputs] == generated(own, prompts(), TOKENS)
    assert min(accepted(llm)) > 0


def test_a_draft_model_with_a_memory_is_refused(tmp_path):
    model("gdn").save_pretrained(tmp_path)
    drafts = {"model": str(tmp_path), "method": "draft_model", "num_speculative_tokens": 3}
    refused = pytest.raises(Exception, match="a draft model in vLLM must have softmax layers only")
    with refused, speculating(tmp_path, speculative_config=drafts):
        pass


def expand(
    x: torch.Tensor, ends: torch.Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """One number of each sequence for each of its drafted tokens. On a CPU vLLM 0.28 to 0.32 write these into a copy and divide
    logits by memory that nothing has written."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    return x.where(x != replace_from, replace_to).repeat_interleave(counts)


@pytest.mark.slow
def test_samples_have_the_distribution_of_the_model(tmp_path, monkeypatch):
    """The second token of many answers to one prompt, by a chi-square test, where each first token has a draft."""
    from vllm.v1.sample import rejection_sampler

    if not torch.cuda.is_available():
        monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    own, (ids,) = model("gdn", initializer_range=0.1), prompts((9,))
    own.save_pretrained(tmp_path)
    with torch.no_grad():
        first = own(torch.tensor([ids])).logits[0, -1].softmax(-1)
        second = own(torch.tensor([[*ids, token] for token in range(VOCABULARY)])).logits[:, -1].softmax(-1)
    drafts = [[*ids, token, likely, likely] for token, likely in enumerate(second.argmax(-1).tolist())]
    count = 2000
    settings = vllm.SamplingParams(temperature=1, max_tokens=3, ignore_eos=True, detokenize=False, seed=0, n=count)
    with speculating(tmp_path, max_num_seqs=64, max_num_batched_tokens=640) as llm, drafted_by(drafts):
        (result,) = llm.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)
        assert accepted(llm)[0] > count / 100
    seen = torch.tensor([output.token_ids[1] for output in result.outputs]).bincount(minlength=VOCABULARY)
    expected = count * (first[:, None] * second).sum(0)
    assert expected.min() > 2
    chi_square = ((seen - expected).square() / expected).sum()
    assert chi_square < VOCABULARY - 1 + 4 * (2 * (VOCABULARY - 1)) ** 0.5
